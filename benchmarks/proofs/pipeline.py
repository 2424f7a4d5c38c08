"""Pipeline parallelism: schedules as data, one executor, a picture of every schedule."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
from grids import compared

matplotlib.use("Agg")
from matplotlib import pyplot
from proofs.base import RESULTS, Check, Outcome, bench_train, shardwright, tests

from shardwright.core.layout import SCHEDULES, Layout
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.schedule.make import INTERLEAVED, gpipe, make_schedule, one_forward_one_backward
from shardwright.schedule.memory import in_flight
from shardwright.schedule.simulate import Costs, closed_form, simulate
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.verify.stress import StressCase, StressOutcome, random_case, stress_rank

RUNS = "tests/ranks/test_pipeline_runs.py"
SMALL = {
    "vocab_size": 320, "dim": 32, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip


def small_config(folder: Path, layout: str, tied: bool = False, **model: Any) -> RunConfig:
    table = {
        "model": SMALL | {"tied_head": tied} | model,
        "data": {"sources": "synthetic:sentences", "seq_len": 32, "cache": str(folder / "datasets")},
        "optim": {"name": "sgd", "lr": 0.1, "clip": 1.0},
        "train": {"steps": 10, "threads": 1, "run_dir": str(folder / "run")},
    }
    return RunConfig.of(table, (), layout)


# -- 1 -------------------------------------------------------------------------------------------------


def in_flight_plot() -> Outcome:
    """Peak activations (micro-batches that the first stage of 8 holds) against m."""
    counts = [1, 2, 4, 8, 16, 32, 64]
    held = {
        "GPipe": [in_flight(gpipe(8, m))[0] for m in counts],
        "1F1B": [in_flight(one_forward_one_backward(8, m))[0] for m in counts],
    }
    figure, axes = pyplot.subplots(figsize=(5, 3.5), layout="constrained")
    for name, values in held.items():
        axes.plot(counts, values, marker="o", label=name)
    axes.set(xlabel="micro-batches", ylabel="held by stage 0 of 8", xscale="log", yscale="log")
    axes.legend()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "pipeline-in-flight.svg")
    right = held["GPipe"] == counts and held["1F1B"] == [min(8, m) for m in counts]
    return Outcome(f"GPipe {held['GPipe']}, 1F1B {held['1F1B']}; benchmarks/results/pipeline-in-flight.svg", right)


# -- 2 -------------------------------------------------------------------------------------------------


def grid(folder: Path) -> Iterator[RunConfig]:
    """Every schedule x pp x micro-batches x tied x recomputation, alone and with dp=2, tp=2, cp=2; virtual 2 where it applies."""
    for schedule, pp, other in product(SCHEDULES, (2, 4), ("", "dp=2,", "tp=2,", "cp=2,")):
        chunks = ",virtual=2" if schedule in INTERLEAVED else ""
        for m, tied, recompute in product((pp, 2 * pp, 4 * pp, 2 * pp + 1, pp - 1), (False, True), ("none", "full")):
            text = f"{other}pp={pp},schedule={schedule},microbatches={m},recompute={recompute},precision=fp64{chunks}"
            yield small_config(folder, text, tied)


def one_process(layout: Layout) -> Layout:
    return Layout(precision="fp64", microbatches=layout.dp * layout.microbatches, micro_batch=layout.micro_batch)


def few(config: RunConfig) -> bool:
    return config.layout.microbatches == config.layout.pp


def verified(grid: Callable[[Path], Iterator[RunConfig]]) -> Outcome:
    """Every layout of ``grid(folder)`` against one process, many in one launch; a dry run of each with as many micro-batches as
    stages, since more of them are booked as the first was."""
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as name:
        configs = list(grid(Path(name)))
        found = [(run.config, result) for run, result in compared(prepare_data(configs[0]), configs, one_process, few)]
    worst = max(result.gradients.max_rel_diff for _, result in found)
    wrong = [str(config.layout) for config, result in found if not result.passed]
    value = f"{len(found) - len(wrong)} of {len(configs)} layouts, worst gradient {worst:.1e}"
    return Outcome(value + (f"; wrong: {wrong[:3]}" if wrong else ""), not wrong)


# -- 4 -------------------------------------------------------------------------------------------------

PEERS = {
    "gpipe": "schedule=gpipe", "1f1b": "schedule=1f1b", "interleaved": "schedule=interleaved,virtual=2",
    "zb_h1": "schedule=zb_h1", "zb_v": "schedule=zb_v", "dualpipe_v": "schedule=dualpipe_v",
}  # fmt: skip


def against_torch(pp: int) -> Outcome:
    found = {}
    for name, text in PEERS.items():
        layout = f"pp={pp},{text},microbatches=8,micro_batch=4"
        found[name] = bench_train(f"pipeline-torch-pp{pp}-{name}", layout, "pipelining", rounds=5 if pp == 2 else 4)
    ratios = {name: result["ratio"] for name, result in found.items()}
    memory = {name: result["ratio_of_memory"] for name, result in found.items()}
    drift = max(result["largest_loss_difference"] for result in found.values())
    shown = ", ".join(f"{name} {ratio:.3f} (memory {memory[name]:.2f})" for name, ratio in ratios.items())
    right = max(ratios.values()) <= 0.98 and max(memory.values()) <= 1.0 and drift < 1e-4
    return Outcome(f"{shown}; losses differ by {drift:.0e}", right)


def best_by_cost() -> Outcome:
    """Our fastest schedules with a split by cost beside the fastest of theirs, in runs that take turns."""
    kept = {name: RESULTS / f"pipeline-torch-pp2-{name}.json" for name in PEERS}
    if not all(path.is_file() for path in kept.values()):
        return Outcome("run check 4 first: it finds their best", None)
    found = {name: json.loads(path.read_text()) for name, path in kept.items()}
    theirs = min(PEERS, key=lambda name: found[name]["peer"]["step_seconds"])
    fastest = sorted(PEERS, key=lambda name: found[name]["ours"]["step_seconds"])[:3]
    other = f"pp=2,{PEERS[theirs]},microbatches=8,micro_batch=4"
    ratios = {}
    for name in fastest:
        layout = f"pp=2,{PEERS[name]},microbatches=8,micro_batch=4,stages=cost"
        ratios[name] = bench_train(f"pipeline-by-cost-{name}", layout, "pipelining", "--peer-layout", other, rounds=6)["ratio"]
    best = min(ratios, key=ratios.__getitem__)
    shown = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    return Outcome(f"{best} {ratios[best]:.3f} of their best, {theirs} ({shown})", ratios[best] <= 0.9)


# -- 5 -------------------------------------------------------------------------------------------------


def simulated() -> Outcome:
    """W < B < F + W: each bubble beside its closed form (a bound for ZB-V); DualPipeV with its F&B as one block."""
    p, m, (f, b, w) = 8, 32, (10.0, 11.0, 8.0)
    shown, right = [], True
    for name in SCHEDULES:
        layout = Layout(schedule=name, pp=p, microbatches=m, virtual=2 if name in INTERLEAVED else 1)
        schedule = make_schedule(layout)
        costs = Costs(f, b, w, overlapped=f + b + w if name == "dualpipe_v" else None)
        bubble = simulate(schedule, costs).bubble_fraction
        closed = closed_form(name, p, m, schedule.num_stages // p, f, b, w)
        assert closed is not None
        shown.append(f"{name} {bubble:.2%} ({closed.meaning} {closed.value:.2%})")
        right = right and abs(bubble - closed.value) < (0.01 if name == "zb_v" else 1e-9)
    return Outcome(", ".join(shown), right)


def measured_idle() -> Outcome:
    """Two ranks that train with 1F1B and with ZB-V, one after the other, three times."""
    bubbles: dict[str, list[float]] = {"1f1b": [], "zb_v": []}
    for name in [*bubbles] * 3:
        with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as folder:
            changes = ["train.steps=30", f"train.run_dir={folder}/run", "model.num_layers=8", "model.dim=256"]
            sets = [word for change in changes for word in ("--set", change)]
            layout = f"pp=2,schedule={name},microbatches=8,micro_batch=4"
            found = shardwright("train", "examples/tiny.toml", "--layout", layout, *sets)["pipeline"]
            bubbles[name].append(found["bubble_fraction"])
    middle = {name: sorted(values)[1] for name, values in bubbles.items()}
    shown = ", ".join(f"{name} {value:.1%}" for name, value in middle.items())
    return Outcome(f"idle {shown} (medians of three runs)", middle["zb_v"] < middle["1f1b"])


# -- 7 -------------------------------------------------------------------------------------------------


def stress_world(env: RankEnv, data: PreparedData, cases: list[StressCase]) -> list[StressOutcome]:
    init_process_group(env)
    return stress_rank(env, data, cases)


def stress(count: int = 500) -> Outcome:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as name:
        plain = small_config(Path(name), "precision=fp64")
        data = prepare_data(plain)
        cases: dict[int, list[StressCase]] = {}
        for seed in range(count):
            ranks = rng.choice((2, 3, 4))
            cases.setdefault(ranks, []).append(random_case(seed, plain, Path(name), ranks, delay_s=0.01))
        ended, differ = 0, []
        for ranks, mine in cases.items():
            for first in range(0, len(mine), 20):
                part = mine[first : first + 20]
                results = run_local_ranks(stress_world, ranks, (data, part), threads_per_rank=1, time_limit_s=900)
                for case, outcomes in zip(part, zip(*results, strict=True), strict=True):
                    ended += 1
                    differ += [case.seed] if any(outcome.differs for outcome in outcomes) else []
    blocking = sum(case.blocking for mine in cases.values() for case in mine)
    value = f"{ended} of {count} ended, {blocking} of them with blocking sends; {len(differ)} with other bits"
    return Outcome(value, ended == count and not differ)


CHECKS = [
    Check(
        "1",
        "bubbles and in-flight counts of the worked examples, zero-bubble closed forms",
        "equal (ZB-V within 1 point, DualPipeV within 2)",
        lambda: tests("tests/unit/test_simulate.py", "tests/unit/test_schedules.py", "tests/unit/test_vectors.py"),
    ),
    Check("1b", "peak activations against m", "GPipe m, 1F1B min(p, m)", in_flight_plot),
    Check("2", "verify over schedules x stages x m x dp, tp, cp, tied, recompute", "all within 1e-9", lambda: verified(grid)),
    Check("2b", "mutations of the pipeline's collectives", "red", lambda: tests("tests/ranks/test_pipeline.py")),
    Check("3", "measured in-flight activations", "the schedule's rule", lambda: tests(RUNS, "-k", "holds")),
    Check("4", "against torch.distributed.pipelining, pp=2", "each ratio <= 0.98, memory not above", lambda: against_torch(2)),
    Check("4b", "the same, pp=4", "each ratio <= 0.98, memory not above", lambda: against_torch(4)),
    Check("4c", "our best with a split by cost against their best", "0.90", best_by_cost),
    Check("5", "bubbles at F, B, W of 10, 11, 8, p=8, m=32", "closed forms; ZB-V within 1 point", simulated),
    Check("5b", "measured idle time", "ZB-V below 1F1B", measured_idle),
    Check(
        "6",
        "a stage dies, stalls, receives a wrong shape",
        "stage, action, micro-batch named",
        lambda: tests(RUNS, "-k", "fails"),
    ),
    Check("7", "500 random schedules with random delays", "no deadlock, same bits", stress),
]
