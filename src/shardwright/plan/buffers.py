"""What a rank holds for a while under ZeRO: gathered parameters and gradients on their way, at their peak, in elements.

A rank's units have places 0, 1, ... in order of use. Forward takes them up, backward down; what is held when follows from
the rules of `parallel.gather` and `parallel.data`, which this file repeats with numbers only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

IN_FLIGHT = 2
"""Gradient buffers whose reduction is under way at once, from stage 2 on; before one more, the first is waited for."""


@dataclass(frozen=True)
class Held:
    """Parameters that are gathered, or reduced, as one: how many, and the places of the first and last unit that uses them."""

    size: int
    first: int
    last: int

    @property
    def places(self) -> set[int]:
        return {self.first, self.last}


@dataclass(frozen=True)
class Part:
    """Parameters of one unit: those with the same ``group`` may be reduced together. ``tied``: used by the last unit too."""

    group: Hashable
    size: int
    tied: bool = False


def by_unit(units: Sequence[Iterable[Part]]) -> list[Held]:
    """What is gathered as one in stage 3, in the order in which backward is done with it."""
    last, found = len(units) - 1, []
    for place in reversed(range(len(units))):
        sizes: dict[tuple[Hashable, bool], int] = {}
        for part in units[place]:
            sizes[part.group, part.tied] = sizes.get((part.group, part.tied), 0) + part.size
        found += [Held(size, place, last if tied else place) for (_, tied), size in sizes.items()]
    return found


def by_size(units: Sequence[Iterable[Part]], limit: int) -> list[Held]:
    """Gradient buckets of at most ``limit`` elements, in the order in which they are ready; as `core.buckets` packs them."""
    open_buckets: dict[Hashable, Held] = {}
    closed: list[Held] = []
    for place in reversed(range(len(units))):
        for part in units[place]:
            held = open_buckets.get(part.group)
            if held is not None and held.size + part.size > limit:
                closed.append(open_buckets.pop(part.group))
                held = None
            last = len(units) - 1 if part.tied else place
            open_buckets[part.group] = (
                Held(part.size, place, last)
                if held is None
                else Held(held.size + part.size, place, max(held.last, last))
            )
    return sorted([*closed, *open_buckets.values()], key=lambda held: -held.first)


def gathered_peak(held: Sequence[Held], num_units: int, prefetch: int, *, around: bool = False) -> int:
    """The most elements gathered at once when each unit is freed after its use and ``prefetch`` more are on their way.

    ``around``: the first unit may follow the last (several stages on one rank).
    """
    at: list[set[int]] = [set() for _ in range(num_units)]
    for index, group in enumerate(held):
        for place in group.places:
            at[place].add(index)
    peak = 0
    for place in range(num_units):
        ahead = range(place, place + 1 + min(prefetch, num_units - 1))
        window = [index % num_units for index in ahead if around or index < num_units]
        peak = max(peak, sum(held[index].size for index in set().union(*(at[index] for index in window))))
    return peak


def reduction_peak(
    held: Sequence[Held],
    num_units: int,
    shards: int,
    *,
    deferred: bool,
    parts: bool,
    passes: int = 1,
    beside: Sequence[float] = (),
) -> float:
    """The most elements of gradient buffers during backward, from stage 2 on.

    A buffer is there from the first gradient that is written to it (``deferred``: from an earlier micro-batch) to the end of
    its reduction. ``parts``: each reduction ends in a shard of its own, which is then added or copied to where shards are
    kept; without, that is so from the second of ``passes`` on. ``beside``: what else is held at each place.
    """
    now = float(sum(group.size for group in held)) if deferred else 0.0
    peak, flying = 0.0, list[float]()
    begins, ends = [0] * num_units, [list[Held]() for _ in range(num_units)]
    for group in held:
        begins[group.last] += 0 if deferred else group.size
        ends[group.first].append(group)
    for run in range(passes):
        apart = parts or run > 0
        for place in reversed(range(num_units)):
            now += begins[place]
            other = beside[place] if beside else 0.0
            peak = max(peak, now + other)
            for group in ends[place]:
                if len(flying) == IN_FLIGHT:
                    now -= flying.pop(0)
                extra = -(-group.size // shards) if apart else 0
                now += extra
                flying.append(group.size + extra)
                peak = max(peak, now + other)
    return peak
