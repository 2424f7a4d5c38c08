"""Predicted against measured step times of random layouts on this machine's own ranks.

    python benchmarks/planned_steps.py --ranks 2 --ranks 4 --layouts 20 --out benchmarks/results/planned-steps.json

For each number of ranks: `bench comm` measures the links; one-rank steps, on as many cores at once as the ranks will use, and
steps of four layouts of that many ranks fit what the software makes of a core and a link (share of a core's rate, seconds per
kernel, message and step); then other layouts, drawn at random, are priced and measured. Each layout has its turn in each of
several rounds, so that a slow minute touches all of them; a step is that of the slowest rank, the figure its median over all
rounds without each round's first. Where ranks are more than cores, what they do at the same time shares the cores. Shown:
Spearman's rank correlation, the median and the largest error.
Use a quiet machine; 20 layouts on 2 and on 4 ranks take some 10 minutes of 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.bench import random_batches
from shardwright.bench_comm import bench_comm, copy_rate
from shardwright.comm.mesh import Mesh
from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.plan import Plan
from shardwright.core.run_config import RunConfig
from shardwright.errors import ShardwrightError
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.plan.accuracy import errors, spearman
from shardwright.plan.calibrate import least
from shardwright.plan.stack import Stack
from shardwright.plan.step_time import Pricer
from shardwright.train.peak import measured_matmul_flops
from shardwright.train.step import Trainer
from shardwright.train.supported import check_supported

FITTED = ("gemm_bf16", "memory", "launch", "message", "step_seconds")
START = Stack(
    name="this machine", gemm_bf16=0.8, attention=0.4, memory=0.6, launch=2e-5, fused=1.5, intra=1.0, latency=1.0,
    message=2e-4, dp_overlap=0.0, p2p_overlap=0.0, step_seconds=2e-3, flash=True,
)  # fmt: skip
ALONE = ("micro_batch=1", "micro_batch=4", "micro_batch=2,microbatches=4", "micro_batch=2,recompute=full")
"""One-rank layouts that the software's constants are fitted on."""
TOGETHER = {
    2: ("tp=2", "tp=2,micro_batch=4", "dp=2,zero=3,micro_batch=2", "pp=2,microbatches=4,micro_batch=2"),
    4: ("tp=4", "tp=4,micro_batch=2", "dp=2,tp=2,zero=3,micro_batch=2", "pp=4,microbatches=4,micro_batch=2"),
}
"""Layouts of so many ranks that they are fitted on too; none of these is predicted."""
MODEL = {"vocab_size": 2048, "dim": 256, "num_layers": 8, "num_heads": 8, "ffn_dim": 704, "max_positions": 256}
SEQ = 128
TRANSPORTS = ("shm", "shm own")
"""What ranks of one machine talk over."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a step of ``layout``: by the plan and on the ranks."""

    layout: str
    predicted: float
    measured: float


def config(layout: str) -> RunConfig:
    """A small run of ``layout``."""
    table = {
        "model": MODEL,
        "data": {"sources": "none", "seq_len": SEQ},
        "optim": {"lr": 1e-3},
        "train": {"steps": 100, "threads": 1, "run_dir": "runs/planned-steps"},
    }
    return RunConfig.of(table, (), layout)


