"""What a schedule holds: activations from a chunk's F until their last use. Only the order of a row matters, no times.

Of a backward that is split, B frees what F saved, and x and dy of every product wait for W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
class Moments:
    """All that a rank holds at one time or another; a row of each array is a moment, a column one of the rank's stages.

    ``saved`` counts micro-batches from F to B, ``waiting`` from B to W; ``backward`` is the stage (by place) whose backward
    begins then, -1 where none does; ``split``: it leaves its W.
    """

    saved: NDArray[np.float64]
    waiting: NDArray[np.float64]
    backward: NDArray[np.int64]
    split: NDArray[np.bool_]


def moments(schedule: Schedule, rank: int) -> Moments:
    """What rank ``rank`` holds while its row runs."""
    place = {stage: index for index, stage in enumerate(schedule.stages_of(rank))}
    saved, waiting = [0] * len(place), [0] * len(place)
    found = {((0,) * len(place), (0,) * len(place), -1, False)}
    for action in schedule.rows[rank]:
        kind, index = action.kind, place[action.stage]
        if kind in (Kind.B, Kind.BW):
            found.add((tuple(saved), tuple(waiting), index, kind is Kind.B))
        saved[index] += (kind is Kind.F) - (kind in (Kind.B, Kind.BW))
        waiting[index] += (kind is Kind.B) - (kind is Kind.W)
        if kind in (Kind.F, Kind.B):
            found.add((tuple(saved), tuple(waiting), -1, False))
    columns = zip(*found, strict=True)
    return Moments(*(np.array(list(column), dtype) for column, dtype in zip(columns, (float, float, int, bool), strict=True)))


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


def peak_of(held: Moments, stages: Sequence[StageBytes]) -> Peak:
    """The fullest of the moments of a rank whose ``stages`` are of these sizes."""
    each_saved, each_waiting = np.array([stage.saved for stage in stages]), np.array([stage.waiting for stage in stages])
    saved, waiting, working = held.saved @ each_saved, held.waiting @ each_waiting, np.zeros(len(held.backward))
    for place, stage in enumerate(stages):
        now = held.backward == place
        working[now] = stage.working
        if stage.waiting > stage.saved:  # fullest at the last unit of a backward that leaves its W
            done, late = 1 - 1 / stage.units, now & held.split
            saved[late] -= done * stage.saved
            waiting[late] += done * stage.waiting
    total = saved + waiting + working
    fullest = np.flatnonzero(total == total.max())
    return max(Peak(*(float(part[index]) for part in (total, saved, waiting, working))) for index in fullest)


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
