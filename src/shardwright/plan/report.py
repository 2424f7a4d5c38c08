"""A plan as one self-contained HTML page: memory bars, the pipeline's timeline, traffic per link, the step as a waterfall,
and what the search looked at. No scripts, no other files; pictures are inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from shardwright.core.plan import GIB, Candidate, Plan
from shardwright.errors import ConfigError
from shardwright.plan.explain import in_words
from shardwright.plan.step_time import Pricer
from shardwright.schedule.draw import svg as draw_timeline

CLASSES = {
    "parameters": "#5b8ff9", "gradients": "#5ad8a6", "optimizer": "#f6bd16", "activations": "#e8684a", "buffers": "#9270ca"
}  # fmt: skip
PARTS = {
    "compute": "#5b8ff9", "bubble": "#c9ced9", "exposed communication": "#e8684a", "optimizer": "#f6bd16", "other": "#9270ca"
}  # fmt: skip
WIDTH, ROW, LEFT = 1200, 26, 190
SHOWN_STAGES, SHOWN_MICRO_BATCHES = 16, 16


def write_report(path: Path, plan: Plan, pricer: Pricer) -> None:
    """Write the page to ``path``; raises :class:`ConfigError` where that cannot be."""
    try:
        path.write_text(html_report(plan, pricer), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name a file in a folder that exists") from None


def html_report(plan: Plan, pricer: Pricer) -> str:
    """The text of the page."""
    source = files("shardwright.plan").joinpath("report.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
    step = plan.step
    tiles = (
        ("a step", f"{step.seconds:.3g} s"),
        ("tokens/s per GPU", f"{step.tokens_per_second_per_gpu:,.0f}"),
        (f"MFU of {step.mfu_precision}, causal", f"{step.mfu:.1%}"),
        ("of the fullest GPU's memory", f"{plan.device_bytes / plan.capacity:.0%}"),
        ("pipeline bubble", f"{plan.pipeline.bubble_fraction:.1%}"),
    )
    figures = [
        ("Memory per pipeline stage", _memory_note(plan), memory_bars(plan)),
        ("The step", "Each bar begins where the one above ends.", waterfall(plan)),
        ("Traffic per link", "Seconds of the slowest stage's messages in a step; dark: nothing hides them.", traffic(plan)),
    ]  # fmt: skip
    if plan.layout.pp > 1:
        figures.insert(1, ("The pipeline", _pipeline_note(plan), pipeline(plan, pricer)))
    if plan.explored:
        figures.append(("The search", "Each point is a layout that fits: device memory against seconds; the line is the best "
                        "for its memory, the ring the answer.", frontier(plan)))  # fmt: skip
    shown = [(title, note, Markup(picture)) for title, note, picture in figures]
    tables = (("Candidates", _rows(plan.candidates)), ("Rejected", _rows(plan.rejected)))
    words = list(in_words(plan, pricer))
    return template.render(plan=plan, tiles=tiles, words=words, figures=shown, tables=tables)


def _rows(candidates: Sequence[Candidate]) -> list[tuple[str, str, str, str]]:
    return [
        (
            "*" if c.layout is None else str(c.layout),
            "" if c.seconds is None else f"{c.seconds:.3g}",
            "" if c.memory_bytes is None else f"{c.memory_bytes / GIB:.1f}",
            c.reason,
        )
        for c in candidates
    ]


def _memory_note(plan: Plan) -> str:
    more = len(plan.memory) - SHOWN_STAGES
    rest = f" {more} lighter stages are not shown." if more > 0 else ""
    return f"GiB allocated, heaviest stage first; the line is the GPU's memory.{rest}"


def _pipeline_note(plan: Plan) -> str:
    shown = min(plan.pipeline.microbatches, SHOWN_MICRO_BATCHES)
    return (
        f"{plan.pipeline.schedule}, the first of {plan.pipeline.microbatches} micro-batches; about {shown} are drawn."
    )


# -- pictures --------------------------------------------------------------------------------------


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    opened = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(label)}">'
    )
    return "\n".join([opened, *parts, "</svg>"])


def _bar(x: float, y: float, width: float, colour: str, hint: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{ROW - 8}" fill="{colour}">'
        f"<title>{escape(hint)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(names: dict[str, str], y: float) -> list[str]:
    parts, x = [], float(LEFT)
    for name, colour in names.items():
        parts += [
            f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" fill="{colour}"/>',
            _text(x + 16, y, name),
        ]
        x += 30 + 8 * len(name)
    return parts


def memory_bars(plan: Plan) -> str:
    """A stacked bar of each stage's classes."""
    stages = plan.memory[:SHOWN_STAGES]
    top = max(plan.capacity, max(stage.total for stage in stages))
    scale = (WIDTH - LEFT - 90) / top
    parts: list[str] = []
    for row, stage in enumerate(stages):
        y, x = 6.0 + row * ROW, float(LEFT)
        parts.append(_text(LEFT - 8, y + 13, f"stage {stage.stage}", "end"))
        for name, colour in CLASSES.items():
            size = getattr(stage, name)
            parts.append(_bar(x, y, size * scale, colour, f"{name}: {size / GIB:.2f} GiB"))
            x += size * scale
        parts.append(_text(x + 6, y + 13, f"{stage.total / GIB:.1f}"))
    limit, height = LEFT + plan.capacity * scale, 6 + len(stages) * ROW
    parts.append(
        f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="{height}" stroke="#c0362c" stroke-dasharray="4 3"/>'
    )
    return _svg(height + 26, [*parts, *_legend(CLASSES, height + 18)], "memory by class")


