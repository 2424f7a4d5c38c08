"""One optimizer step: micro-batches -> executor -> reduced gradients -> clip -> update -> what happened.

The same path at every layout: with one rank all verbs return their input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.buckets import plan_buckets
from shardwright.core.ledger import BucketTiming, Ledger
from shardwright.core.run_config import RunConfig
from shardwright.core.specs import bucket_members, check_frozen, unit_names
from shardwright.core.stages import split_units
from shardwright.errors import NonFiniteError
from shardwright.model.balance import Balance, Balancer
from shardwright.model.context import Context
from shardwright.model.transformer import Transformer, freeze
from shardwright.ops.attention import Attend, CausalAttend, ScoreDropout, ScoresAttend
from shardwright.ops.capacity import Limit
from shardwright.ops.kernels import dropout_key
from shardwright.parallel.context import ContextAttend, attention_balance, cut_segments
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.flat import FlatParameters
from shardwright.parallel.gather import UnitGatherer
from shardwright.parallel.hooks import CommHook, check_reduction, hook_for
from shardwright.parallel.pipeline import Executor, StageUnits
from shardwright.schedule.action import Schedule
from shardwright.schedule.gathers import Use, plan_gathers, unit_uses
from shardwright.schedule.make import make_schedule
from shardwright.schedule.passes import add_communication
from shardwright.train.data import MicroBatch
from shardwright.train.delayed import DelayedUpdate
from shardwright.train.optim import FlatOptimizer, NormWatch, clip, global_norm, learning_rate
from shardwright.train.supported import DTYPES, check_supported


@dataclass
class StepResult:
    """What one step did, the same on every rank except ``ledger`` and the waits, which are the rank's own."""

    step: int
    loss: float
    """Nats per valid token over the whole global batch."""
    tokens: int
    grad_norm: float
    lr: float
    skipped: bool
    stop: bool
    """Some rank asked to stop: all ranks stop after this step."""
    busy_seconds: tuple[float, ...]
    """Compute time of each rank before it waits for its peers."""
    exposed_tail: float
    ledger: Ledger
    balance: Balance | None = None
    """What the routers did, where the model has experts; its ``aux_loss`` is not part of ``loss``."""
    attention_balance: float = 1.0
    """Work in attention of the busiest rank of this rank's cp group over the mean; 1 is even."""
    token_splits: tuple[str, ...] = ()
    """How the tokens of each micro-batch were split over cp; empty without context parallelism."""

    @property
    def slowest_rank(self) -> int:
        return self.busy_seconds.index(max(self.busy_seconds))

    @property
    def rank_skew(self) -> float:
        """Seconds between the first and the last rank to finish its own work."""
        return max(self.busy_seconds) - min(self.busy_seconds)


