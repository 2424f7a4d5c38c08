"""The ``verify`` verb: one layout, a matrix of layouts, or every mutation; shown on a console, returned as JSON values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.launch import torchrun_env
from shardwright.train.display import tokenise_progress
from shardwright.train.start import check_start
from shardwright.verify.broken import break_everything
from shardwright.verify.gradient_files import check_folder
from shardwright.verify.matrix import verify_matrix
from shardwright.verify.mutate import find_mutation
from shardwright.verify.page import breakage_table, matrix_progress, matrix_table, write_page
from shardwright.verify.parity import verify
from shardwright.verify.report import verification_table

EVERYTHING = "all"
"""The name that stands for every mutation."""


def one_layout(
    config: RunConfig, steps: int, mutation: str | None, folder: Path | None, console: Console
) -> dict[str, Any]:
    """The run's own layout and model against one process; ``folder`` takes the gradients of both."""
    if mutation is not None:
        find_mutation(mutation)
    check_start(config)
    if folder is not None:
        check_folder(folder)
    with tokenise_progress(console, quiet=console.quiet) as progress:
        result = verify(config, steps, mutation=mutation, folder=folder, progress=progress)
    console.print(verification_table(result))
    console.print(_verdict(result.passed))
    return result.to_json()


def matrix(
    config: RunConfig, folder: Path, steps: int, most_ranks: int, least: int, console: Console
) -> dict[str, Any]:
    """A covering set of layouts; the page is ``report.html`` in ``folder``."""
    _starts_its_own_ranks("--matrix")
    with matrix_progress(console, "layouts", quiet=console.quiet) as progress:
        found = verify_matrix(config, folder, steps, most_ranks=most_ranks, least=least, on_row=progress)
    page = folder / "report.html"
    write_page(found, page)
    console.print(matrix_table(found))
    passed, kept = sum(row.passed for row in found.rows), sum(row.kept for row in found.rows)
    where = f"{kept} of them in an earlier run; report {page}"
    console.print(f"{passed} of {len(found.rows)} layouts passed, {where}", soft_wrap=True)
    console.print(_verdict(found.passed))
    return {**found.to_json(), "report": str(page)}


def mutations(config: RunConfig, folder: Path, steps: int, console: Console) -> dict[str, Any]:
    """Every mutation on the smallest layout that has what it breaks."""
    _starts_its_own_ranks("--mutate")
    with matrix_progress(console, "mutations", quiet=console.quiet) as progress:
        found = break_everything(config, folder, steps, on_caught=progress)
    console.print(breakage_table(found))
    console.print(_verdict(found.passed))
    return found.to_json()


def _verdict(passed: bool) -> str:
    return "[bold green]passed[/]" if passed else "[bold red]failed[/]"


def _starts_its_own_ranks(option: str) -> None:
    if torchrun_env() is not None:
        raise ConfigError(
            f"verify {option} starts ranks of several layouts itself; run it without torchrun or srun, or verify one --layout"
        )
