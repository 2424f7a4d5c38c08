"""What a matrix and the mutations look like: tables in the terminal, a progress bar, and one page of HTML without scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shardwright.verify.broken import Breakages, Caught
from shardwright.verify.layouts import Plan, shown_values
from shardwright.verify.matrix import CHECKS, Matrix, Row

Report = Callable[[int, int, Any], None]


@contextmanager
def matrix_progress(console: Console, what: str, *, quiet: bool = False) -> Iterator[Report]:
    """A callback ``(done, total, row)`` that moves a bar and prints what failed; in a log, a line for each answer."""
    if quiet:
        yield lambda done, total, row: None
        return
    bar = Progress(
        TextColumn(f"[bold]{what}[/bold]"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}", style="dim", markup=False), console=console, disable=not console.is_interactive,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None)

        def report(done: int, total: int, row: Row | Caught | str) -> None:
            name, line, bad = _in_a_line(row)
            bar.update(task, completed=done, total=total or None, description=name)
            if bad or not console.is_interactive:
                console.print(f"{done}/{total} {line}", markup=False, highlight=False, soft_wrap=True)

        yield report


def _in_a_line(row: Row | Caught | str) -> tuple[str, str, bool]:
    """What was done, in words, and whether it is bad news."""
    if isinstance(row, str):
        return row, row, False
    if isinstance(row, Row):
        mark = "pass" if row.passed else "FAIL"
        return row.layout, f"{mark} {row.layout} {row.error or row.result.get('worst', '')}".rstrip(), not row.passed
    caught = ", ".join(row.caught_by) or f"NOT CAUGHT {_first_line(row.error)}".rstrip()
    return row.name, f"{row.name}: {caught}", not row.caught_by


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def matrix_table(matrix: Matrix) -> Table:
    """A row for each check: the worst of all layouts; then the bytes of all together."""
    answer = matrix.to_json()
    table = Table(title=f"{len(matrix.rows)} layouts of {matrix.model} against one process", title_justify="left")
    for name in ("check", "worst difference", "tolerance", "where"):
        table.add_column(name)
    for name in CHECKS:
        one = answer[name]
        if one is not None:
            where = f"{one['layout']}: {one['worst']}" if one["worst"] else one["layout"]
            table.add_row(name, f"{one['max_rel_diff']:.2e}", f"{one['tolerance']:.0e}", where)
    ledger = answer["ledger"]
    where = f"measured against predicted; dry run {ledger['dryrun_bytes']:,}"
    table.add_row("bytes sent", f"{ledger['measured_bytes']:,}", f"{ledger['predicted_bytes']:,}", where)
    for row in matrix.rows:
        if not row.passed:
            table.add_row(Text("FAIL", "bold red"), "", "", f"{row.layout}: {row.error or row.result.get('worst', '')}")
    return table


def breakage_table(found: Breakages) -> Table:
    """A row for each mutation: what it stands for, where it was tried, which checks are red."""
    stopped = f", {len(found.stopped)} ended by an error" if found.stopped else ""
    table = Table(title=f"{len(found.caught)} kinds of defects, one at a time{stopped}", title_justify="left")
    for name in ("mutation", "stands for", "layout", "caught by"):
        table.add_column(name)
    for one in found.caught:
        nothing = Text(f"nothing: {_first_line(one.error)}" if one.error else "nothing", "bold red")
        table.add_row(one.name, one.stands_for, one.layout, ", ".join(one.caught_by) or nothing)
    for name, reason in found.skipped.items():
        table.add_row(name, "", "", Text(f"skipped: {reason}", "yellow"))
    for layout, checks in found.unsound.items():
        table.add_row(Text("unbroken", "bold red"), "", layout, ", ".join(checks))
    return table


def write_page(matrix: Matrix, path: Path) -> None:
    """One HTML file: layouts and checks, bytes of every axis, and how often each pair of values was run."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("shardwright", "verify"), autoescape=True)
    values, grid = _pair_grid(matrix.plan)
    page = environment.get_template("matrix.html").render(
        title=f"{matrix.model} against one process",
        passed=matrix.passed,
        rows=matrix.rows,
        num_passed=sum(row.passed for row in matrix.rows),
        num_kept=sum(row.kept for row in matrix.rows),
        checks=CHECKS,
        pairs=matrix.plan.num_pairs,
        refused=matrix.plan.refused,
        seconds=matrix.seconds,
        values=values,
        grid=grid,
    )
    path.write_text(page, encoding="utf-8")


def _pair_grid(plan: Plan) -> tuple[list[str], list[list[Mapping[str, Any]]]]:
    """Every value that some layout has, and for each two of them the number of layouts that have both."""
    shown = [shown_values(layout) for layout in plan.layouts]
    values = sorted({value for layout in shown for value in layout})
    counts: dict[tuple[str, str], int] = {}
    for layout in shown:
        for pair in combinations(sorted(layout), 2):
            counts[pair] = counts.get(pair, 0) + 1
    reasons = {
        tuple(sorted(f"{name}={value}" for name, value in pair)): reason for pair, reason in plan.refused.items()
    }

    def cell(one: str, other: str) -> Mapping[str, Any]:
        pair = (min(one, other), max(one, other))
        count = sum(one in layout for layout in shown) if one == other else counts.get(pair, 0)
        return {"count": count, "why": f"{one}, {other}" if count else reasons.get(pair, "has no meaning")}

    return values, [[cell(one, other) for other in values] for one in values]
