"""A schedule's clock: when each action starts and ends, given what F, B, W and the links cost. No torch.

Actions of a rank run in the order of its row, each as soon as the rank is free and its input has arrived. Sends never
hold up the rank that sends, receives are posted early: as in the executor. The rows may hold sends and receives; the
clock takes their times from ``Costs.link`` and ignores where they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.errors import ConfigError
from shardwright.schedule.action import COMPUTE, Action, Kind, Schedule


@dataclass(frozen=True)
class Link:
    """A boundary between two stages: a message occupies it for ``seconds`` (bytes / bandwidth), then ``latency`` passes.

    Messages from one rank to another wait for each other's ``seconds``.
    """

    latency: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(cls, num_bytes: float, bandwidth: float, latency: float = 0.0) -> Link:
        """``num_bytes`` a message over ``bandwidth`` bytes/s, ``latency`` in seconds."""
        return cls(latency, num_bytes / bandwidth)


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of one micro-batch's F, B and W on one stage: a value for all stages, or one for each.

    BW takes B + W. ``link``: one for all boundaries, or one for each of the num_stages - 1; free where both stages are
    on one rank. ``overlapped``: the seconds of an F directly followed by a BW of another micro-batch when the two run as
    one block (DualPipe's F&B): it starts when both inputs are there and gives both results at its end. None: one
    after the other.
    """

    forward: float | Sequence[float] = 1
    backward: float | Sequence[float] = 1
    weight: float | Sequence[float] = 1
    link: Link | Sequence[Link] = field(default_factory=Link)
    overlapped: float | None = None


@dataclass(frozen=True)
class Span:
    """One action with its start and end, and how much of that it stood still for messages (measured ones only)."""

    action: Action
    start: float
    end: float
    waited: float = 0.0

    @property
    def busy(self) -> float:
        return self.end - self.start - self.waited


