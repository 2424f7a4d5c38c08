"""All legal layouts of a model on a cluster, pruned with reasons, ranked by step time with memory as the limit.

The order of pruning is the field's sizing sequence: tensor degree inside the fast domain, pipeline within the layers,
data for the rest; for each, the cheapest memory saving that fits (sharding before recomputation) is priced. Many layouts
are compared by the pipeline's closed form, with 1F1B or interleaved stages. Those that would be fastest with a sixth of their
bubble are tried with every other schedule, the best of all with other switches (sharding, resharding, recomputation, sequence
parallelism, rank order), and the best of these are priced by the schedule's rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Any

from shardwright.core.cluster import Cluster
from shardwright.core.layout import CHOICES, SCHEDULES, Layout, divisors
from shardwright.core.model_config import ModelConfig
from shardwright.core.plan import GIB, Candidate, Plan
from shardwright.errors import ConfigError
from shardwright.plan.neighbours import remedy
from shardwright.plan.stack import Stack
from shardwright.plan.step_time import Pricer
from shardwright.schedule.make import INTERLEAVED

LEAST_CP_TOKENS = 4096
"""Tokens per rank below which a context split is not looked at: its blocks are too short to hide a transfer."""
MICRO_BATCHES = (1, 2, 4, 8)
STEP_TOKENS = 4 * 2**20
"""Tokens of a step where no global batch is given."""
ZERO_BUBBLE_SAVES = 5 / 6
"""Of 1F1B's bubble, by which layouts are chosen to try other schedules: ZB-V fills with half a forward."""
SCHEDULED = 24
"""Layouts that are tried with other schedules."""
SWITCHED, SWITCH_ROUNDS = 6, 2
"""Of so many of the best every switch is turned, so many times over."""
REFINED = 12
"""Layouts that are priced by the schedule's rows."""
MOST_EXPLORED = 2000
"""Layouts that a report's picture of the search shows at most."""
NEAREST, NEAR_MISSES = 24, 8
"""Of so many layouts that miss the memory by least, so many of the fastest are shown."""


@dataclass
class Rejections:
    """Why layouts were left out: how many for each reason, and those that only memory keeps out."""

    reasons: Counter[str] = field(default_factory=Counter)
    too_large: list[tuple[float, Layout]] = field(default_factory=list)
    """With a lower bound of the bytes that each needs."""

    def nearest(self, pricer: Pricer, count: int) -> list[tuple[float, Layout]]:
        """Those that need least, with what they need; as few as possible are worked out."""
        queue = [(least, str(layout), False, layout) for least, layout in self.too_large]
        heapify(queue)
        found: list[tuple[float, Layout]] = []
        while queue and len(found) < count:
            need, text, exact, layout = heappop(queue)
            if exact:
                found.append((need, layout))
            else:
                heappush(queue, (pricer.peak_bytes(layout), text, True, layout))
        return found


