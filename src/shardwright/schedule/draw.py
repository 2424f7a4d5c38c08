"""A schedule as a picture: a coloured grid for a terminal, an SVG for a report, and one summary for both and for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.layout import Layout
from shardwright.errors import ConfigError
from shardwright.schedule.action import Action, Kind, Schedule
from shardwright.schedule.file import locate, read_schedule
from shardwright.schedule.make import good_counts, make_schedule
from shardwright.schedule.memory import in_flight, in_flight_by_stage
from shardwright.schedule.passes import add_communication, check, communicates
from shardwright.schedule.simulate import ClosedForm, Costs, Span, Timeline, closed_form, simulate

NAMES = MappingProxyType(
    {Kind.F: "forward", Kind.B: "input gradient", Kind.W: "weight gradient", Kind.BW: "both gradients"}
)
COLOURS: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {
        Kind.F: ("#5b8ff9", "#a9c6ff"),
        Kind.B: ("#5ad8a6", "#b5efd6"),
        Kind.W: ("#f6bd16", "#fbe08c"),
        Kind.BW: ("#2f9e78", "#86cfb6"),
    }
)
"""Of each kind on a rank's first chunk, and, lighter, on its second (third: as the first, and so on)."""
STYLES: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {
        Kind.F: ("bright_white on blue", "black on bright_blue"),
        Kind.B: ("bright_white on green", "black on bright_green"),
        Kind.W: ("black on yellow", "black on bright_yellow"),
        Kind.BW: ("black on cyan", "black on bright_cyan"),
    }
)
"""The same in the colours that every terminal has."""


@dataclass(frozen=True)
class Report:
    """What ``shardwright schedule`` shows: the rows, what is wrong with them or, if nothing is, their timeline."""

    schedule: Schedule
    problems: tuple[str, ...]
    timeline: Timeline | None
    closed: ClosedForm | None
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        """``rows``, ``bubble_fraction``, ``in_flight`` (chunks that each rank holds at most) and what else is known."""
        schedule, timeline = self.schedule, self.timeline
        return {
            "schedule": schedule.name,
            "stages": len(schedule.rows),
            "virtual": schedule.num_stages // len(schedule.rows),
            "microbatches": schedule.num_microbatches,
            "placement": list(schedule.placement),
            "rows": [[str(action) for action in row] for row in schedule.rows],
            "bubble_fraction": timeline and timeline.bubble_fraction,
            "closed_form": self.closed and self.closed.value,
            "in_flight": list(in_flight(schedule)),
            "in_flight_by_stage": list(in_flight_by_stage(schedule)),
            "makespan": timeline and timeline.makespan,
            "idle": timeline and list(timeline.idle),
            "problems": list(self.problems),
        }

    def lines(self) -> list[str]:
        """The numbers in words."""
        schedule = self.schedule
        lines = [
            f"{schedule.name}: {len(schedule.rows)} ranks, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} micro-batches"
        ]
        if self.timeline is not None:
            lines.append(
                f"bubble {self.timeline.bubble_fraction:.2%} of {self.timeline.makespan:g} time units{self._beside()}"
            )
        held = ", ".join(map(str, in_flight(schedule)))
        lines.append(f"in flight at most, by rank: {held}")
        return lines + ([self.hint] if self.hint else [])

    def _beside(self) -> str:
        if self.closed is None:
            return ""
        return f" ({self.closed.meaning} {self.closed.formula} = {self.closed.value:.2%})"


def report(
    name: str,
    stages: int | None,
    microbatches: int | None,
    virtual: int = 1,
    costs: tuple[float, float, float] = (1, 1, 1),
) -> Report:
    """Build or read the schedule ``name``, check it with its sends and receives, and run it on the clock.

    ``costs`` are the times of one chunk's F, B and W. A file says itself how many ranks and micro-batches it is for; a
    file that reads well but cannot run is reported, not refused.
    """
    f, b, w = costs
    if name.startswith("file:"):
        path = name.removeprefix("file:")
        schedule, lines = read_schedule(path)
        if problems := tuple(locate(problem, path, schedule, lines) for problem in check(schedule)):
            return Report(schedule, problems, None, None)
        _agree(schedule, stages, microbatches)
        closed, hint = None, ""
    else:
        if stages is None or microbatches is None:
            raise ConfigError(
                f"schedule {name} needs --stages and --microbatches; for instance --stages 4 --microbatches 8"
            )
        layout = Layout(schedule=name, pp=stages, microbatches=microbatches, virtual=virtual)
        schedule = make_schedule(layout)
        chunks = schedule.num_stages // len(schedule.rows)
        good = good_counts(layout)
        fills = microbatches in good
        holds = fills and (name != "zb_h1" or microbatches >= stages)  # else theory has no formula
        closed = closed_form(schedule.name, stages, microbatches, chunks, f, b, w) if holds else None
        hint = "" if fills else f"{' or '.join(map(str, good))} micro-batches fill this schedule better"
    problems = tuple(check(schedule if communicates(schedule) else add_communication(schedule)))
    return Report(schedule, problems, None if problems else simulate(schedule, Costs(f, b, w)), closed, hint)


