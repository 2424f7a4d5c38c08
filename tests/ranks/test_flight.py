"""A rank that sleeps and one that calls another collective, in a real run: the printed report says which, where and what."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.runs import write_documents
from ranks.test_resume import Plan, make_config, planned_rank
from shardwright.comm.flight import REPORT, file_of, read_flight
from shardwright.errors import RankError
from shardwright.launch import RankEnv
from shardwright.train import loop
from shardwright.train.start import RunOptions, prepare_run
from shardwright.train.step import Trainer

LIMIT_S = 4.0


def disturb(env: RankEnv, rank: int, act: Callable[[Trainer], None]) -> None:
    """Have ``rank`` call ``act(trainer)`` at the beginning of its fourth step."""
    original = Trainer.step

    def step(self: Trainer, batches: Any, number: int) -> Any:
        if number == 3 and env.rank == rank:
            act(self)
        return original(self, batches, number)

    Trainer.step = step  # type: ignore[method-assign]


def sleep(trainer: Trainer) -> None:
    time.sleep(60)


def stray(trainer: Trainer) -> None:
    trainer.mesh.world.barrier(name="stray")


def larger(trainer: Trainer) -> None:
    trainer.mesh.world.all_reduce(torch.zeros(5000, dtype=torch.int64), name="tokens")


def gather_first(trainer: Trainer) -> None:
    trainer.mesh.world.all_gather(torch.zeros(2, dtype=torch.int64), name="other")


def die_soon(trainer: Trainer) -> None:
    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()


def error_of(folder: Path, run: str, layout: str, act: Callable[[Trainer], None], patch: pytest.MonkeyPatch) -> str:
    """What `train` raises when rank 1 calls ``act`` at the beginning of its fourth step."""
    write_documents(folder)
    config = make_config(folder, run, layout, timeout_s=LIMIT_S)
    data = prepare_run(config, RunOptions())
    patch.setattr(loop, "run_rank", functools.partial(planned_rank, plan=Plan(prepare=disturb, arguments=(1, act))))
    with pytest.raises(RankError) as caught:
        loop.train(config, data)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,comm=gloo"])
def test_lh_01_a_rank_that_sleeps(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    error = error_of(tmp_path, "sleeps", layout, sleep, monkeypatch)
    assert time.monotonic() - start < LIMIT_S + 15
    assert re.search(r"rank 1 has not come to all_reduce of 'tokens' \(16 bytes\), number \d+ over world in data", error)
    assert "it is at step 3" in error and re.search(r"rank 1 waits for nobody, at step 3; its last verb was", error)
    record = read_flight(file_of(tmp_path / "sleeps" / "flight", 0))
    assert record.waiting is not None and record.waiting.name == "tokens"
    assert (tmp_path / "sleeps" / "flight" / "report-0.txt").is_file()


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,comm=gloo"])
@pytest.mark.parametrize(
    ("act", "theirs"),
    [
        (stray, "barrier of 'stray'"),
        (gather_first, r"all_gather of 'other' \(32 bytes\)"),
        (larger, r"all_reduce of 'tokens' \(40000 bytes\)"),
    ],
)
def test_lh_01_a_rank_that_calls_something_else(
    act: Callable[[Trainer], None], theirs: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dies of it: gloo aborts the process that is right, when more bytes come than it waits for."""
    start = time.monotonic()
    error = error_of(tmp_path, "else", layout, act, monkeypatch)
    assert time.monotonic() - start < LIMIT_S + 15
    assert re.match(
        r"ranks 0 and 1 differ: number \d+ over world is all_reduce of 'tokens' \(16 bytes\) on rank 0 \(at step 3\) "
        rf"but {theirs} on rank 1 \(at step 3\)\n",
        error,
    )
    assert error.count(REPORT) == 1 and "\nrank 1 " in error.split(REPORT)[1]
    assert (tmp_path / "else" / "flight" / "report.txt").read_text() == f"{error}\n"


@pytest.mark.parametrize("layout", ["tp=2,pp=2,microbatches=4", "cp=2,dp=2,zero=3,comm=gloo"])
def test_lh_01_a_rank_that_is_killed_in_mid_step_is_named_and_nobody_differs(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = error_of(tmp_path, "killed", layout, die_soon, monkeypatch)
    assert error.startswith("rank 1 was killed by SIGKILL (out of memory, or killed by hand); it was at ")
    assert "differ" not in error and re.search(r"\nrank 1 (waits|has waited)", error.split(REPORT)[1])
