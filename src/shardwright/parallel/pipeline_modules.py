"""Pipeline parallelism for modules of the user's own: `Stage` and `Schedule`, in the executor that runs our own model.

    held = Schedule.stages_of("1f1b", 2, mesh)                        # the stages of this rank
    stages = [Stage(parts[index], index, num_stages=2) for index in held]
    schedule = Schedule("1f1b", stages, microbatches=4, mesh=mesh, loss_fn=criterion)
    optimizer.zero_grad()
    losses = []
    output = schedule.step(x, target=y, losses=losses)                # parameter.grad is that of the whole batch
    optimizer.step()

PP:  stages[pp]  |  each rank has the parameters of its own stages
sends each stage's outputs forward and as many gradients backward per micro-batch and boundary (**send**, neighbours).

`shardwright.schedule.action.Schedule` is a schedule as data, a row of actions for each rank. The `Schedule` of this file
runs one of these over the user's stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwright.comm.dist import device_of_backend
from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.errors import ConfigError
from shardwright.parallel.module_executor import LossFunction, ModuleExecutor, Part, Tensors, as_tuple
from shardwright.parallel.wrap import DataParallel
from shardwright.schedule.action import Schedule as Rows
from shardwright.schedule.file import load_schedule
from shardwright.schedule.make import INTERLEAVED, make_schedule
from shardwright.schedule.passes import add_communication, check


class Stage:
    """Part ``index`` (from 0) of a model that is cut into ``num_stages``, one after another.

    ``module`` takes what the stage before returns, the first stage the batch: one tensor, or a tuple, whose tensors are its
    positional arguments. It returns a tensor or a tuple of tensors of any shapes and dtypes, the same for every micro-batch.
    It may be a `DataParallel`, whose gradients are then reduced once a step.

    Raises `ConfigError` for an index that is not one of ``num_stages``, and for what is no module.
    """

    def __init__(self, module: nn.Module, index: int, num_stages: int) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"stage {index}: needs an nn.Module, got {type(module).__name__}; wrap what it computes in one"
            )
        if not 0 <= index < num_stages:
            raise ConfigError(f"stage {index} is not one of num_stages={num_stages}; stages are 0 to {num_stages - 1}")
        self.module, self.index, self.num_stages = module, index, num_stages


class Schedule:
    """Runs the micro-batches of a step over a pipeline of `Stage`, in the order of ``schedule``.

    ``schedule`` is one of `core.layout.SCHEDULES` (``gpipe``, ``1f1b``, ``interleaved``, ``zb_h1``, ``interleaved_zb``,
    ``zb_v``, ``dualpipe_v``), ``file:PATH`` (`schedule.file`), or rows of actions (`schedule.action.Schedule`). ``stages``
    are those of this rank, the ones that :meth:`stages_of` names. ``microbatches`` is what a step's batch is cut into.
    ``loss_fn(output, target)`` is needed where the last stage is.

    ``loss_reduction`` says what ``loss_fn`` does with the rows of a micro-batch: ``mean`` (the gradient is that of the mean
    over the whole batch, whose micro-batches all have as many rows) or ``sum`` (that of the sum).

    - Gradients are added to ``parameter.grad``, as ``backward()`` does. A parameter that several stages hold a copy of has
      in each the gradient of that stage's use: sum them yourself.
    - Where ``schedule`` splits backward into B and W, W makes the weight gradients of `nn.Linear` layers, and each keeps its
      input and its output's gradient until then. All other parameters get theirs with B, which frees what autograd saved.
      Layers that a parametrization changes, or that are inside ``torch.compile``, are not split.
    - A stage whose module is, or has inside, a `DataParallel` reduces when the step ends, whatever is gathered by then.
    - Gradients do not flow on to ``x``.

    All ranks of ``mesh.pp`` must make it alike. Raises `ConfigError`, on all of them, where stages, schedule and ranks do not
    fit, or where the last stage has no ``loss_fn``.
    """

    def __init__(
        self,
        schedule: str | Rows,
        stages: Stage | Sequence[Stage],
        microbatches: int,
        mesh: Mesh,
        loss_fn: LossFunction | None = None,
        *,
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        stages = [stages] if isinstance(stages, Stage) else list(stages)
        self.mesh, self.microbatches = mesh, microbatches
        self.rows = _agreed(mesh, lambda: _checked(schedule, stages, microbatches, mesh, loss_fn, loss_reduction))
        """What each rank does, sends and receives included."""
        self._last = self.rows.num_stages - 1
        self._has_first, self._has_last = (index in self.rows.stages_of(mesh.pp.rank) for index in (0, self._last))
        modules = {stage.index: stage.module for stage in sorted(stages, key=lambda stage: stage.index)}
        self._replicas = [child for m in modules.values() for child in m.modules() if isinstance(child, DataParallel)]
        tensors = [tensor for m in modules.values() for tensor in (*m.parameters(), *m.buffers())]
        device = tensors[0].device if tensors else device_of_backend()
        scale = 1.0 if loss_reduction == "sum" else 1.0 / microbatches
        self._loss_scale = torch.tensor(scale, dtype=torch.float64, device=device)
        self.executor = ModuleExecutor(self.rows, modules, mesh, loss_fn, device)
        """After a step its ``spans`` say when each action ran, ``most_in_flight`` what each stage held."""

    @staticmethod
    def stages_of(schedule: str | Rows, num_stages: int, mesh: Mesh) -> tuple[int, ...]:
        """The stages that this rank holds under ``schedule``, in order: the ones to build here."""
        if isinstance(schedule, str) and schedule.startswith("file:"):
            schedule = load_schedule(schedule.removeprefix("file:"))
        microbatches = 1 if isinstance(schedule, str) else schedule.num_microbatches
        return _rows(schedule, num_stages, microbatches, mesh.pp.size).stages_of(mesh.pp.rank)

    def step(self, x: Tensor | Tensors | None = None, *, target: Any = None, losses: list[Tensor] | None = None) -> Any:
        """Forward and backward of one batch. Returns the last stage's outputs, put together; None on other ranks.

        ``x`` (N, ...) is the whole batch, a tensor or a tuple of them, and ``target`` what ``loss_fn`` compares with. Both
        are cut along dim 0 into as many equal parts as there are micro-batches; ``x`` counts where the first stage is,
        ``target`` where the last is, and other ranks may leave them out. ``losses`` is filled with the loss of each
        micro-batch where the last stage is. Under ``torch.no_grad()`` a step only evaluates.

        Raises `ConfigError` for a batch that does not divide, for ``x`` or ``target`` that is missing, for a loss that is
        more than one number, and where a stage's outputs differ in shape or dtype from those that it gave first.
        """
        parts = [Part(*pair) for pair in zip(self._inputs(x), self._targets(target), strict=True)]
        with ExitStack() as gathering:
            for replica in self._replicas:
                gathering.enter_context(replica.no_sync())
            self.executor.run(parts, self._loss_scale)
        if torch.is_grad_enabled():
            for replica in self._replicas:
                replica.reduce()
        if not self._has_last:
            return None
        if losses is not None:
            losses[:] = [part.loss for part in parts]
        return _merged([part.output for part in parts])

    def _inputs(self, x: Tensor | Tensors | None) -> list[Tensors]:
        if not self._has_first:
            return [()] * self.microbatches
        if x is None:
            raise ConfigError("step() needs x, the batch, where stage 0 is; give it on this rank")
        cut = [self._cut(tensor, "x") for tensor in as_tuple(x, "x")]
        return list(zip(*cut, strict=True))

    def _targets(self, target: Any) -> list[Any]:
        if not self._has_last:
            return [None] * self.microbatches
        if target is None:
            raise ConfigError(f"step() needs target= where the last stage ({self._last}) is; give it on this rank")
        if isinstance(target, Tensor):
            return list(self._cut(target, "target"))
        return list(zip(*(self._cut(tensor, "target") for tensor in as_tuple(target, "target")), strict=True))

    def _cut(self, whole: Tensor, name: str) -> Tensors:
        rows = whole.shape[0] if whole.dim() else 0
        if not rows or rows % self.microbatches:
            raise ConfigError(
                f"step(): {name} has {rows} rows (dim 0), which {self.microbatches} micro-batches cannot share; give a "
                f"multiple of {self.microbatches}"
            )
        return whole.chunk(self.microbatches)


# -- what fits ---------------------------------------------------------------------------------------------


def _agreed(mesh: Mesh, make: Callable[[], Rows]) -> Rows:
    """What ``make`` returns, if it does on all pipeline ranks and is the same on them."""
    rows, problem = None, ""
    try:
        rows = make()
    except ConfigError as error:
        problem = str(error)
    every = mesh.pp.gather_objects((problem, str(rows)))
    if problem:
        raise ConfigError(problem)
    other = next((rank for rank, (theirs, _) in enumerate(every) if theirs), None)
    if other is not None:
        raise ConfigError(f"pipeline rank {other}: {every[other][0]}")
    assert rows is not None
    differs = next((rank for rank, (_, theirs) in enumerate(every) if theirs != every[0][1]), None)
    if differs is not None:
        raise ConfigError(
            f"pipeline rank {differs} has another schedule than rank 0; give all ranks the same schedule and microbatches"
        )
    return rows


def _checked(
    schedule: str | Rows,
    stages: Sequence[Stage],
    microbatches: int,
    mesh: Mesh,
    loss_fn: LossFunction | None,
    loss_reduction: str,
) -> Rows:
    """The rows of ``schedule`` if this rank's stages fit them."""
    if loss_reduction not in ("mean", "sum"):
        raise ConfigError(f"loss_reduction={loss_reduction!r} is not known; use 'mean' or 'sum'")
    counts = {stage.num_stages for stage in stages}
    if len(counts) != 1:
        given = f"the stages say num_stages={sorted(counts)}" if counts else "no stage was given"
        raise ConfigError(f"{given}; each pipeline rank needs its stages of one and the same pipeline")
    rows = _rows(schedule, counts.pop(), microbatches, mesh.pp.size)
    indices, held = [stage.index for stage in stages], rows.stages_of(mesh.pp.rank)
    for index in indices:
        if index not in held:
            raise ConfigError(
                f"stage {index} belongs on pipeline rank {rows.placement[index]} under schedule {rows.name}, and this is rank "
                f"{mesh.pp.rank}; build {_listed(held)} here (Schedule.stages_of says so)"
            )
    if sorted(indices) != list(held):
        raise ConfigError(
            f"pipeline rank {mesh.pp.rank} holds {_listed(held)} under schedule {rows.name}, given are {_listed(indices)}; "
            "give each of them once"
        )
    if rows.num_stages - 1 in held and loss_fn is None:
        raise ConfigError(
            f"the last stage ({rows.num_stages - 1}) needs a loss; give Schedule(..., loss_fn=) on this rank"
        )
    return add_communication(rows)


