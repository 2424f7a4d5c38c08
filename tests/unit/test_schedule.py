"""Schedules as data: the generators, what they hold in flight, added communication, and the checker on broken rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwright.core.layout import Layout
from shardwright.errors import LayoutError
from shardwright.schedule.action import COMPUTE, Action, Kind, Schedule
from shardwright.schedule.make import gpipe, make_schedule, one_forward_one_backward
from shardwright.schedule.passes import add_communication, check, split_backward

GENERATORS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 13)]


def in_flight(row: tuple[Action, ...], last: frozenset[Kind]) -> int:
    """The most micro-batches that a row has forwarded and not finished with one of ``last``."""
    now = peak = 0
    for action in row:
        now += (action.kind is Kind.F) - (action.kind in last)
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_schedules_can_run_as_made_split_and_with_communication(name: str, p: int, m: int) -> None:
    made = GENERATORS[name](p, m)
    for schedule in (made, split_backward(made), add_communication(made), add_communication(split_backward(made))):
        assert check(schedule) == []
    assert (len(made.rows), made.placement, made.name) == (p, tuple(range(p)), name)
    assert all(len(row) == 2 * m for row in made.rows)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_micro_batches_in_flight_follow_the_rule(p: int, m: int) -> None:
    done = frozenset({Kind.BW})
    assert [in_flight(row, done) for row in gpipe(p, m).rows] == [m] * p
    assert [in_flight(row, done) for row in one_forward_one_backward(p, m).rows] == [min(p - s, m) for s in range(p)]
    deferred = split_backward(one_forward_one_backward(p, m))  # no W before the end: all are held for their weights
    assert [in_flight(row, frozenset({Kind.W})) for row in deferred.rows] == [m] * p
    assert [in_flight(row, frozenset({Kind.B})) for row in deferred.rows] == [min(p - s, m) for s in range(p)]


def test_rows_read_as_in_the_papers() -> None:
    assert str(one_forward_one_backward(2, 3)) == (
        "rank 0: F0.0 F0.1 BW0.0 F0.2 BW0.1 BW0.2\nrank 1: F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2"
    )
    assert str(split_backward(gpipe(1, 2))) == "rank 0: F0.0 F0.1 B0.0 B0.1 W0.0 W0.1"
    assert str(add_communication(one_forward_one_backward(2, 1))) == (
        "rank 0: F0.0 SEND_F0.0 RECV_B0.0 BW0.0\nrank 1: RECV_F1.0 F1.0 BW1.0 SEND_B1.0"
    )


def test_neighbours_on_one_rank_need_no_messages() -> None:
    rows = (tuple(Action(k, s, 0) for k, s in [(Kind.F, 0), (Kind.F, 1), (Kind.BW, 1), (Kind.BW, 0)]),)
    schedule = Schedule("two stages on one rank", 2, 1, (0, 0), rows)
    assert check(schedule) == [] and add_communication(schedule) == schedule
    assert schedule.stages_of(0) == (0, 1)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_layout_names_the_schedule(pp: int) -> None:
    assert make_schedule(Layout(pp=pp, microbatches=5)) == one_forward_one_backward(pp, 5)
    named = make_schedule(Layout(pp=pp, microbatches=5, schedule="gpipe"))
    assert named == (gpipe(pp, 5) if pp > 1 else one_forward_one_backward(1, 5))  # one stage: least in flight


def test_chunks_that_a_schedule_cannot_have_are_refused() -> None:
    with pytest.raises(LayoutError, match="schedule=zb_v has two stages per rank, virtual=3 was given; leave virtual out"):
        make_schedule(Layout(pp=2, schedule="zb_v", virtual=3))
    with pytest.raises(LayoutError, match="virtual=2 needs a schedule with several stages per rank; leave virtual out"):
        make_schedule(Layout(pp=2, virtual=2))


# -- broken schedules ------------------------------------------------------------------------------


def edited(schedule: Schedule, rank: int, edit: Callable[[list[Action]], None]) -> Schedule:
    row = list(schedule.rows[rank])
    edit(row)
    rows = (*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :])
    return replace(schedule, rows=rows)


def swap(first: Action, second: Action) -> Callable[[list[Action]], None]:
    def edit(row: list[Action]) -> None:
        a, b = row.index(first), row.index(second)
        row[a], row[b] = row[b], row[a]

    return edit


PLAIN = one_forward_one_backward(2, 3)
SENDING = add_communication(PLAIN)
F, B, W, BW = Kind.F, Kind.B, Kind.W, Kind.BW


def test_a_backward_before_its_forward_is_named() -> None:
    assert check(edited(PLAIN, 1, swap(Action(F, 1, 0), Action(BW, 1, 0)))) == [
        "rank 0 is stuck at BW0.0: what it needs never comes",
        "rank 1 is stuck at BW1.0: what it needs never comes",
    ]


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it forwards 1, rank 1 wants 1 before it gives the gradient."""
    first = edited(PLAIN, 0, swap(Action(F, 0, 1), Action(BW, 0, 0)))
    crossed = edited(first, 1, swap(Action(BW, 1, 0), Action(F, 1, 1)))
    assert check(crossed) == [
        "rank 0 is stuck at BW0.0: what it needs never comes",
        "rank 1 is stuck at F1.1: what it needs never comes",
    ]


