"""What this machine's software makes of its cores and links, from a few training steps of a small model: ``bench comm``'s
second half.

A verb by itself takes some 10 us of software here; as a layer calls it, with its recording, its part of the autograd graph and
the copies around it, it takes more, and what a kernel takes beyond its work no data sheet says. So steps of one rank, by all
ranks at once, and of a few layouts of all ranks are timed, and the planner's constants (`plan.stack.Stack`) are fitted to
them. Each layout has its turn in each of several rounds, so that a slow minute touches all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, log
from typing import Any

import torch

from shardwright.bench import random_batches
from shardwright.comm.mesh import Mesh
from shardwright.core.cluster import Cluster
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv, available_cores, init_process_group, run_local_ranks
from shardwright.plan.calibrate import least
from shardwright.plan.stack import MEASURED, Stack, software_of
from shardwright.plan.step_time import Pricer
from shardwright.train.peak import measured_matmul_flops
from shardwright.train.step import Trainer

FITTED = ("gemm_bf16", "memory", "launch", "message", "step_seconds")
START = Stack(
    name=MEASURED, gemm_bf16=0.8, attention=0.4, memory=0.6, launch=3e-5, fused=1.5, intra=1.0, latency=1.0,
    message=4e-4, dp_overlap=0.0, p2p_overlap=0.0, step_seconds=2e-3, flash=True, tiles=False, accumulate=4.0,
)  # fmt: skip
ALONE = ("micro_batch=1", "micro_batch=4", "micro_batch=2,microbatches=4", "micro_batch=2,recompute=full")
"""One-rank layouts that are timed."""
MODEL = {"vocab_size": 3072, "dim": 320, "num_layers": 8, "num_heads": 8, "ffn_dim": 864, "max_positions": 192}
SEQ = 192
ROUNDS, REPEATS = 3, 2
PULL = 0.01
"""Less than the planner's own for published runs: the same machine is predicted that was measured."""
TIME_LIMIT_S = 900.0


def small_run(layout: str, model: Mapping[str, Any], seq_len: int) -> RunConfig:
    """A run of ``layout`` whose steps are timed."""
    table = {
        "model": dict(model),
        "data": {"sources": "none", "seq_len": seq_len},
        "optim": {"lr": 1e-3},
        "train": {"steps": 100, "threads": 1},
    }
    return RunConfig.of(table, (), layout)


def together(ranks: int) -> tuple[str, ...]:
    """Layouts of ``ranks`` ranks that are timed: tensor parallelism twice, sharded data parallelism, a pipeline."""
    tp = gcd(ranks, int(MODEL["num_heads"]))
    inner = 2 if tp > 2 else 1
    stages = gcd(ranks, int(MODEL["num_layers"]))
    return (
        f"dp={ranks // tp},tp={tp}",
        f"dp={ranks // tp},tp={tp},micro_batch=4",
        f"dp={ranks // inner},tp={inner},zero=3,micro_batch=2",
        f"dp={ranks // stages},pp={stages},microbatches={max(4, stages)},micro_batch=2",
    )


@dataclass(frozen=True)
class Step:
    """Seconds of a step of ``layout``, as measured and as the fitted constants have it."""

    layout: str
    measured: float
    fitted: float


def with_software(cluster: Cluster, *, rounds: int = ROUNDS) -> tuple[Cluster, list[Step]]:
    """``cluster``, one node of CPU ranks, with this machine's own rates of a core and constants of its software; and the
    steps that these are from."""
    ranks, limit = cluster.gpus_per_node, available_cores()
    used = min(ranks, limit)
    before = slowest_core(used)
    layouts = (*ALONE, *(together(ranks) if ranks > 1 else ()))
    found = step_seconds(ranks, [small_run(text, MODEL, SEQ) for text in layouts], rounds, REPEATS)
    flops, copied = map(max, before, slowest_core(used))  # a peak: what steps reach of it is fitted
    chip = replace(cluster.chip, fp32=flops, memory_bandwidth=copied)
    cluster = replace(cluster, chip=chip, cores=limit if ranks > limit else 0)
    seconds = dict(zip(layouts, found, strict=True))
    seconds |= {text: seconds[text] / max(1.0, ranks / limit) for text in ALONE}
    cluster = replace(cluster, software=software_of(fitted_stack(cluster, seconds)))
    pricer = Pricer(small_run("", MODEL, SEQ).model, cluster, SEQ)
    steps = [Step(text, real, pricer.seconds(small_run(text, MODEL, SEQ).layout)) for text, real in seconds.items()]
    return cluster, steps


def slowest_core(cores: int) -> tuple[float, float]:
    """FLOP/s of products and bytes/s of copies of the slowest of so many cores that work at once."""
    flops, copied = (min(rates) for rates in zip(*run_local_ranks(core_rates, cores, threads_per_rank=1), strict=True))
    return flops, copied


def fitted_stack(cluster: Cluster, seconds: Mapping[str, float]) -> Stack:
    """The constants under which ``seconds`` of steps, by layout, are predicted best on ``cluster``."""
    runs = [(small_run(text, MODEL, SEQ), real) for text, real in seconds.items()]
    base = Pricer(runs[0][0].model, cluster, SEQ, START)

    def error(stack: Stack) -> float:
        pricer = base.with_stack(stack)
        return sum(abs(log(pricer.seconds(run.layout) / real)) for run, real in runs) / len(runs)

    return least(error, START, FITTED, 400, pull=PULL)


def step_seconds(ranks: int, runs: Sequence[RunConfig], rounds: int, repeats: int) -> list[float]:
    """Seconds of a step of each run: that of the slowest rank, the median over ``rounds`` of ``repeats`` steps each.

    A run of one rank is trained by every rank by itself, at the same time as by the others.
    """
    arguments = (runs, rounds, repeats)
    results = run_local_ranks(timed_steps, ranks, arguments, threads_per_rank=1, time_limit_s=TIME_LIMIT_S)
    return [statistics.median(map(max, zip(*of_ranks, strict=True))) for of_ranks in zip(*results, strict=True)]


def timed_steps(env: RankEnv, runs: Sequence[RunConfig], rounds: int, repeats: int) -> list[list[float]]:
    """Seconds of the steps of every run on this rank, ranks waiting for one another before each; each turn's first step is
    not timed."""
    if env.world_size > 1:
        init_process_group(env)
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for times, run in zip(found, runs, strict=True):
            layout = run.layout
            mesh = Mesh.distributed(layout, env.rank) if layout.world_size > 1 else Mesh.solo()
            trainer = Trainer(run, mesh)
            batches = random_batches(
                run.model, layout.microbatches, layout.micro_batch, run.data.seq_len, mesh.coordinates["dp"]
            )
            for step in range(1 + repeats):
                if env.world_size > 1:
                    torch.distributed.barrier()
                start = time.perf_counter()
                trainer.step(batches, step)
                if step:
                    times.append(time.perf_counter() - start)
    return found


def core_rates(env: RankEnv) -> tuple[float, float]:
    """FLOP/s and bytes per second of a core while the other ranks' cores work too."""
    if env.world_size > 1:
        init_process_group(env)
        torch.distributed.barrier()
    return measured_matmul_flops(torch.float32, repeats=20), copy_rate()


def copy_rate(size: int = 64 << 20) -> float:
    """Bytes per second of memory traffic of a copy (read and write), the best of a few."""
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best
