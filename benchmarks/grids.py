"""Many layouts in few launches, each compared with one process; what the proofs' grids are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.train.prepare import PreparedData
from shardwright.verify.parity import Verification, compare, dry_steps, trace_steps, train_sampler, whole_batches
from shardwright.verify.reference import Trace, reference_run

IN_ONE_LAUNCH = 24


def trace_many(env: RankEnv, data: PreparedData, configs: Sequence[RunConfig], steps: int) -> list[Trace]:
    """One rank: the traces of all configurations, one after another."""
    init_process_group(env)
    return [trace_steps(Mesh.distributed(config.layout, env.rank), config, data, steps) for config in configs]


def traced(data: PreparedData, configs: Sequence[RunConfig], steps: int = 3) -> Iterator[tuple[RunConfig, list[Trace]]]:
    """Each configuration with the traces of its ranks, fewest ranks first; those of one number of ranks share launches.

    The next launch runs while the caller looks at what this one gave.
    """
    launches = []
    for world in sorted({config.layout.world_size for config in configs}):
        chosen = [config for config in configs if config.layout.world_size == world]
        launches += [chosen[first : first + IN_ONE_LAUNCH] for first in range(0, len(chosen), IN_ONE_LAUNCH)]

    def run(part: list[RunConfig]) -> list[tuple[Trace, ...]]:
        world = part[0].layout.world_size
        results = run_local_ranks(trace_many, world, (data, part, steps), threads_per_rank=1, time_limit_s=900)
        return list(zip(*results, strict=True))

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(run, launches[0])
        for part, following in zip_longest(launches, launches[1:]):
            found = ahead.result()
            if following is not None:
                ahead = pool.submit(run, following)
            for config, traces in zip(part, found, strict=True):
                yield config, list(traces)


def compared(
    data: PreparedData, configs: Sequence[RunConfig], alone: Callable[[Layout], Layout]
) -> Iterator[tuple[RunConfig, list[Trace], Verification]]:
    """`traced` with three steps, each against one process; ``alone`` is equal for layouts with the same reference."""
    references: dict[str, Trace] = {}
    for config, traces in traced(data, configs):
        key = str(config.model_copy(update={"layout": alone(config.layout)}))
        if key not in references:
            references[key] = reference_run(config, whole_batches(train_sampler(config, data, 0)), 3)
        yield config, traces, compare(config, traces, references[key], dry_steps(config, traces))
