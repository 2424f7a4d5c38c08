"""Peer: the model of `plain_llama` through `DistributedDataParallel` with fused AdamW.

`gradient_as_bucket_view=True`, default buckets of 25 MiB, `no_sync` on all micro-batches but the last.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.train.data import MicroBatch

sys.path.insert(0, str(Path(__file__).parents[1]))
from plain_llama import Llama, accumulate, adamw, check_model

AXES = ("dp",)


def check(config: RunConfig) -> None:
    check_model(config)


class Peer:
    """One rank of PyTorch's DDP; with one rank the plain module."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor], mesh: Mesh, device: torch.device) -> None:
        model = Llama(config).fill(weights).to(device)
        self.seq_len = config.data.seq_len
        self.model: nn.Module = model
        if mesh.world.size > 1:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer: torch.optim.Optimizer = adamw(model.parameters(), config.optim)

    def step(self, batches: list[MicroBatch]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        total = accumulate(self.model, batches, self.seq_len, self._sync)
        self.optimizer.step()
        return total

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        quiet = isinstance(self.model, DistributedDataParallel) and not last
        return self.model.no_sync() if quiet else nullcontext()
