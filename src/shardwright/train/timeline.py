"""The measured timeline of a pipeline: what each rank did when, beside what the schedule's own clock says. No torch.

A rank is busy while it computes: where an F, B or W stands still for a message (a gather of parameters, a collective of tp or
cp, a limit on what is under way) it is idle.

Every rank keeps the spans of its executor; at the end of a run they are gathered, once. Clocks of ranks are compared as
wall-clock time, which is one clock on one host and as good as the hosts' time service between hosts.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.core.ledger import Wait
from shardwright.schedule.action import COMPUTE, Kind, Schedule
from shardwright.schedule.simulate import Costs, Span, simulate

KEPT_STEPS = 100
"""Steps, the last ones, that the measured bubble is the median of."""
TRACED_STEPS = 3
LAST_TRACED = 5
"""Of the run's first ``LAST_TRACED`` steps the last ``TRACED_STEPS`` are drawn: the third to the fifth, in short runs the last
ones."""


@dataclass
class RankClock:
    """One rank's measurements; small and picklable. ``offset`` takes ``time.perf_counter`` to wall-clock seconds."""

    rank: int
    pipeline_rank: int
    label: str = ""
    offset: float = field(default_factory=lambda: time.time() - time.perf_counter())
    seconds: defaultdict[tuple[Kind, int], float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[tuple[Kind, int]] = field(default_factory=Counter)
    windows: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """Of each step: start of the first computation, end of the last, seconds that all computed."""
    most_in_flight: Counter[int] = field(default_factory=Counter)
    traced: deque[tuple[list[Span], list[Wait]]] = field(default_factory=lambda: deque(maxlen=TRACED_STEPS))
    num_steps: int = 0

    def add(
        self,
        spans: Sequence[Span],
        most_in_flight: Mapping[int, int],
        messages: Iterable[Wait] = (),
        *,
        trace: bool = False,
    ) -> None:
        """Take in one step, with what it waited for. The first one, which warms up, is replaced by the second."""
        if self.num_steps == 1:
            self.seconds.clear()
            self.counts.clear()
            self.windows.clear()
        if trace and self.num_steps < LAST_TRACED:
            self.traced.append((list(spans), list(messages)))
        self.num_steps += 1
        self.most_in_flight |= Counter(most_in_flight)
        computed = [span for span in spans if span.action.kind in COMPUTE]
        for span in computed:
            key = (span.action.kind, span.action.stage)
            self.seconds[key] += span.busy
            self.counts[key] += 1
        if computed:
            busy = sum(span.busy for span in computed)
            self.windows.append((computed[0].start + self.offset, computed[-1].end + self.offset, busy))


# -- measured beside simulated -------------------------------------------------------------------------


@dataclass(frozen=True)
class PipelineReport:
    """``stage_seconds[s]``: mean seconds of one micro-batch's F, B (the whole backward where it is not split) and W."""

    schedule: str
    bubble_fraction: float
    simulated_bubble_fraction: float
    stage_seconds: tuple[dict[str, float], ...]
    idle_seconds: tuple[float, ...]
    in_flight: tuple[int, ...]

    @property
    def slowest_stage(self) -> int:
        totals = [sum(seconds.values()) for seconds in self.stage_seconds]
        return totals.index(max(totals))

    def to_json(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "bubble_fraction": self.bubble_fraction,
            "simulated_bubble_fraction": self.simulated_bubble_fraction,
            "slowest_stage": self.slowest_stage,
            "stage_seconds": list(self.stage_seconds),
            "idle_seconds": list(self.idle_seconds),
            "in_flight": list(self.in_flight),
        }


def pipeline_report(schedule: Schedule, clocks: Sequence[RankClock]) -> PipelineReport | None:
    """The measured bubble of one pipeline (a clock for each of its ranks), and the simulated one with the mean times
    measured here and free links. None before any step.
    """
    steps = list(zip(*(clock.windows for clock in clocks), strict=True))
    if not steps:
        return None
    bubbles, idle = [], []
    for step in steps:
        makespan = max(end for _, end, _ in step) - min(start for start, _, _ in step)
        idle.append([makespan - busy for _, _, busy in step])
        bubbles.append(sum(idle[-1]) / (len(step) * makespan))
    times = [_stage_times(clocks[schedule.placement[stage]], stage) for stage in range(schedule.num_stages)]
    forward, backward, weight = ([seconds[name] for seconds in times] for name in "FBW")
    return PipelineReport(
        schedule.name,
        median(bubbles),
        simulate(schedule, Costs(forward, backward, weight)).bubble_fraction,
        tuple(times),
        tuple(median(rank) for rank in zip(*idle, strict=True)),
        tuple(clocks[schedule.placement[stage]].most_in_flight[stage] for stage in range(schedule.num_stages)),
    )


def _stage_times(clock: RankClock, stage: int) -> dict[str, float]:
    """Mean F, B and W. Where some backwards are split and some not, B and W are scaled to what all took together."""
    seconds = {kind: clock.seconds[kind, stage] for kind in COMPUTE}
    counts = {kind: clock.counts[kind, stage] for kind in COMPUTE}
    mean = {kind: seconds[kind] / counts[kind] if counts[kind] else 0.0 for kind in COMPUTE}
    if not counts[Kind.B]:
        return {"F": mean[Kind.F], "B": mean[Kind.BW], "W": 0.0}
    split = mean[Kind.B] + mean[Kind.W]
    whole = sum(seconds[kind] for kind in (Kind.B, Kind.W, Kind.BW)) / (counts[Kind.B] + counts[Kind.BW])
    scale = whole / split if split else 1.0
    return {"F": mean[Kind.F], "B": mean[Kind.B] * scale, "W": mean[Kind.W] * scale}


# -- trace ---------------------------------------------------------------------------------------------

_LANES = ("compute", "communication", "idle")
_NEIGHBOURS = ("send", "recv")
"""Verbs that are actions of the schedule, and drawn as such."""
_FIRST_PROCESS = 1 << 30
"""Process numbers of ranks in a trace begin here, so that none is a real process of PyTorch's own profile."""


def write_trace(path: Path, clocks: Iterable[RankClock]) -> None:
    """Add three lanes for each rank (compute, communication, idle) to the Chrome trace at ``path``, or make one.

    Waits are drawn in the communication lane; gathers, reductions and other messages that were under way before they were
    waited for have a track of their own, from launch to end. A trace that is there is PyTorch's profile of one rank: its times
    are microseconds from its ``baseTimeNanoseconds``.
    """
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"displayTimeUnit": "ms"}
    base = found.get("baseTimeNanoseconds", 0) / 1000
    events: list[dict[str, Any]] = found.setdefault("traceEvents", [])
    clocks = sorted(clocks, key=lambda clock: clock.rank)
    for clock in clocks:
        events += _names(clock)
    for steps in zip(*(clock.traced for clock in clocks), strict=True):
        computed = [
            (span.start + clock.offset, span.end + clock.offset)
            for clock, (spans, _) in zip(clocks, steps, strict=True)
            for span in spans
            if span.action.kind in COMPUTE
        ]
        window = (min(start for start, _ in computed), max(end for _, end in computed))
        for clock, (spans, messages) in zip(clocks, steps, strict=True):
            events += _events(clock, spans, messages, window, base)
            events += _under_way(clock, messages, base)
    path.write_text(json.dumps(found), encoding="utf-8")


