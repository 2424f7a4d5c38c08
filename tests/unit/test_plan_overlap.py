"""Two streams of one rank: what communication adds to compute."""

from __future__ import annotations

import pytest

from shardwright.core.layout import Layout
from shardwright.plan.overlap import COMPUTE, SEND, Task, exposed, hidden, makespan
from shardwright.plan.stack import Stack
from shardwright.plan.traffic import Message


def test_streams_run_beside_one_another() -> None:
    tasks = [Task(COMPUTE, 4.0), Task(SEND, 3.0), Task(COMPUTE, 1.0, (1,))]
    assert makespan(tasks, 1.0, 0.0) == 5.0
    assert makespan(tasks, 0.0, 0.0) == 8.0  # no progress beside compute: after it, then what waits for it
    assert makespan(tasks, 1.0, 0.5) == pytest.approx(6.0)  # 3 of sending slow 2 of compute to 3
    assert makespan(tasks, 0.5, 0.0) == pytest.approx(6.0)  # 2 sent beside, 1 alone, then 1
    assert makespan([], 1.0, 0.0) == 0.0


def test_only_the_first_gather_and_the_last_reduction_show() -> None:
    for units in (2, 5, 40):
        assert exposed(units, 1.0, 2.0, 0.5, 0.5, 0.5, 1, 1.0, 0.0) == pytest.approx(1.0)
        assert exposed(units, 1.0, 2.0, 0.0, 0.0, 0.7, 1, 1.0, 0.0) == pytest.approx(0.7)
        everything = units * (0.5 + 0.5 + 0.5)
        assert exposed(units, 1.0, 2.0, 0.5, 0.5, 0.5, 1, 0.0, 0.0) == pytest.approx(everything)
    assert exposed(9, 1.0, 2.0, 0.0, 0.0, 0.0, 1, 1.0, 0.0) == 0.0


def test_long_messages_set_the_pace() -> None:
    assert exposed(20, 1.0, 2.0, 3.0, 3.0, 3.0, 1, 1.0, 0.0) == pytest.approx(20 * (9 - 3), rel=0.05)
    late = exposed(20, 1.0, 2.0, 0.9, 0.9, 0.9, 0, 1.0, 0.0)
    early = exposed(20, 1.0, 2.0, 0.9, 0.9, 0.9, 1, 1.0, 0.0)
    assert late > 10 * early  # without prefetch each gather waits for the unit before it


def test_contention_slows_compute() -> None:
    free, slowed = (exposed(20, 1.0, 2.0, 0.5, 0.5, 0.5, 1, 1.0, share) for share in (0.0, 0.3))
    assert 0.2 * 30 * 0.3 < slowed - free < 30 * 0.3


def test_exposed_seconds_are_shared_among_messages() -> None:
    def message(phase: str, count: int) -> Message:
        return Message(phase, "all_gather", "dp", "parameters", 8, 0.5, 0.5, "intra", count)

    layout = Layout(dp=4, zero=3, microbatches=3)
    sent = [message("F", 3 * 4), message("B", 3 * 4), message("reduce", 4)]
    found = hidden(sent, layout, 4, (4.0, 4.0, 4.0), Stack(dp_overlap=1.0))
    assert sum(m.exposed * m.count for m in found) == pytest.approx(
        3 * 0.5 + 0.5
    )  # a first gather each, one last reduction
    none = hidden(sent, layout, 4, (4.0, 4.0, 4.0), Stack(dp_overlap=0.0))
    assert sum(m.exposed * m.count for m in none) == pytest.approx(28 * 0.5)
    whole = hidden(
        [message("reduce", 4), message("update", 4)], Layout(dp=4, zero=1), 4, (4.0, 4.0, 4.0), Stack(dp_overlap=1.0)
    )
    assert [m.exposed for m in whole] == [pytest.approx(0.125), pytest.approx(0.125)]
