"""A dry run for people: memory of every stage, what one rank sends, and whether the closed form says the same."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shardwright.core.plan import GIB
from shardwright.plan.collectives import predict_step
from shardwright.train.dryrun import DryRun
from shardwright.train.report import ledger_table

CLASSES = ("parameters", "gradients", "optimizer", "activations", "buffers")


def dry_report(console: Console, result: DryRun) -> None:
    """Print it."""
    layout = result.config.layout
    shown = Table(title=f"Memory of one rank of each stage, GiB allocated; {layout.world_size:,} ranks")
    for column in ("stage", *CLASSES, "sum", "parameters held", "TFLOP a step"):
        shown.add_column(column, justify="right")
    for stage in result.stages:
        memory = stage.memory
        sizes = [f"{getattr(memory, name) / GIB:.3f}" for name in CLASSES]
        shown.add_row(
            str(memory.stage),
            *sizes,
            f"{memory.total / GIB:.3f}",
            f"{stage.parameters:,}",
            f"{stage.flops / 1e12:,.3f}",
        )
    console.print(shown)
    heaviest = max(result.stages, key=lambda stage: stage.ledger.total_bytes)
    rank = layout.grid.rank({"pp": heaviest.memory.stage})
    predicted = predict_step(result.config.model, layout, result.config.data.seq_len, result.config.train.freeze, rank)
    title = f"Sent by one rank of stage {heaviest.memory.stage} in one step"
    console.print(ledger_table(predicted, heaviest.ledger, title=title))
    verdict = "[green]equal[/]" if result.agrees else "[red]different[/]"
    console.print(f"closed form of every entry of {len(result.stages)} stages: {verdict}; {result.seconds:.1f} s")
    for stage in result.stages:
        for line in stage.differences:
            console.print(line, highlight=False, soft_wrap=True)
