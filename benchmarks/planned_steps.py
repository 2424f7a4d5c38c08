"""Predicted against measured step times of random layouts on this machine's own ranks.

    python benchmarks/planned_steps.py --ranks 2 --ranks 4 --layouts 20 --out benchmarks/results/planned-steps.json

For each number of ranks: ``shardwright bench comm`` measures this machine and writes a cluster file, with what the software takes
(from steps of another small model than the one here); layouts drawn at random are priced on that file, as ``shardwright plan
--cluster`` does, and measured. Each layout has its turn in each of several rounds, so that a slow minute touches all of them; a
step is that of the slowest rank, the figure its median over all rounds without each round's first. Shown: Spearman's rank
correlation, the median and the largest error; and the median error with the machine's own drift taken out: by how much two
one-rank steps of `bench comm`, timed in turns with the layouts, are slower than its cluster file says.
Use a quiet machine; 20 layouts on 2 and on 4 ranks take some 10 minutes of 2 cores.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright import bench_steps
from shardwright.bench_steps import small_run, step_seconds
from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.errors import ShardwrightError
from shardwright.launch import available_cores
from shardwright.plan.accuracy import errors, spearman
from shardwright.plan.step_time import Pricer
from shardwright.train.supported import check_supported

MODEL = {"vocab_size": 2048, "dim": 256, "num_layers": 8, "num_heads": 8, "ffn_dim": 704, "max_positions": 256}
SEQ = 128
CLOCKS = ("micro_batch=4", "micro_batch=2,recompute=full")
"""One-rank steps of the model of `bench comm` that are timed beside the others: the machine's speed may have changed."""


@dataclass(frozen=True)
class Timing:
    """Seconds of a step of ``layout``: by the plan and on the ranks."""

    layout: str
    predicted: float
    measured: float


def config(layout: str) -> RunConfig:
    """A small run of ``layout``."""
    return small_run(layout, MODEL, SEQ)


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


def compare(ranks: int, count: int, rounds: int, repeats: int, seed: int) -> dict[str, Any]:
    """The whole comparison for one number of ranks."""
    rng = random.Random(seed)
    layouts: list[str] = []
    while len(layouts) < count:
        text = str(random_layout(rng, ranks))
        if text not in layouts:
            layouts.append(text)
    cluster = measured_cluster(ranks)
    clocks = [small_run(text, bench_steps.MODEL, bench_steps.SEQ) for text in CLOCKS]
    seconds = step_seconds(ranks, [*clocks, *(config(text) for text in layouts)], rounds, repeats)
    slower = slowdown(cluster, dict(zip(CLOCKS, seconds, strict=False)), ranks)
    pricer = Pricer(config("").model, cluster, SEQ)
    planned = [pricer.price(config(text).layout).step.seconds for text in layouts]
    measured = seconds[len(CLOCKS) :]
    corrected = [value * slower for value in planned]
    timings = [Timing(*row) for row in zip(layouts, planned, measured, strict=True)]
    return {
        "ranks": ranks,
        "cores": available_cores(),
        "spearman": spearman(planned, measured),
        "slower_than_when_measured": slower,
        "at_the_same_speed": errors(corrected, measured),
        "as_planned": errors(planned, measured),
        "cluster": cluster.to_toml().splitlines(),
        "layouts": [vars(timing) for timing in timings],
    }


def slowdown(cluster: Cluster, alone: Mapping[str, float], ranks: int) -> float:
    """By how much this machine is slower now than when ``cluster`` was measured: from ``alone``, seconds of one-rank steps of
    the model of `bench comm` by layout, trained by all of ``ranks`` at once."""
    pricer = Pricer(small_run("", bench_steps.MODEL, bench_steps.SEQ).model, cluster, bench_steps.SEQ)
    shared = max(1.0, ranks / available_cores())
    layouts = {text: small_run(text, bench_steps.MODEL, bench_steps.SEQ).layout for text in alone}
    return statistics.mean(real / shared / pricer.seconds(layouts[text]) for text, real in alone.items())


def measured_cluster(ranks: int) -> Cluster:
    """The cluster file that ``shardwright bench comm`` writes on this machine."""
    folder = f"runs/planned-steps/{ranks}"
    command = [sys.executable, "-m", "shardwright", "bench", "comm", "--ranks", str(ranks), "--out", folder, "--json"]
    command += ["--max-mb", "8", "--transport", "shm", "--transport", "shm own"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    return Cluster.load(f"{folder}/cluster.toml")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, action="append", choices=(2, 4), help="ranks; repeatable (default: 2 and 4)"
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
        raw, same, slower = result["as_planned"], result["at_the_same_speed"], result["slower_than_when_measured"]
        print(
            f"{result['ranks']} ranks, {len(result['layouts'])} layouts: Spearman {result['spearman']:.2f}, median error "
            f"{raw['median']:.1f} %, largest {raw['max']:.1f} %; one-rank steps were {slower:.2f} times as slow as when the "
            f"machine was measured, with that taken out {same['median']:.1f} %"
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
