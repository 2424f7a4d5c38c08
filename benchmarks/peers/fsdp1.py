"""Peer: the model of `plain_llama` through FSDP1, `FullyShardedDataParallel`, with fused AdamW.

Each block is a unit, the rest (embedding, last norm, head) the root's. ``reshard`` picks FULL_SHARD or SHARD_GRAD_OP,
``accumulate=defer`` uses `no_sync` on all micro-batches but the last.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.train.data import MicroBatch

sys.path.insert(0, str(Path(__file__).parents[1]))
from plain_llama import Block, Llama, accumulate, check_model

AXES = ("dp",)


def check(config: RunConfig) -> None:
    check_model(config)
    layout = config.layout
    if layout.zero != 3 or layout.dp == 1 or layout.dp_replicate > 1:
        raise ConfigError(f"peer fsdp1 is ZeRO-3 over dp and not {layout}; use dp=2,zero=3 with either reshard setting")


class Peer:
    """One rank of FSDP1."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor], mesh: Mesh, device: torch.device) -> None:
        full = not config.layout.keeps_gathered
        self.defer, self.seq_len = config.layout.accumulate == "defer", config.data.seq_len
        self.model = FullyShardedDataParallel(
            Llama(config).fill(weights),
            sharding_strategy=ShardingStrategy.FULL_SHARD if full else ShardingStrategy.SHARD_GRAD_OP,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=device,
            use_orig_params=True,
        )
        # A shard is flat, so a matrix is told by its name.
        norms = {name: "norm" in name for name, _ in self.model.named_parameters()}
        groups = [
            {"params": [p for name, p in self.model.named_parameters() if norms[name] is plain], "weight_decay": decay}
            for plain, decay in ((False, config.optim.weight_decay), (True, 0.0))
        ]
        optim = config.optim
        self.optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)

    def step(self, batches: list[MicroBatch]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        total = accumulate(self.model, batches, self.seq_len, self._sync)
        self.optimizer.step()
        return total

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or not self.defer else self.model.no_sync()
