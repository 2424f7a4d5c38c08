"""All axes together: many layouts against one process, defects one at a time, two hosts, a real model."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from proofs.base import ROOT, Check, Outcome, keep, shardwright, tests

FIVE_AXES = "tp=2,cp=2,dp=2,pp=2,ep=2"


def axes_of(layout: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in layout.split(","))


def has(layouts: list[str], text: str) -> bool:
    """Whether each ZeRO stage has a layout with at least these degrees."""
    wanted = axes_of(text)
    stages = {axes.get("zero", "0") for axes in map(axes_of, layouts) if wanted.items() <= axes.items()}
    return stages == {"0", "1", "2", "3"}


def matrix(run_file: str, folder: str | None = None) -> tuple[dict[str, Any], float]:
    """The answer, and its seconds. A folder of an earlier run is resumed."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as name:
        found = shardwright("verify", run_file, "--matrix", "--out", folder or name, timeout=7200)
    return found, time.perf_counter() - start


def whole_matrix(run_file: str, kept: str) -> Outcome:
    found, seconds = matrix(run_file)
    keep(kept, {name: value for name, value in found.items() if name != "report"})  # a folder that is gone
    rows = found["layouts"]
    layouts = [row["layout"] for row in rows if row["ranks"] <= 8]
    passed = sum(row["passed"] for row in rows)
    experts = any(axes.get("ep", "1") != "1" for axes in map(axes_of, layouts))
    named = has(layouts, "tp=2,cp=2,pp=2") and (not experts or has(layouts, "tp=2,dp=2,pp=2,ep=2"))
    largest = max(rows, key=lambda row: row["ranks"])
    five = all(axes_of(largest["layout"]).get(axis) == "2" for axis in ("tp", "cp", "dp", "pp", *(("ep",) if experts else ())))
    value = (
        f"{passed} of {len(rows)} layouts ({len(layouts)} of up to 8 ranks; {largest['ranks']} ranks: {largest['layout']}), "
        f"{found['pairs']} pairs, worst gradient {found['gradients']['max_rel_diff']:.1e}, bytes equal: "
        f"{found['ledger']['equal']}, {seconds / 60:.1f} min; every ZeRO stage of tp x cp x pp and of tp x dp x pp x ep: {named}"
    )
    right = found["passed"] and found["ledger"]["equal"] and len(layouts) >= 60 and named and five and largest["ranks"] == 16
    return Outcome(value, right and seconds < 25 * 60)


def resumed() -> Outcome:
    """A second run of the same folder starts no rank."""
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as name:
        words = ("verify", "examples/tiny.toml", "--matrix", "--most-ranks", "1", "--least", "1", "--steps", "1", "--out", name)
        first = shardwright(*words)
        again = shardwright(*words)
        page = Path(name, "report.html").stat().st_size
    kept = sum(row["kept"] for row in again["layouts"])
    spent = f"{again['seconds']:.0f} s after {first['seconds']:.0f} s"
    value = f"{kept} of {len(first['layouts'])} taken over in {spent}; page {page} B"
    return Outcome(value, first["passed"] and kept == len(first["layouts"]) > 0)


def mutations() -> Outcome:
    found = shardwright("verify", "examples/tiny.toml", "--mutate", "all", timeout=3600)
    keep("mutations.json", found)
    checks = sorted({check for one in found["mutations"] for check in one["caught_by"]})
    value = f"{found['kinds']} kinds, missed {found['missed']}, skipped {sorted(found['skipped'])}; caught by {', '.join(checks)}"
    return Outcome(value, found["passed"] and found["kinds"] >= 25 and not found["skipped"])


def two_hosts() -> Outcome:
    command = [sys.executable, "benchmarks/two_hosts.py", "--mbit", "50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        return Outcome(done.stderr.strip()[-300:], False)
    found = json.loads(done.stdout)
    if "skipped" in found:
        return Outcome(f"skipped: {found['skipped']}", None)
    keep("two-hosts.json", found)
    (inside, near), (across, far) = found["layouts"].items()
    planned = found["planned_seconds"]
    split = near["transports"]["tp"] == "shared memory" and near["transports"]["dp"] == "gloo"
    value = (
        f"tp inside {near['step_seconds']:.2f} s, across {far['step_seconds']:.2f} s (planned {planned[inside]:.2f} and "
        f"{planned[across]:.2f}); shared memory inside, gloo across: {split}; verify passed {found['verify']['passed']}"
    )
    slower = far["step_seconds"] > near["step_seconds"] and planned[across] > planned[inside]
    return Outcome(value, split and slower and found["verify"]["passed"])


CHECKS = [
    Check(
        "1",
        "verify --matrix on a dense model",
        "60 layouts and 16 ranks at once, all pass, under 25 min",
        lambda: whole_matrix("examples/tiny.toml", "matrix-dense.json"),
    ),
    Check("1c", "verify --matrix a second time", "nothing is run again", resumed),
    Check("1d", "two hosts, a link of 50 Mbit/s", "verify passes, tp across slower than inside, as planned", two_hosts),
    Check("2", "verify --mutate", "25 kinds, all caught", mutations),
    Check("8", "the same seed twice", "the same bits", lambda: tests("tests/ranks/test_determinism.py")),
    Check("9", "fine-tune, change the layout, load in transformers", "same losses, same logits",
          lambda: tests("tests/e2e/test_finetune.py")),
    Check("10", "train --check replicas", "silent when right, names what is not", lambda: tests("tests/ranks/test_placement.py")),
]  # fmt: skip
if Path(ROOT, "examples", "tiny-moe.toml").is_file():
    CHECKS.insert(1, Check(
        "1b", "verify --matrix on a model with experts", f"the same, with {FIVE_AXES}",
        lambda: whole_matrix("examples/tiny-moe.toml", "matrix-experts.json"),
    ))  # fmt: skip