def _names(clock: RankClock) -> list[dict[str, Any]]:
    pid = _FIRST_PROCESS + clock.rank
    process = {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {clock.rank} {clock.label}".strip()}}
    order = {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": clock.rank - _FIRST_PROCESS}}
    lanes = [
        {"ph": "M", "pid": pid, "tid": lane, "name": "thread_name", "args": {"name": name}}
        for lane, name in enumerate(_LANES)
    ]
    return [process, order, *lanes]


def _events(
    clock: RankClock, spans: Sequence[Span], messages: Sequence[Wait], window: tuple[float, float], base: float
) -> list[dict[str, Any]]:
    """The spans of one rank and step, its waits, and where it computes nothing between ``window``'s start and end."""
    pid, found, at = _FIRST_PROCESS + clock.rank, [], window[0]

    def event(lane: int, name: str, start: float, end: float, **arguments: int | str) -> dict[str, Any]:
        times = {"ts": start * 1e6 - base, "dur": (end - start) * 1e6}
        return {"ph": "X", "pid": pid, "tid": lane, "name": name, "cat": _LANES[lane], **times, "args": arguments}

    stands = _apart((message.start, message.end) for message in messages)
    for span in spans:
        start, end, action = span.start + clock.offset, span.end + clock.offset, span.action
        about: dict[str, int | str] = {"stage": action.stage, "microbatch": action.microbatch}
        if action.kind not in COMPUTE:
            found.append(event(1, str(action), start, end, **about))
            continue
        while stands and stands[0][1] <= span.start:
            stands.popleft()
        while stands and stands[0][1] <= span.end:  # a wait inside it cuts it in two
            first, last = (time + clock.offset for time in stands.popleft())
            if first > start:
                found.append(event(0, str(action), start, first, **about))
                if start > at:
                    found.append(event(2, "idle", at, start))
                at = first
            start = last
        found.append(event(0, str(action), start, end, **about))
        if start > at:
            found.append(event(2, "idle", at, start))
        at = end
    if window[1] > at:
        found.append(event(2, "idle", at, window[1]))
    for message in (message for message in messages if message.verb not in _NEIGHBOURS):
        name = f"wait for {message.verb} {message.tensor}"
        found.append(event(1, name, message.start + clock.offset, message.end + clock.offset, axis=message.axis))
    return found


def _apart(pairs: Iterable[tuple[float, float]]) -> deque[tuple[float, float]]:
    """Intervals in order, those that overlap made one."""
    found: deque[tuple[float, float]] = deque()
    for start, end in sorted(pairs):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _under_way(clock: RankClock, messages: Sequence[Wait], base: float) -> list[dict[str, Any]]:
    """Messages from launch to end, beside the lanes: several may be under way at once."""
    pid, found = _FIRST_PROCESS + clock.rank, []
    for number, message in enumerate(messages):
        if message.verb in _NEIGHBOURS:
            continue
        about = {
            "pid": pid, "tid": 1, "cat": "communication", "id": f"{pid}.{number}.{message.launch}",
            "name": f"{message.verb} {message.tensor}", "args": {"axis": message.axis},
        }  # fmt: skip
        for phase, when in (("b", message.launch), ("e", message.end)):
            found.append(about | {"ph": phase, "ts": (when + clock.offset) * 1e6 - base})
    return found
