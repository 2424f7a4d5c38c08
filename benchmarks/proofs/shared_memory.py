"""Shared memory: ranks of one host exchange bytes without sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from proofs.base import RESULTS, ROOT, TRIAL, Check, Outcome, bench_train, keep, ratio_of, shardwright, tests
from proofs.pipeline import small_config, verified

from shardwright.core.run_config import RunConfig

KIB, MIB = 1 << 10, 1 << 20
BARS = {
    ("all_reduce", 64 * MIB): 5.0,
    ("all_reduce", KIB): 10.0,
    ("reduce_scatter", 64 * MIB): 8.0,
    ("all_gather", 64 * MIB): 8.0,
}
FOUR_RANKS = {("all_reduce", 64 * MIB): 3.0, ("reduce_scatter", 64 * MIB): 3.0, ("all_gather", 64 * MIB): 3.0}


def grid(folder: Path) -> Iterator[RunConfig]:
    """Every axis and a few of their products on 2, 3, 4 and 8 ranks, over shared memory and over gloo."""
    layouts = (
        "dp=2", "dp=3", "dp=4", "dp=8", "tp=2", "tp=4", "tp=2,sp=off", "pp=2,microbatches=4", "pp=3,microbatches=3",
        "pp=4,microbatches=4,schedule=zb_v", "dp=3,zero=3", "tp=2,dp=2,zero=2", "tp=2,pp=2,microbatches=2,dp=2",
        "dp=8,zero=3,dp_replicate=2", "tp=4,dp=2,zero=1",
    )  # fmt: skip
    for text, kind, tied in product(layouts, ("shm", "gloo"), (False, True)):
        yield small_config(folder, f"{text},comm={kind},precision=fp64", tied, num_kv_heads=4)


def links(ranks: int, bars: dict[tuple[str, int], float]) -> Outcome:
    """How much faster own buffers are than PyTorch's verbs over gloo, medians of turns in one run."""
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as folder:
        found = shardwright("bench", "comm", "--ranks", str(ranks), "--out", folder, timeout=3600)
        keep(f"shared-memory-comm-{ranks}.json", found)
        if TRIAL not in os.environ:
            (RESULTS / f"shared-memory-comm-{ranks}.png").write_bytes((Path(folder) / "comm.png").read_bytes())
    seconds = {(p["verb"], p["bytes"], p["transport"]): p["seconds"] for p in found["points"]}
    shown, right = [], True
    for (verb, size), bar in bars.items():
        gloo, composed, own = (seconds[verb, size, transport] for transport in ("gloo", "gloo composed", "shm own"))
        where = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
        times = f"{own * 1e3:.3g} against {gloo * 1e3:.3g} ms, {composed * 1e3:.3g} composed"
        shown.append(f"{verb} {where} {gloo / own:.1f} times (bar {bar:g}; {times})")
        right = right and gloo / own >= bar
    return Outcome("; ".join(shown), right)


def stress() -> Outcome:
    """200,000 random verbs on 8 ranks, then 200 kills."""
    trial = ["--verbs", "2000", "--kills", "3"] if TRIAL in os.environ else []
    command = [sys.executable, "benchmarks/shm_stress.py", *trial]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=14400, check=False)
    if done.returncode:
        return Outcome(f"exit {done.returncode}: {done.stderr.strip()[-500:]}", False)
    found: dict[str, Any] = json.loads(done.stdout)
    keep("shared-memory-stress.json", found)
    verbs, kills = max(rank["verbs"] for rank in found["verbs"]), found["kills"]
    value = (
        f"{verbs} verbs equal to a reference; {kills['count']} kills, the others ended after {kills['median_s']:.3f} s in the "
        f"median, {kills['most_s']:.2f} s at most; left in /dev/shm: {found['left_in_dev_shm'] or 'nothing'}"
    )
    return Outcome(value, kills["most_s"] < 5.0 and not found["left_in_dev_shm"])


SHM, OTHERS = "tests/ranks/test_shm.py", ("tests/ranks/test_comm.py", "tests/ranks/test_regions.py")
CHECKS = [
    Check("1", "verbs and adjoints over both transports, 2, 3, 4 and 8 ranks", "green", lambda: tests(SHM, *OTHERS)),
    Check("1b", "verify over both transports, 2, 3, 4 and 8 ranks", "all within 1e-9", lambda: verified(grid)),
    Check(
        "1c",
        "shared memory and gloo on 2 ranks",
        "the same bits",
        lambda: tests("tests/ranks/test_parity.py", "tests/ranks/test_tensor.py", SHM, "-k", "same_bits or gloo"),
    ),
    Check("2", "bench comm, 2 ranks, own buffers against gloo", "5, 10, 8, 8 times", lambda: links(2, BARS)),
    Check("2b", "bench comm, 4 ranks, own buffers of 64 MiB against gloo", "3 times", lambda: links(4, FOUR_RANKS)),
    Check(
        "3",
        "training step against DistributedDataParallel, comm=auto",
        "ratio at most 0.90",
        lambda: ratio_of(bench_train("shared-memory-ddp", "dp=2,micro_batch=4", "ddp"), 0.90),
    ),
    Check("4", "random verbs with delays, kills", "same results, no hang, no leak, dead rank named in 5 s", stress),
]
