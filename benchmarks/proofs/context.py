"""Context parallelism: ring, gathered and exchanged attention (the context half of issue 4)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from proofs.base import ROOT, Check, Outcome, tests
from proofs.pipeline import SMALL, verified

from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.core.segments import Segments, contiguous, zigzag

RESULTS = ROOT / "benchmarks" / "results"
UNIT, RANKS = ("tests/unit/test_segments.py", "tests/unit/test_context.py"), "tests/ranks/test_context.py"
KINDS = ("ring", "allgather", "ulysses")
HEADS = SMALL | {"dim": 48, "num_heads": 24, "head_dim": 4, "num_layers": 2}
"""For every degree of tp x cp that is tried; ulysses needs as many KV heads."""


def script(name: str, *arguments: str) -> dict[str, Any]:
    """A script of benchmarks/ that writes JSON, which is kept."""
    RESULTS.mkdir(exist_ok=True)
    kept = RESULTS / f"{name.replace('_', '-')}.json"
    command = [sys.executable, f"benchmarks/{name}.py", "--json", str(kept), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


# -- 2 -------------------------------------------------------------------------------------------------


def grid(folder: Path) -> Iterator[RunConfig]:
    """Each kind x cp x other axis x recomputation x tied head x dropout, windows full of short documents."""
    others = ("", "tp=2,", "tp=2,sp=off,", "dp=2,", "dp=2,zero=3,", "pp=2,schedule=zb_h1,", "tp=2,dp=2,")
    for kind, cp, other in product(KINDS, (2, 3, 4), others):
        if Layout.parse(f"{other}cp={cp}").world_size > 8:
            continue
        for recompute, tied, dropout in product(("none", "selective", "full"), (False, True), (0.0, 0.1)):
            text = f"{other}cp={cp},cp_kind={kind},microbatches=2,micro_batch=2,recompute={recompute},precision=fp64"
            table = {
                "model": HEADS | {"num_kv_heads": 24 if kind == "ulysses" else 2, "tied_head": tied, "dropout": dropout},
                "data": {"sources": "synthetic:sentences", "seq_len": 47, "cache": str(folder / "datasets")},
                "optim": {"name": "sgd", "lr": 0.1, "clip": 1.0},
                "train": {"steps": 10, "threads": 1, "run_dir": str(folder / "run")},
            }
            yield RunConfig.of(table, (), text)


# -- 5 -------------------------------------------------------------------------------------------------


def against_one_process() -> Outcome:
    found = script("ring_attention")
    right = found["ratio"] >= 0.8 and found["largest_difference"] < 1e-5
    value = f"{found['ratio']:.3f} of its speed, {found['ring_seconds']:.2f} s"
    return Outcome(f"{value}; numbers differ by {found['largest_difference']:.0e}", right)


def longest_path() -> Outcome:
    paths = [Segments((8192,), split(8192, 4)).critical_work for split in (contiguous, zigzag)]
    return Outcome(f"{paths[0] / paths[1]:.3f}", paths[0] >= 1.6 * paths[1])


# -- 6 -------------------------------------------------------------------------------------------------


def longer_sequences() -> Outcome:
    found = script("long_context")
    shown, right = [], True
    for name in ("7 x", "8 x"):
        run = found[name]
        loss = run["losses"][0] if run["trained"] else float("nan")
        right = right and run["trained"] and not run["fits_one_rank"]
        right = right and abs(loss - run["first_loss_of_one_process"]) < 1e-5
        fate = f"train, loss {loss:.5f}" if run["trained"] else "do not fit"
        shown.append(f"{run['tokens']} tokens with {run['layout']} {fate}")
    return Outcome(f"{found['one']} tokens on one rank within {found['limit_mib']} MiB; " + "; ".join(shown), right)


CHECKS = [
    Check("2", "verify over kinds x cp x other axes x recompute, tied, dropout", "all within 1e-9", lambda: verified(grid)),
    Check("2b", "verify's cases of the suite, mutations of each collective", "equal; red", lambda: tests(RANKS)),
    Check("3", "messages of ring, gather and exchange", "closed form, to the byte", lambda: tests(RANKS, "-k", "sends or round")),
    Check("5", "ring attention, 8,192 tokens, 2 ranks, against 2 threads", ">= 0.80 of its speed", against_one_process),
    Check("5b", "longest path of a contiguous split over zigzag's at 4 ranks", ">= 1.6", longest_path),
    Check("6", "7 and 8 times one rank's longest sequence, memory limit enforced", "train on cp=8", longer_sequences),
    Check("7", "pitfalls CP, RN, US (context)", "as written", lambda: tests(*UNIT)),
]
