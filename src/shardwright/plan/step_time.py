"""One optimizer step: kernels, pipeline, what communication is not hidden, the optimizer.

A rank's F, B and W of one micro-batch are its units' kernels plus the messages among them that nothing hides (but at
least what the host needs to launch them). The pipeline is those times on the schedule's clock. Gathers of parameters and
reductions of gradients run on a stream of their own beside the units' compute (`plan.overlap`); the slowest pipeline
rank's exposed part is added, then the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger
from shardwright.core.model_config import ModelConfig
from shardwright.core.plan import GIB, CheckpointTime, Margin, PipelineSummary, Plan, StageMemory, StepTime
from shardwright.core.specs import TIED, check_frozen, parameter_specs
from shardwright.errors import LayoutError, ModelConfigError
from shardwright.plan.compute import (
    Kernels,
    LayerKind,
    Shape,
    UnitCost,
    compute_peak,
    embedding_cost,
    head_cost,
    layer_cost,
    optimizer_seconds,
)
from shardwright.plan.memory import PARAMETER_BYTES, MemoryModel, by_rows, in_flight, optimizer_bytes, shard_ranks
from shardwright.plan.network import Network
from shardwright.plan.overlap import hidden
from shardwright.plan.pipeline import StageTimes, makespan, run_rows, stretch_of_shared_cores
from shardwright.plan.stack import Stack, stack_for
from shardwright.plan.stages import (
    Parameters,
    ParameterTable,
    RankUnits,
    layer_kinds,
    layers_per_stage,
    rank_units,
    stages_of_rank,
)
from shardwright.plan.traffic import Message, Traffic, add_messages
from shardwright.schedule.simulate import Timeline

CONVENTION = "model FLOPs, causal attention (half of the square), head counted, embedding look-up and recomputation not"
HOST_BYTES_PER_PARAMETER = 28
"""Traffic of Adam on the host: as on the device less the working copy's write."""
CHECKPOINT_SECONDS = 1800.0
"""Between two checkpoints where a run does not say it."""
HOST_MEMORY_GB_S = 25e9
"""Bytes/s of host memory for one of a node's GPUs, an assumption."""


@dataclass
class Phase:
    """Seconds of one micro-batch on one stage: kernels, exposed messages, kernels that the host must launch."""

    compute: float = 0.0
    exposed: float = 0.0
    kernels: float = 0.0

    def add(self, compute: float, exposed: float, kernels: float, count: int = 1) -> None:
        self.compute += compute * count
        self.exposed += exposed * count
        self.kernels += kernels * count

    def seconds(self, stack: Stack) -> float:
        return max(self.compute + self.exposed, self.kernels * stack.host)


@dataclass
class StageCost:
    """One stage's F, B and W, its messages of one micro-batch, its FLOPs with recomputation."""

    forward: Phase
    backward: Phase
    weight: Phase
    flops: float = 0.0


