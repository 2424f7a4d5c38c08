"""The real training step with shapes only, for every pipeline stage of any world: its exact ledger and memory by class.

`Trainer` and its executor run on meta tensors over `DryComm`. The first micro-batch of each stage runs every unit for real;
the others walk the same row of the schedule, with the gathers, sends and reductions between units, and book again what
the first one booked inside each unit. Equality with a full replay is tested at small micro-batch counts.

Activations are the bytes of the distinct storages that autograd's saved tensors, units' inputs and the queue of deferred
weight gradients hold, without parameters; what a kernel needs while it runs is not in them. FLOPs are those of matrix
products and of causal attention (half of the square), with recomputation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardwright.comm.mesh import Mesh
from shardwright.core.ledger import Ledger, LedgerEntry
from shardwright.core.plan import StageMemory
from shardwright.core.run_config import RunConfig
from shardwright.model.context import Context
from shardwright.ops.attention import Attend, CausalAttend
from shardwright.ops.gradients import GradSlot, Waiting, slot_of, storage_of, tensors_in
from shardwright.parallel.context import ContextAttend
from shardwright.parallel.pipeline import Executor, MicroBatch
from shardwright.plan.collectives import predict_step
from shardwright.train.data import MicroBatch as Batch
from shardwright.train.step import Trainer


@dataclass
class UnitTrace:
    """What one unit did for its first micro-batch: messages of its forward and backward, shapes and bytes."""

    output: Tensor | None = None
    forward: list[LedgerEntry] = field(default_factory=list)
    again: list[LedgerEntry] = field(default_factory=list)
    """Of the forward that full recomputation runs before the backward: what was kept is not sent or computed again."""
    backward: list[LedgerEntry] = field(default_factory=list)
    saved: int = 0
    """Bytes that its backward holds on to; with full recomputation while it runs only."""
    kept: int = 0
    """Bytes that attention keeps between the forward and its recomputation."""
    deferred: Waiting = field(default_factory=Waiting)
    """What its weight gradients hold on to between B and W."""
    written_at_once: list[int] = field(default_factory=list)
    """Of its gradients those that are written in B although the others wait for W (norms)."""
    flops_forward: float = 0.0
    flops_again: float = 0.0
    flops_backward: float = 0.0
    flops_weights: float = 0.0
    attention: float = 0.0
    """Of ``flops_forward`` the part in scores and values; backward has twice as many."""


@dataclass
class DryStage:
    """One rank of one pipeline stage: its ledger, memory, parameters, FLOPs of one step, and where the closed form differs."""

    memory: StageMemory
    ledger: Ledger
    parameters: int
    flops: float
    differences: list[str]


@dataclass
class DryRun:
    """The answer of ``shardwright dryrun``."""

    config: RunConfig
    stages: list[DryStage]
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether the closed form predicts every entry of every stage."""
        return not any(stage.differences for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """The keys of the contract; ``communication`` has the entries of one rank of each stage."""
        layout = self.config.layout
        return {
            "layout": str(layout),
            "world_size": layout.world_size,
            "memory": [
                stage.memory.to_json(0) | {"capacity": None}
                for stage in sorted(self.stages, key=lambda stage: -stage.memory.total)
            ],
            "communication": [
                {"stage": stage.memory.stage, **entry}
                for stage in self.stages
                for entry in stage.ledger.to_json()["communication"]
            ],
            "parameters": {
                "model": self.config.model.num_parameters(),
                "per_rank": [stage.parameters for stage in self.stages],
            },
            "flops": {
                "per_rank": [stage.flops for stage in self.stages],
                "total": sum(stage.flops for stage in self.stages) * layout.world_size / layout.pp,
            },
            "bytes_per_rank": [stage.ledger.total_bytes for stage in self.stages],
            "closed_form": {
                "equal": self.agrees,
                "differences": [line for stage in self.stages for line in stage.differences],
            },
            "seconds": self.seconds,
        }


def dry_run(config: RunConfig, progress: Callable[[int, int], None] | None = None) -> DryRun:
    """One step of one rank (tp, cp and dp coordinates 0) of every pipeline stage; raises what training would raise.

    ``progress`` is told how many of how many stages are done.
    """
    start = time.perf_counter()
    layout, stages = config.layout, []
    for pp in range(layout.pp):
        stages.append(dry_stage(config, layout.grid.rank({"pp": pp}), pp))
        if progress is not None:
            progress(pp + 1, layout.pp)
    return DryRun(config, stages, time.perf_counter() - start)


def dry_stage(config: RunConfig, rank: int, stage: int) -> DryStage:
    """One step of ``rank``, which is in pipeline rank ``stage``."""
    layout, seq = config.layout, config.data.seq_len
    trainer = DryTrainer(config, Mesh.dry(layout, rank), "meta")
    executor = DryExecutor.like(trainer.executor)
    trainer.executor = executor
    trainer.mesh.recorder.take()
    tokens = seq * layout.micro_batch
    shape = torch.empty(tokens, dtype=torch.int64, device="meta")
    batch = Batch(shape, shape, shape, shape, (seq,) * layout.micro_batch, tokens, ())
    ledger = trainer.step([batch] * layout.microbatches, 0).ledger
    held, peak = trainer.memory(), ledger.peak
    parts = {"gathered units": peak["gathered"], "buffers of gradients": peak["buffers"],
             "stage boundaries": executor.boundary_bytes()}  # fmt: skip
    waiting = {name: peak.get(name, 0) for name in ("held for W", "gathered for W")}
    memory = StageMemory(
        stage=stage,
        parameters=held["parameters"],
        gradients=held["gradients"],
        optimizer=held["optimizer"],
        activations=executor.peak,
        buffers=sum(parts.values()),
        parts={name: size for name, size in (parts | waiting).items() if size},
    )
    closed = predict_step(config.model, layout, seq, config.train.freeze, rank)
    differences = [f"stage {stage}: {line}" for line in closed.differences(ledger)]
    count = sum(parameter.numel() for parameter in trainer.parameters.values())
    return DryStage(memory, ledger, count, executor.flops, differences)


class DryTrainer(Trainer):
    """A `Trainer` that makes the context of equal micro-batches once."""

    def context(self, batch: Batch, step: int, *, training: bool = True) -> Context:
        """As `Trainer.context`; a batch that was seen before has the same one."""
        seen: dict[int, Context] = self.__dict__.setdefault("_contexts", {})
        if id(batch) not in seen:
            seen[id(batch)] = super().context(batch, step, training=training)
        return seen[id(batch)]


class DryExecutor(Executor):
    """An `Executor` that computes each stage's first micro-batch only and books the others like it.

    After a step ``peak`` has the most bytes of activations that were live, ``flops`` the rank's FLOPs.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.traces: dict[tuple[int, str], UnitTrace] = {}
        self.first: dict[int, int] = {}
        self.live = self.peak = 0
        self.flops = 0.0
        self._counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops})

    @classmethod
    def like(cls, other: Executor) -> DryExecutor:
        """With the parts of ``other``, which has not run."""
        return cls(
            other.schedule, other.stages, other.pp, other.reducer, other.recorder, recompute=other.recompute,
            dtype=other.dtype, token_shards=other.token_shards, reduce_each=other.reduce_each, weights=other.weights,
            sides=other.sides,
        )  # fmt: skip

    def run(self, microbatches: Sequence[MicroBatch], loss_scale: Tensor) -> Tensor:
        """One step; attention inside segments is fused, so that meta tensors do not make scores."""
        return super().run([_with_fused_attention(batch) for batch in microbatches], loss_scale)

    def boundary_bytes(self) -> int:
        """Receive buffers that are posted at once, and one tensor on its way out."""
        incoming = sum(min(self._posted, len(order)) for order in self._order.values())
        if not incoming:
            return 0
        tokens: Tensor = self._microbatches[0].tokens
        rows = tokens.shape[0] // self.token_shards
        width = next(iter(self.stages.values())).width
        return (incoming + 1) * rows * width * torch.empty((), dtype=self.dtype).element_size()

    # -- units -------------------------------------------------------------------------------------------

    def _unit_forward(self, stage: int, m: int, name: str, x: Tensor, *, again: bool = False) -> Tensor:
        trace = self.traces.setdefault((stage, name), UnitTrace())
        if self.first.setdefault(stage, m) == m:
            y = self._traced_forward(stage, m, name, x, trace, again)
        else:
            self._book(trace.again if again else trace.forward)
            assert trace.output is not None
            y = torch.empty_like(trace.output)
        self.flops += trace.flops_again if again else trace.flops_forward
        if again:
            self._hold(trace.saved - trace.kept - x.nbytes)
        else:
            self._hold(x.nbytes + trace.kept if self.recompute == "full" else trace.saved)
        return y

    def _traced_forward(self, stage: int, m: int, name: str, x: Tensor, trace: UnitTrace, again: bool) -> Tensor:
        """Run the unit and note what it sends and what autograd saves."""
        unit, microbatch = self.stages[stage].units[name], self._microbatches[m]
        saved: list[Tensor] = [x]
        known = {storage_of(tensor) for tensor in [*_tensors_of(unit), *tensors_in(vars(microbatch).values())]}

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        attend = microbatch.attend if isinstance(microbatch, Context) else None
        before, kept = _attention_flops(attend), attend.kept_bytes if isinstance(attend, ContextAttend) else 0
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with self._watched() as entries, self._counter as counter, hooks:
            y: Tensor = super()._unit_forward(stage, m, name, x, again=again)
        attention = _attention_flops(attend) - before
        if isinstance(attend, ContextAttend) and not again:
            trace.kept = attend.kept_bytes - kept
        trace.output = torch.empty_like(y)
        if again:
            trace.again, trace.flops_again = entries, counter.get_total_flops() + attention
        else:
            trace.forward, trace.flops_forward = entries, counter.get_total_flops() + attention
        trace.attention = attention or trace.attention  # none where an output was kept
        last = name == list(self.stages[stage].units)[-1]
        excluded = known - {storage_of(x)} | ({storage_of(y)} if not last or y.dim() == 0 else set())
        if last and y.dim() > 0:
            saved.append(y)
        trace.saved = _bytes(saved, excluded)
        return y

    def _unit_backward(self, stage: int, m: int, name: str, x: Tensor, y: Tensor, gradient: Tensor) -> Tensor:
        trace, queue = self.traces[stage, name], self.reducer.queue
        if self.first[stage] == m:
            gradient = self._traced_backward(stage, m, name, x, y, gradient)
        else:
            self._book(trace.backward)
            slots = _slots(self.stages[stage].units[name])
            _mark_written(slots[index] for index in trace.written_at_once)
            queue.submit(lambda: _mark_written(slots))
            gradient = torch.empty_like(x) if x.is_floating_point() else gradient
        self.flops += trace.flops_backward + trace.flops_weights
        self._hold(-trace.saved)
        self._hold(trace.deferred.bytes if queue.defer else 0)
        return gradient

    def _traced_backward(self, stage: int, m: int, name: str, x: Tensor, y: Tensor, gradient: Tensor) -> Tensor:
        """Run the unit's backward with its weight gradients deferred, to see what they hold, and do them as asked."""
        trace, queue = self.traces[stage, name], self.reducer.queue
        deferred = queue.defer
        queue.defer = True
        with self._watched() as entries, self._counter as counter:
            gradient = super()._unit_backward(stage, m, name, x, y, gradient)
        trace.deferred = queue.waiting()
        writes = queue.take()
        queue.defer = deferred
        slots = _slots(self.stages[stage].units[name])
        trace.written_at_once = [index for index, slot in enumerate(slots) if slot.written]
        trace.backward = entries
        trace.flops_backward = counter.get_total_flops() + 2 * trace.attention

        def write_all() -> None:
            with self._counter as counter:
                for write in writes:
                    write()
            trace.flops_weights = counter.get_total_flops()

        queue.submit(write_all)
        return gradient

    def _weights(self, stage: int, m: int) -> None:
        traces = [self.traces[stage, name] for name, *_ in self._in_flight[stage, m].deferred]
        before = [trace.flops_weights for trace in traces]
        super()._weights(stage, m)
        for trace, counted in zip(traces, before, strict=True):
            self._hold(-trace.deferred.bytes)
            self.flops += trace.flops_weights - counted  # counted with B once it is known

    def _waiting(self, stage: int, name: str) -> Waiting:
        return self.traces[stage, name].deferred

    # -- books -------------------------------------------------------------------------------------------

    def _hold(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def _book(self, entries: Iterable[LedgerEntry]) -> None:
        for entry in entries:
            self.recorder.ledger.add(*entry.key, entry.bytes, count=entry.count)

    @contextmanager
    def _watched(self) -> Iterator[list[LedgerEntry]]:
        """The entries made inside, which are booked as well."""
        recorder = self.recorder
        kept, recorder.ledger = recorder.ledger, Ledger()
        found: list[LedgerEntry] = []
        try:
            yield found
        finally:
            new, recorder.ledger = recorder.ledger, kept
            found += new.entries.values()
            for entry in found:
                kept.add(*entry.key, entry.bytes, count=entry.count)


def _slots(unit: object) -> list[GradSlot]:
    assert isinstance(unit, nn.Module)
    slots = (slot_of(parameter) for parameter in unit.parameters() if parameter.requires_grad)
    return [slot for slot in slots if slot is not None]


def _mark_written(slots: Iterable[GradSlot]) -> None:
    """Give gradients their buffers, as a backward does."""
    for slot in slots:
        _ = slot.view
        slot.written = True


# -- storages ----------------------------------------------------------------------------------------------


def _bytes(tensors: Iterable[Tensor], excluded: set[int]) -> int:
    sizes = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for storage, size in sizes.items() if storage not in excluded)


def _tensors_of(unit: object) -> list[Tensor]:
    return list(unit.parameters()) if isinstance(unit, nn.Module) else []


# -- kernels -----------------------------------------------------------------------------------------------


def _addmm_flops(target: Any, a: Any, b: Any, *args: Any, **options: Any) -> int:
    return 2 * int(a[0]) * int(a[1]) * int(b[1])


class FusedAttend:
    """`CausalAttend` as a fused kernel leaves it: outputs and one fp32 statistic per row and head; counts its FLOPs."""

    def __init__(self, lengths: Sequence[int], windows: Sequence[int | None]) -> None:
        self.lengths, self.windows, self.flops = tuple(lengths), tuple(windows), 0.0

    def heads(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q (T, N, H), k and v (T, K, H) -> (T, N, H)."""
        window = self.windows[layer] if self.windows else None
        for length in self.lengths:
            keys = min(window or length, length)
            self.flops += 4.0 * q.shape[1] * q.shape[2] * (length * keys - keys * keys / 2)
        out: Tensor = _Fused.apply(q, k, v)
        return out


class _Fused(torch.autograd.Function):
    """Shapes of fused attention, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _with_fused_attention(batch: MicroBatch) -> MicroBatch:
    if not isinstance(batch, Context):
        return batch
    attend = batch.attend
    if isinstance(attend, ContextAttend):
        if isinstance(attend.whole, CausalAttend):
            attend.whole = FusedAttend(attend.whole.lengths, attend.whole.windows)
    elif type(attend) is CausalAttend:
        return replace(batch, attend=FusedAttend(attend.lengths, attend.windows))
    return batch


def _attention_flops(attend: Attend | None) -> float:
    """What was counted so far in scores and values, forward."""
    if isinstance(attend, ContextAttend):
        return attend.flops + _attention_flops(attend.whole)
    return attend.flops if isinstance(attend, FusedAttend) else 0.0
