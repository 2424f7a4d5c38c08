"""What a run shows when it is done: short tables in human units, the curves, and where everything is. No torch.

``records`` are lines of ``metrics.jsonl`` (`shardwright.train.metrics.StepRecord` as plain dicts); keys may be missing
and numbers may be None. Ledgers are those of one step and one rank, times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardwright.core.ledger import BucketTiming, Ledger, LedgerEntry
from shardwright.train.curves import plot_curves
from shardwright.train.experts import expert_table, plot_experts, read_experts
from shardwright.train.metrics import METRICS_FILE, read_metrics, series
from shardwright.train.units import format_bytes, format_count, format_duration, format_seconds, sparkline

Record = Mapping[str, Any]

MAX_BUCKET_ROWS = 12
MAX_DIFFERENCES = 8  # that are listed below the ledger's table
TIMELINE_WIDTH = 28

# ------------------------------------------------------------------------------------------------- the ledger


@dataclass
class _Row:
    """One line of the ledger's table: one key, or all numbered tensors of one name (``gradients.0``, ...)."""

    first: LedgerEntry
    names: list[str]
    predicted: tuple[int, int]  # bytes, calls
    measured: tuple[int, int]
    wrong: int  # how many of the keys differ in bytes or calls
    seconds: float
    exposed: float

    @property
    def tensor(self) -> str:
        if len(self.names) == 1:
            return self.names[0]
        stem = _stem(self.names[0])
        return f"{stem}.* ({len(self.names)}{' buckets' if stem == 'gradients' else ''})"


def _stem(tensor: str) -> str:
    return re.sub(r"\.\d+$", "", tensor)


def _rows(predicted: Ledger | None, measured: Ledger) -> list[_Row]:
    union = Ledger.merged([measured, predicted] if predicted else [measured])
    order: dict[tuple[str, str, str, str], list[LedgerEntry]] = {}
    for entry in union.sorted_entries():
        order.setdefault((*entry.key[:3], _stem(entry.tensor)), []).append(entry)
    return [_row(entries, predicted or Ledger(), measured) for entries in order.values()]


def _row(entries: list[LedgerEntry], predicted: Ledger, measured: Ledger) -> _Row:
    nothing = LedgerEntry(*entries[0].key, bytes=0, count=0)
    pairs = [(predicted.entries.get(e.key, nothing), measured.entries.get(e.key, nothing)) for e in entries]
    return _Row(
        first=entries[0],
        names=sorted((e.tensor for e in entries), key=lambda name: (len(name), name)),
        predicted=(sum(p.bytes for p, _ in pairs), sum(p.count for p, _ in pairs)),
        measured=(sum(m.bytes for _, m in pairs), sum(m.count for _, m in pairs)),
        wrong=sum((p.bytes, p.count) != (m.bytes, m.count) for p, m in pairs),
        seconds=sum(m.seconds for _, m in pairs),
        exposed=sum(m.exposed_seconds for _, m in pairs),
    )


