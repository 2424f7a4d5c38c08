"""Peer: the model of `plain_llama` through `parallelize_module`: Colwise, Rowwise, SequenceParallel and `loss_parallel`.

The plan is that of PyTorch's tutorial on tensor parallelism; ``sp=off`` leaves sequence parallelism out. Fused AdamW.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.train.data import MicroBatch

sys.path.insert(0, str(Path(__file__).parents[1]))
from plain_llama import Llama, check_model, groups, mean_loss

AXES = ("tp",)
COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
ROWS = ("attention.out", "mlp.down")


def check(config: RunConfig) -> None:
    check_model(config)
    if config.layout.tp == 1:
        raise ConfigError("peer parallelize_module splits layers; use tp=2, say")
    for name in ("vocab_size", "num_kv_heads"):
        if getattr(config.model, name) % config.layout.tp:
            raise ConfigError(f"peer parallelize_module needs a {name} that tp={config.layout.tp} divides; use tp=2")
    if config.layout.sequence_parallel and config.data.seq_len % config.layout.tp:
        raise ConfigError(f"peer parallelize_module needs a seq_len that tp={config.layout.tp} divides; use 256")


def plans(sequence: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is done with the model's own modules, and with those of a block."""
    between = Shard(1) if sequence else Replicate()
    model: dict[str, Any] = {
        "embedding.token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    block: dict[str, Any] = dict.fromkeys(COLUMNS, ColwiseParallel())
    block |= dict.fromkeys(ROWS, RowwiseParallel(output_layouts=between))
    if sequence:
        model["head_norm"] = block["attention_norm"] = block["mlp_norm"] = SequenceParallel()
        block["attention"] = PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        )
        block["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return model, block


class Peer:
    """One rank of DTensor's tensor parallelism."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor], mesh: Mesh, device: torch.device) -> None:
        self.seq_len = config.data.seq_len
        self.model = Llama(config).fill(weights).to(device)
        devices = init_device_mesh(device.type, (mesh.world.size,))
        whole, block_plan = plans(config.layout.sequence_parallel)
        for block in self.model.blocks:
            parallelize_module(block, devices, block_plan)
        parallelize_module(self.model, devices, whole)
        # The fused optimizer takes either DTensors or tensors in one group.
        parts = [
            {"params": chosen, "weight_decay": group["weight_decay"]}
            for group in groups(self.model.parameters(), config.optim.weight_decay)
            for split in (True, False)
            if (chosen := [p for p in group["params"] if isinstance(p, DTensor) is split])
        ]
        optim = config.optim
        self.optimizer = torch.optim.AdamW(parts, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)

    def step(self, batches: list[MicroBatch]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for batch in batches:
            with loss_parallel():
                loss = mean_loss(self.model(batch.tokens.view(-1, self.seq_len)), batch.targets) / len(batches)
                loss.backward()
            found = loss.detach()
            total = total + (found.full_tensor() if isinstance(found, DTensor) else found)
        self.optimizer.step()
        return total
