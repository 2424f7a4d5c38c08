"""Who is to blame for a step that must not be applied: the rank, the layer and the batch, in words.

The parameters are still those that the step began with, so its forward passes are run once more, without dropout, and
each unit's output is looked at; the reduced gradients are still there too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from shardwright.core.specs import unit_names
from shardwright.train.data import MicroBatch
from shardwright.train.state import StateWriter
from shardwright.train.step import Trainer


@dataclass
class _Finding:
    """One micro-batch of one rank. ``unit``: the first whose output is not finite. ``loss``: per token, where it is known."""

    rank: int
    place: str
    index: int
    samples: tuple[int, ...]
    unit: str | None
    loss: float | None

    @property
    def batch(self) -> str:
        return f"micro-batch {self.index} (samples {', '.join(map(str, self.samples))}) of rank {self.rank} ({self.place})"


@dataclass
class _Report:
    findings: list[_Finding] = field(default_factory=list)
    squares: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def blame(trainer: Trainer, batches: Sequence[MicroBatch], step: int) -> str:
    """One line, the same on every rank; all ranks must call, right after the step."""
    mesh = trainer.mesh
    with mesh.recorder.aside():
        mine = _Report([_look(trainer, batch, index, step) for index, batch in enumerate(batches)])
        for piece in StateWriter(trainer).gradients().pieces:
            mine.squares[piece.name] = mine.squares.get(piece.name, 0.0) + _square(piece.data)
        reports: list[_Report] = mesh.world.gather_objects(mine)
    order = {name: index for index, name in enumerate(unit_names(trainer.config.model))}
    findings = [finding for report in reports for finding in report.findings]
    squares: dict[str, float] = {}
    for report in reports:
        for name, square in report.squares.items():
            squares[name] = squares.get(name, 0.0) + square
    return f"{_batch_at_fault(findings, order)}; {_layer_at_fault(squares)}"


def _look(trainer: Trainer, batch: MicroBatch, index: int, step: int) -> _Finding:
    place = trainer.mesh.coordinates
    words = ", ".join(f"{axis} {position}" for axis, position in place.items() if trainer.mesh.axis(axis).size > 1)
    broken: list[str] = []
    hooks = [unit.register_forward_hook(partial(_note, broken, name)) for name, unit in trainer.model.units().items()]
    try:
        loss = trainer.executor.evaluate(trainer.context(batch, step, training=False))
    finally:
        for hook in hooks:
            hook.remove()
    known = trainer.has_loss and place["tp"] == 0 and batch.num_valid
    value = _number(loss) / batch.num_valid if known else None
    first = broken[0] if broken else None
    return _Finding(trainer.mesh.rank, words or "alone", index, batch.samples, first, value)


def _note(broken: list[str], name: str, unit: nn.Module, inputs: object, output: object) -> None:
    if isinstance(output, Tensor) and not math.isfinite(_number(output.detach().float().sum())):
        broken.append(name)


def _batch_at_fault(findings: Sequence[_Finding], order: dict[str, int]) -> str:
    broken = sorted((f for f in findings if f.unit is not None), key=lambda f: (order[f.unit or ""], f.rank, f.index))
    if broken:
        return f"the output of {broken[0].unit} is not finite in {broken[0].batch}"
    worst = max((f for f in findings if f.loss is not None), key=lambda f: f.loss or 0.0, default=None)
    if worst is None:
        return "no batch has a token to predict"
    return f"the largest loss, {worst.loss:.4g} per token, is that of {worst.batch}"


def _layer_at_fault(squares: dict[str, float]) -> str:
    broken = [name for name, square in squares.items() if not math.isfinite(square)]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        return f"the gradient of {broken[0]}{more} is not finite"
    if not squares:
        return "nothing is trained"
    name = max(squares, key=squares.__getitem__)
    share = squares[name] / (sum(squares.values()) or 1.0)
    return f"the largest gradient is that of {name}, {share:.0%} of the squared norm"


def _square(gradient: Tensor) -> float:
    return _number(torch.linalg.vector_norm(gradient.double()).square())


def _number(value: Tensor) -> float:
    """A scalar on the host: after a step that is not applied, where time does not matter."""
    return float(value.item())
