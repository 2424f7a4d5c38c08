"""What a schedule holds: activations from a chunk's F until their last use. Only the order of a row matters, no times."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.errors import ConfigError
from shardwright.schedule.action import Action, Kind, Schedule


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


def peak_bytes(schedule: Schedule, stage_bytes: Sequence[float], freed_at_backward: float = 0.0) -> tuple[float, ...]:
    """The most bytes of activations that each rank holds at once.

    ``stage_bytes[s]`` is what one micro-batch leaves on stage s after its F. B frees ``freed_at_backward`` of it (0 to
    1); the rest, x and dy of every linear, stays for W.
    """
    if len(stage_bytes) != schedule.num_stages:
        raise ConfigError(f"{len(stage_bytes)} stage sizes were given for {schedule.num_stages} stages; give one each")
    if not 0 <= freed_at_backward <= 1:
        raise ConfigError(f"freed_at_backward={freed_at_backward} must lie between 0 and 1")
    change = {Kind.F: 1.0, Kind.B: -freed_at_backward, Kind.W: freed_at_backward - 1.0, Kind.BW: -1.0}
    return tuple(_peak(row, stage_bytes, change) for row in schedule.rows)


def _peak(row: tuple[Action, ...], stage_bytes: Sequence[float], change: dict[Kind, float]) -> float:
    held = peak = 0.0
    for action in row:
        held += change.get(action.kind, 0.0) * stage_bytes[action.stage]
        peak = max(peak, held)
    return peak
