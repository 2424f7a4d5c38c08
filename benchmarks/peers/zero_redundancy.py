"""Peer: DDP with `ZeroRedundancyOptimizer` around fused AdamW (ZeRO-1); buckets and accumulation as in the peer ddp.

``parameters_as_bucket_view`` is left off, its default: on it is neither faster nor smaller for this model.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.train.data import MicroBatch

sys.path.insert(0, str(Path(__file__).parents[1]))
from plain_llama import Llama, accumulate, check_model, groups

AXES = ("dp",)


def check(config: RunConfig) -> None:
    check_model(config)
    if config.layout.zero != 1 or config.layout.dp == 1:
        raise ConfigError(f"peer zero_redundancy is ZeRO-1 over dp and not {config.layout}; use dp=2,zero=1, say")


class Peer:
    """One rank of DDP whose optimizer state is cut over the ranks."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor], mesh: Mesh, device: torch.device) -> None:
        optim, self.seq_len = config.optim, config.data.seq_len
        model = Llama(config).fill(weights).to(device)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(
            groups(model.parameters(), optim.weight_decay),
            torch.optim.AdamW,
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            fused=True,
        )

    def step(self, batches: list[MicroBatch]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        sync = self.model.no_sync
        total = accumulate(self.model, batches, self.seq_len, lambda last: nullcontext() if last else sync())
        self.optimizer.step()
        return total