def _rows(schedule: str | Rows, num_stages: int, microbatches: int, ranks: int) -> Rows:
    """What ``schedule`` means for so many stages, micro-batches and pipeline ranks."""
    if isinstance(schedule, str):
        if schedule in INTERLEAVED and ranks > 1 and (num_stages % ranks or num_stages < 2 * ranks):
            raise ConfigError(
                f"schedule {schedule} over pp={ranks} needs a multiple of {ranks} stages, {2 * ranks} or more; num_stages="
                f"{num_stages} was given"
            )
        virtual = num_stages // ranks if schedule in INTERLEAVED and ranks > 1 else 1
        rows = make_schedule(Layout(pp=ranks, schedule=schedule, microbatches=microbatches, virtual=virtual))
    elif problems := check(schedule):
        raise ConfigError(f"schedule {schedule.name} cannot run: {problems[0]}")
    else:
        rows = schedule
    found = {"pp": len(rows.rows), "microbatches": rows.num_microbatches, "num_stages": rows.num_stages}
    given = {"pp": ranks, "microbatches": microbatches, "num_stages": num_stages}
    for key, value in given.items():
        if found[key] != value:
            raise ConfigError(
                f"schedule {rows.name} over pp={ranks} is for {key}={found[key]}, and {key}={value} was given; set "
                f"{key}={found[key]} or use another schedule"
            )
    return rows


def _listed(indices: Sequence[int]) -> str:
    return ("stage " if len(indices) == 1 else "stages ") + (" and ".join(map(str, indices)) or "none")


def _merged(outputs: Sequence[Any]) -> Any:
    """The outputs of all micro-batches along dim 0; single numbers become a vector."""
    if isinstance(outputs[0], tuple):
        return tuple(_merged(each) for each in zip(*outputs, strict=True))
    return torch.cat(list(outputs)) if outputs[0].dim() else torch.stack(list(outputs))
