"""Many layouts in few launches, each compared with one process; what the proofs' grids are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.plan.collectives import predict_step
from shardwright.train.prepare import PreparedData
from shardwright.verify.parity import (
    Verification,
    compare,
    dry_step,
    first_of_each_stage,
    trace_steps,
    train_sampler,
    whole_batches,
)
from shardwright.verify.reference import Trace, reference_run

IN_ONE_LAUNCH = 24
PRELOAD = ("torch", "torch.distributed", "torch._dynamo")
"""What ranks need not import each; a dry run has a use for the last."""


def trace_many(
    env: RankEnv, data: PreparedData, configs: Sequence[RunConfig], steps: int, dry: Sequence[bool]
) -> list[tuple[Trace, Ledger | None]]:
    """One rank: the traces of all configurations, one after another; of those that are marked ``dry`` the dry run of the
    rank, where one is compared with (it takes longer than the run, and here all cores work on it)."""
    init_process_group(env)
    found = []
    for config, with_dry in zip(configs, dry, strict=True):
        trace = trace_steps(Mesh.distributed(config.layout, env.rank), config, data, steps)
        wanted = with_dry and env.rank in first_of_each_stage(config.layout)
        found.append((trace, dry_step(config, env.rank, trace.ledgers[-1].dispatches) if wanted else None))
    return found


@dataclass
class Traced:
    """The traces of a configuration's ranks, and the dry runs of the first rank of each stage where they were asked for."""

    config: RunConfig
    traces: list[Trace]
    dry: list[Ledger] | None


def no_dry_run(config: RunConfig) -> bool:
    return False


def traced(
    data: PreparedData, configs: Sequence[RunConfig], steps: int = 3, *, dry: Callable[[RunConfig], bool] = no_dry_run
) -> Iterator[Traced]:
    """Each configuration, fewest ranks first; those of one number of ranks share launches. ``dry`` says which are dry run too.

    The next launch runs while the caller looks at what this one gave.
    """
    launches = []
    for world in sorted({config.layout.world_size for config in configs}):
        chosen = [config for config in configs if config.layout.world_size == world]
        launches += [chosen[first : first + IN_ONE_LAUNCH] for first in range(0, len(chosen), IN_ONE_LAUNCH)]

    def run(part: list[RunConfig]) -> list[Traced]:
        world = part[0].layout.world_size
        marks = [dry(config) for config in part]
        ranks = run_local_ranks(
            trace_many, world, (data, part, steps, marks), threads_per_rank=1, time_limit_s=900, preload=PRELOAD
        )
        results = []
        for config, marked, found in zip(part, marks, zip(*ranks, strict=True), strict=True):
            ledgers = [ledger for _, ledger in found if ledger is not None]
            results.append(Traced(config, [trace for trace, _ in found], ledgers if marked else None))
        return results

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(run, launches[0])
        for following in (*launches[1:], None):
            found = ahead.result()
            if following is not None:
                ahead = pool.submit(run, following)
            yield from found


def closed_form(config: RunConfig, traces: Sequence[Trace]) -> list[Ledger]:
    """What stands where no dry run was asked for: then the closed form is compared with what was measured alone."""
    model, seq_len, freeze = config.model, config.data.seq_len, config.train.freeze
    ranks = first_of_each_stage(config.layout)
    sent = [traces[rank].ledgers[-1].dispatches or None for rank in ranks]
    return [
        predict_step(model, config.layout, seq_len, freeze, rank, config.router, dispatches)
        for rank, dispatches in zip(ranks, sent, strict=True)
    ]


def compared(
    data: PreparedData,
    configs: Sequence[RunConfig],
    alone: Callable[[Layout], Layout],
    dry: Callable[[RunConfig], bool] = lambda config: True,
) -> Iterator[tuple[Traced, Verification]]:
    """`traced` with three steps, each against one process; ``alone`` is equal for layouts with the same reference."""
    references: dict[str, Trace] = {}
    columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for found in progress.track(traced(data, configs, dry=dry), len(configs), description="Layouts"):
            config = found.config
            key = str(config.model_copy(update={"layout": alone(config.layout)}))
            if key not in references:
                references[key] = reference_run(config, whole_batches(train_sampler(config, data, 0)), 3)
            made = closed_form(config, found.traces) if found.dry is None else found.dry
            result = compare(config, found.traces, references[key], made)
            if not result.passed:
                progress.console.print(f"not equal: {config.layout}", soft_wrap=True)
            if not progress.console.is_terminal and progress.tasks[0].completed % 50 == 0:
                progress.console.print(f"{progress.tasks[0].completed:.0f} of {len(configs)} layouts")
            yield found, result
