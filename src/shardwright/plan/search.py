"""All legal layouts of a model on a cluster, pruned with reasons, ranked by step time with memory as the limit.

The order of pruning is the field's sizing sequence: tensor degree inside the fast domain, pipeline within the layers,
data for the rest; for each, the cheapest memory saving that fits (sharding before recomputation) is priced. Many layouts
are compared by the pipeline's closed form; the best are priced again by the schedule's rows, in both rank orders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from heapq import heapify, heappop, heappush
from itertools import product
from typing import Any

from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.plan import GIB, Candidate, Plan
from shardwright.errors import ConfigError, LayoutError
from shardwright.plan.stack import Stack
from shardwright.plan.step_time import Pricer

LEAST_CP_TOKENS = 4096
"""Tokens per rank below which a context split is not looked at: its blocks are too short to hide a transfer."""
MICRO_BATCHES = (1, 2, 4, 8)
STEP_TOKENS = 4 * 2**20
"""Tokens of a step where no global batch is given."""
REFINED = 16
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
) -> Plan:
    """The best layout on all GPUs of ``cluster`` with the ``top`` candidates; the smallest layout when none fits.

    ``global_batch`` is in sequences of ``seq`` tokens. Raises :class:`ConfigError` when no layout is legal at all.
    """
    pricer = Pricer(model, cluster, seq, stack)
    batch = default_global_batch(cluster, seq) if global_batch is None else global_batch
    if batch < 1 or top < 1:
        raise ConfigError(f"global batch {batch} and top {top} must be at least 1")
    rejections = Rejections()
    priced: list[tuple[float, str, Layout, float]] = []
    for base in _degrees(pricer, batch, precision, rejections):
        for layout, need in _fitting(pricer, base, rejections):
            priced.append((pricer.quick(layout), str(layout), layout, need))
    if not priced:
        if not rejections.too_large:
            raise ConfigError(_nothing_legal(pricer, batch, rejections))
        ((_, smallest),) = rejections.nearest(pricer, 1)
        return replace(pricer.price(smallest), rejected=_rejected(pricer, rejections))
    priced.sort(key=lambda item: item[:2])
    plans = _refined(pricer, [layout for _, _, layout, _ in priced[: max(REFINED, top)]])
    best = plans[0]
    candidates = tuple(Candidate(p.layout, p.step.seconds, p.memory[0].total) for p in plans[:top])
    explored = tuple(Candidate(layout, seconds, need) for seconds, _, layout, need in priced[:MOST_EXPLORED])
    return replace(best, candidates=candidates, rejected=_rejected(pricer, rejections), explored=explored)


def exhaustive(pricer: Pricer, batch: int, precision: str = "bf16") -> Plan:
    """The fastest of all layouts of the search's space that fit, each with every memory saving and both rank orders, by
    the schedule's rows: what the search's shortcuts are measured against. Slow; for small clusters.
    """
    best: tuple[float, str, Layout] | None = None
    for base in _degrees(pricer, batch, precision, Rejections()):
        for policy, sharding in product(("none", "selective", "full"), _shardings(base)):
            layout = base.with_(recompute=policy, **sharding)
            if pricer.peak_bytes(layout) > pricer.cluster.chip.memory_bytes:
                continue
            for one in _orders(layout):
                found = (pricer.seconds(one), str(one), one)
                best = found if best is None or found[:2] < best[:2] else best
    if best is None:
        raise ConfigError(f"no layout of {pricer.model.name} fits {pricer.cluster.world_size} GPUs; use more")
    return pricer.price(best[2])


def _degrees(pricer: Pricer, batch: int, precision: str, rejections: Rejections) -> Iterator[Layout]:
    """Layouts that use every GPU, before memory is looked at."""
    model, cluster = pricer.model, pricer.cluster
    world = cluster.world_size
    fast = cluster.levels[0].size if cluster.levels else 1
    for tp in _divisors(world):
        reason = _tensor_reason(model, tp, fast)
        if reason:
            rejections.reasons[reason] += 1
            continue
        for pp in _divisors(world // tp):
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
            try:
                layout = Layout.of(
                    {
                        **degrees, "micro_batch": size, "microbatches": m, "virtual": virtual,
                        "schedule": "interleaved" if virtual > 1 else "1f1b", "reduce_dtype": reduce_dtype,
                    }
                )  # fmt: skip
                pricer.check(layout)
            except LayoutError as error:
                rejections.reasons[str(error)] += 1
                continue
            yield layout


def _fitting(pricer: Pricer, base: Layout, rejections: Rejections) -> Iterator[tuple[Layout, float]]:
    """``base`` with the memory savings that are worth pricing, and their bytes: for each recomputation the cheapest
    sharding that fits.

    Nothing else is looked at where plain sharding without recomputation fits.
    """
    policies = ("none", "full") if pricer.stack.flash else ("none", "selective", "full")
    for policy in policies:
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


def _refined(pricer: Pricer, layouts: Sequence[Layout]) -> list[Plan]:
    """Plans by the schedule's rows, fastest first; with several nodes in the other rank order as well."""
    found = []
    for layout in layouts:
        found += [pricer.price(one) for one in _orders(layout)]
    return sorted(found, key=lambda plan: (plan.step.seconds, plan.memory[0].total))