def default_global_batch(cluster: Cluster, seq: int) -> int:
    """Sequences of a step: `STEP_TOKENS` rounded up to a multiple of the GPUs."""
    gpus = cluster.world_size
    return gpus * max(1, -(-STEP_TOKENS // (seq * gpus)))


def search(
    model: ModelConfig,
    cluster: Cluster,
    seq: int,
    global_batch: int | None = None,
    *,
    precision: str = "bf16",
    top: int = 5,
    stack: Stack | None = None,
    frozen: Sequence[str] = (),
    moments: int = 2,
) -> Plan:
    """The best layout on all GPUs of ``cluster`` with the ``top`` candidates; the smallest layout when none fits.

    ``global_batch`` is in sequences of ``seq`` tokens; ``frozen`` and ``moments`` as `Pricer` has them. Raises
    :class:`ConfigError` when no layout is legal at all.
    """
    pricer = Pricer(model, cluster, seq, stack, frozen=frozen, moments=moments)
    batch = default_global_batch(cluster, seq) if global_batch is None else global_batch
    if batch < 1 or top < 1:
        raise ConfigError(f"global batch {batch} and top {top} must be at least 1")
    rejections = Rejections()
    priced: list[Priced] = []
    for base in _degrees(pricer, batch, precision, rejections):
        for layout, need in _fitting(pricer, base, rejections):
            step = pricer.quick_step(layout)
            saved = ZERO_BUBBLE_SAVES * step.bubble_seconds if layout.virtual == 1 else 0.0
            priced.append(Priced(step.seconds, step.seconds - saved, layout, need))
    if not priced:
        if not rejections.too_large:
            raise ConfigError(_nothing_legal(pricer, batch, rejections))
        ((_, smallest),) = rejections.nearest(pricer, 1)
        return replace(pricer.price(smallest), rejected=_rejected(pricer, rejections))
    priced.sort(key=lambda one: (one.seconds, str(one.layout)))
    plans = _refined(pricer, _shortlist(pricer, priced, max(REFINED, 2 * top)))
    best = plans[0]
    candidates = tuple(Candidate(p.layout, p.step.seconds, p.memory[0].total) for p in plans[:top])
    explored = tuple(Candidate(one.layout, one.seconds, one.need) for one in priced[:MOST_EXPLORED])
    return replace(
        best,
        candidates=candidates,
        rejected=_rejected(pricer, rejections),
        explored=explored,
        sequence=_sizing_sequence(pricer, priced),
    )


def _degrees(pricer: Pricer, batch: int, precision: str, rejections: Rejections) -> Iterator[Layout]:
    """Layouts that use every GPU, before memory is looked at."""
    model, cluster = pricer.model, pricer.cluster
    world = cluster.world_size
    fast = cluster.fast_size
    for tp in divisors(world):
        reason = _tensor_reason(model, tp, fast)
        if reason:
            rejections.reasons[reason] += 1
            continue
        for pp in divisors(world // tp):
            if pp > model.num_layers:
                rejections.reasons[f"pp above the model's {model.num_layers} layers"] += 1
                continue
            for cp in _context_degrees(pricer.seq, world // (tp * pp)):
                dp = world // (tp * pp * cp)
                if batch % dp:
                    rejections.reasons[f"dp does not divide the global batch of {batch}"] += 1
                    continue
                for ep in _expert_degrees(model, tp * cp * dp):
                    shared: dict[str, int | str] = {
                        "tp": tp,
                        "pp": pp,
                        "cp": cp,
                        "dp": dp,
                        "ep": ep,
                        "precision": precision,
                    }
                    yield from _batches(pricer, shared, batch // dp, rejections)


def _batches(pricer: Pricer, degrees: dict[str, int | str], sequences: int, rejections: Rejections) -> Iterator[Layout]:
    """Micro-batch sizes and schedules for fixed degrees; ``sequences`` are those of one data-parallel rank."""
    pp = int(degrees["pp"])
    reduce_dtype = "bf16" if degrees["precision"] != "fp32" else "fp32"
    for size in MICRO_BATCHES:
        if sequences % size:
            continue
        m = sequences // size
        for virtual in _virtual_stages(pricer.model.num_layers, pp):
            if virtual > 1 and m % pp:
                rejections.reasons["interleaved stages need micro-batches that divide by pp"] += 1
                continue
            layout = Layout.of(
                {
                    **degrees, "micro_batch": size, "microbatches": m, "virtual": virtual,
                    "schedule": "interleaved" if virtual > 1 else "1f1b", "reduce_dtype": reduce_dtype,
                }
            )  # fmt: skip
            if reason := pricer.refusal(layout):
                rejections.reasons[reason] += 1
                continue
            yield layout


def _fitting(pricer: Pricer, base: Layout, rejections: Rejections) -> Iterator[tuple[Layout, float]]:
    """``base`` with the memory savings that are worth pricing, and their bytes: for each recomputation the cheapest
    sharding that fits.

    Nothing else is looked at where plain sharding without recomputation fits.
    """
    for policy in _policies(pricer):
        for index, sharding in enumerate(_shardings(base)):
            layout = base.with_(recompute=policy, **sharding)
            need = pricer.peak_bytes(layout, walk=False)
            if need <= pricer.cluster.chip.memory_bytes:
                need = pricer.peak_bytes(layout)
            if need > pricer.cluster.chip.memory_bytes:
                rejections.too_large.append((need, layout))
                continue
            yield layout, need
            if policy == "none" and index == 0:
                return
            break


def _shardings(base: Layout) -> list[dict[str, Any]]:
    """Ways to shard the state, cheapest first: gradients of several micro-batches are whole unless each is reduced."""
    if base.dp * base.cp == 1:
        return [{"zero": 0}]
    found: list[dict[str, Any]] = [{"zero": 1}, {"zero": 3}]
    if base.microbatches > 1:
        found += [{"zero": 2, "accumulate": "reduce"}, {"zero": 3, "accumulate": "reduce"}]
    return found


def _policies(pricer: Pricer) -> tuple[str, ...]:
    """Kinds of recomputation that save memory under the pricer's stack."""
    saves = not pricer.stack.flash or pricer.stack.selective_repeats > 0
    return ("none", "selective", "full") if saves else ("none", "full")


# -- the best, looked at more closely ----------------------------------------------------------------


@dataclass(frozen=True)
class Priced:
    """A layout by the closed form: seconds of a step, those that a schedule with little bubble may make of them, bytes that
    a device shows."""

    seconds: float
    hoped: float
    layout: Layout
    need: float


class Shortlist:
    """Layouts by the closed form, fastest first. Memory is worked out in full only for those that come to the front."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer, self.capacity = pricer, pricer.cluster.chip.memory_bytes
        self._queue: list[tuple[float, int, str, Layout, tuple[Layout, ...]]] = []  # of equals the shorter text is plainer
        self._seen: set[str] = set()
        self._fitting: set[str] = set()

    def add(self, *choices: Layout) -> bool:
        """The first of ``choices`` that fits, as far as is known without a walk; the others take its place if it does not.
        Whether it is the very first."""
        for index, layout in enumerate(choices):
            text = str(layout)
            if text in self._seen:
                return index == 0
            if self.pricer.refusal(layout) or self.pricer.peak_bytes(layout, walk=False) > self.capacity:
                continue
            self._seen.add(text)
            heappush(self._queue, (self.pricer.quick(layout), len(text), text, layout, choices[index + 1 :]))
            return index == 0
        return False

    def add_known(self, priced: Priced) -> None:
        """One that fits."""
        text = str(priced.layout)
        self._seen.add(text)
        self._fitting.add(text)
        heappush(self._queue, (priced.seconds, len(text), text, priced.layout, ()))

    def best(self, count: int) -> list[Layout]:
        """The fastest that fit; they stay in the list."""
        found: list[tuple[float, int, str, Layout, tuple[Layout, ...]]] = []
        while self._queue and len(found) < count:
            item = heappop(self._queue)
            _, _, text, layout, others = item
            if text in self._fitting or self.pricer.peak_bytes(layout) <= self.capacity:
                self._fitting.add(text)
                found.append(item)
            else:
                self.add(*others)
        for item in found:
            heappush(self._queue, item)
        return [layout for _, _, _, layout, _ in found]


def _sizing_sequence(pricer: Pricer, priced: Sequence[Priced]) -> Candidate:
    """What the field's sequence gives: the largest tensor degree of the fast domain, the fewest pipeline stages with which a
    layout fits, data parallelism with sharding for the rest; 1F1B or interleaved stages, no context parallelism."""
    tensor = max(one.layout.tp for one in priced)
    fitting = [one for one in priced if one.layout.tp == tensor and one.layout.cp == 1]
    if not fitting:
        return Candidate(None, reason=f"none with tp={tensor} and whole sequences on a rank fits")
    stages = min(one.layout.pp for one in fitting)
    layout = next(one.layout for one in fitting if one.layout.pp == stages)  # the fastest of them: priced is sorted
    return Candidate(layout, pricer.seconds(layout), pricer.peak_bytes(layout))


def _refined(pricer: Pricer, layouts: Sequence[Layout]) -> list[Plan]:
    """Plans by the schedule's rows, fastest first; of those that are alike in time and memory the first."""
    plans: dict[tuple[float, int], Plan] = {}
    for layout in layouts:
        plan = pricer.price(layout)
        plans.setdefault((plan.step.seconds, plan.memory[0].total), plan)
    return [plans[key] for key in sorted(plans)]


def _shortlist(pricer: Pricer, priced: Sequence[Priced], count: int) -> list[Layout]:
    """The ``count`` best of ``priced`` and of what other schedules and switches make of the best of them."""
    found = Shortlist(pricer)
    for one in priced:
        found.add_known(one)
    bases: dict[Layout, None] = {}
    for one in sorted(priced, key=lambda one: (one.hoped, str(one.layout))):
        if one.layout.pp > 1 and len(bases) < SCHEDULED:
            bases.setdefault(one.layout.with_(schedule="1f1b", virtual=1, **_PLAIN))
    for base in bases:
        for schedule, virtual in _other_schedules(pricer.model.num_layers, base):
            other = base.with_(schedule=schedule, virtual=virtual)
            for policy in _policies(pricer):
                if found.add(*(other.with_(recompute=policy, **sharding) for sharding in _shardings(other))):
                    break  # plain sharding fits, so nothing need be repeated
    turned: set[str] = set()
    for _ in range(SWITCH_ROUNDS):
        for layout in found.best(SWITCHED):
            if str(layout) not in turned:
                turned.add(str(layout))
                for other in _switched(pricer, layout):
                    found.add(other)
    return found.best(count)


_PLAIN: Mapping[str, Any] = MappingProxyType({"zero": 0, "recompute": "none", "accumulate": "defer"})


def _other_schedules(layers: int, base: Layout) -> list[tuple[str, int]]:
    """Schedules beside 1F1B and interleaved stages, with their chunks on each rank."""
    found = [(kind, 1) for kind in SCHEDULES if kind != "1f1b" and kind not in INTERLEAVED]
    if base.microbatches % base.pp == 0:
        found += [("interleaved_zb", v) for v in _virtual_stages(layers, base.pp) if v > 1]
    return found


def _switched(pricer: Pricer, layout: Layout) -> Iterator[Layout]:
    """``layout`` with one switch turned, where that can make it faster or small enough to be."""
    if layout.tp > 1:
        yield layout.with_(sp="auto" if layout.sp == "off" else "off")
    for policy in _policies(pricer):
        yield layout.with_(recompute=policy)
    other = "always" if layout.pp > 1 else "after_backward"
    for sharding in _shardings(layout):
        for reshard in ("auto", other) if sharding["zero"] == 3 else ("auto",):
            yield layout.with_(**{"accumulate": "defer", **sharding, "reshard": reshard})
    for order in CHOICES["order"] if layout.pp > 1 and layout.dp > 1 else ():
        yield layout.with_(order=order)


def _rejected(pricer: Pricer, rejections: Rejections) -> tuple[Candidate, ...]:
    """The fastest of the layouts that miss the memory by least, then one line for every other reason."""
    capacity = pricer.cluster.chip.memory_bytes
    found = [
        Candidate(
            layout,
            pricer.quick(layout),
            need,
            f"needs {need / GIB:.1f} GiB of {capacity / GIB:.1f}: {(need - capacity) / GIB:.1f} GiB too much",
        )
        for need, layout in rejections.nearest(pricer, NEAREST)
    ]
    found.sort(key=lambda candidate: (candidate.seconds or 0.0, str(candidate.layout)))
    shown = [
        replace(near, reason=near.reason + remedy(pricer, near.layout)) for near in found[:NEAR_MISSES] if near.layout
    ]
    others = rejections.reasons.items()
    return (*shown, *(Candidate(None, reason=f"{reason} ({count} layouts)") for reason, count in others))


def _nothing_legal(pricer: Pricer, batch: int, rejections: Rejections) -> str:
    gpus, name = pricer.cluster.world_size, pricer.model.name
    reason = next(iter(rejections.reasons), "no degrees divide the world")
    return f"no layout of {name} uses all {gpus} GPUs with a global batch of {batch}: {reason}; change the batch or the GPUs"


# -- degrees ---------------------------------------------------------------------------------------


def _tensor_reason(model: ModelConfig, tp: int, fast: int) -> str:
    """Why tp is not looked at; empty when it is."""
    if tp > fast:
        return f"tp above the {fast} GPUs of the fast domain"
    if model.num_heads % tp:
        return f"tp does not divide the model's {model.num_heads} heads"
    if model.mla is None and model.num_kv_heads % tp and model.num_kv_heads > 1:
        return f"tp does not divide the model's {model.num_kv_heads} KV heads"
    return ""


def _context_degrees(seq: int, ranks: int) -> list[int]:
    return [cp for cp in (1, 2, 4, 8, 16, 32) if ranks % cp == 0 and (cp == 1 or seq // cp >= LEAST_CP_TOKENS)]


def _expert_degrees(model: ModelConfig, ranks: int) -> list[int]:
    if model.moe is None:
        return [1]
    return [ep for ep in divisors(model.moe.num_experts) if ranks % ep == 0]


def _virtual_stages(layers: int, pp: int) -> list[int]:
    """One chunk per rank, two, and as many as there are layers to split evenly."""
    if pp == 1:
        return [1]
    even = [v for v in range(2, layers // pp + 1) if layers % (pp * v) == 0]
    return [1, *sorted({even[0], even[len(even) // 2], even[-1]} if even else ())]
