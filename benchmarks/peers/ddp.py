"""Peer: the same model as ordinary PyTorch modules through `DistributedDataParallel` with fused AdamW.

Batched (sequences x length) as a user of PyTorch writes it: nn.Linear, nn.RMSNorm, scaled_dot_product_attention,
F.cross_entropy; `gradient_as_bucket_view=True`, default buckets of 25 MiB, weight decay on matrices only.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.train.data import MicroBatch

AXES = ("dp",)


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


class Peer:
    """One rank of PyTorch's DDP; a step is the micro-batches with `no_sync` on all but the last."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor], mesh: Mesh, device: torch.device) -> None:
        model = Llama(config)
        state = {name.replace("head.norm.", "head_norm."): value for name, value in weights.items()}
        model.load_state_dict(state)
        model.to(device)
        self.seq_len = config.data.seq_len
        self.model: nn.Module = model
        if mesh.world.size > 1:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            fused=True,
        )

    def step(self, batches: list[MicroBatch]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            quiet = isinstance(self.model, DistributedDataParallel) and not last
            with self.model.no_sync() if quiet else nullcontext():
                tokens = batch.tokens.view(-1, self.seq_len)
                logits = self.model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), batch.targets) / len(batches)
                loss.backward()
            total = total + loss.detach()
        self.optimizer.step()
        return total