def random_layout(rng: random.Random, ranks: int) -> Layout:
    """Any layout of ``ranks`` ranks that can be trained."""
    while True:
        tp = rng.choice([k for k in (1, 2, 4) if ranks % k == 0])
        pp = rng.choice([k for k in (1, 2, 4) if ranks // tp % k == 0])
        dp = ranks // tp // pp
        zero = rng.choice((0, 1, 2, 3)) if dp > 1 else 0
        m = rng.choice((1, 2, 4, 8))
        schedule = rng.choice(("1f1b", "gpipe", "zb_h1", "interleaved")) if pp > 1 else "1f1b"
        virtual = 2 if schedule == "interleaved" else 1
        if schedule == "interleaved" and m % pp:
            continue
        try:
            layout = Layout(
                tp=tp, pp=pp, dp=dp, zero=zero, microbatches=m, micro_batch=rng.choice((1, 2, 4)), schedule=schedule,
                virtual=virtual, recompute=rng.choice(("none", "none", "full")),
                accumulate=rng.choice(("defer", "reduce")) if zero >= 2 else "defer",
            )  # fmt: skip
            check_supported(config(str(layout)))
        except ShardwrightError:
            continue
        return layout


def time_steps(env: RankEnv, layouts: Sequence[str], rounds: int, repeats: int, apart: bool) -> list[list[float]]:
    """Seconds of the steps of every layout on this rank, ranks waiting for one another before each; without each round's first.

    ``apart``: every rank trains a layout of one rank by itself, at the same time as the others.
    """
    if env.world_size > 1:
        init_process_group(env)
    found: list[list[float]] = [[] for _ in layouts]
    for _ in range(rounds):
        for times, text in zip(found, layouts, strict=True):
            run = config(text)
            mesh = Mesh.solo() if apart else Mesh.distributed(run.layout, env.rank)
            trainer = Trainer(run, mesh)
            seed, layout = mesh.coordinates["dp"], run.layout
            batches = random_batches(run.model, layout.microbatches, layout.micro_batch, SEQ, seed)
            for step in range(1 + repeats):
                if env.world_size > 1:
                    dist.barrier()
                start = time.perf_counter()
                trainer.step(batches, step)
                if step:
                    times.append(time.perf_counter() - start)
    return found


def measure(ranks: int, layouts: Sequence[str], rounds: int, repeats: int, *, apart: bool = False) -> list[float]:
    """Seconds of a step of each layout: the median of the slowest rank's."""
    arguments = (layouts, rounds, repeats, apart)
    results = run_local_ranks(time_steps, ranks, arguments, threads_per_rank=1, time_limit_s=900)
    return [
        statistics.median(max(step) for step in zip(*of_ranks, strict=True)) for of_ranks in zip(*results, strict=True)
    ]


def core_rates(env: RankEnv) -> tuple[float, float]:
    """FLOP/s and bytes per second of a core while the other cores work too."""
    if env.world_size > 1:
        init_process_group(env)
        dist.barrier()
    return measured_matmul_flops(torch.float32, repeats=20), copy_rate()


def cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def on_shared_cores(plan: Plan, ranks: int) -> float:
    """Seconds of the plan's step on this machine: ranks that are busy at the same time share its cores, and most of what a
    message takes is software."""
    busy = ranks * (1 - plan.pipeline.bubble_fraction)
    return plan.step.seconds * max(1.0, busy / cores())


def predicted(text: str, cluster: Cluster, stack: Stack) -> float:
    """Seconds of a step of a layout."""
    run = config(text)
    plan = Pricer(run.model, cluster, SEQ, stack).price(run.layout)
    return on_shared_cores(plan, run.layout.world_size)


def fitted_stack(cluster: Cluster, measured: Mapping[str, float]) -> Stack:
    """What the software makes of a core and of a link, from seconds of steps by layout."""

    def error(stack: Stack) -> float:
        return sum(abs(log(predicted(text, cluster, stack) / real)) for text, real in measured.items()) / len(measured)

    return least(error, START, FITTED, 300)


def compare(ranks: int, count: int, rounds: int, repeats: int, seed: int) -> dict[str, Any]:
    """The whole comparison for one number of ranks."""
    rng = random.Random(seed)
    known = {str(Layout.parse(text)) for text in TOGETHER[ranks]}
    layouts: list[str] = []
    while len(layouts) < count:
        text = str(random_layout(rng, ranks))
        if text not in known:
            known.add(text)
            layouts.append(text)
    used = min(ranks, cores())
    cluster = Cluster.load(_written(bench_comm(ranks, 8 << 20, TRANSPORTS)["cluster"], ranks))
    flops, copied = (min(rates) for rates in zip(*run_local_ranks(core_rates, used, threads_per_rank=1), strict=True))
    cluster = replace(cluster, chip=replace(cluster.chip, fp32=flops, memory_bandwidth=copied))
    fitted = dict(zip(ALONE, measure(used, ALONE, rounds, repeats, apart=True), strict=True))
    together = TOGETHER[ranks]
    seconds = dict(zip((*together, *layouts), measure(ranks, (*together, *layouts), rounds, repeats), strict=True))
    fitted |= {text: seconds[text] for text in together}
    stack = fitted_stack(cluster, fitted)
    timings = [Timing(text, predicted(text, cluster, stack), seconds[text]) for text in layouts]
    planned, measured = [timing.predicted for timing in timings], [timing.measured for timing in timings]
    return {
        "ranks": ranks,
        "cores": cores(),
        "spearman": spearman(planned, measured),
        **errors(planned, measured),
        "constants": {name: getattr(stack, name) for name in FITTED},
        "fitted_on": [vars(Timing(text, predicted(text, cluster, stack), real)) for text, real in fitted.items()],
        "layouts": [vars(timing) for timing in timings],
    }


def _written(text: str, ranks: int) -> str:
    path = Path(f"runs/planned-steps/cluster-{ranks}.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, action="append", choices=sorted(TOGETHER), help="ranks; repeatable (default: 2 and 4)"
    )
    parser.add_argument("--layouts", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each layout")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps of each turn, after one that is not")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep the JSON here")
    options = parser.parse_args()
    found = [
        compare(ranks, options.layouts, options.rounds, options.repeats, options.seed)
        for ranks in options.ranks or (2, 4)
    ]
    for result in found:
        print(
            f"{result['ranks']} ranks, {len(result['layouts'])} layouts: Spearman {result['spearman']:.2f}, "
            f"median error {result['median']:.1f} %, mean {result['mape']:.1f} %, largest {result['max']:.1f} %"
        )
        for timing in result["layouts"]:
            error = 100 * (timing["predicted"] / timing["measured"] - 1)
            print(f"  {1e3 * timing['measured']:8.1f} ms {error:+6.1f} %  {timing['layout']}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
