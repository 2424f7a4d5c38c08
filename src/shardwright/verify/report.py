"""The verification of one layout as a table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from shardwright.verify.parity import Verification


def verification_table(result: Verification) -> Table:
    """One row per check: the worst difference, the tolerance, the place; then the ledger's three totals."""
    table = Table(title=f"{result.layout} against one process", title_justify="left")
    for name in ("check", "worst difference", "tolerance", "where", ""):
        table.add_column(name)
    for name, comparison in result.comparisons.items():
        mark = Text("pass", "green") if comparison.passed else Text("FAIL", "bold red")
        table.add_row(name, f"{comparison.max_rel_diff:.2e}", f"{comparison.tolerance:.0e}", comparison.worst, mark)
    totals = (result.predicted.total_bytes, result.dryrun.total_bytes, result.measured.total_bytes)
    mark = Text("FAIL", "bold red") if result.differences else Text("pass", "green")
    where = f"measured against predicted; dry run {totals[1]:,}"
    table.add_row("bytes sent", f"{totals[2]:,}", f"{totals[0]:,}", where, mark)
    for line in result.differences[:5]:
        table.add_row("", "", "", line, "")
    return table