def _agree(schedule: Schedule, stages: int | None, microbatches: int | None) -> None:
    for option, given, found in (
        ("--stages", stages, len(schedule.rows)),
        ("--microbatches", microbatches, schedule.num_microbatches),
    ):
        if given is not None and given != found:
            raise ConfigError(f"{option} {given} was given, but the file is for {found}; leave {option} out")


# -- terminal ------------------------------------------------------------------------------------------


def grid(timeline: Timeline, width: int = 100) -> RenderableType:
    """One line for each rank, time to the right, in at most ``width`` columns; micro-batches are named where they fit."""
    labels = [f"rank {rank} " for rank in range(len(timeline.rows))]
    room = max(1, width - max(map(len, labels)))
    columns = _columns(timeline, room)
    lines = [
        Text(label.rjust(max(map(len, labels)))) + _line(timeline, rank, columns) for rank, label in enumerate(labels)
    ]
    return Group(*lines, _legend(timeline))


def _columns(timeline: Timeline, room: int) -> int:
    """A whole number of columns for the shortest action, as many as its label needs; fewer, down to all in ``room``."""
    shortest = min((span.end - span.start for span in _all_spans(timeline) if span.end > span.start), default=1.0)
    digits = len(str(max(timeline.schedule.num_microbatches - 1, 0)))
    actions = timeline.makespan / shortest
    each = min(digits + 1, int(room / actions)) if actions else 0
    return max(1, round(each * actions)) if each else room


def _all_spans(timeline: Timeline) -> list[Span]:
    return [span for rank in range(len(timeline.rows)) for span in timeline.spans(rank)]


def _line(timeline: Timeline, rank: int, columns: int) -> Text:
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    origin = min(starts[0] for starts in timeline.starts if starts)
    line, at = Text(), 0
    for span in timeline.spans(rank):
        first, last = round((span.start - origin) * scale), round((span.end - origin) * scale)
        first = max(first, at)
        if last <= first:
            continue
        line.append("·" * (first - at), style="dim")
        label = str(span.action.microbatch)
        shown = label if len(label) < last - first or (len(label) == 1 == last - first) else ""
        line.append(shown.ljust(last - first), style=STYLES[span.action.kind][_shade(timeline.schedule, span.action)])
        at = last
    line.append("·" * (columns - at), style="dim")
    return line


def _shade(schedule: Schedule, action: Action) -> int:
    """0 on a rank's first, third, ... chunk, 1 on the others."""
    return schedule.stages_of(schedule.placement[action.stage]).index(action.stage) % 2


def _legend(timeline: Timeline) -> Text:
    kinds = {action.kind for row in timeline.rows for action in row}
    legend = Text("\n")
    for kind, name in NAMES.items():
        if kind in kinds:
            legend.append("  ", style=STYLES[kind][0])
            legend.append(f" {kind.value} {name}   ")
    several = timeline.schedule.num_stages > len(timeline.rows)
    return legend.append("· idle" + ("\nlighter: the rank's second chunk (fourth, ...)" if several else ""))


# -- SVG -----------------------------------------------------------------------------------------------

_ROW, _GAP, _LEFT, _TOP = 24, 4, 64, 34


def svg(timeline: Timeline, title: str = "", width: int = 1200) -> str:
    """The timeline as an SVG text, ``width`` pixels wide; each action shows its name and times under the pointer."""
    schedule, ranks = timeline.schedule, len(timeline.rows)
    height = _TOP + ranks * (_ROW + _GAP) + 40
    scale = (width - _LEFT - 10) / timeline.makespan if timeline.makespan else 0.0
    title = title or f"{schedule.name}, bubble {timeline.bubble_fraction:.2%}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{escape(title)}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    origin = min(starts[0] for starts in timeline.starts if starts)
    for rank in range(ranks):
        y = _TOP + rank * (_ROW + _GAP)
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 16}" text-anchor="end">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{timeline.makespan * scale:.2f}" height="{_ROW}" fill="#eeeeee"/>'
        )
        parts += [_box(schedule, span, origin, scale, y) for span in timeline.spans(rank)]
    parts.append(_svg_legend(timeline, height - 18))
    return "\n".join([*parts, "</svg>", ""])


def _box(schedule: Schedule, span: Span, origin: float, scale: float, y: float) -> str:
    action = span.action
    x, width = _LEFT + (span.start - origin) * scale, (span.end - span.start) * scale
    label = str(action.microbatch)
    text = ""
    if width > 7 * len(label):
        text = f'<text x="{x + width / 2:.2f}" y="{y + 16}" text-anchor="middle">{label}</text>'
    return (
        f'<g><title>{action} {span.start:g} to {span.end:g}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{_ROW}" fill="{COLOURS[action.kind][_shade(schedule, action)]}" stroke="white" stroke-width="0.5"/>{text}</g>'
    )


def _svg_legend(timeline: Timeline, y: float) -> str:
    kinds = {action.kind for row in timeline.rows for action in row}
    parts, x = [], _LEFT
    for kind, name in NAMES.items():
        if kind in kinds:
            parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind][0]}"/>')
            parts.append(f'<text x="{x + 16}" y="{y}">{kind.value} {name}</text>')
            x += 130
    return "\n".join(parts)
