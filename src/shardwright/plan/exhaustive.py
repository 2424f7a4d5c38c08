"""The fastest of all layouts of a small cluster, none left out that could win: what the search is measured against."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from shardwright.core.layout import CHOICES, RECOMPUTE, SCHEDULES, Layout, divisors
from shardwright.core.plan import Plan
from shardwright.errors import ConfigError
from shardwright.plan.step_time import Pricer
from shardwright.schedule.make import INTERLEAVED


def exhaustive(pricer: Pricer, batch: int, precision: str = "bf16") -> Plan:
    """The fastest of all layouts that fit, by the schedule's rows: what the search's shortcuts are measured against.

    Every product of degrees, micro-batches, schedules, chunks, recomputation, sequence parallelism, rank orders and
    shardings, none of them as the search makes them. Left out is only what cannot win: a layout of which the slowest rank's
    own work takes longer than a whole step that was found. Slow; for small clusters.
    """
    groups = sorted(
        ((pricer.least_seconds(base), str(base), base) for base in _bases(pricer, batch, precision)),
        key=lambda group: group[:2],
    )
    best: tuple[float, str, Layout] | None = None
    for least, _, base in groups:
        if best is not None and least >= best[0]:
            break
        for sharding in _shardings(base):
            layout = base.with_(**sharding)
            if pricer.peak_bytes(layout, walk=False) > pricer.cluster.chip.memory_bytes:
                continue
            if pricer.peak_bytes(layout) <= pricer.cluster.chip.memory_bytes:
                found = (pricer.seconds(layout), str(layout), layout)
                best = found if best is None or found[:2] < best[:2] else best
    if best is None:
        raise ConfigError(f"no layout of {pricer.model.name} fits {pricer.cluster.world_size} GPUs; use more")
    return pricer.price(best[2])


def _bases(pricer: Pricer, batch: int, precision: str) -> Iterator[Layout]:
    """Every legal layout but for how its state is sharded."""
    model, world = pricer.model, pricer.cluster.world_size
    reduce_dtype = "fp32" if precision == "fp32" else "bf16"
    experts = 1 if model.moe is None else model.moe.num_experts
    for tp, pp, cp, ep in product(divisors(world), divisors(world), divisors(world), divisors(experts)):
        dp, rest = divmod(world, tp * pp * cp)
        if rest or (tp * cp * dp) % ep or batch % dp:
            continue
        kinds = [(kind, 1) for kind in SCHEDULES if kind not in INTERLEAVED] if pp > 1 else [("1f1b", 1)]
        if pp > 1:
            kinds += [(kind, virtual) for kind in INTERLEAVED for virtual in range(2, model.num_layers // pp + 1)]
        switches = product(
            divisors(batch // dp), kinds, RECOMPUTE, ("auto", "off") if tp > 1 else ("auto",),
            CHOICES["order"] if pp > 1 and dp > 1 else ("tp-cp-dp-pp",),
        )  # fmt: skip
        for size, (schedule, virtual), recompute, sp, order in switches:
            layout = Layout(
                tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, micro_batch=size, microbatches=batch // dp // size,
                schedule=schedule, virtual=virtual, recompute=recompute, sp=sp, order=order, precision=precision,
                reduce_dtype=reduce_dtype,
            )  # fmt: skip
            if not pricer.refusal(layout):
                yield layout


def _shardings(base: Layout) -> Iterator[dict[str, Any]]:
    for zero, accumulate, reshard in product((0, 1, 2, 3), CHOICES["accumulate"], CHOICES["reshard"]):
        if (zero >= 2 or accumulate == "defer") and (zero == 3 or reshard == "auto"):
            yield {"zero": zero, "accumulate": accumulate, "reshard": reshard}