def _orders(layout: Layout) -> list[Layout]:
    """``layout`` in both rank orders, where they differ."""
    orders = ("tp-cp-dp-pp", "tp-cp-pp-dp") if layout.pp > 1 and layout.dp > 1 else ("tp-cp-dp-pp",)
    return [layout.with_(order=order) for order in orders]


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


def neighbours(layout: Layout) -> list[Layout]:
    """Layouts one change away that need less memory: what would make ``layout`` fit."""
    changes: list[dict[str, Any]] = []
    if layout.dp * layout.cp > 1:
        reduced = {"accumulate": "reduce"} if layout.microbatches > 1 else {}
        changes += [{"zero": zero, **(reduced if zero > 1 else {})} for zero in (1, 2, 3) if zero > layout.zero]
    if layout.recompute != "full":
        changes.append({"recompute": "full"})
    if layout.micro_batch % 2 == 0:
        changes.append({"micro_batch": layout.micro_batch // 2, "microbatches": layout.microbatches * 2})
    if layout.dp % 2 == 0:
        more = {"dp": layout.dp // 2, "microbatches": layout.microbatches * 2}
        changes += [{**more, "tp": layout.tp * 2}, {**more, "pp": layout.pp * 2}, {**more, "cp": layout.cp * 2}]
    changes.append({"offload": "optimizer"})
    found = []
    for change in changes:
        try:
            found.append(layout.with_(**change).without_idle())
        except LayoutError:
            continue
    return found


def remedy(pricer: Pricer, layout: Layout) -> str:
    """The first change that makes ``layout`` fit, in words for the end of a sentence; empty where none does."""
    for other in neighbours(layout):
        try:
            pricer.check(other)
        except LayoutError:
            continue
        if pricer.peak_bytes(other) <= pricer.cluster.chip.memory_bytes:
            changed = [f for f in fields(Layout) if getattr(other, f.name) != getattr(layout, f.name)]
            return "; fits with " + ", ".join(f"{f.name}={getattr(other, f.name)}" for f in changed)
    return ""


def price_with_neighbours(pricer: Pricer, layout: Layout, top: int = 5) -> Plan:
    """One layout with its neighbours: those that fit as candidates, the others as rejected with the reason."""
    plan = pricer.price(layout)
    fitting, rejected = [plan], []
    for other in neighbours(layout):
        try:
            near = pricer.price(other)
        except LayoutError as error:
            rejected.append(Candidate(other, reason=str(error)))
            continue
        if near.fits:
            fitting.append(near)
        else:
            lacks = (near.device_bytes - near.capacity) / GIB
            reason = f"{lacks:.1f} GiB more than the GPU has"
            rejected.append(Candidate(other, near.step.seconds, near.device_bytes, reason))
    shown = sorted((p for p in fitting if p.fits), key=lambda p: p.step.seconds)[:top]
    candidates = tuple(Candidate(p.layout, p.step.seconds, p.memory[0].total) for p in shown)
    return replace(plan, candidates=candidates, rejected=tuple(rejected))


# -- degrees ---------------------------------------------------------------------------------------


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


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
    return [ep for ep in _divisors(model.moe.num_experts) if ranks % ep == 0]


def _virtual_stages(layers: int, pp: int) -> list[int]:
    """One chunk per rank, two, and as many as there are layers to split evenly."""
    if pp == 1:
        return [1]
    even = [v for v in range(2, layers // pp + 1) if layers % (pp * v) == 0]
    return [1, *sorted({even[0], even[len(even) // 2], even[-1]} if even else ())]