@dataclass(frozen=True)
class Timeline:
    """``starts[r][i]`` and ``ends[r][i]`` belong to ``rows[r][i]``, the i-th computation of pipeline rank r."""

    schedule: Schedule
    rows: tuple[tuple[Action, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks."""
        return max(ends[-1] for ends in self.ends if ends) - min(starts[0] for starts in self.starts if starts)

    @property
    def idle(self) -> tuple[float, ...]:
        """What each rank does not compute of the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """1 - busy / (p x makespan)."""
        total = len(self.rows) * self.makespan
        return (total - sum(self.busy)) / total if total else 0.0

    def spans(self, rank: int) -> Iterator[Span]:
        """What ``rank`` computes, in order."""
        return map(Span, self.rows[rank], self.starts[rank], self.ends[rank])


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run the rows on the clock. Raises :class:`ConfigError` when they cannot run, with the stuck action of each rank."""
    clock = _Clock(schedule, costs or Costs())
    clock.run()
    if stuck := clock.stuck():
        raise ConfigError(f"schedule {schedule.name} cannot run, stuck: {', '.join(stuck)}; see check()")
    starts, ends = (tuple(map(tuple, times)) for times in (clock.starts, clock.ends))
    return Timeline(schedule, clock.rows, starts, ends, tuple(clock.busy))


class _Clock:
    """The state of `simulate`. ``ready[kind][stage * m + microbatch]`` is when the input of an action is there."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        num_stages, m = schedule.num_stages, schedule.num_microbatches
        self.placement, self.num_microbatches, self.last = schedule.placement, m, num_stages - 1
        forward, backward, weight = (
            _per_stage(getattr(costs, name), num_stages, name) for name in ("forward", "backward", "weight")
        )
        both = [b + w for b, w in zip(backward, weight, strict=True)]
        self.seconds = {Kind.F: forward, Kind.B: backward, Kind.W: weight, Kind.BW: both}
        self.overlapped = costs.overlapped
        self.links = _links(costs.link, schedule.placement)
        self.rows = tuple(tuple(action for action in row if action.kind in COMPUTE) for row in schedule.rows)
        inputs, gradients, deferred = (_unknown(num_stages * m) for _ in range(3))
        inputs[:m] = [0] * m
        self.ready = {Kind.F: inputs, Kind.B: gradients, Kind.BW: gradients, Kind.W: deferred}
        self.link_free: dict[tuple[int, int], float] = {}
        self.starts: list[list[float]] = [[] for _ in self.rows]
        self.ends: list[list[float]] = [[] for _ in self.rows]
        self.busy: list[float] = [0 for _ in self.rows]

    def run(self) -> None:
        """Advance every rank as far as it goes; what it makes wakes the rank that may wait for it."""
        awake = list(range(len(self.rows)))
        while awake:
            awake.extend(self._advance(awake.pop()))

    def stuck(self) -> list[str]:
        """Each rank that has not reached the end of its row, with the action it is at."""
        state = enumerate(zip(self.rows, self.ends, strict=True))
        return [f"rank {rank} at {row[len(done)]}" for rank, (row, done) in state if len(done) < len(row)]

    def _advance(self, rank: int) -> set[int]:
        """Run ``rank`` until an input is missing; the ranks that it made something for."""
        row, starts, ends = self.rows[rank], self.starts[rank], self.ends[rank]
        now = ends[-1] if ends else 0
        made_for: set[int] = set()
        while len(ends) < len(row):
            at = len(ends)
            block = row[at : at + 2] if self.overlapped is not None and _is_block(row, at) else (row[at],)
            start = now
            for action in block:
                arrival = self.ready[action.kind][action.stage * self.num_microbatches + action.microbatch]
                if arrival is None:
                    return made_for
                if arrival > start:
                    start = arrival
            if self.overlapped is not None and len(block) == 2:
                seconds = self.overlapped
            else:
                seconds = self.seconds[row[at].kind][row[at].stage]
            now = start + seconds
            self.busy[rank] += seconds
            for action in block:
                starts.append(start)
                ends.append(now)
                made_for.add(self._hand_on(action, now))
        return made_for

    def _hand_on(self, action: Action, end: float) -> int:
        """Note when what ``action`` made is there for the action that needs it; that one's rank."""
        kind, stage = action.kind, action.stage
        index = stage * self.num_microbatches + action.microbatch
        if kind is Kind.F and stage < self.last:
            self.ready[Kind.F][index + self.num_microbatches] = self._arrival(stage, stage + 1, end)
            return self.placement[stage + 1]
        if kind is Kind.F:
            self.ready[Kind.B][index] = end
        elif kind is not Kind.W:
            self.ready[Kind.W][index] = end
            if stage > 0:
                self.ready[Kind.B][index - self.num_microbatches] = self._arrival(stage, stage - 1, end)
                return self.placement[stage - 1]
        return self.placement[stage]

    def _arrival(self, source: int, target: int, end: float) -> float:
        """When a message made at ``end`` arrives, after those that went the same way before."""
        link = self.links[min(source, target)]
        if link is None:
            return end
        way = (self.placement[source], self.placement[target])
        sent = max(end, self.link_free.get(way, end)) + link.seconds
        self.link_free[way] = sent
        return sent + link.latency


def _is_block(row: tuple[Action, ...], at: int) -> bool:
    """Whether a forward and the whole backward of another micro-batch or chunk stand next to each other at ``at``."""
    if at + 1 == len(row) or row[at].kind is not Kind.F or row[at + 1].kind is not Kind.BW:
        return False
    return (row[at].stage, row[at].microbatch) != (row[at + 1].stage, row[at + 1].microbatch)


def _unknown(size: int) -> list[float | None]:
    return [None] * size


def _per_stage(value: float | Sequence[float], num_stages: int, name: str) -> list[float]:
    values = [value] * num_stages if isinstance(value, int | float) else list(value)
    if len(values) != num_stages:
        raise ConfigError(f"{name} has {len(values)} times for {num_stages} stages; give one, or one for each stage")
    if not all(0 <= seconds < float("inf") for seconds in values):
        raise ConfigError(f"{name} has a time below 0 or not finite: {min(values)} to {max(values)}")
    return values


def _links(link: Link | Sequence[Link], placement: tuple[int, ...]) -> list[Link | None]:
    """The link of each boundary; None where it costs nothing, as between two stages of one rank."""
    boundaries = len(placement) - 1
    links = [link] * boundaries if isinstance(link, Link) else list(link)
    if len(links) != boundaries:
        raise ConfigError(f"{len(links)} links were given for {boundaries} boundaries; give one, or one for each")
    for one in links:
        if not (0 <= one.latency < float("inf") and 0 <= one.seconds < float("inf")):
            raise ConfigError(f"a link has a time below 0 or not finite: {one}")
    return [
        one if placement[stage] != placement[stage + 1] and one != Link() else None for stage, one in enumerate(links)
    ]


@dataclass(frozen=True)
class ClosedForm:
    """A bubble fraction by formula. ``meaning``: ``closed form`` is what the rows give, the others say what it is."""

    formula: str
    value: float
    meaning: str


def closed_form(
    name: str, ranks: int, num_microbatches: int, virtual: int = 1, f: float = 1, b: float = 1, w: float = 1
) -> ClosedForm | None:
    """The bubble fraction that theory gives for balanced stages without link costs; None for a schedule from a file.

    ``f``, ``b``, ``w``: times of one chunk. Idle time of a rank over idle plus work v m (f + b + w). Sources: GPipe and
    1F1B, interleaved: Narayanan et al. 2021; ZB-H1: Qi et al. 2024; ZB-V: the fill of the V, below which no step with a
    barrier at its end can come; interleaved zero-bubble: that of ZB-H1 with chunks, ours; DualPipeV: DeepSeek's DualPipe
    repository, (PP/2 - 1)(F&B + B - 3W) with PP = 2p stages, there B = b + w, and F&B = f + b + w where overlapping
    wins no time. The formulas hold for `make.good_counts`, of ZB-H1 from m >= p on.
    """
    p, m = ranks, num_microbatches
    exact = "closed form"
    idle: dict[str, tuple[str, int, float, str]] = {
        "gpipe": ("(p-1)/(m+p-1)", 1, f + b + w, exact),
        "1f1b": ("(p-1)/(m+p-1)", 1, f + b + w, exact),
        "interleaved": ("(p-1)/(vm+p-1)", virtual, f + b + w, exact),
        "zb_h1": ("(p-1)(F+B-W) / (m(F+B+W) + (p-1)(F+B-W))", 1, f + b - w, exact),
        "interleaved_zb": ("(p-1)(F+B-W) / (vm(F+B+W) + (p-1)(F+B-W))", virtual, f + b - w, exact),
        "zb_v": ("(p-1)F / (2m(F+B+W) + (p-1)F)", 2, f, "at least"),
        "dualpipe_v": ("(p-1)(F+2B-W) / (2m(F+B+W) + (p-1)(F+2B-W))", 2, f + 2 * b - w, "F&B as one block:"),
    }
    if name not in idle:
        return None
    formula, chunks, per_hop, meaning = idle[name]
    total = (p - 1) * per_hop + chunks * m * (f + b + w)
    return ClosedForm(formula, (p - 1) * per_hop / total if total else 0.0, meaning)
