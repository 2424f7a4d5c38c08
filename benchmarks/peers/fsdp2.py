"""Peer: the model of `plain_llama` through FSDP2, `fully_shard`, with fused AdamW.

Each block is a unit, the rest (embedding, last norm, head) the root's, which by PyTorch's default is not resharded after
forward: it is needed again at once. ``reshard`` is `reshard_after_forward` of the blocks; ``accumulate=defer`` synchronises
gradients of the last micro-batch only.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.train.data import MicroBatch

sys.path.insert(0, str(Path(__file__).parents[1]))
from plain_llama import Llama, accumulate, adamw, check_model

AXES = ("dp",)


def check(config: RunConfig) -> None:
    check_model(config)
    layout = config.layout
    if layout.zero != 3 or layout.dp == 1 or layout.dp_replicate > 1:
        raise ConfigError(f"peer fsdp2 is ZeRO-3 over dp and not {layout}; use dp=2,zero=3 with either reshard setting")


class Peer:
    """One rank of FSDP2."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor], mesh: Mesh, device: torch.device) -> None:
        full = not config.layout.keeps_gathered
        self.defer, self.seq_len = config.layout.accumulate == "defer", config.data.seq_len
        model = Llama(config).fill(weights).to(device)
        devices = init_device_mesh(device.type, (mesh.world.size,))
        for block in model.blocks:
            fully_shard(block, mesh=devices, reshard_after_forward=full)
        self.model = fully_shard(model, mesh=devices)
        self.optimizer = adamw(model.parameters(), config.optim)

    def step(self, batches: list[MicroBatch]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        total = accumulate(self.model, batches, self.seq_len, self._sync)
        self.optimizer.step()
        return total

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        self.model.set_requires_gradient_sync(last or not self.defer)
        self.model.set_is_last_backward(last)
        return nullcontext()
