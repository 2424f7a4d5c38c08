"""When sharded parameters are gathered and freed: a plan over the uses of units in a schedule, made before the run.

A rank's row of F and B, unit by unit, is a fixed sequence of uses. Parameters are gathered in groups (what the same units
use). With ``always`` a group is there for one use and freed after it; with ``after_backward`` it stays from its first
forward to the end of the backward passes that need it: of the step while the reduction of gradients is deferred, else
until no micro-batch is between its forward and its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.layout import Layout
from shardwright.schedule.action import Action, Kind, Schedule


@dataclass(frozen=True)
class Use:
    """One forward ("F") or backward ("B") of one unit, and the groups to gather before it and to free after it."""

    phase: str
    unit: str
    gather: tuple[int, ...] = ()
    free: tuple[int, ...] = ()


def unit_uses(schedule: Schedule, rank: int, stages: Sequence[Sequence[str]]) -> list[Use]:
    """The uses of units in one step on pipeline rank ``rank``, in order; nothing is gathered yet."""
    return uses_of_row(schedule.rows[rank], dict(enumerate(stages)))


def uses_of_row(row: Iterable[Action], stages: Mapping[int, Sequence[str]]) -> list[Use]:
    """The uses of units in ``row``; ``stages`` are the units of each of its stages, in order."""
    uses: list[Use] = []
    for action in row:
        if action.kind is Kind.F:
            uses += [Use("F", unit) for unit in stages[action.stage]]
        elif action.kind in (Kind.B, Kind.BW):
            uses += [Use("B", unit) for unit in reversed(stages[action.stage])]
    return uses


def plan_gathers(uses: Sequence[Use], groups: Sequence[Collection[str]], layout: Layout) -> list[Use]:
    """``uses`` with what to gather and to free; ``groups`` are the units that use each group of parameters."""
    gather: list[list[int]] = [[] for _ in uses]
    free: list[list[int]] = [[] for _ in uses]
    at: dict[str, list[int]] = {}
    for index, use in enumerate(uses):
        at.setdefault(use.unit, []).append(index)
    for group, units in enumerate(groups):
        places = sorted(index for unit in set(units) for index in at.get(unit, ()))
        held, in_flight = False, 0
        for place in places:
            if not held:
                gather[place].append(group)
            in_flight += 1 if uses[place].phase == "F" else -1
            held = place != places[-1] and _stays(layout, in_flight)
            if not held:
                free[place].append(group)
    return [Use(use.phase, use.unit, tuple(g), tuple(f)) for use, g, f in zip(uses, gather, free, strict=True)]


def uses_ahead(uses: Sequence[Use], place: int, prefetch: int) -> Iterator[Use]:
    """The uses whose gathers are started before the one at ``place`` begins: it and ``prefetch`` more (with 0 none), up to
    the first that gathers again what one of them frees."""
    seen: set[int] = set()
    for use in uses[place : place + 1 + prefetch] if prefetch else ():
        if seen & set(use.gather):
            return
        seen.update(use.gather)
        yield use


def _stays(layout: Layout, in_flight: int) -> bool:
    """Whether a group that is used again stays until then; ``in_flight`` backward passes will need it."""
    return layout.keeps_gathered and (layout.accumulate == "defer" or in_flight > 0)