class Pricer:
    """Prices layouts of one model on one cluster under one stack; costs that layouts share are computed once."""

    def __init__(
        self,
        model: ModelConfig,
        cluster: Cluster,
        seq: int,
        stack: Stack | None = None,
        *,
        frozen: Sequence[str] = (),
        moments: int = 2,
    ) -> None:
        """``frozen``: prefixes of names that are not trained; ``moments`` of the optimizer: 2 of Adam, 1 of SGD."""
        if seq < 1:
            raise ModelConfigError(f"seq={seq} must be at least 1 token")
        if frozen:
            check_frozen(frozen, parameter_specs(model))
        self.model, self.cluster, self.seq = model, cluster, seq
        self.stack = stack or stack_for(cluster)
        self.frozen, self.moments = tuple(frozen), moments
        self.table = ParameterTable(model, frozen)
        self.network = Network(cluster, self.stack)
        self.memory = MemoryModel(model, self.table, self.stack, moments)
        self.kinds = layer_kinds(model, frozen)
        self._units: dict[tuple[object, ...], UnitCost] = {}
        self._ranks: dict[tuple[object, ...], list[RankUnits]] = {}
        self.margin = Margin(int(self.stack.reserve_gib * GIB), self.stack.reserve_share)
        self._flops_causal = model.flops_per_token(seq, convention="causal")
        self._flops_full = model.flops_per_token(seq, convention="full")
        self._flops_embedding = model.flops_per_token(seq, embedding=True)

    def with_stack(self, stack: Stack) -> Pricer:
        """The same model and cluster under another stack; what no stack changes is shared."""
        other = copy(self)
        other.stack = stack
        other.network = Network(self.cluster, stack)
        other.memory = MemoryModel(self.model, self.table, stack, self.moments)
        other.margin = Margin(int(stack.reserve_gib * GIB), stack.reserve_share)
        other._units = {}
        return other

    def with_cluster(self, cluster: Cluster) -> Pricer:
        """The same model and training on another cluster."""
        return Pricer(self.model, cluster, self.seq, self.stack, frozen=self.frozen, moments=self.moments)

    # -- layouts -----------------------------------------------------------------------------------

    def check(self, layout: Layout) -> None:
        """Raise :class:`LayoutError` for a layout that this model or this cluster cannot run."""
        model = self.model
        layout.check_model(model)
        layout.check_training(self.model, self.seq)
        if layout.world_size > self.cluster.world_size:
            raise LayoutError(
                f"layout {layout} needs {layout.world_size} GPUs, the cluster has {self.cluster.world_size}; lower a degree"
            )
        layers_per_stage(model, layout)
        if model.moe is not None and model.moe.num_experts % layout.ep:
            raise LayoutError(f"ep={layout.ep} must divide the model's {model.moe.num_experts} experts")
        if self.seq % layout.cp:
            raise LayoutError(f"cp={layout.cp} must divide the sequence of {self.seq} tokens")
        tokens = layout.micro_batch * self.seq // layout.cp
        if layout.sequence_parallel and tokens % layout.tp:
            raise LayoutError(f"sp=on: tp={layout.tp} must divide the {tokens} tokens of a micro-batch")

    def refusal(self, layout: Layout) -> str:
        """Why :meth:`check` refuses ``layout``; empty where it does not."""
        try:
            self.check(layout)
        except LayoutError as error:
            return str(error)
        return ""

    def units_of_ranks(self, layout: Layout) -> list[RankUnits]:
        """The units of every pipeline rank."""
        key = (layout.pp, layout.virtual, layout.schedule, layout.stages)
        if key not in self._ranks:
            counts = layers_per_stage(self.model, layout)
            self._ranks[key] = [rank_units(layout, rank, counts, self.kinds) for rank in range(layout.pp)]
        return self._ranks[key]

    def stage_memory(self, layout: Layout) -> tuple[StageMemory, ...]:
        """Memory of every pipeline rank, heaviest first."""
        shape = Shape.of(layout, self.seq)
        found = [
            self.memory.stage(layout, rank, units, shape) for rank, units in enumerate(self.units_of_ranks(layout))
        ]
        return tuple(sorted(found, key=lambda stage: -stage.total))

    def peak_bytes(self, layout: Layout, *, walk: bool = True) -> float:
        """What the fullest device shows as used. Of ranks with the same units the first holds most, unless the rows decide.

        Without ``walk`` a lower bound, sooner: what ZeRO gathers and reduces is left out.
        """
        shape = Shape.of(layout, self.seq)
        first: dict[tuple[RankUnits, str], int] = {}
        for rank, units in enumerate(self.units_of_ranks(layout)):
            first.setdefault((units, layout.recompute_on(rank)), rank)
        alike = ((rank, units) for (units, _), rank in first.items())
        ranks = enumerate(self.units_of_ranks(layout)) if by_rows(layout) else alike
        peak = max(self.memory.stage(layout, rank, units, shape, walk=walk).total for rank, units in ranks)
        return self.margin.device_bytes(peak)

    # -- units -------------------------------------------------------------------------------------

    def _unit(self, what: LayerKind | str, layout: Layout, shape: Shape) -> UnitCost:
        key = (what, shape, layout.precision)
        if key not in self._units:
            kernels = Kernels(self.cluster.chip, self.stack, layout.precision)
            if isinstance(what, LayerKind):
                self._units[key] = layer_cost(self.model, what, shape, kernels)
            else:
                cost = embedding_cost if what == "embedding" else head_cost
                self._units[key] = cost(self.model, shape, kernels)
            self._without_frozen(what, layout, self._units[key])
        return self._units[key]

    def _without_frozen(self, what: LayerKind | str, layout: Layout, cost: UnitCost) -> None:
        """No weight gradient is made of what is not trained: its share of the unit's parameters stands for its share of that."""
        held, frozen = self._parameters(what, layout)
        if share := frozen.total / held.total if held.total else 0.0:
            cost.backward_weight *= 1 - share
            cost.flops_backward -= share * (cost.flops_backward - cost.flops_forward)

    def _parameters(self, what: LayerKind | str, layout: Layout) -> tuple[Parameters, Parameters]:
        """Parameters of one unit on one rank, and how many of them are not trained."""
        table, tp, ep = self.table, layout.tp, layout.ep
        if isinstance(what, LayerKind):
            held, frozen = table.layer(what, tp, ep), table.frozen_layer(what, tp, ep)
        elif what == "embedding":
            held, frozen = table.embedding(tp), table.frozen_end("embedding", tp)
        else:
            held, frozen = table.head(tp, with_embedding=False), table.frozen_end("head", tp)
        return held, frozen

    def _sum_seconds(self, what: LayerKind | str, layout: Layout) -> float:
        """What adding a unit's gradients to those of the micro-batches before takes, for one of all micro-batches."""
        held, frozen = self._parameters(what, layout)
        dense, experts = shard_ranks(layout) if layout.num_reductions > 1 else (1, 1)  # shards are summed, or all
        trained = (held.dense - frozen.dense) / dense + (held.experts - frozen.experts) / experts
        summed = trained * (1 - 1 / layout.microbatches)
        return summed * self.stack.accumulate / (self.cluster.chip.memory_bandwidth * self.stack.memory)

    def _add_unit(
        self, stage: StageCost, cost: UnitCost, messages: Sequence[Message], count: int, recomputed: bool
    ) -> None:
        exposed = {"F": 0.0, "B": 0.0, "W": 0.0, "recompute": 0.0}
        for message in messages:
            exposed[message.phase] += message.exposed * message.count
        again = cost.forward if recomputed else 0.0
        kernels = cost.kernels_forward if recomputed else 0
        stage.forward.add(cost.forward, exposed["F"], cost.kernels_forward, count)
        stage.backward.add(
            cost.backward_input + again, exposed["B"] + exposed["recompute"], cost.kernels_backward + kernels, count
        )
        stage.weight.add(cost.backward_weight, exposed["W"], 0, count)
        stage.flops += count * (cost.flops_forward * (1 + recomputed) + cost.flops_backward)

    def _recomputed(self, cost: UnitCost, policy: str) -> UnitCost:
        """``selective`` repeats the attention core where its scores are not kept; a fused kernel repeats them anyway, and
        then what the stack's own policy drops."""
        if policy != "selective":
            return cost
        again = UnitCost(**vars(cost))
        if self.stack.flash:
            share = self.stack.selective_repeats
            again.backward_input += share * cost.forward
            again.kernels_backward += int(share * cost.kernels_forward)
            return again
        again.backward_input += cost.attention_forward
        again.kernels_backward += 4
        return again

    def _stages(self, layout: Layout, traffic: Traffic, shape: Shape) -> tuple[list[StageCost], list[list[Message]]]:
        """Cost and messages of one micro-batch on every stage."""
        counts = layers_per_stage(self.model, layout)
        policy_of = {stage: layout.recompute_on(rank) for rank in range(layout.pp) for stage in stages_of_rank(layout, rank)}
        per_policy: dict[str, dict[LayerKind, tuple[UnitCost, list[Message]]]] = {}
        for policy in dict.fromkeys(policy_of.values()):
            per_policy[policy] = {}
            for kind in dict.fromkeys(self.kinds):
                cost = self._unit(kind, layout, shape)
                per_policy[policy][kind] = (self._recomputed(cost, policy), traffic.layer(kind, cost, policy))
        alike: dict[tuple[object, ...], tuple[StageCost, list[Message]]] = {}
        found, start, last = [], 0, len(counts) - 1
        for index, count in enumerate(counts):
            held: dict[LayerKind, int] = {}
            for kind in self.kinds[start : start + count]:
                held[kind] = held.get(kind, 0) + 1
            start += count
            policy = policy_of[index]
            key = (*held.items(), policy, index == 0, index == last)
            if key not in alike:
                alike[key] = self._stage(layout, traffic, shape, per_policy[policy], held, (index, last), policy == "full")
            found.append(alike[key])
        return [stage for stage, _ in found], [sent for _, sent in found]

    def _stage(
        self,
        layout: Layout,
        traffic: Traffic,
        shape: Shape,
        per_kind: dict[LayerKind, tuple[UnitCost, list[Message]]],
        held: dict[LayerKind, int],
        place: tuple[int, int],
        recomputed: bool,
    ) -> tuple[StageCost, list[Message]]:
        """One stage that holds so many layers of each kind; ``place`` is (its index, the last stage's)."""
        index, last = place
        stage, sent = StageCost(Phase(), Phase(), Phase()), []
        for kind, number in held.items():
            cost, among = per_kind[kind]
            self._add_unit(stage, cost, among, number, recomputed)
            stage.weight.add(self._sum_seconds(kind, layout), 0.0, 0, number)
            sent += [message.times(number) for message in among]
        if index == 0:
            among = traffic.embedding()
            self._add_unit(stage, self._unit("embedding", layout, shape), among, 1, False)
            stage.weight.add(self._sum_seconds("embedding", layout), 0.0, 0)
            sent += among
        if index == last:
            among = traffic.head()
            self._add_unit(stage, self._unit("head", layout, shape), among, 1, False)
            stage.weight.add(self._sum_seconds("head", layout), 0.0, 0)
            sent += among
        self._add_boundaries(stage, sent, index, last, traffic.boundary())
        return stage, sent

    @staticmethod
    def _add_boundaries(stage: StageCost, sent: list[Message], index: int, last: int, boundary: list[Message]) -> None:
        """Activations go on from all but the last stage, gradients back from all but the first; both ends wait."""
        for message in boundary:
            sends = index < last if message.phase == "F" else index > 0
            receives = index > 0 if message.phase == "F" else index < last
            phase = stage.forward if message.phase == "F" else stage.backward
            phase.exposed += message.exposed * (sends + receives)
            if sends:
                sent.append(message)

    # -- a step ------------------------------------------------------------------------------------

    def quick(self, layout: Layout) -> float:
        """Seconds of a step by the closed form of the pipeline: for comparing many layouts."""
        return self.quick_step(layout).seconds

    def quick_step(self, layout: Layout) -> StepTime:
        """A step by the closed form of the pipeline, with its parts."""
        return self._price(layout, exact=False)[0]

    def least_seconds(self, layout: Layout) -> float:
        """What no step of ``layout`` is faster than, however its state is sharded: the slowest rank's own work."""
        shape = Shape.of(layout, self.seq)
        traffic = Traffic(self.model, layout, shape, self.network, self.stack)
        times = self._times(layout, self._stages(layout, traffic, shape)[0], traffic)
        work = max(sum(times.of_rank(stages_of_rank(layout, rank))) for rank in range(layout.pp))
        return layout.microbatches * work + self.stack.step_seconds

    def seconds(self, layout: Layout) -> float:
        """Seconds of a step by the schedule's rows, without the rest of the account."""
        return self._price(layout, exact=True)[0].seconds

    def price(self, layout: Layout) -> Plan:
        """The whole account of one layout; raises :class:`LayoutError` where it cannot run."""
        self.check(layout)
        step, pipeline, ledger = self._price(layout, exact=True)
        return Plan(
            model=self.model,
            layout=layout,
            cluster=self.cluster,
            seq=self.seq,
            memory=self.stage_memory(layout),
            communication=tuple(ledger.sorted_entries()),
            pipeline=pipeline,
            step=step,
            margin=self.margin,
            checkpoint=self.checkpoint_time(layout),
        )

    def checkpoint_time(self, layout: Layout, interval: float = CHECKPOINT_SECONDS) -> CheckpointTime:
        """A checkpoint every ``interval`` seconds, each byte written once: parameters, master copies and moments.

        Every rank copies its part to host memory, then all nodes write beside training.
        """
        (units,) = self.units_of_ranks(Layout())
        held, trained = self.table.of_rank(units, 1, 1).total, self.table.trained_of_rank(units, 1, 1).total
        total = held * PARAMETER_BYTES.get(layout.precision, 2)
        total += int(trained * optimizer_bytes(layout.precision, self.stack, self.moments))
        nodes = min(self.cluster.nodes, -(-layout.world_size // self.cluster.gpus_per_node))
        copied = total / layout.world_size / self.stack.host_bandwidth
        return CheckpointTime(total, copied, total / (nodes * self.cluster.storage_bandwidth), interval)

    def timeline(self, layout: Layout, most: int) -> Timeline:
        """The pipeline's rows on the clock, with at most ``most`` micro-batches (a multiple of pp where there are more)."""
        shape = Shape.of(layout, self.seq)
        traffic = Traffic(self.model, layout, shape, self.network, self.stack)
        times = self._times(layout, self._stages(layout, traffic, shape)[0], traffic)
        count = min(layout.microbatches, max(layout.pp, most // layout.pp * layout.pp))
        return run_rows(layout.with_(microbatches=count), times)

    def _times(self, layout: Layout, stages: Sequence[StageCost], traffic: Traffic) -> StageTimes:
        stack = self.stack
        return StageTimes(
            tuple(stage.forward.seconds(stack) for stage in stages),
            tuple(stage.backward.seconds(stack) for stage in stages),
            tuple(stage.weight.seconds(stack) for stage in stages),
            sum(message.seconds for message in traffic.boundary()) / 2,
        )

    def _price(self, layout: Layout, *, exact: bool) -> tuple[StepTime, PipelineSummary, Ledger]:
        shape = Shape.of(layout, self.seq)
        traffic = Traffic(self.model, layout, shape, self.network, self.stack)
        stages, messages = self._stages(layout, traffic, shape)
        stack, p, m = self.stack, layout.pp, layout.microbatches
        times = self._times(layout, stages, traffic)
        span = makespan(layout, times, exact=exact)
        by_rank = [stages_of_rank(layout, rank) for rank in range(p)]
        work = [sum(times.of_rank(held)) for held in by_rank]
        slow = max(range(p), key=work.__getitem__)
        data, exposed_data, update = self._once(layout, traffic, times, by_rank)
        compute = m * sum(
            phase.compute for s in by_rank[slow] for phase in (stages[s].forward, stages[s].backward, stages[s].weight)
        )
        waiting = m * work[slow] - compute
        bubble = 1 - m * sum(work) / (p * span) if span else 0.0
        shared = 1.0
        if cores := self.cluster.cores * -(-layout.world_size // self.cluster.gpus_per_node):
            busy = layout.world_size * (1 - bubble) / cores
            shared = stretch_of_shared_cores(layout, times, cores) if exact else max(1.0, busy)
        seconds = (
            span + exposed_data[slow] + update + stack.step_seconds, compute, span - m * work[slow],
            waiting + exposed_data[slow], update, stack.step_seconds,
        )  # fmt: skip
        step = self._step(layout, sum(s.flops for s in stages), *(shared * part for part in seconds))
        pipeline = PipelineSummary(
            layout.schedule if p > 1 else "none",
            layout.num_stages,
            m,
            bubble,
            tuple(in_flight(layout, rank) for rank in range(p)),
        )
        ledger = Ledger()
        if exact:
            for s in by_rank[slow]:
                add_messages(ledger, [message.times(m) for message in messages[s]])
            add_messages(ledger, data[slow])
        return step, pipeline, ledger

    def _once(
        self, layout: Layout, traffic: Traffic, times: StageTimes, by_rank: Sequence[Sequence[int]]
    ) -> tuple[list[list[Message]], list[float], float]:
        """Messages of each rank's parameters and gradients, their exposed seconds, and the optimizer's seconds."""
        all_messages, exposed, update = [], [], 0.0
        alike: dict[RankUnits, tuple[list[Message], float]] = {}
        for held, units in zip(by_rank, self.units_of_ranks(layout), strict=True):
            if units not in alike:
                parameters = self.table.of_rank(units, layout.tp, layout.ep)
                both_ends = self.model.tied_head and layout.pp > 1 and units.embedding != units.head
                trained = self.table.trained_of_rank(units, layout.tp, layout.ep)
                head = self.table.head(layout.tp, with_embedding=False).dense
                tied = head if both_ends and not (self.frozen and TIED.startswith(self.frozen)) else 0
                sends = traffic.data(parameters, units.num_units, tied, trained)
                alike[units] = (sends, self._update(layout, trained))
            sent, seconds = alike[units]
            found = hidden(sent, layout, units.num_units, times.of_rank(held), self.stack)
            all_messages.append(found)
            exposed.append(sum(message.exposed * message.count for message in found))
            update = max(update, seconds)
        return all_messages, exposed, update

    def _update(self, layout: Layout, held: Parameters) -> float:
        dense, experts = shard_ranks(layout)
        owned = held.dense / dense + held.experts / experts if layout.zero else float(held.total)
        on_host = owned * layout.offload_fraction if layout.offload != "none" else 0.0
        seconds = optimizer_seconds(self.cluster.chip, self.stack, owned - on_host, self.moments)
        if on_host:  # gradients down, parameters up, Adam between
            moved = on_host * (4 + 2) / self.stack.host_bandwidth
            seconds += moved + on_host * HOST_BYTES_PER_PARAMETER / HOST_MEMORY_GB_S
        return seconds

    def _step(
        self,
        layout: Layout,
        flops: float,
        seconds: float,
        compute: float,
        bubble: float,
        exposed: float,
        update: float,
        other: float,
    ) -> StepTime:
        tokens = layout.global_batch * self.seq
        gpus = layout.world_size
        peak = compute_peak(self.cluster.chip, layout.precision) * gpus * seconds
        computed = flops * layout.microbatches * layout.tp * layout.cp * layout.dp
        return StepTime(
            seconds=seconds,
            tokens_per_second_per_gpu=tokens / seconds / gpus,
            mfu=self._flops_causal * tokens / peak,
            mfu_convention=CONVENTION,
            mfu_precision=layout.precision,
            mfu_full_attention=self._flops_full * tokens / peak,
            mfu_with_embedding=self._flops_embedding * tokens / peak,
            hfu=computed / peak,
            compute_seconds=compute,
            bubble_seconds=max(0.0, bubble),
            exposed_communication_seconds=exposed,
            optimizer_seconds=update,
            other_seconds=other,
        )