def ledger_table(predicted: Ledger | None, measured: Ledger, *, title: str = "Sent by one rank in one step") -> Table:
    """What was sent per phase, verb, axis and tensor, predicted beside measured; differences are listed below.

    A ✓ means equal to the byte and to the call, a ✗ not. Numbered tensors of one name (``gradients.0``, ...) share a
    line, which has a ✓ only if each of them is equal.
    """
    table = _table(title)
    for name in ("phase", "verb", "axis"):
        table.add_column(name, no_wrap=True)
    table.add_column("tensor", overflow="fold", min_width=8)
    table.add_column("calls", justify="right", no_wrap=True)
    if predicted is not None:
        table.add_column("predicted", justify="right", no_wrap=True)
    for name in ("measured" if predicted is None else "measured  ", "time", "exposed"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = _rows(predicted, measured)
    for row in rows:
        entry = row.first
        table.add_row(entry.phase, entry.verb, entry.axis, Text(row.tensor), *_numbers(row, predicted is not None))
    table.add_section()
    table.add_row("total", "", "", "", *_numbers(_total(rows), predicted is not None), style="bold")
    if predicted is not None:
        _list_differences(table, predicted.differences(measured))
    return table


def _list_differences(table: Table, lines: list[str]) -> None:
    if not lines:
        return
    shown = (
        lines
        if len(lines) <= MAX_DIFFERENCES
        else [*lines[:MAX_DIFFERENCES], f"and {len(lines) - MAX_DIFFERENCES} more"]
    )
    table.caption = Text("\n".join(["✗ predicted against measured:", *(f"  {line}" for line in shown)]))
    table.caption_justify, table.caption_style = "left", "red"


def _total(rows: list[_Row]) -> _Row:
    return _Row(
        first=LedgerEntry("total", "", "", "", bytes=0),
        names=[name for row in rows for name in row.names],
        predicted=(sum(row.predicted[0] for row in rows), sum(row.predicted[1] for row in rows)),
        measured=(sum(row.measured[0] for row in rows), sum(row.measured[1] for row in rows)),
        wrong=sum(row.wrong for row in rows),
        seconds=sum(row.seconds for row in rows),
        exposed=sum(row.exposed for row in rows),
    )


def _numbers(row: _Row, compare: bool) -> list[str | Text]:
    times = [format_seconds(row.seconds), format_seconds(row.exposed)]
    sent = format_bytes(row.measured[0])
    if not compare:
        return [f"{row.measured[1]:,}", sent, *times]
    verdict = Text(sent).append(*((" ✗", "bold red") if row.wrong else (" ✓", "green")))
    return [f"{row.measured[1]:,}", format_bytes(row.predicted[0]), verdict, *times]


def bucket_table(buckets: Sequence[BucketTiming]) -> Table:
    """When each gradient bucket was ready, launched and reduced, from the start of the step, and what was waited for.

    In the picture ``·`` is a ready bucket that waits for its turn, ``█`` the reduction.
    """
    table = _table("Gradient buckets of one step")
    table.add_column("bucket", no_wrap=True)
    for name in ("size", "ready", "launch", "end", "waited"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    start = min((bucket.ready for bucket in buckets), default=0.0)
    end = max((bucket.end for bucket in buckets), default=0.0)
    head, tail = MAX_BUCKET_ROWS // 2, MAX_BUCKET_ROWS - MAX_BUCKET_ROWS // 2
    for index, bucket in enumerate(buckets):
        if len(buckets) > MAX_BUCKET_ROWS + 1 and head <= index < len(buckets) - tail:
            if index == head:
                table.add_row(f"… {len(buckets) - MAX_BUCKET_ROWS} more", style="dim")
            continue
        times = (bucket.ready, bucket.launch, bucket.end, bucket.waited)
        line = _timeline(bucket, start, end)
        table.add_row(Text(bucket.bucket), format_bytes(bucket.bytes), *(format_seconds(t) for t in times), line)
    table.add_section()
    waited = format_seconds(sum(bucket.waited for bucket in buckets))
    size = format_bytes(sum(bucket.bytes for bucket in buckets))
    table.add_row("exposed tail", size, "", "", "", waited, style="bold")
    return table


def _timeline(bucket: BucketTiming, start: float, end: float) -> Text:
    def column(moment: float) -> int:
        share = (moment - start) / (end - start) if end > start else 0.0
        return min(TIMELINE_WIDTH - 1, max(0, int(share * TIMELINE_WIDTH)))

    ready, launch, stop = column(bucket.ready), column(bucket.launch), column(bucket.end) + 1
    line = Text(" " * ready)
    line.append("·" * (launch - ready), style="dim")
    line.append("█" * (stop - launch), style="cyan")
    return line


def pipeline_table(pipeline: Mapping[str, Any]) -> Table:
    """One micro-batch's times on each stage, the slowest marked; the measured bubble beside the simulated one."""
    table = _table(f"Pipeline ({pipeline['schedule']})")
    for name in ("stage", "forward", "backward", "weight gradient", "in flight"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for stage, seconds in enumerate(pipeline["stage_seconds"]):
        mark = Text("slowest", "yellow") if stage == pipeline["slowest_stage"] else ""
        times = (format_seconds(seconds[kind]) if seconds[kind] else "" for kind in "FBW")
        table.add_row(str(stage), *times, str(pipeline["in_flight"][stage]), mark)
    measured, simulated = pipeline["bubble_fraction"], pipeline["simulated_bubble_fraction"]
    table.caption = f"bubble {measured:.1%} measured, {simulated:.1%} simulated with these times and free links"
    table.caption_justify = "left"
    return table


def memory_table(memory: Mapping[str, int], peak_bytes: int | None = None) -> Table:
    """Bytes of one rank by class, largest first, and its peak; what no class explains is a line of its own."""
    table = _table("Memory of one rank")
    table.add_column("class", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    total = sum(memory.values())
    whole = max(total, peak_bytes or 0) or 1
    lines = [(name, size) for name, size in sorted(memory.items(), key=lambda item: -item[1]) if size]
    if peak_bytes is not None and peak_bytes > total:
        lines.append(("program, libraries, workspace", peak_bytes - total))
    largest = max((size for _, size in lines), default=1)
    for name, size in lines:
        bar = Text("█" * round(20 * size / largest), style="cyan")
        table.add_row(Text(name), format_bytes(size), f"{size / whole:.0%}", bar)
    table.add_section()
    if peak_bytes is None:
        table.add_row("total", format_bytes(total), style="bold")
    else:
        table.add_row("peak", format_bytes(peak_bytes), style="bold")
    return table


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", header_style="dim", box=box.SIMPLE_HEAD, padding=0,
        pad_edge=False, show_edge=False, border_style="dim",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- the summary


def summary_panel(records: Sequence[Record], *, width: int = 44) -> Panel:
    """How the run went: losses, speed and where the time went; ``width`` is that of the loss curve."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in [
        *_progress_lines(records), *_loss_lines(records, width), *_expert_lines(records), *_speed_lines(records)
    ]:
        grid.add_row(name, value)
    return Panel(grid, title="[bold]Training[/bold]", title_align="left", border_style="dim", expand=False)


Line = tuple[str, str | Text]


def _progress_lines(records: Sequence[Record]) -> list[Line]:
    if not records:
        return [("steps", "none")]
    steps = [record["step"] for record in records if "loss" in record]
    tokens = sum(series(records, "tokens")[1])
    seconds = sum(series(records, "step_seconds")[1])
    lines: list[Line] = []
    if steps:
        text = f"{min(steps):,} to {max(steps):,}, {format_count(tokens)} tokens in {format_duration(seconds)} of steps"
        lines.append(("steps", text))
    skipped = sum(bool(record.get("skipped")) for record in records)
    broken = len(steps) - len(series(records, "loss")[0])
    if skipped:
        lines.append(
            ("skipped", Text(f"{skipped:,} of {len(steps):,} updates: gradients were not finite", style="yellow"))
        )
    if broken:
        lines.append(("broken", Text(f"{broken:,} of {len(steps):,} steps: the loss was not finite", style="bold red")))
    return lines


def _loss_lines(records: Sequence[Record], width: int) -> list[Line]:
    lines: list[Line] = []
    curve = sparkline([record["loss"] for record in records if "loss" in record], width)
    for name, key in (("train loss", "loss"), ("valid loss", "valid_loss"), ("bits per byte", "bits_per_byte")):
        steps, values = series(records, key)
        if not values:
            continue
        best = min(range(len(values)), key=values.__getitem__)
        text = Text(f"{values[0]:.3f} → ")
        text.append(f"{values[-1]:.3f}", style="bold")
        if steps[best] != steps[-1]:
            text.append(f"   best {values[best]:.3f} at step {steps[best]:,}", style="dim")
        lines.append((name, text))
        if key == "loss":
            lines.append(("", Text(curve, style="cyan")))
    return lines


def _expert_lines(records: Sequence[Record]) -> list[Line]:
    """How evenly tokens were spread over experts, at the start and now, and what was dropped."""
    busiest, entropy = (series(records, key)[1] for key in ("expert_max_over_mean", "expert_entropy"))
    if not busiest or not entropy:
        return []
    text = Text(f"busiest {busiest[0]:.2f} → ").append(f"{busiest[-1]:.2f}", style="bold")
    text.append(f" times the mean, entropy {entropy[0]:.3f} → ").append(f"{entropy[-1]:.3f}", style="bold")
    lines: list[Line] = [("experts", text.append(" (worst layer)", style="dim"))]
    dead = series(records, "dead_experts")[1]
    if dead and dead[-1]:
        lines.append(("", Text(f"{dead[-1]:,.0f} experts got no token in the last step", style="yellow")))
    sent, ranks = (series(records, key)[1] for key in ("expert_bytes", "expert_rank_max_over_mean"))
    if sent and ranks:
        traffic = f"{format_bytes(int(median(sent)))} sent per step and rank, busiest rank {ranks[-1]:.2f} times the mean"
        lines.append(("", traffic))
    for name, key in (("dropped", "dropped_share"), ("rerouted", "rerouted_share")):
        values = series(records, key)[1]
        if any(values):
            lines.append((name, f"{values[-1]:.1%} of choices in the last step, {sum(values) / len(values):.1%} on average"))
    return lines


def _speed_lines(records: Sequence[Record]) -> list[Line]:
    def middle(key: str) -> float | None:
        values = series(records, key)[1]
        return median(values) if values else None

    step, speed, mfu = middle("step_seconds"), middle("tokens_per_second"), middle("mfu")
    lines: list[Line] = []
    if speed is not None:
        share = "" if mfu is None else f", MFU {mfu:.1%}"
        lines.append(("speed", f"{format_count(speed)} tokens/s{share} (medians)"))
    if step is not None:
        slow = float(np.quantile(series(records, "step_seconds")[1], 0.95))
        lines.append(("step time", f"{format_seconds(step)} median, {format_seconds(slow)} at the 95th percentile"))
    for name, key in (("data wait", "data_seconds"), ("exposed comm", "exposed_communication_seconds")):
        value = middle(key)
        if value is not None:
            share = f", {value / step:.1%} of a step" if step else ""
            lines.append((name, f"{format_seconds(value)}{share}"))
    tail = middle("exposed_tail_seconds")
    if tail is not None:
        lines.append(("exposed tail", f"{format_seconds(tail)} after the last backward"))
    skew = middle("rank_skew_seconds")
    if skew is not None:
        lines.append(("rank skew", f"{format_seconds(skew)}{_slowest(records)}"))
    balance = middle("attention_balance")
    if balance is not None:
        worst = max(series(records, "attention_balance")[1])
        splits = Counter(split for record in records for split in record.get("token_splits", ()))
        shown = ", ".join(f"{name} {count / splits.total():.0%}" for name, count in splits.most_common())
        lines.append(("attention work", f"max/mean {balance:.2f} over cp, at most {worst:.2f}; tokens split {shown}"))
    peak = max(series(records, "peak_memory_bytes")[1], default=0)
    if peak:
        lines.append(("peak memory", f"{format_bytes(peak)} per rank"))
    return lines


def _slowest(records: Sequence[Record]) -> str:
    ranks = Counter(record["slowest_rank"] for record in records if record.get("slowest_rank") is not None)
    if not ranks:
        return ""
    rank, times = ranks.most_common(1)[0]
    return f", rank {rank} slowest in {times / sum(ranks.values()):.0%} of steps"


# ------------------------------------------------------------------------------------------------- all of it


def final_report(
    console: Console,
    run_dir: Path | str,
    *,
    predicted: Ledger | None = None,
    measured: Ledger | None = None,
    peak_bytes: int | None = None,
    pipeline: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Print what happened, draw the curves, and say where everything is. Returns the pictures' paths.

    ``measured`` is the ledger of one step of one rank, with its memory and buckets; without it their tables are left
    out. A run folder without metrics (no step was done) is only named. ``pipeline``: the summary's, see `timeline`.
    """
    run_dir = Path(run_dir)
    records: list[dict[str, Any]] = []
    pictures: list[Path] = []
    if (run_dir / METRICS_FILE).is_file():
        records = read_metrics(run_dir)
        pictures = [*plot_curves(run_dir, records), *plot_experts(run_dir)]
        console.print(summary_panel(records))
    experts = read_experts(run_dir)
    if experts is not None:
        console.print(expert_table(experts))
        console.print()
    if pipeline is not None:
        console.print(pipeline_table(pipeline))
        console.print()
    if measured is not None:
        tables = [ledger_table(predicted, measured)]
        if measured.buckets:
            tables.append(bucket_table(measured.buckets))
        if measured.memory:
            tables.append(memory_table(measured.memory, peak_bytes or _peak(records)))
        for table in tables:
            console.print(table)
            console.print()
    _print_folder(console, run_dir, pictures)
    return pictures


def _peak(records: Sequence[Record]) -> int | None:
    return int(max(series(records, "peak_memory_bytes")[1], default=0)) or None


def _print_folder(console: Console, run_dir: Path, pictures: Sequence[Path]) -> None:
    def say(name: str, value: str) -> None:
        console.print(Text.assemble((f"{name:<12}", "dim"), value), soft_wrap=True)

    say("run folder", str(run_dir))
    if pictures:
        say("curves", ", ".join(path.name for path in pictures))
    checkpoints = sorted((run_dir / "checkpoints").glob("step-*"), key=lambda path: (len(path.name), path.name))
    if checkpoints:
        say("checkpoint", str(checkpoints[-1].relative_to(run_dir)))
