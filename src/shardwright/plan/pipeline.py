"""How long a pipeline takes: by its schedule's rows on the clock, or by the closed forms where there are many to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from shardwright.core.layout import Layout
from shardwright.plan.stages import chunks_per_rank, stages_of_rank
from shardwright.schedule.action import Schedule
from shardwright.schedule.make import make_schedule
from shardwright.schedule.simulate import Costs, Link, Timeline, simulate

ROUNDS: Mapping[str, int] = MappingProxyType({"1f1b": 2, "gpipe": 2})
OTHER_ROUNDS = 6
"""Multiples of p micro-batches after which a step grows by the same time with every further p of them."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on each stage, in order: F, B (with recomputation), W; ``link``: one boundary."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    link: float

    def of_rank(self, stages: Sequence[int]) -> tuple[float, float, float]:
        """F, B and W of one micro-batch over all of a rank's ``stages``."""
        return (
            sum(self.forward[s] for s in stages),
            sum(self.backward[s] for s in stages),
            sum(self.weight[s] for s in stages),
        )


def makespan(layout: Layout, times: StageTimes, *, exact: bool = True) -> float:
    """Seconds from the first forward to the last backward over all ranks.

    ``exact`` runs the schedule's rows on the clock (many micro-batches are continued from the steady state); else the
    closed form: the slowest rank's work, one pass of the others, and what the schedule saves of it.
    """
    if layout.pp == 1:
        return layout.microbatches * sum(times.of_rank(stages_of_rank(layout, 0)))
    if not exact:
        return _closed_form(layout, times)
    p, m = layout.pp, layout.microbatches
    base = ROUNDS.get(layout.schedule, OTHER_ROUNDS) * p + m % p
    if layout.schedule.startswith("file:") or m <= base + p:
        return _simulated(layout, times)
    first, second = (_simulated(layout.with_(microbatches=count), times) for count in (base, base + p))
    return second + (second - first) * ((m - base) // p - 1)


def stretch_of_shared_cores(layout: Layout, times: StageTimes, cores: int) -> float:
    """By how much a pipeline takes longer whose ranks share ``cores``: while more are busy than there are cores, all are slower.

    The ranks of a stage (tp, cp, dp) are busy at the same time.
    """
    alike = layout.world_size // layout.pp
    if layout.pp == 1:
        return max(1.0, alike / cores)
    timeline = run_rows(layout, times)
    changes = sorted(
        event
        for rank in range(layout.pp)
        for span in timeline.spans(rank)
        for event in ((span.start, alike), (span.end, -alike))
    )
    busy, before, stretched = 0, changes[0][0], 0.0
    for moment, change in changes:
        stretched += (moment - before) * max(1.0, busy / cores)
        busy, before = busy + change, moment
    return stretched / timeline.makespan


def run_rows(layout: Layout, times: StageTimes) -> Timeline:
    """The schedule's rows on the clock."""
    costs = Costs(times.forward, times.backward, times.weight, Link(latency=times.link))
    file = layout.schedule.startswith("file:")
    rows = make_schedule(layout) if file else _rows(layout.schedule, layout.pp, layout.virtual, layout.microbatches)
    return simulate(rows, costs)


@lru_cache(maxsize=16)
def _rows(name: str, pp: int, virtual: int, microbatches: int) -> Schedule:
    """A search asks for the same rows at many degrees of the other axes."""
    return make_schedule(Layout(schedule=name, pp=pp, virtual=virtual, microbatches=microbatches))


def _simulated(layout: Layout, times: StageTimes) -> float:
    return run_rows(layout, times).makespan


def _closed_form(layout: Layout, times: StageTimes) -> float:
    p, m, chunks = layout.pp, layout.microbatches, chunks_per_rank(layout)
    ranks = [times.of_rank(stages_of_rank(layout, rank)) for rank in range(p)]
    slowest = max(ranks, key=sum)
    others = [sum(rank[kind] for rank in ranks) - slowest[kind] for kind in range(3)]
    forward, backward, weight = others
    idle = {
        "gpipe": forward + backward + weight,
        "1f1b": forward + backward + weight,
        "interleaved": (forward + backward + weight) / chunks,
        "zb_h1": forward + backward - weight,
        "interleaved_zb": (forward + backward - weight) / chunks,
        "zb_v": forward / chunks,
        "dualpipe_v": (forward + 2 * backward - weight) / chunks,
    }.get(layout.schedule, forward + backward + weight)
    hops = 2 * (layout.num_stages - 1) * times.link
    late = -m % p if layout.schedule in ("interleaved", "interleaved_zb") else 0
    return m * sum(slowest) + max(0.0, idle) + hops + late * sum(slowest) * (chunks - 1) / chunks