def waterfall(plan: Plan) -> str:
    """The step's parts, each where the one before ends."""
    step = plan.step
    sizes = (
        step.compute_seconds, step.bubble_seconds, step.exposed_communication_seconds, step.optimizer_seconds,
        step.other_seconds,
    )  # fmt: skip
    scale, x = (WIDTH - LEFT - 110) / max(step.seconds, 1e-12), float(LEFT)
    parts: list[str] = []
    for row, ((name, colour), seconds) in enumerate(zip(PARTS.items(), sizes, strict=True)):
        y = 6.0 + row * ROW
        parts += [_text(LEFT - 8, y + 13, name, "end"), _bar(x, y, seconds * scale, colour, f"{name}: {seconds:.4g} s")]
        x += seconds * scale
        parts.append(_text(x + 6, y + 13, f"{seconds:.3g} s, {seconds / step.seconds:.0%}"))
    return _svg(10 + len(PARTS) * ROW, parts, "the step's parts")


def traffic(plan: Plan) -> str:
    """For each link and axis the seconds of its messages, the exposed part dark."""
    sums: dict[tuple[str, str], list[float]] = {}
    for entry in plan.communication:
        total = sums.setdefault((entry.link, entry.axis), [0.0, 0.0, 0.0])
        for index, value in enumerate((entry.seconds, entry.exposed_seconds, entry.bytes)):
            total[index] += value
    longest = max((seconds for seconds, _, _ in sums.values()), default=0.0) or 1.0
    scale, parts = (WIDTH - LEFT - 260) / longest, []
    for row, ((link, axis), (seconds, exposed, sent)) in enumerate(sorted(sums.items())):
        y = 6.0 + row * ROW
        parts += [
            _text(LEFT - 8, y + 13, f"{link or 'none'}: {axis}", "end"),
            _bar(LEFT, y, seconds * scale, "#f4b9a7", f"{seconds:.4g} s"),
            _bar(LEFT, y, exposed * scale, "#e8684a", f"exposed {exposed:.4g} s"),
            _text(
                LEFT + seconds * scale + 6, y + 13, f"{sent / 1e9:,.2f} GB, {seconds:.3g} s, {exposed:.3g} s exposed"
            ),
        ]
    return _svg(12 + max(1, len(sums)) * ROW, parts or [_text(LEFT, 20, "no messages")], "traffic per link")


def pipeline(plan: Plan, pricer: Pricer) -> str:
    """The schedule's rows on the clock; a pipeline of many ranks is drawn with fewer micro-batches."""
    return draw_timeline(pricer.timeline(plan.layout, SHOWN_MICRO_BATCHES), width=WIDTH)


def frontier(plan: Plan) -> str:
    """Device memory against seconds of what the search priced, up to three times the best."""
    points = [(c.memory_bytes or 0.0, c.seconds or 0.0, str(c.layout)) for c in plan.explored]
    least = min(seconds for _, seconds, _ in points)
    points = [point for point in points if point[1] <= 3 * least]
    height, slowest = 360.0, max(seconds for _, seconds, _ in points)
    wide = plan.capacity

    def place(num_bytes: float, seconds: float) -> tuple[float, float]:
        return LEFT + num_bytes / wide * (WIDTH - LEFT - 40), height - 40 - seconds / slowest * (height - 70)

    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - 40}" y1="{height - 40}" y2="{height - 40}" stroke="#888"/>',
        f'<line x1="{LEFT}" x2="{LEFT}" y1="20" y2="{height - 40}" stroke="#888"/>',
        _text(WIDTH - 40, height - 20, f"{wide / GIB:.0f} GiB", "end"), _text(LEFT - 8, 34, f"{slowest:.3g} s", "end"),
        _text(LEFT - 8, height - 40, "0", "end"),
    ]  # fmt: skip
    for num_bytes, seconds, name in points:
        x, y = place(num_bytes, seconds)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#5b8ff9" opacity="0.5">'
            f"<title>{escape(name)}: {seconds:.3g} s</title></circle>"
        )
    best, corners = float("inf"), []
    for num_bytes, seconds, _ in sorted(points):
        if seconds < best:
            best = seconds
            corners.append("{:.1f},{:.1f}".format(*place(num_bytes, seconds)))
    parts.append(f'<polyline points="{" ".join(corners)}" fill="none" stroke="#e8684a" stroke-width="2"/>')
    x, y = place(plan.device_bytes, plan.step.seconds)
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none" stroke="#18794e" stroke-width="2.5"/>')
    return _svg(height, parts, "memory against seconds")
