"""What a rank holds for a while under ZeRO: gathered parameters and gradients on their way, at their peak.

A rank's units have places 0, 1, ... in order of use. Forward takes a stage's places up, backward down; what is held when
follows from the rank's row of the schedule by the rules of `parallel.gather` and `parallel.data`, which this file follows
with numbers only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from shardwright.core.layout import Layout
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.gathers import plan_gathers, uses_ahead, uses_of_row

IN_FLIGHT = 2
"""Gradient buffers whose reduction is under way at once, from stage 2 on; before one more, the first is waited for."""


@dataclass(frozen=True)
class Part:
    """One parameter of one unit. Those with the same ``group`` may be reduced together, over the same ``shards`` ranks.

    ``tied``: used by the last unit too. ``at_once``: its gradient is written in B although others wait for W. ``frozen``: it
    is not trained, so it has no gradient.
    """

    group: Hashable
    size: int
    tied: bool = False
    shards: int = 1
    at_once: bool = False
    frozen: bool = False


@dataclass
class Held:
    """Parameters that are gathered, or reduced, as one: how many, the ranks that they are cut over, and the places of the
    units that use them. ``at_once``: places whose B writes some of their gradients."""

    shards: int
    size: int = 0
    places: set[int] = field(default_factory=set)
    at_once: set[int] = field(default_factory=set)
    frozen: bool = False

    @property
    def shard(self) -> int:
        return -(-self.size // self.shards)

    @property
    def padded(self) -> int:
        """Elements of a buffer for all of them, which is cut into equal shards."""
        return self.shard * self.shards

    def add(self, part: Part, place: int, last: int) -> None:
        """``part`` of the unit at ``place`` joins; ``last`` is the place of the last unit."""
        self.size += part.size
        self.places |= {place, last} if part.tied else {place}
        if part.at_once:
            self.at_once.add(place)


def by_unit(units: Sequence[Iterable[Part]]) -> list[Held]:
    """What is gathered as one in stage 3, in the order in which backward is done with it."""
    found: list[Held] = []
    for place in reversed(range(len(units))):
        alike: dict[tuple[Hashable, bool, bool], Held] = {}
        for part in units[place]:
            held = alike.setdefault((part.group, part.tied, part.frozen), Held(part.shards, frozen=part.frozen))
            held.add(part, place, len(units) - 1)
        found += alike.values()
    return found


def by_size(units: Sequence[Iterable[Part]], limit: int) -> list[Held]:
    """Gradient buckets of at most ``limit`` elements, in the order in which they are ready; as `core.buckets` packs them."""
    open_buckets: dict[Hashable, Held] = {}
    closed: list[Held] = []
    for place in reversed(range(len(units))):
        for part in units[place]:
            if part.frozen:
                continue
            held = open_buckets.get(part.group)
            if held is not None and held.size + part.size > limit:
                closed.append(open_buckets.pop(part.group))
            open_buckets.setdefault(part.group, Held(part.shards)).add(part, place, len(units) - 1)
    return sorted([*closed, *open_buckets.values()], key=lambda held: -min(held.places))


@dataclass
class Meter:
    """A quantity that comes and goes, and the most of it at any time."""

    now: float = 0.0
    peak: float = 0.0

    def add(self, amount: float) -> None:
        self.now += amount
        if self.now > self.peak:
            self.peak = self.now


@dataclass(frozen=True)
class Peaks:
    """Bytes: gathered parameters; buffers of gradients with shards that come from the host; those shards alone."""

    gathered: float
    buffers: float
    arriving: float


class Walk:
    """One rank's row of a schedule, with what it gathers and reduces.

    ``held`` are its groups of parameters, ``stages`` the places of each of its stages' units by stage, ``param`` and
    ``grad`` the bytes of an element. The result is the same as long as ``row`` has its beginning, steady state and end.
    """

    def __init__(
        self, layout: Layout, held: Sequence[Held], stages: dict[int, range], param: float, grad: float
    ) -> None:
        self.layout, self.held, self.stages, self.param, self.grad = layout, held, stages, param, grad
        count = max((places.stop for places in stages.values()), default=0)
        self._of_place: list[list[int]] = [[] for _ in range(count)]
        for index, group in enumerate(held):
            for place in () if group.frozen else group.places:
                self._of_place[place].append(index)
        self._early = [[i for i in found if place in held[i].at_once] for place, found in enumerate(self._of_place)]
        self._param_bytes = [param * group.padded for group in held]
        self._grad_bytes = [grad * group.padded for group in held]
        self._shard_bytes = [grad * group.shard for group in held]
        self._hosted = [layout.offload != "none" and layout.hosted(group.shard) > 0 for group in held]
        self._places = [tuple(group.places) for group in held]

    def peaks(self, row: Sequence[Action]) -> Peaks:
        """Walk ``row`` from its first F to its last W."""
        last = 1 + max((action.microbatch for action in row), default=0)
        self._times = last if self.layout.num_reductions > 1 else 1
        self._skip = last - self._times
        self._gathered, self._buffers, self._arriving = Meter(), Meter(), Meter()
        self._whole, self._in_flight = [False] * len(self.held), deque[float]()
        self._launched = [0] * len(self.held)
        self._done = [0] * len(self._of_place)
        if self.layout.zero == 3:
            self._begin_gathers(row)
        for action in row:
            places = self.stages[action.stage]
            for place in places if action.kind is Kind.F else reversed(places):
                self._use(action.kind, place)
        return Peaks(self._gathered.peak, self._buffers.peak, self._arriving.peak)

    def _use(self, kind: Kind, place: int) -> None:
        gathers = kind is not Kind.W and self.layout.zero == 3
        if gathers:
            self._acquire()
        if kind in (Kind.W, Kind.BW):
            self._open(self._of_place[place])
        elif kind is Kind.B:
            self._open(self._early[place])
        if gathers:
            self._release()
        if kind in (Kind.W, Kind.BW):
            self._unit_written(place)

    # -- parameters ------------------------------------------------------------------------------------

    def _begin_gathers(self, row: Sequence[Action]) -> None:
        self._place, self._there, self._on_their_way = 0, set[int](), set[int]()
        uses = uses_of_row(row, {s: [str(place) for place in places] for s, places in self.stages.items()})
        self._uses = plan_gathers(uses, [{str(place) for place in g.places} for g in self.held], self.layout)
        self._start_ahead()

    def _start(self, index: int) -> None:
        if index not in self._there:
            self._there.add(index)
            self._on_their_way.add(index)
            self._gathered.add(self._param_bytes[index])
            self._arrive(index, 1)

    def _arrive(self, index: int, sign: int) -> None:
        """A shard of which a part is in host memory is on the device while it is gathered."""
        if self.layout.offload == "params" and self.layout.hosted(self.held[index].shard):
            for meter in (self._arriving, self._buffers):
                meter.add(sign * self.param * self.held[index].shard)

    def _acquire(self) -> None:
        gather = self._uses[self._place].gather
        for index in gather:
            self._start(index)
        for index in gather:
            if index in self._on_their_way:
                self._on_their_way.remove(index)
                self._arrive(index, -1)

    def _start_ahead(self) -> None:
        for use in uses_ahead(self._uses, self._place, self.layout.prefetch):
            if any(index in self._there and index not in self._on_their_way for index in use.gather):
                return
            for index in use.gather:
                self._start(index)

    def _release(self) -> None:
        for index in self._uses[self._place].free:
            self._there.remove(index)
            self._gathered.add(-self._param_bytes[index])
        self._place += 1
        self._start_ahead()

    # -- gradients -------------------------------------------------------------------------------------

    def _open(self, groups: Iterable[int]) -> None:
        for index in groups:
            if not self._whole[index]:
                self._whole[index] = True
                self._buffers.add(self._grad_bytes[index])

    def _unit_written(self, place: int) -> None:
        """A group is reduced when all its places are written once more."""
        done = self._done
        done[place] += 1
        if done[place] <= self._skip:
            return
        for index in self._of_place[place]:
            places = self._places[index]
            ready = min(self._times, (done[place] if len(places) == 1 else min(done[p] for p in places)) - self._skip)
            while self._launched[index] < ready:
                self._launch(index)

    def _launch(self, index: int) -> None:
        """Reduce a group: into the shard that is kept, or apart where one is there already or goes to the host."""
        if not self._whole[index]:
            self._buffers.add(self._grad_bytes[index])
        while len(self._in_flight) >= IN_FLIGHT:
            self._buffers.add(-self._in_flight.popleft())
        apart = self._shard_bytes[index] if self._launched[index] or self._hosted[index] else 0.0
        self._buffers.add(apart)
        self._in_flight.append(self._grad_bytes[index] + apart)
        self._whole[index] = False
        self._launched[index] += 1
