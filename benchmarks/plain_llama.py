"""Llama as ordinary PyTorch modules, for the peers: batched (sequences x length) as a user of PyTorch writes it.

nn.Linear, nn.RMSNorm, scaled_dot_product_attention, F.cross_entropy; fused AdamW with weight decay on matrices only.
Parameter names follow ours, so that weights can be copied by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.core.run_config import OptimConfig, RunConfig
from shardwright.errors import ConfigError
from shardwright.train.data import MicroBatch


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary positions on (batch, heads, length, head dim)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for part in (self.q, self.k, self.v))
        gqa = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=gqa
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, ffn, bias=False), nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, ffn: int, eps: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, eps=eps), nn.RMSNorm(dim, eps=eps)
        self.attention = Attention(dim, heads, kv_heads, head_dim)
        self.mlp = MLP(dim, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Llama with untied head; parameter names follow ours so that weights can be copied by name."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        m = config.model
        self.embedding = nn.ModuleDict({"token": nn.Embedding(m.vocab_size, m.dim)})
        shape = (m.dim, m.num_heads, m.num_kv_heads, m.head_dim, m.ffn_dim, m.norm_eps)
        self.blocks = nn.ModuleList(Block(*shape) for _ in range(m.num_layers))
        self.head = nn.Linear(m.dim, m.vocab_size, bias=False)
        self.head_norm = nn.RMSNorm(m.dim, eps=m.norm_eps)
        positions = torch.arange(config.data.seq_len, dtype=torch.float32)
        frequencies = m.rope_theta ** (-torch.arange(0, m.head_dim, 2, dtype=torch.float32) / m.head_dim)
        angles = torch.outer(positions, frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding["token"](tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.head_norm(x))

    def fill(self, weights: dict[str, Tensor]) -> Llama:
        """Take initial values by our names; returns self."""
        self.load_state_dict({name.replace("head.norm.", "head_norm."): value for name, value in weights.items()})
        return self


def check_model(config: RunConfig) -> None:
    """Refuse a model that `Llama` is not."""
    model = config.model
    usual = model.position == "rope" and model.activation == "swiglu" and not model.qk_norm and model.moe is None
    if model.tied_head or not usual:
        raise ConfigError(f"the peers' model is a Llama with a head of its own, and {model.name} is not; use bench-25m")


def groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without."""
    every = list(parameters)
    matrices, vectors = [p for p in every if p.dim() > 1], [p for p in every if p.dim() == 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def adamw(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """PyTorch's fused AdamW with the run's settings."""
    return torch.optim.AdamW(
        groups(parameters, optim.weight_decay), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
    )


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """logits (B, S, V) and B * S targets in any shape -> the mean loss."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def accumulate(
    model: nn.Module, batches: Sequence[MicroBatch], seq_len: int, sync: Callable[[bool], AbstractContextManager[Any]]
) -> Tensor:
    """Forward and backward of every micro-batch, each inside ``sync(last)``; returns the mean loss."""
    total = torch.zeros(())
    for index, batch in enumerate(batches):
        with sync(index == len(batches) - 1):
            loss = mean_loss(model(batch.tokens.view(-1, seq_len)), batch.targets) / len(batches)
            loss.backward()
        total = total + loss.detach()
    return total
