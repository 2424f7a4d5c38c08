"""Gradients as files, after reduction and before clipping: of a layout by all its ranks, of one process, by one writer.

::

    FOLDER/layout/step-N/state/gradients.safetensors       full tensors under our names, steps counted from 0
    FOLDER/reference/step-N/state/gradients.safetensors    the same from one process (fp64 for a layout of fp32)

They are checkpoints that hold nothing else: each byte written once by a rank that has it, hashed, and invisible until all of
it is there. So what any two runs have computed can be compared afterwards, with any program that reads safetensors.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from torch import Tensor

from shardwright.checkpoint.io import read_kind, whole
from shardwright.checkpoint.manifest import check_hashes, named_steps
from shardwright.checkpoint.save import Group, Saver, Snapshot
from shardwright.core.run_config import RunConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import ConfigError
from shardwright.train.state import StateWriter
from shardwright.train.step import Trainer

KIND = "gradients"
LAYOUT, REFERENCE = "layout", "reference"


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` if ``folder`` holds gradients that others would mix with."""
    if named_steps(folder / LAYOUT) or named_steps(folder / REFERENCE):
        raise ConfigError(f"--write-gradients {folder} holds gradients already; remove them, or give another folder")


class GradientWriter:
    """Writes the reduced gradients of ``trainer`` from all ranks; every rank makes the same calls, between the reduction
    and the update."""

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        mesh, train = trainer.mesh, trainer.config.train
        with mesh.recorder.aside():
            token = mesh.world.gather_objects(secrets.token_hex(4))[0]
        self._state = StateWriter(trainer)
        self._saver = Saver(
            folder / LAYOUT,
            trainer.config.model,
            rank=mesh.rank,
            num_ranks=mesh.world.size,
            token=token,
            keep_every=1,
            timeout_s=train.timeout_s,
        )

    def write(self, step: int) -> None:
        self._saver.save(_snapshot(step, self._state.gradients()))

    def close(self) -> None:
        self._saver.close()


def write_reference(folder: Path, config: RunConfig, gradients: list[dict[str, Tensor]]) -> None:
    """Write what one process has computed, step by step."""
    with Saver(folder / REFERENCE, config.model, keep_every=1) as saver:
        for step, tensors in enumerate(gradients):
            saver.save(_snapshot(step, whole(tensors)))


def read_gradients(folder: Path, config: RunConfig, step: int) -> dict[str, Tensor]:
    """Full tensors by our names from ``FOLDER/layout`` or ``FOLDER/reference``; every byte is checked."""
    path = folder / f"step-{step}"
    check_hashes(path)
    return read_kind(path, KIND, {name: spec.shape for name, spec in parameter_specs(config.model).items()})


def _snapshot(step: int, gradients: Group) -> Snapshot:
    return Snapshot(step, 0, None, {KIND: gradients})
