"""A rank that sleeps and one that calls another collective, in a real run: the printed report says which, where and what."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranks.kit import preload
from ranks.runs import write_documents
from ranks.test_resume import Plan, make_config, planned_rank
from shardwright.comm.flight import file_of, read_flight
from shardwright.errors import RankError
from shardwright.launch import RankEnv, run_local_ranks
from shardwright.train.loop import RunOptions, prepare_run
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


def error_of(folder: Path, run: str, layout: str, act: Callable[[Trainer], None]) -> str:
    write_documents(folder)
    config = make_config(folder, run, layout, timeout_s=LIMIT_S)
    options = RunOptions()
    data = prepare_run(config, options)
    with pytest.raises(RankError) as caught:
        run_local_ranks(
            planned_rank,
            2,
            (config, data, options, Plan(prepare=disturb, arguments=(1, act))),
            threads_per_rank=1,
            timeout_s=LIMIT_S,
            time_limit_s=60.0,
            grace_s=0.5,
            preload=preload(),
        )
    return str(caught.value)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,comm=gloo"])
def test_lh_01_a_rank_that_sleeps(layout: str, tmp_path: Path) -> None:
    start = time.monotonic()
    error = error_of(tmp_path, "sleeps", layout, sleep)
    assert time.monotonic() - start < LIMIT_S + 15
    assert re.search(r"rank 1 has not come to all_reduce of 'tokens' \(16 bytes\), number \d+ over world in data", error)
    assert "it is at step 3" in error and re.search(r"rank 1 waits for nobody, at step 3; its last verb was", error)
    record = read_flight(file_of(tmp_path / "sleeps" / "flight", 0))
    assert record.waiting is not None and record.waiting.name == "tokens"
    assert (tmp_path / "sleeps" / "flight" / "report-0.txt").is_file()


def test_lh_01_a_rank_that_calls_another_collective(tmp_path: Path) -> None:
    start = time.monotonic()
    error = error_of(tmp_path, "stray", "dp=2", stray)
    assert time.monotonic() - start < LIMIT_S + 15
    assert re.search(
        r"ranks 0 and 1 differ: number \d+ over world is all_reduce of 'tokens' \(16 bytes\) on rank 0 \(at step 3\) "
        r"but barrier of 'stray' on rank 1 \(at step 3\)",
        error,
    )
