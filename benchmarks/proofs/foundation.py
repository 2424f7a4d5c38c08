"""The foundation: a transformer trained on real text, data-parallel, with two commands."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from proofs.base import ROOT, Check, Outcome, bench_train, on_a_gpu, ratio_of, shardwright, tests


@cache
def clone() -> Path:
    """A fresh clone without any environment, removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="shardwright-proof-")
    clone.folder = folder  # type: ignore[attr-defined] # keeps it alive
    target = Path(folder.name) / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(target)], check=True)
    shared = ROOT.parent / "shared"
    if shared.is_dir():
        (target.parent / "shared").symlink_to(shared)
    return target


def make(target: str, timeout: float) -> tuple[str, float, int]:
    """``make TARGET`` in the clone: what it printed, seconds, exit code."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    start = time.perf_counter()
    done = subprocess.run(
        ["make", target], cwd=clone(), capture_output=True, text=True, timeout=timeout, check=False, env=environment
    )
    return done.stdout + done.stderr, time.perf_counter() - start, done.returncode


def demo() -> Outcome:
    text, seconds, code = make("demo", 1200)
    loss = re.search(r"held-out loss ([0-9.]+)", text)
    same = "recomputing the whole text for each: yes" in " ".join(text.split())
    if loss is None:
        return Outcome(f"no loss printed, exit {code}: {text.strip()[-300:]}", False)
    value = f"{seconds:.0f} s, {loss[1]} nats per token held out, cached text equal: {same}"
    return Outcome(value, code == 0 and same and seconds < 360 and float(loss[1]) < 4.2)


def demo_again() -> Outcome:
    text, seconds, code = make("demo", 1200)
    return Outcome(f"{seconds:.0f} s, exit {code}", code == 0 and "tokenising" not in text)


def test() -> Outcome:
    text, seconds, code = make("test", 1800)
    return Outcome(f"{seconds:.0f} s, {text.strip().splitlines()[-1]}", code == 0 and seconds < 600)


def mutated() -> Outcome:
    found = shardwright("verify", "examples/tiny.toml", "--layout", "dp=2", "--mutate", "drop-gradient-all-reduce")
    return Outcome(f"passed {found['passed']}, worst {found['worst']}", not found["passed"])


def verified(layout: str) -> Outcome:
    found = shardwright("verify", "examples/tiny.toml", "--layout", layout)
    ledger, gradients = found["ledger"], found["gradients"]["max_rel_diff"]
    sent = f"{ledger['predicted_bytes']} = {ledger['dryrun_bytes']} = {ledger['measured_bytes']} B"
    return Outcome(
        f"passed {found['passed']}, gradients {gradients:.1e}, bytes {sent}", found["passed"] and ledger["equal"]
    )


def against_ddp() -> Outcome:
    return ratio_of(bench_train("foundation-ddp", "dp=2,micro_batch=4,comm=gloo", "ddp", rounds=20), 1.0)


CHECKS = [
    Check(
        "1",
        "make demo from nothing to generated text",
        "under 360 s, below 4.2 nats per token, on held-out files",
        demo,
    ),
    Check("1b", "a second make demo reuses environment and dataset", "no tokenising", demo_again),
    Check("2", "make test", "green, under 600 s", test),
    Check("2b", "without the gradient all-reduce", "red", mutated),
    Check("3", "verify dp=2", "passed, bytes equal", lambda: verified("dp=2")),
    Check("3b", "verify dp=4", "passed, bytes equal", lambda: verified("dp=4")),
    Check("4", "training step against DistributedDataParallel", "ratio at most 1.0", against_ddp),
    Check(
        "5",
        "a rank killed in the middle of a step",
        "exit 3 in 15 s, rank named, resume equal",
        lambda: tests("tests/e2e/test_faults.py"),
    ),
    Check("6", "bad input", "one line, exit 2, nothing overwritten", lambda: tests("tests/e2e/test_bad_input.py")),
    Check("7", "the same losses on a GPU", "1e-3", on_a_gpu),
]