def document_attention(
    config: RunConfig, batch: MicroBatch, step: int, *, training: bool = True, tp_rank: int = 0
) -> Attend:
    """Attention inside each document of one micro-batch, for the heads of ``tp_rank``."""
    model, train = config.model, config.train
    windows = [model.layer_window(layer) for layer in range(model.num_layers)]
    if train.attention == "fused":
        return CausalAttend(batch.lengths, windows)
    dropout = None
    if training and model.dropout:
        keys = [dropout_key(train.seed, step, layer, site=3) for layer in range(model.num_layers)]
        first_head = tp_rank * (model.num_heads // config.layout.tp)
        dropout = ScoreDropout(model.dropout, batch.token_index, keys, first_head)
    return ScoresAttend(batch.lengths, windows, dropout)


class Trainer:
    """Model, buckets, optimizer and executor of one rank.

    ``hook`` replaces the layout's communication hook. Raises `LayoutError` for a layout that cannot be trained.
    """

    def __init__(
        self, config: RunConfig, mesh: Mesh, device: torch.device | str = "cpu", hook: CommHook | None = None
    ) -> None:
        check_supported(config)
        self.config, self.mesh, self.layout = config, mesh, config.layout
        self.recompute = self.layout.recompute_on(mesh.coordinates["pp"])
        self.device = torch.device(device)
        dtype = DTYPES[self.layout.precision]
        schedule = add_communication(make_schedule(self.layout))
        stages = split_units(config.model, schedule.num_stages, self.layout.stages)
        held = schedule.stages_of(mesh.coordinates["pp"])
        self.has_loss = schedule.num_stages - 1 in held
        units = [unit for stage in held for unit in stages[stage]]
        by_unit = self.layout.zero == 3
        model = Transformer(config.model, mesh, dtype, self.device, units, hollow=by_unit)
        self.model = model.initialise(config.train.seed)  # hollow: shard by shard, below; no rank holds the whole model
        check_frozen(config.train.freeze, self.model.specs)
        freeze(self.model, config.train.freeze)
        self.parameters = self.model.spec_parameters()
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        members = bucket_members(config.model, self.layout, mesh.coordinates, units)
        order, size = unit_names(config.model), self.layout.bucket_mb
        plans = plan_buckets([m for m in members if m.name in trained], order, size, by_unit=by_unit)
        kept = [m for m in members if m.name not in trained and by_unit]
        direct = not config.train.compile
        hook = hook or hook_for(self.layout.reduce_dtype)
        check_reduction(hook, "sum", "training divides the loss by the tokens of the whole batch")
        write = partial(self.model.first_value, seed=config.train.seed) if by_unit else None
        self.buckets = GradientBuckets(
            plans, trained, mesh, hook, direct=direct, layout=self.layout, write=write, side_by_side=True
        )
        storage = self.buckets.storage
        self.frozen = [
            FlatParameters(
                plan, self.parameters, mesh.axis(plan.shard_over), zero=3, storage=storage, write=write, side_by_side=True
            )
            for plan in plan_buckets(kept, order, size, by_unit=True, prefix="frozen")
        ]
        """Parameters that are not trained, where ZeRO-3 shards them too."""
        self.optimizer = FlatOptimizer(config.optim, self.buckets.buckets)
        self.delayed = DelayedUpdate(self.optimizer, self.buckets) if self.layout.delayed_update else None
        if config.train.compile:
            self.model.compile_blocks()
        self.balancer = self._balancer()
        self.gatherer = self._gatherer(unit_uses(schedule, mesh.coordinates["pp"], stages)) if by_unit else None
        self.executor = self._executor(schedule, {stage: stages[stage] for stage in held}, dtype)
        self.stop_requested = False
        self.norms = NormWatch(config.train.spike_factor)
        self._attention_work: tuple[float, tuple[str, ...]] = (1.0, ())
        self.on_gradients: Callable[[Trainer], None] | None = None
        """Called when the gradients of a step are reduced and not yet clipped (verification)."""
        self.before_update: Callable[[], None] | None = None
        """Called before the parameters and the optimizer's state change (a save may be copying them)."""

    def _balancer(self) -> Balancer | None:
        if self.config.model.moe is None:
            return None
        biases = {int(spec.unit.removeprefix("blocks.")): self.parameters[name]
                  for name, spec in self.model.specs.items() if spec.buffer and name in self.parameters}  # fmt: skip
        return Balancer(self.config.model, self.config.router, self.model.sums, biases, self.device)

    def _gatherer(self, uses: Sequence[Use]) -> UnitGatherer:
        buckets: list[FlatParameters] = [*self.buckets.buckets, *self.frozen]
        layout = self.layout
        planned = plan_gathers(uses, [bucket.plan.units for bucket in buckets], layout)
        return UnitGatherer(buckets, planned, layout.prefetch, self.mesh.recorder)

    def _executor(self, schedule: Schedule, held: Mapping[int, Sequence[str]], dtype: torch.dtype) -> Executor:
        """Runs this rank's row of ``schedule``; ``held``: its stages and their units."""
        modules, layout = self.model.units(), self.layout
        width = self.config.model.dim
        return Executor(
            schedule,
            {stage: StageUnits({unit: modules[unit] for unit in units}, width) for stage, units in held.items()},
            self.mesh.pp,
            self.buckets,
            self.mesh.recorder,
            recompute=self.recompute,
            dtype=dtype,
            token_shards=layout.tp if layout.sequence_parallel else 1,
            reduce_each=layout.num_reductions > 1,
            weights=self.gatherer,
            sides=self.balancer,
        )

    def context(self, batch: MicroBatch, step: int, *, training: bool = True) -> Context:
        """What the model is told about one micro-batch, on this rank's device."""
        batch = batch.padded(self.layout.token_multiple)
        recompute = self.recompute if training else "none"
        attend = document_attention(self.config, batch, step, training=training, tp_rank=self.mesh.tp.rank)
        if self.layout.cp > 1:
            windows = [self.config.model.layer_window(layer) for layer in range(self.config.model.num_layers)]
            cp, kind = self.mesh.cp, self.layout.cp_kind
            segments = cut_segments(batch.lengths, batch.padding, cp.size, kind)
            batch = batch.cut(segments.split.ranges[cp.rank])
            attend = ContextAttend(cp, segments, kind, keep=recompute == "full", windows=windows)
            if recompute == "selective":  # attention keeps no scores that would be worth a second exchange
                recompute = "none"
        experts = self._for_experts(batch, training) if self.balancer is not None else {}
        batch = batch.to(self.device)
        return self.model.context(
            batch.tokens,
            batch.positions,
            attend,
            targets=batch.targets,
            token_index=batch.token_index if training else None,
            seed=self.config.train.seed,
            step=step,
            recompute=recompute,
            loss_chunk=self.config.train.loss_chunk,
            **experts,
        )

    def _for_experts(self, batch: MicroBatch, training: bool) -> dict[str, Any]:
        """What routers are told: which sequence each token belongs to, where it stands in it, and what they may do."""
        return {
            "router": self.config.router,
            "sequence": sequence_numbers(batch, self.config.data.seq_len).to(self.device, non_blocking=True),
            "place": batch.token_index.to(self.device, non_blocking=True),
            "num_sequences": max(len(batch.samples), 1),
            "padded": batch.padding > 0 or not batch.samples,
            "limit": Limit.of(self.layout.capacity, self.config.router.drop_by),
            "routed": [] if training else None,
        }

    def step(self, batches: Sequence[MicroBatch], step: int) -> StepResult:
        """One optimizer step (0-based) on this rank's micro-batches."""
        start = time.perf_counter()
        delayed = self.delayed if step >= self.config.optim.delay_after else None
        tokens, stop = self._agree(sum(batch.num_valid for batch in batches))
        if delayed is not None:
            self._may_update()
            delayed.start()
        loss_sum = self.gradients(batches, step, tokens)
        busy = time.perf_counter() - start
        if self.executor.note is not None:
            self.executor.note(f"step {step}, reduction and update")
        self.mesh.recorder.waits = self.executor.waits  # reductions that are still under way are of this step too
        timings = self.buckets.finish()
        self.mesh.recorder.waits = None
        if self.on_gradients is not None:
            self.on_gradients(self)
        with self.mesh.recorder.phase("update"):
            norm = _read(global_norm(self.buckets, self.mesh, self.device))
        lr = learning_rate(self.config.optim, step, self.config.train.steps)
        trouble = self.norms.judge(norm)
        if delayed is not None:
            with self.mesh.recorder.phase("update"):
                delayed.finish()
        if trouble is None:
            clip(self.buckets, norm, self.config.optim.clip)
            if delayed is not None:
                delayed.keep(lr)
            else:
                self._may_update()
                with self.mesh.recorder.phase("update"):
                    self.optimizer.step(lr)
        balance = self._balance(update=trouble is None)
        loss, every_busy = self._gather_metrics(loss_sum, busy)
        ledger = self.mesh.recorder.take()
        self._account(ledger, timings)
        result = StepResult(
            step,
            loss / max(tokens, 1),
            tokens,
            norm,
            lr,
            trouble is not None,
            stop,
            every_busy,
            ledger.exposed_tail,
            ledger,
            balance,
            *self._attention_work,
        )
        if trouble is not None and self.config.train.on_nonfinite != "skip":
            raise NonFiniteError(
                f"step {step}: {trouble} and the loss {result.loss:.4g}; parameters are those of the step before. "
                "Lower optim.lr, or set train.on_nonfinite=skip"
            )
        return result

    def _may_update(self) -> None:
        if self.before_update is not None:
            self.before_update()

    def settle(self) -> None:
        """Make up for an update that is outstanding (``delayed_update``), if there is one; all ranks must call."""
        if self.delayed is not None:
            self.delayed.settle()

    def gradients(self, batches: Sequence[MicroBatch], step: int, tokens: int) -> Tensor:
        """Run the executor over the micro-batches and start every reduction; returns the rank's summed loss."""
        self.buckets.begin()
        if self.balancer is not None:
            own = sum(len(batch.tokens) for batch in batches)  # not padded yet, nor cut over cp
            self.balancer.begin(own * self.layout.dp)
        contexts = [self.context(batch, step) for batch in batches]
        self._attention_work = attention_balance([context.attend for context in contexts])
        wide = torch.float64 if self.layout.precision == "fp64" else torch.float32
        scale = torch.full((), 1.0 / max(tokens, 1), dtype=wide, device=self.device)
        return self.executor.run(contexts, scale)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """(nats per valid token, valid tokens) over all ranks' batches; every rank must bring the same number."""
        totals = torch.zeros(2, dtype=torch.float64)
        place = self.mesh.coordinates
        counts = self.has_loss and place["tp"] == 0  # the others of tp have the same loss, those of cp other tokens
        with self.mesh.recorder.phase("eval"):
            for batch in batches:
                loss = self.executor.evaluate(self.context(batch, 0, training=False))
                if counts:
                    valid = batch.num_valid if place["cp"] == 0 else 0
                    totals += torch.stack([loss.double().cpu(), torch.tensor(valid, dtype=torch.float64)])
            loss_sum, tokens = _read_all(self.mesh.world.all_reduce(totals.to(self.device), name="eval"))
        return loss_sum / max(tokens, 1.0), int(tokens)

    def named_parameters(self, kind: str = "parameters") -> dict[str, Tensor]:
        """Whole tensors of all parameters of this rank; ``master`` has those of the trained ones in their own precision.

        With ZeRO all ranks must call.
        """
        named = {name: p.detach() for name, p in self.parameters.items() if not p.requires_grad}
        for flat in self.frozen:
            named |= flat.named()
        return named | self.buckets.named(kind)

    def fill_parameters(self, write: Callable[[str, Tensor], None]) -> None:
        """``write(name, view)`` gives every parameter its value, and every master in its own precision."""
        flats: list[FlatParameters] = [*self.buckets.buckets, *self.frozen]
        for flat in flats:
            flat.fill_parameters(write)
        in_flats = {member.name for flat in flats for member in flat.plan.members}
        for name, parameter in self.parameters.items():
            if name not in in_flats:
                write(name, parameter)

    def memory(self) -> dict[str, int]:
        """Persistent bytes by class on this rank; those in host memory begin with ``host`` and are there with offload only."""
        held = self.buckets.memory()
        whole = [p for p in self.parameters.values() if not p.requires_grad and not self.frozen]
        frozen = sum(p.nbytes for p in whole) + sum(flat.parameters.nbytes for flat in self.frozen)
        found = {
            "parameters": held["parameters"] + frozen,
            "gradients": held["gradients"],
            "optimizer": self.optimizer.memory(hosted=False) + held["master"],
        }
        hosted = {
            "host parameters": held["host parameters"] + sum(flat.on_host.nbytes for flat in self.frozen),
            "host gradients": held["host gradients"],
            "host optimizer": self.optimizer.memory(hosted=True) + held["host master"],
        }
        return found | {kind: size for kind, size in hosted.items() if size}

    def _account(self, ledger: Ledger, timings: list[BucketTiming]) -> None:
        storage = self.buckets.storage
        ledger.buckets, ledger.windows, ledger.memory = timings, storage.windows, self.memory()
        ledger.peak = ledger.memory | {kind: storage.peak.get(kind, 0) for kind in ("gathered", "buffers")}
        if (waiting := self.executor.most_waiting).bytes:
            ledger.peak |= {"held for W": waiting.bytes, "gathered for W": waiting.gathered}

    def _agree(self, num_valid: int) -> tuple[int, bool]:
        """Valid tokens of the whole global batch, and whether any rank asked to stop."""
        place = self.mesh.coordinates
        counted = num_valid if place["tp"] == place["cp"] == place["pp"] == 0 else 0  # the others read the same samples
        counts = torch.tensor([counted, int(self.stop_requested)], dtype=torch.int64, device=self.device)
        with self.mesh.recorder.phase("data"):
            tokens, stops = _read_all(self.mesh.world.all_reduce(counts, name="tokens"))
        return int(tokens), stops > 0

    def _balance(self, *, update: bool) -> Balance | None:
        """Sum what the routers did over all ranks; moves the correction biases if the step counts."""
        if self.balancer is None:
            return None
        with self.mesh.recorder.phase("metrics"):
            report = self.mesh.world.all_reduce(self.balancer.report(), name="routers")
        if update:
            self.balancer.update_bias(report)
        return self.balancer.balance(_read_all(report))

    def _gather_metrics(self, loss_sum: Tensor, busy: float) -> tuple[float, tuple[float, ...]]:
        """The summed loss of the whole batch and every rank's busy seconds; the same on all ranks."""
        mine = torch.stack([loss_sum.double(), torch.full_like(loss_sum, busy, dtype=torch.float64)])
        with self.mesh.recorder.phase("metrics"):
            rows = self.mesh.world.all_gather(mine.unsqueeze(0), name="metrics")
        values = _read_all(rows.flatten())
        return sum(values[0::2]) / self.mesh.tp.size, tuple(values[1::2])


def sequence_numbers(batch: MicroBatch, seq_len: int) -> Tensor:
    """Which of the micro-batch's sequences each token belongs to (T,), -1 for padding."""
    if batch.token_index.is_meta:
        return torch.zeros_like(batch.token_index)
    if not batch.samples:
        return torch.full_like(batch.token_index, -1)
    samples = torch.tensor(batch.samples, dtype=torch.int64)
    number = torch.searchsorted(samples, batch.token_index.clamp(min=0) // seq_len)
    return torch.where(batch.token_index < 0, -1, number)


def _read(value: Tensor) -> float:
    """The one place where a scalar of the step is read on the host (0 in a dry run)."""
    return 0.0 if value.is_meta else float(value.item())


def _read_all(values: Tensor) -> list[float]:
    """The one place where a small vector of the step is read on the host (zeros in a dry run)."""
    return [0.0] * values.numel() if values.is_meta else [float(value) for value in values.tolist()]
