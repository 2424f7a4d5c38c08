"""Peer: the model of `plain_llama` through DeepSpeed's ZeRO engine (stage 1, 2 or 3) with PyTorch's fused AdamW, over gloo.

DeepSpeed is not among our requirements, since its own would bring another PyTorch: without it a run is refused with the reason.
On CPU ranks its memory-shared all-reduce is compiled at the first run (some 20 s, needs a C++ compiler).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.train.data import MicroBatch

sys.path.insert(0, str(Path(__file__).parents[1]))
from plain_llama import Llama, adamw, check_model, mean_loss

AXES = ("dp",)
INSTALL = "pip install --no-deps --no-build-isolation deepspeed hjson py-cpuinfo einops msgpack ninja"
"""Without dependencies, so that it takes the PyTorch that is here."""


def check(config: RunConfig) -> None:
    check_model(config)
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(f"peer deepspeed needs the package deepspeed, which is not installed; {INSTALL}")
    layout = config.layout
    if layout.zero == 0 or layout.dp == 1 or layout.dp_replicate > 1:
        raise ConfigError(f"peer deepspeed is ZeRO over dp and not {layout}; use dp=2,zero=1, say")


class Peer:
    """One rank of DeepSpeed."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor], mesh: Mesh, device: torch.device) -> None:
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        places = {"RANK": mesh.rank, "LOCAL_RANK": mesh.rank, "WORLD_SIZE": mesh.world.size}
        os.environ.update({name: str(value) for name, value in places.items()})  # as its launcher sets them
        import deepspeed

        layout, self.seq_len = config.layout, config.data.seq_len
        model = Llama(config).fill(weights).to(device)
        settings = {
            "train_micro_batch_size_per_gpu": layout.micro_batch,
            "gradient_accumulation_steps": layout.microbatches,
            "zero_optimization": {"stage": layout.zero},
            "gradient_clipping": 0.0,  # its default is 1
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1_000_000,
        }
        optimizer = adamw(model.parameters(), config.optim)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )

    def step(self, batches: list[MicroBatch]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:  # the engine divides by their number, and updates after the last
            loss = mean_loss(self.engine(batch.tokens.view(-1, self.seq_len)), batch.targets)
            self.engine.backward(loss)
            self.engine.step()
            total = total + loss.detach() / len(batches)
        return total
