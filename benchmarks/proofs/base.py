"""What a proof is made of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


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


def tests(*paths: str, timeout: float = 1800) -> Outcome:
    """A pytest run; the value is its last line."""
    command = [sys.executable, "-m", "pytest", "-q", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-200:]
    return Outcome(last, done.returncode == 0)