def test_missing_and_repeated_work_is_counted() -> None:
    problems = check(edited(PLAIN, 1, lambda row: row.remove(Action(BW, 1, 2))))
    assert problems == [
        "stage 1, micro-batch 2: needs F and B W (or BW) once, has F",
        "rank 0 is stuck at BW0.2: what it needs never comes",
    ]
    assert check(edited(PLAIN, 0, lambda row: row.append(Action(BW, 0, 0)))) == [
        "stage 0, micro-batch 0: needs F and B W (or BW) once, has F BW BW"
    ]
    split = split_backward(PLAIN)
    assert check(edited(split, 0, lambda row: row.remove(Action(W, 0, 1)))) == [
        "stage 0, micro-batch 1: needs F and B W (or BW) once, has F B"
    ]
    early = edited(split, 0, lambda row: row.insert(0, row.pop()))
    assert check(early) == [
        "rank 0 is stuck at W0.2: what it needs never comes",
        "rank 1 is stuck at F1.0: what it needs never comes",
    ]


def test_work_on_the_wrong_rank_is_named() -> None:
    assert check(edited(PLAIN, 1, lambda row: row.append(Action(F, 0, 0)))) == [
        "rank 1: F0.0 belongs on rank 0, which holds stage 0"
    ]
    assert check(edited(PLAIN, 1, lambda row: row.append(Action(F, 2, 0)))) == [
        "rank 1: F2.0 is outside of the schedule's stages and micro-batches"
    ]
    assert check(edited(SENDING, 0, lambda row: row.append(Action(Kind.SEND_B, 0, 0)))) == [
        "rank 0: SEND_B0.0 is outside of the schedule's stages and micro-batches"
    ]


def test_a_send_without_its_receive_is_named() -> None:
    problems = check(edited(SENDING, 1, lambda row: row.remove(Action(Kind.RECV_F, 1, 2))))
    assert problems[0] == "rank 0 sends to rank 1 for RECV_F1.2 where rank 1 has nothing"
    assert "rank 1 is stuck at F1.2: what it needs never comes" in problems


def test_a_receive_without_its_send_is_named() -> None:
    problems = check(edited(SENDING, 1, lambda row: row.remove(Action(Kind.SEND_B, 1, 0))))
    assert problems == [
        "rank 1 sends to rank 0 for RECV_B0.1 where rank 0 has RECV_B0.0",
        "rank 0 is stuck at RECV_B0.0: what it needs never comes",
        "rank 1 is stuck at RECV_F1.2: what it needs never comes",
    ]


def test_messages_in_another_order_are_named_although_nobody_is_stuck() -> None:
    """Ranks match messages by order: micro-batch 1 would be taken for micro-batch 0."""
    forwards = add_communication(gpipe(2, 2))
    turned = edited(forwards, 1, swap(Action(Kind.RECV_F, 1, 0), Action(Kind.RECV_F, 1, 1)))
    turned = edited(turned, 1, swap(Action(F, 1, 0), Action(F, 1, 1)))
    assert check(turned) == ["rank 0 sends to rank 1 for RECV_F1.0 where rank 1 has RECV_F1.1"]


def test_every_single_removal_is_noticed() -> None:
    for schedule in (PLAIN, SENDING, add_communication(split_backward(gpipe(3, 2)))):
        for rank, row in enumerate(schedule.rows):
            for index, action in enumerate(row):
                broken = edited(schedule, rank, lambda row, index=index: row.pop(index) and None)
                assert check(broken), f"{schedule.name}: rank {rank} without {action}"


def test_communication_is_added_once_for_each_boundary_and_micro_batch() -> None:
    p, m = 4, 6
    schedule = add_communication(one_forward_one_backward(p, m))
    kinds = [action.kind for row in schedule.rows for action in row if action.kind not in COMPUTE]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == dict.fromkeys(
        (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B), (p - 1) * m
    )
