"""What a proof is made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TRIAL = "SHARDWRIGHT_PROOF_ROUNDS"
"""Set by ``proof.py --rounds``: so many rounds of every measurement, and none of them is kept."""


@dataclass(frozen=True)
class Outcome:
    """What was measured; ``passed`` of None means that it could not be tried here, ``value`` says why."""

    value: str
    passed: bool | None


@dataclass(frozen=True)
class Check:
    number: str
    what: str
    bar: str
    run: Callable[[], Outcome]


def shardwright(*arguments: str, timeout: float = 1800) -> dict[str, Any]:
    """One verb of the command line with ``--json``."""
    command = [sys.executable, "-m", "shardwright", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def keep(name: str, value: Any) -> None:
    """Write a measurement into benchmarks/results, unless it is a trial."""
    if TRIAL not in os.environ:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def bench_train(name: str, layout: str, peer: str, *arguments: str, rounds: int = 12) -> dict[str, Any]:
    """``bench train`` against ``peer``, kept as ``name``.json."""
    rounds = int(os.environ.get(TRIAL, rounds))
    found = shardwright(
        "bench", "train", "--layout", layout, "--peer", peer, "--rounds", str(rounds), *arguments, timeout=3600
    )
    keep(f"{name}.json", found)
    return found


def ratio_of(found: dict[str, Any], bar: float) -> Outcome:
    """Step time of ours over the peer's, from runs that took turns, with what else such a run shows."""
    ours, peer = found["ours"], found["peer"]
    memory = [row["peak_memory_bytes"] / 2**20 for row in (ours, peer)]
    value = (
        f"{found['ratio']:.3f} ({ours['tokens_per_second']:.0f} against {peer['tokens_per_second']:.0f} tokens/s; of pairs "
        f"{found['ratio_of_pairs']:.3f}, of processor time {found['ratio_of_processor_time']:.3f}); "
        f"{ours['exposed_communication'] / ours['step_seconds']:.1%} of our step waits for other ranks; "
        f"peak memory {memory[0]:.0f} against {memory[1]:.0f} MiB; losses differ by {found['largest_loss_difference']:.0e}"
    )
    return Outcome(value, found["ratio"] <= bar and found["largest_loss_difference"] < 1e-4)


def tests(*paths: str, timeout: float = 1800) -> Outcome:
    """A pytest run; the value is its last line."""
    command = [sys.executable, "-m", "pytest", "-q", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-200:]
    return Outcome(last, done.returncode == 0)


def on_a_gpu() -> Outcome:
    """The script under benchmarks/gpu: losses as on the CPU; speed and memory with the state in each place."""
    command = [sys.executable, "benchmarks/gpu/train.py", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if not done.stdout.strip():
        return Outcome(f"ended with {done.returncode}: {done.stderr.strip()[-200:]}", False)
    found = json.loads(done.stdout)
    if "skipped" in found:
        return Outcome(f"skipped: {found['skipped']}", None)
    return Outcome(json.dumps(found["summary"]), bool(found["passed"]))
