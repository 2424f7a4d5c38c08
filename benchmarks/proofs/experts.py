"""Mixture of experts: routers, experts and expert parallelism, composed with every other axis."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from grids import compared
from proofs.base import ROOT, Check, Outcome, tests

from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.train.prepare import prepare_data

RESULTS = ROOT / "benchmarks" / "results"
RUNS = "tests/ranks/test_expert_runs.py"
SMALL = {
    "vocab_size": 320, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
    "family": "mixtral",
}  # fmt: skip


# -- 2 -------------------------------------------------------------------------------------------------


def write_skewed_text(folder: Path) -> None:
    """Long documents, 19 of 20 words the same: nearly all tokens go to the same experts, and some get none."""
    rng = random.Random(7)
    words = [first + second + last for first in "bdfgkmnprs" for second in "aeiou" for last in "ntx"]
    texts = [" ".join("la" if rng.random() < 0.95 else rng.choice(words) for _ in range(300)) for _ in range(80)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def small_config(folder: Path, top_k: int, layout: str) -> RunConfig:
    moe = {"num_experts": 8, "top_k": top_k, "expert_dim": 24, "aux_coefficient": 0.05, "normalise_top_k": top_k > 1}
    table = {
        "model": SMALL | {"moe": moe},
        "data": {"sources": f"{folder}/text.jsonl", "seq_len": 32, "cache": f"{folder}/datasets"},
        "optim": {"name": "sgd", "lr": 0.1},
        "train": {"steps": 10, "threads": 1, "run_dir": f"{folder}/run"},
    }
    return RunConfig.of(table, (), layout)


def grid(folder: Path) -> Iterator[RunConfig]:
    """ep x {dp, tp with sp, cp, pp, ZeRO-1, ZeRO-3} x {dropless, capacity} x k, as far as ep divides the ranks of a stage."""
    for ep, moe, top_k in product((1, 2, 4), ("dropless", "capacity:1.25", "capacity:1.0:reroute"), (1, 2, 3, 4)):
        for other in ("dp=4", "tp=2,dp=2", "cp=2,dp=2", f"pp=2,dp={ep},schedule=1f1b", "dp=4,zero=1", "dp=4,zero=3"):
            exchange = ",ep_deduplicate=on" if ep > 1 and top_k > 2 else ""
            text = f"{other},ep={ep},moe={moe},microbatches=2,precision=fp64{exchange}"
            yield small_config(folder, top_k, text)


def one_process(layout: Layout) -> Layout:
    """Equal for layouts that one process compares with: whose tokens are balanced together and what experts may take."""
    return Layout(precision="fp64", dp=layout.dp, microbatches=layout.microbatches, moe=layout.moe)


def verified() -> Outcome:
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as name:
        write_skewed_text(Path(name))
        configs = list(grid(Path(name)))
        worst, wrong, busiest, idle = 0.0, [], 0.0, 0
        for run, found in compared(prepare_data(configs[0]), configs, one_process):
            worst = max(worst, found.gradients.max_rel_diff)
            wrong += [] if found.passed else [str(run.config.layout)]
            for counts in run.traces[0].choices[0]:
                busiest = max(busiest, max(counts) / sum(counts))
                idle += min(counts) == 0
    value = f"{len(configs) - len(wrong)} of {len(configs)} layouts, worst gradient {worst:.1e}; busiest expert "
    value += f"{busiest:.0%} of the choices, {idle} layers with an expert that gets none"
    return Outcome(value + (f"; wrong: {wrong[:3]}" if wrong else ""), not wrong)


# -- 4 -------------------------------------------------------------------------------------------------


def balanced() -> Outcome:
    """The busiest expert over the mean, at the start and over the last steps of runs with and without balancing."""
    subprocess.run([sys.executable, "benchmarks/moe_balance.py"], cwd=ROOT, check=True, capture_output=True, timeout=1800)
    runs: dict[str, Any] = json.loads((RESULTS / "moe-balance.json").read_text())["runs"]
    ends = {name: (run["max_over_mean"][0], statistics.mean(run["max_over_mean"][-20:])) for name, run in runs.items()}
    value = ", ".join(f"{name} {first:.1f} -> {last:.1f}" for name, (first, last) in ends.items())
    (_, (_, left)), *methods = ends.items()
    right = all(last < 0.6 * first and last < left for _, (first, last) in methods)
    return Outcome(f"busiest over mean: {value}; benchmarks/results/moe-balance.png", right)


# -- 5 -------------------------------------------------------------------------------------------------


def against_peers(comm: str) -> Outcome:
    out = RESULTS / f"moe-{comm}.json"
    command = [sys.executable, "benchmarks/moe.py", "--comm", comm, "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=1800)
    found: dict[str, Any] = json.loads(out.read_text())
    ratios = {name: f"{value:.2f}" for name, value in found["ratio_to_book"].items() if name != "book"}
    best = min(value for name, value in found["ratio_to_book"].items() if name.startswith("ours"))
    speed = {name: f"{value:,.0f}" for name, value in found["tokens_per_second"].items()}
    value = f"to book {ratios}; tokens/s {speed}; losses differ by {found['largest_loss_difference']:.0e}"
    return Outcome(value, best <= 0.8 and found["largest_loss_difference"] < 1e-4)


CHECKS = [
    Check(
        "1",
        "vectors: tokens per expert, capacity, DeepSeek-V2 sizes",
        "equal",
        lambda: tests("tests/unit/test_vectors.py", "tests/unit/test_moe.py", "tests/unit/test_model_config.py"),
    ),
    Check("2", "verify over ep, dp, tp, cp, pp, ZeRO, capacity, k, skewed routing", "all within 1e-9, bytes equal", verified),
    Check("2b", "mutations of exchanges, routers' sums and expert gradients", "red", lambda: tests(RUNS, "-k", "red")),
    Check(
        "3",
        "bytes of dispatch and combine, to the byte, local routes excluded",
        "equal",
        lambda: tests("tests/unit/test_dispatch.py", "tests/ranks/test_expert.py"),
    ),
    Check("4", "balance from a skewed start on real text, both methods", "below 0.6 of the start", balanced),
    Check("5", "a step of the layer on two ranks, gloo", "0.80 of the book's", lambda: against_peers("gloo")),
    Check("5b", "ours over shared memory, theirs over gloo", "0.80 of the book's", lambda: against_peers("shm")),
    Check("6", "group MO: a rank without tokens, recomputation, copies, pipelines", "equal", lambda: tests(RUNS)),
]
