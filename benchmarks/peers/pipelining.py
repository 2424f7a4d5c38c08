"""Peer: the model of `plain_llama` through `torch.distributed.pipelining` with fused AdamW.

The same schedule names, stages, micro-batches and batch as ours; communication over PyTorch's own process group. Its
zero-bubble schedules split the backward of plain modules by themselves. ZB-H1 is its interleaved zero-bubble schedule
with one stage on each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules

from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.core.stages import split_units
from shardwright.errors import ConfigError
from shardwright.schedule.make import make_schedule
from shardwright.train.data import MicroBatch

sys.path.insert(0, str(Path(__file__).parents[1]))
from plain_llama import Block, adamw, check_model, mean_loss

AXES = ("pp",)
SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb_h1": pipelining.ScheduleInterleavedZeroBubble,
    "interleaved_zb": pipelining.ScheduleInterleavedZeroBubble,
    "zb_v": pipelining.ScheduleZBVZeroBubble,
    "dualpipe_v": schedules.ScheduleDualPipeV,
}
SINGLE = ("gpipe", "1f1b")
"""Schedules of one stage on each rank, which take the stage itself."""


class Part(nn.Module):
    """Some units of `plain_llama.Llama`, in order; parameter names follow ours so that weights can be copied by name."""

    def __init__(self, config: RunConfig, units: Sequence[str]) -> None:
        super().__init__()
        m = config.model
        shape = (m.dim, m.num_heads, m.num_kv_heads, m.head_dim, m.ffn_dim, m.norm_eps)
        if "embedding" in units:
            self.embedding = nn.ModuleDict({"token": nn.Embedding(m.vocab_size, m.dim)})
        self.blocks = nn.ModuleDict({unit.split(".")[1]: Block(*shape) for unit in units if unit.startswith("blocks.")})
        if "head" in units:
            self.head = nn.Linear(m.dim, m.vocab_size, bias=False)
            self.head_norm = nn.RMSNorm(m.dim, eps=m.norm_eps)
        positions = torch.arange(config.data.seq_len, dtype=torch.float32)
        frequencies = m.rope_theta ** (-torch.arange(0, m.head_dim, 2, dtype=torch.float32) / m.head_dim)
        angles = torch.outer(positions, frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.has_embedding, self.has_head = "embedding" in units, "head" in units

    def forward(self, x: Tensor) -> Tensor:
        if self.has_embedding:
            x = self.embedding["token"](x)
        for block in self.blocks.values():
            x = block(x, self.cos, self.sin)
        return self.head(self.head_norm(x)) if self.has_head else x


def check(config: RunConfig) -> None:
    check_model(config)
    if config.layout.schedule not in SCHEDULES:
        raise ConfigError(f"peer pipelining runs {', '.join(SCHEDULES)}; not {config.layout.schedule}")


class Peer:
    """One rank of PyTorch's pipeline; ``step`` gives the loss on the rank that has the last stage, NaN on the others."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor], mesh: Mesh, device: torch.device) -> None:
        layout = config.layout
        ours = make_schedule(layout)
        units = split_units(config.model, ours.num_stages, layout.stages)
        held = ours.stages_of(mesh.pp.rank)
        parts = [Part(config, units[stage]).to(device) for stage in held]
        for part in parts:
            names = {name: name.replace("head_norm.", "head.norm.") for name in part.state_dict()}
            part.load_state_dict({name: weights[own] for name, own in names.items()})
        stages = [
            PipelineStage(part, stage, ours.num_stages, device) for part, stage in zip(parts, held, strict=True)
        ]
        self.first, self.last = 0 in held, ours.num_stages - 1 in held
        self.seq_len = config.data.seq_len
        kind = SCHEDULES[layout.schedule]
        given = stages[0] if layout.schedule in SINGLE else stages
        self.schedule = kind(given, layout.microbatches, loss_fn=mean_loss)
        every = [parameter for part in parts for parameter in part.parameters()]
        self.optimizer = adamw(every, config.optim)

    def step(self, batches: list[MicroBatch]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        inputs = (torch.cat([batch.tokens for batch in batches]).view(-1, self.seq_len),) if self.first else ()
        targets = torch.cat([batch.targets for batch in batches]).view(-1, self.seq_len) if self.last else None
        losses: list[Tensor] = []
        self.schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        self.optimizer.step()
        return torch.stack(losses).mean() if self.last else torch.tensor(float("nan"))
