"""One trained run, which most tests of the command line look at, copy or continue."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.kit import TINY, Outcome, sets, shardwright

STEPS = 20


@dataclass(frozen=True)
class TrainedRun:
    """``shardwright train examples/tiny.toml --layout dp=2 --profile --json`` and what it was given and left."""

    folder: Path
    changes: dict[str, Any]
    outcome: Outcome

    @property
    def summary(self) -> dict[str, Any]:
        return self.outcome.json()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / f"step-{STEPS}"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The datasets of all tests: the sentences of examples/tiny.toml are tokenised once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def short(cache: Path) -> dict[str, Any]:
    """Changes that make a run of examples/tiny.toml a matter of a second."""
    return {
        "data__cache": cache, "data__seq_len": 16, "train__threads": 1, "train__peak_tflops": 0.05,
        "train__steps": 2, "optim__warmup_steps": 1,
    }  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, short: dict[str, Any]) -> TrainedRun:
    """A run of 20 steps over two ranks, evaluated and saved every 10, with a trace."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    changes = {
        **short,
        "train__steps": STEPS,
        "train__eval_every": 10,
        "train__save_every": 10,
        "train__run_dir": folder,
    }
    return TrainedRun(
        folder, changes, shardwright("train", TINY, "--layout", "dp=2", "--profile", "--json", *sets(**changes))
    )
