"""What a schedule holds: activations from a chunk's F until their last use. Only the order of a row matters, no times.

Of a backward that is split, B frees what F saved, and x and dy of every product wait for W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.errors import ConfigError
from shardwright.schedule.action import Kind, Schedule


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most chunks that each rank holds at once, each from its F until its BW or W is over."""
    return tuple(int(peak) for peak in peak_bytes(schedule, [1] * schedule.num_stages))


def in_flight_by_stage(schedule: Schedule) -> tuple[int, ...]:
    """The most micro-batches that each stage holds at once, each from its F until its BW or W is over."""
    peaks = [0] * schedule.num_stages
    for row in schedule.rows:
        held = [0] * schedule.num_stages
        for action in row:
            held[action.stage] += (action.kind is Kind.F) - (action.kind in (Kind.BW, Kind.W))
            peaks[action.stage] = max(peaks[action.stage], held[action.stage])
    return tuple(peaks)


@dataclass(frozen=True)
class Moment:
    """Micro-batches that a rank holds of each of its stages: ``saved`` from F to B, ``waiting`` from B to W.

    ``backward``: the stage (of the rank's, by place) whose backward begins, if one does; ``split``: it leaves its W.
    """

    saved: tuple[int, ...]
    waiting: tuple[int, ...]
    backward: int | None = None
    split: bool = False


def moments(schedule: Schedule, rank: int) -> frozenset[Moment]:
    """All that rank ``rank`` holds at one time or another."""
    place = {stage: index for index, stage in enumerate(schedule.stages_of(rank))}
    saved, waiting = [0] * len(place), [0] * len(place)
    found = set()
    for action in schedule.rows[rank]:
        kind, index = action.kind, place[action.stage]
        if kind in (Kind.B, Kind.BW):
            found.add(Moment(tuple(saved), tuple(waiting), index, kind is Kind.B))
        saved[index] += (kind is Kind.F) - (kind in (Kind.B, Kind.BW))
        waiting[index] += (kind is Kind.B) - (kind is Kind.W)
        if kind in (Kind.F, Kind.B):
            found.add(Moment(tuple(saved), tuple(waiting)))
    return frozenset(found)


@dataclass(frozen=True)
class StageBytes:
    """What one micro-batch has on a stage: ``saved`` from its F on, ``waiting`` from B to W, ``working`` during backward only.

    ``units``: how many a backward takes one after another, each of which frees its share and leaves its share.
    """

    saved: float
    waiting: float
    working: float = 0.0
    units: int = 1


@dataclass(frozen=True, order=True)
class Peak:
    """The most bytes that a rank holds at once, and their parts at that time."""

    total: float = 0.0
    saved: float = 0.0
    waiting: float = 0.0
    working: float = 0.0


def peak_of(held: frozenset[Moment], stages: Sequence[StageBytes]) -> Peak:
    """The fullest of the moments of a rank whose ``stages`` are of these sizes."""
    return max((_at(moment, stages) for moment in held), default=Peak())


def _at(moment: Moment, stages: Sequence[StageBytes]) -> Peak:
    saved = sum(count * stage.saved for count, stage in zip(moment.saved, stages, strict=True))
    waiting = sum(count * stage.waiting for count, stage in zip(moment.waiting, stages, strict=True))
    if moment.backward is None:
        return Peak(saved + waiting, saved, waiting)
    now = stages[moment.backward]
    if moment.split and now.waiting > now.saved:  # fullest at its last unit
        done = 1 - 1 / now.units
        saved, waiting = saved - done * now.saved, waiting + done * now.waiting
    return Peak(saved + waiting + now.working, saved, waiting, now.working)


def peak_bytes(
    schedule: Schedule, stage_bytes: Sequence[float], waiting_bytes: Sequence[float] | None = None
) -> tuple[float, ...]:
    """The most bytes of activations that each rank holds at once.

    ``stage_bytes[s]`` is what one micro-batch leaves on stage s after its F, ``waiting_bytes[s]`` what B leaves for W; by
    default all of it.
    """
    waiting = stage_bytes if waiting_bytes is None else waiting_bytes
    for sizes in (stage_bytes, waiting):
        if len(sizes) != schedule.num_stages:
            raise ConfigError(f"{len(sizes)} stage sizes were given for {schedule.num_stages} stages; give one each")
    each = [StageBytes(saved, left) for saved, left in zip(stage_bytes, waiting, strict=True)]
    return tuple(
        peak_of(moments(schedule, rank), [each[stage] for stage in schedule.stages_of(rank)]).total
        for rank in range(len(schedule.rows))
    )
