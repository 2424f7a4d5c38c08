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
    """One action with its start and end."""

    action: Action
    start: float
    end: float


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
    if any(at < len(row) for at, row in zip(clock.position, clock.blocks, strict=True)):
        stuck = [
            f"rank {rank} at {clock.blocks[rank][at][0]}"
            for rank, at in enumerate(clock.position)
            if at < len(clock.blocks[rank])
        ]
        raise ConfigError(f"schedule {schedule.name} cannot run, stuck: {', '.join(stuck)}; see check()")
    rows = tuple(tuple(action for block in row for action in block) for row in clock.blocks)
    return Timeline(schedule, rows, tuple(map(tuple, clock.starts)), tuple(map(tuple, clock.ends)), tuple(clock.busy))


class _Clock:
    """The state of `simulate`. ``ready[k][stage * m + microbatch]`` is when the input of an F, B or W is there."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        num_stages, m = schedule.num_stages, schedule.num_microbatches
        self.schedule, self.num_microbatches, self.last = schedule, m, num_stages - 1
        self.forward = _per_stage(costs.forward, num_stages, "forward")
        self.backward = _per_stage(costs.backward, num_stages, "backward")
        self.weight = _per_stage(costs.weight, num_stages, "weight")
        self.both = [b + w for b, w in zip(self.backward, self.weight, strict=True)]
        self.overlapped = costs.overlapped
        self.links = _links(costs.link, schedule.placement)
        self.blocks = [_blocks(row, costs.overlapped is not None) for row in schedule.rows]
        size, ranks = num_stages * m, len(schedule.rows)
        start: list[float | None] = [0] * m
        self.ready_f: list[float | None] = start + [None] * (size - m)
        self.ready_b: list[float | None] = [None] * size
        self.ready_w: list[float | None] = [None] * size
        self.channel: dict[tuple[int, int], float] = {}
        self.position = [0] * ranks
        self.starts: list[list[float]] = [[] for _ in range(ranks)]
        self.ends: list[list[float]] = [[] for _ in range(ranks)]
        self.busy: list[float] = [0] * ranks

    def run(self) -> None:
        """Advance every rank as far as it goes; a rank that sent something wakes the one that may wait for it."""
        awake = list(range(len(self.blocks)))
        while awake:
            awake.extend(self._advance(awake.pop()))

    def _advance(self, rank: int) -> set[int]:
        row, starts, ends = self.blocks[rank], self.starts[rank], self.ends[rank]
        at, now, busy = self.position[rank], ends[-1] if ends else 0, self.busy[rank]
        woken: set[int] = set()
        while at < len(row):
            block = row[at]
            start, seconds = now, 0.0
            for kind, stage, m in block:
                index = stage * self.num_microbatches + m
                if kind is Kind.F:
                    arrival, takes = self.ready_f[index], self.forward[stage]
                elif kind is Kind.W:
                    arrival, takes = self.ready_w[index], self.weight[stage]
                else:
                    arrival, takes = self.ready_b[index], (self.both if kind is Kind.BW else self.backward)[stage]
                if arrival is None:
                    break
                start, seconds = max(start, arrival), seconds + takes
            ...
        return woken
