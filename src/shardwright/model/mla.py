"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with a decoupled rotated key.

x -> q latent -> heads' queries, and x -> kv latent -> heads' keys and values, beside one rotated key that all heads share.
Under tensor parallelism the heads are split and the projections to the latents are held whole, inside the region: tokens are
gathered once, as in ordinary attention, and each rank makes all latents itself.

Notation: T tokens, D model dim, N heads (of the rank), P and R channels of a head without and with rotation, H = P + R, V
value dim of a head, C and Q ranks of the kv and q latents.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.core.model_config import ModelConfig
from shardwright.model.context import Context
from shardwright.model.init import ParameterTable
from shardwright.model.layers import Linear
from shardwright.ops.attention import LatentAttend, filled
from shardwright.ops.norm import rms_norm
from shardwright.ops.rope import apply_rope, softmax_scale
from shardwright.parallel.tensor import column_linear, row_linear

LATENT_EPS = 1e-6
"""Of the norms of both latents, whatever the model's own."""


class LatentNorm(nn.Module):
    """RMSNorm of a latent."""

    def __init__(self, name: str, table: ParameterTable) -> None:
        super().__init__()
        self.weight = table.make(f"{name}.weight")

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, LATENT_EPS)


class LatentAttention(nn.Module):
    """x (T, D) -> (T, D); with sequence parallelism both are the rank's T/tp rows."""

    def __init__(self, config: ModelConfig, layer: int, table: ParameterTable) -> None:
        super().__init__()
        mla = config.mla
        assert mla is not None
        name = f"blocks.{layer}.attention"
        self.layer, self.mla, self.head_dim = layer, mla, config.head_dim
        self.scale = softmax_scale(config)
        straight = mla.q_lora_rank is None
        self.q = Linear(f"{name}.q", table) if straight else None
        self.q_down = None if straight else Linear(f"{name}.q_down", table)
        self.kv_down = Linear(f"{name}.kv_down", table)
        self.q_norm = None if straight else LatentNorm(f"{name}.q_norm", table)
        self.q_up = None if straight else Linear(f"{name}.q_up", table)
        self.kv_norm = LatentNorm(f"{name}.kv_norm", table)
        self.kv_up = Linear(f"{name}.kv_up", table)
        self.out = Linear(f"{name}.out", table)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, latent, k_turned = self._latents(x, context)
        if isinstance(context.attend, LatentAttend):
            up = self.kv_up.weight.view(q.shape[1], -1, self.mla.kv_lora_rank)
            w_uk, w_uv = up.split([self.mla.nope_head_dim, self.mla.v_head_dim], dim=1)
            mixed = context.attend.latent(q, latent, k_turned, w_uk, w_uv, self.layer)
        else:
            mixed = self._attend(*self._heads(q, latent, k_turned), context)[..., : self.mla.v_head_dim]
        return row_linear(mixed.reshape(mixed.shape[0], -1), self.out.weight, None, context.region, "attention out")

    def _latents(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q (T, N, H), of which the last R channels are rotated, the kv latent (T, C) and the rotated key (T, R)."""
        mla, rotation = self.mla, context.rotation
        assert rotation is not None
        first = self.q if self.q_down is None else self.q_down
        assert first is not None
        fused = column_linear(x, [first.weight, self.kv_down.weight], [], context.region, "attention in")
        sizes = [first.weight.shape[0], mla.kv_lora_rank, mla.rope_head_dim]
        q, latent, shared = fused.split(sizes, dim=1)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q = q.view(len(q), -1, self.head_dim)
        if self.scale != 1.0:
            q = q * self.scale
        q_plain, q_turned = q.split([mla.nope_head_dim, mla.rope_head_dim], dim=2)
        q = torch.cat([q_plain, apply_rope(q_turned, rotation)], dim=2)
        return q, self.kv_norm(latent), apply_rope(shared.unsqueeze(1), rotation).squeeze(1)

    def _heads(self, q: Tensor, latent: Tensor, k_turned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (T, N, max(H, V)): attention wants one width, so they are filled up with zeros."""
        mla, width = self.mla, max(self.head_dim, self.mla.v_head_dim)
        kv = self.kv_up(latent).view(len(q), -1, mla.nope_head_dim + mla.v_head_dim)
        k_plain, v = kv.split([mla.nope_head_dim, mla.v_head_dim], dim=2)
        k = torch.cat([k_plain, k_turned.unsqueeze(1).expand(-1, kv.shape[1], -1)], dim=2)
        if width > self.head_dim:  # scores are divided by its root
            q = q * math.sqrt(width / self.head_dim)
        return filled(q, width), filled(k, width), filled(v, width)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        if context.recompute == "selective":
            heads = context.attend.heads
            mixed: Tensor = checkpoint(heads, q, k, v, self.layer, use_reentrant=False, preserve_rng_state=False)
            return mixed
        return context.attend.heads(q, k, v, self.layer)
