"""The attention layer: projections, optional QK norm, rotary positions, and whatever `attend` the caller gave.

Notation: T tokens, D model dim, N query heads and K KV heads (local to the rank), H head dim.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.core.model_config import ModelConfig
from shardwright.model.context import Context
from shardwright.model.init import ParameterTable
from shardwright.model.layers import Linear, Norm
from shardwright.ops.rope import apply_rope, split_rope
from shardwright.parallel.tensor import column_linear, row_linear


class Attention(nn.Module):
    """x (T, D) -> (T, D); with sequence parallelism both are the rank's T/tp rows."""

    def __init__(self, config: ModelConfig, layer: int, table: ParameterTable) -> None:
        super().__init__()
        name = f"blocks.{layer}.attention"
        self.layer, self.head_dim = layer, config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        """Query heads that share a KV head."""
        self.q, self.k, self.v = (Linear(f"{name}.{part}", table) for part in "qkv")
        self.q_norm = Norm(f"{name}.q_norm", config, table) if config.qk_norm else None
        self.k_norm = Norm(f"{name}.k_norm", config, table) if config.qk_norm else None
        self.out = Linear(f"{name}.out", table)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self._heads(x, context)
        if context.recompute == "selective":
            mixed = checkpoint(
                context.attend.heads, q, k, v, self.layer, use_reentrant=False, preserve_rng_state=False
            )
        else:
            mixed = context.attend.heads(q, k, v, self.layer)
        mixed = mixed.reshape(mixed.shape[0], -1)
        return row_linear(mixed, self.out.weight, self.out.bias, context.region, "attention out")

    def _heads(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q (T, N, H), k and v (T, K, H), rotated. With fewer KV heads than ranks of tp each rank makes all and uses one."""
        q, k, v = self._projected(x, context)
        if k.shape[1] * self.group > q.shape[1] and k.shape[1] > 1:
            first = context.region.comm.rank * q.shape[1] // self.group
            k, v = k[:, first : first + 1], v[:, first : first + 1]
        return q, k, v

    def _projected(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        parts = (self.q, self.k, self.v)
        biases = [part.bias for part in parts if part.bias is not None]
        fused = column_linear(x, [part.weight for part in parts], biases, context.region, "attention in")
        fused = fused.view(fused.shape[0], -1, self.head_dim)
        num_heads, num_kv_heads = (part.weight.shape[0] // self.head_dim for part in (self.q, self.k))
        if self.q_norm is None and context.rotation is not None:
            return split_rope(fused, context.rotation, num_heads, num_kv_heads)
        q, k, v = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rotation is not None:
            q, k = apply_rope(q, context.rotation), apply_rope(k, context.rotation)
        return q, k, v
