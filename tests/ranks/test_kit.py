"""The test kit itself: quick starts, planned faults, and stacks of what hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks.kit import FaultPlan, living_ranks, run_ranks
from shardwright.errors import RankError
from shardwright.launch import RankEnv


def total(env: RankEnv, faults: FaultPlan) -> float:
    faults.on(env).wrap(dist, "all_reduce")
    value = torch.tensor([float(env.rank + 1)])
    for step in range(3):
        faults.on(env).at("before_reduce", step)
        dist.all_reduce(value)
    return float(value)


def write_slowly(env: RankEnv, path: Path, faults: FaultPlan) -> None:
    faults.on(env).wrap(os, "replace", "rename")
    partial = path.with_suffix(".partial")
    partial.write_text("all of it")
    os.replace(partial, path)


def hold(env: RankEnv) -> None:
    env.send(os.getpid())
    dist.barrier()
    while env.rank == 1:
        time.sleep(0.01)
    dist.barrier()


def test_two_warm_ranks_start_and_meet_quickly() -> None:
    run_ranks(total, 2, FaultPlan())
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert run_ranks(total, 2, FaultPlan()) == [12.0, 12.0]
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0  # about 0.1 s on an idle machine; a fresh interpreter with torch takes over 2 s


def test_a_point_kills_the_planned_rank_at_the_planned_step() -> None:
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL"):
        run_ranks(total, 3, FaultPlan(kill={"before_reduce": 2}, ranks=[1]))
    assert run_ranks(total, 2, FaultPlan(kill={"before_reduce": 3})) == [12.0, 12.0]  # a step that is never reached


def test_a_wrapped_call_is_a_point_whose_step_is_the_count_of_calls() -> None:
    with pytest.raises(RankError, match=r"^rank 0 was killed by SIGKILL"):
        run_ranks(total, 2, FaultPlan(kill={"all_reduce": 2}, ranks=[0]))
    assert run_ranks(total, 2, FaultPlan(kill={"all_reduce": 3}, ranks=[0])) == [12.0, 12.0]


def test_a_delay_slows_the_collective_and_keeps_its_result() -> None:
    start = time.perf_counter()
    assert run_ranks(total, 2, FaultPlan(delay={"all_reduce": 0.1}, ranks=[1])) == [12.0, 12.0]
    assert time.perf_counter() - start > 0.3


def test_a_write_can_be_cut_off_before_its_rename(tmp_path: Path) -> None:
    target = tmp_path / "state.bin"
    with pytest.raises(RankError, match=r"^rank 0 was killed"):
        run_ranks(write_slowly, 1, target, FaultPlan(kill={"rename": None}))
    assert not target.exists()
    assert target.with_suffix(".partial").read_text() == "all of it"


def test_what_hangs_is_ended_and_every_stack_is_shown() -> None:
    pids: dict[int, int] = {}
    start = time.perf_counter()
    with pytest.raises(RankError, match="time limit of 1 s") as caught:
        run_ranks(hold, 2, time_limit=1.0, on_message=pids.__setitem__)
    assert time.perf_counter() - start < 8
    message = str(caught.value)
    assert message.startswith("ranks 0, 1 did not end")
    rank_0, rank_1 = message.split("rank 0:")[1].split("rank 1:")
    assert "in barrier" in rank_0 and "in hold" in rank_0  # blocked in native code below barrier()
    assert "in barrier" not in rank_1 and "in hold" in rank_1
    assert set(pids) == {0, 1}
    assert not living_ranks() & set(pids.values())
