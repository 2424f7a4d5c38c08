"""Every schedule: what its rows hold and cost, files, and that the checker passes ours and stops broken ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.layout import Layout
from shardwright.errors import ConfigError, LayoutError
from shardwright.schedule.action import COMPUTE, Action, Kind, Schedule
from shardwright.schedule.file import load_schedule, read_schedule
from shardwright.schedule.make import (
    dualpipe_v,
    good_counts,
    interleaved,
    interleaved_zero_bubble,
    make_schedule,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_v,
)
from shardwright.schedule.memory import in_flight, in_flight_by_stage, peak_bytes
from shardwright.schedule.passes import add_communication, check, communicates, fill_weights, receives_to_post

NAMES = ("gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
SPLIT = ("zb_h1", "interleaved_zb", "zb_v")


def build(name: str, p: int, m: int, v: int = 2) -> Schedule:
    """A schedule through the layout, as a run gets it."""
    virtual = v if name in ("interleaved", "interleaved_zb") and p > 1 else 1
    return make_schedule(Layout(schedule=name, pp=p, microbatches=m, virtual=virtual))


names, ranks, microbatches, chunks = st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 20), st.integers(2, 4)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(names, ranks, microbatches, chunks)
def test_every_schedule_can_run(name: str, p: int, m: int, v: int) -> None:
    schedule = build(name, p, m, v)
    assert len(schedule.rows) == p and schedule.num_microbatches == m
    assert check(schedule) == []
    sending = add_communication(schedule)
    assert check(sending) == []
    assert add_communication(sending) == sending and communicates(sending) is (p > 1)
    assert [[a for a in row if a.kind in COMPUTE] for row in sending.rows] == [list(row) for row in schedule.rows]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(names, ranks, microbatches, chunks)
def test_what_is_held_stays_within_the_published_limits(name: str, p: int, m: int, v: int) -> None:
    held = in_flight(build(name, p, m, v))
    if p == 1:
        assert held == (1,)
    elif name == "gpipe":
        assert held == (m,) * p
    elif name == "1f1b":
        assert held == tuple(min(p - s, m) for s in range(p))
    elif name == "interleaved":
        assert all(most <= (v - 1) * p + 2 * (p - r) - 1 for r, most in enumerate(held))
    else:
        assert max(held) <= {"zb_h1": p, "interleaved_zb": v * p, "zb_v": 2 * p, "dualpipe_v": 2 * p + 1}[name]


def test_in_flight_of_the_worked_examples(shared: Path) -> None:
    rules = {rule["schedule"]: rule["rule"] for rule in vectors(shared)["in_flight_activations"]}
    p, m, v, r, most = 16, 144, *map(int, re.findall(r"\d+", rules["interleaved_1f1b"].split(";")[1])[1:])
    assert f"p={p}, v={v}, r={r}: {most}" in rules["interleaved_1f1b"]
    held = in_flight(interleaved(p, m, v))
    assert held[r] == most == 79
    assert held == tuple((v - 1) * p + 2 * (p - rank) - 1 for rank in range(p))
    assert "every stage holds m" in rules["gpipe"] and in_flight(build("gpipe", 4, 9)) == (9,) * 4
    assert "at most min(p - s, m)" in rules["1f1b"] and in_flight(build("1f1b", 4, 9)) == (4, 3, 2, 1)


def vectors(shared: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((shared / "vectors" / "worked_examples.json").read_text())
    return loaded


def test_rows_read_as_in_the_papers() -> None:
    assert str(zero_bubble_h1(2, 3)) == (
        "rank 0: F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2\nrank 1: F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2"
    )
    assert str(interleaved(2, 2, 2)) == (
        "rank 0: F0.0 F0.1 F2.0 F2.1 BW2.0 BW2.1 BW0.0 BW0.1\nrank 1: F1.0 F1.1 F3.0 BW3.0 F3.1 BW3.1 BW1.0 BW1.1"
    )
    v_shaped = zero_bubble_v(2, 4)
    assert v_shaped.placement == (0, 1, 1, 0)
    assert str(v_shaped).startswith("rank 0: F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 B3.1")
    assert (
        str(dualpipe_v(2, 5))
        .splitlines()[0]
        .startswith("rank 0: F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 F0.3 BW3.1 F3.2 BW0.0")
    )


def test_memory_in_bytes_and_by_stage() -> None:
    schedule = zero_bubble_h1(2, 4)
    assert in_flight_by_stage(schedule) == in_flight(schedule) == (2, 2)
    assert peak_bytes(schedule, [100, 10]) == (200, 20)
    assert peak_bytes(schedule, [100, 10], [0, 0]) == (200, 10)
    assert peak_bytes(schedule, [100, 10], [60, 6]) == pytest.approx((200, 16))
    assert peak_bytes(schedule, [100, 10], [100, 50]) == (200, 100)  # as two wait for W
    assert in_flight_by_stage(zero_bubble_v(2, 8)) == (4, 3, 2, 1)
    with pytest.raises(ConfigError, match="1 stage sizes were given for 2 stages"):
        peak_bytes(schedule, [1])
    with pytest.raises(ConfigError, match="3 stage sizes were given for 2 stages"):
        peak_bytes(schedule, [1, 1], [1, 1, 1])


def test_layouts_that_make_no_schedule_are_refused() -> None:
    def refused(message: str, **layout: Any) -> None:
        with pytest.raises(LayoutError, match=message):
            make_schedule(Layout(**layout))

    refused("schedule=interleaved needs several stages per rank, virtual=1", pp=2, schedule="interleaved")
    refused("schedule=interleaved_zb needs several stages per rank", pp=2, schedule="interleaved_zb")
    refused("virtual=2 needs a schedule with several stages", pp=2, schedule="zb_h1", virtual=2)
    refused("schedule=dualpipe_v has two stages per rank, virtual=3", pp=2, schedule="dualpipe_v", virtual=3)
    named = make_schedule(Layout(pp=2, schedule="zb_v", microbatches=4, virtual=2))
    assert named == make_schedule(Layout(pp=2, schedule="zb_v", microbatches=4)) and named.num_stages == 4


def test_counts_that_fill_a_schedule_better() -> None:
    def counts(name: str, m: int, virtual: int = 1) -> tuple[int, ...]:
        return good_counts(Layout(schedule=name, pp=4, microbatches=m, virtual=virtual))

    assert counts("interleaved", 7, 2) == (4, 8) and counts("interleaved", 3, 2) == (4,)
    assert counts("interleaved_zb", 8, 2) == (8,)
    assert counts("zb_v", 5) == (8,) and counts("zb_v", 8) == (8,) and counts("1f1b", 3) == (3,)


# -- sends that block ------------------------------------------------------------------------------


def test_receives_that_must_be_posted_when_sends_block() -> None:
    needed = {name: receives_to_post(add_communication(build(name, 4, 8))) for name in NAMES}
    assert needed == {
        "gpipe": 0, "1f1b": 1, "interleaved": 1, "zb_h1": 1, "interleaved_zb": 2, "zb_v": 2, "dualpipe_v": 2,
    }  # fmt: skip
    assert check(add_communication(one_forward_one_backward(2, 2)), posted=0) == [
        "rank 0 is stuck at SEND_F0.1 when sends block and 0 receives are posted ahead",
        "rank 1 is stuck at SEND_B1.0 when sends block and 0 receives are posted ahead",
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(names, st.integers(2, 7), microbatches, chunks)
def test_few_posted_receives_are_enough(name: str, p: int, m: int, v: int) -> None:
    most = {"gpipe": 0, "1f1b": 1, "zb_h1": 1, "interleaved_zb": p // 2 + 1}.get(name, 2)
    assert receives_to_post(add_communication(build(name, p, m, v))) <= most


def test_messages_of_both_chunks_are_received_in_the_order_they_are_sent() -> None:
    """On a V two ranks exchange activations and gradients both ways; some arrive before they are needed."""
    early = 0
    for name in ("zb_v", "dualpipe_v", "interleaved", "interleaved_zb"):
        for row in add_communication(build(name, 2, 6)).rows:
            waiting = 0
            for action in row:
                waiting += action.kind in (Kind.RECV_F, Kind.RECV_B)
                early += waiting > 1
                if action.kind in COMPUTE:
                    waiting = 0
    assert early > 0


# -- broken schedules ------------------------------------------------------------------------------


def edited(schedule: Schedule, rank: int, edit: Callable[[list[Action]], object]) -> Schedule:
    row = list(schedule.rows[rank])
    edit(row)
    return replace(schedule, rows=(*schedule.rows[:rank], tuple(row), *schedule.rows[rank + 1 :]))


@pytest.mark.parametrize("name", ["interleaved", "interleaved_zb", "zb_v", "dualpipe_v"])
def test_every_single_removal_is_noticed(name: str) -> None:
    schedule = add_communication(build(name, 2, 4))
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            broken = edited(schedule, rank, lambda row, index=index: row.pop(index))
            assert check(broken), f"{name}: rank {rank} without {action}"


@pytest.mark.parametrize("name", NAMES)
def test_work_before_what_it_needs_is_noticed(name: str) -> None:
    """Every B moved before its F, every W before its B."""
    schedule = build(name, 3, 6)
    for rank, row in enumerate(schedule.rows):
        for late, action in enumerate(row):
            before = {Kind.B: Kind.F, Kind.BW: Kind.F, Kind.W: Kind.B}.get(action.kind)
            if before is None:
                continue
            early = row.index(Action(before, action.stage, action.microbatch))
            broken = edited(schedule, rank, lambda row, late=late, early=early: row.insert(early, row.pop(late)))
            assert f"rank {rank} is stuck at {action}: what it needs never comes" in check(broken)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(names, st.integers(2, 4), st.integers(1, 6), st.data())
def test_shuffled_rows_pass_or_are_stuck_on_the_clock_too(name: str, p: int, m: int, data: st.DataObject) -> None:
    """Two independent runs of the same rows, the checker's and the simulator's, agree on which can be run."""
    from shardwright.schedule.simulate import simulate

    schedule = build(name, p, m)
    rank = data.draw(st.integers(0, p - 1))
    broken = edited(schedule, rank, lambda row: row.__setitem__(slice(None), data.draw(st.permutations(row))))
    problems = check(broken)
    assert all("is stuck at" in problem for problem in problems)
    if problems:
        with pytest.raises(ConfigError, match="cannot run, stuck: rank"):
            simulate(broken)
    else:
        assert simulate(broken).makespan > 0


def test_no_weights_are_placed_and_no_messages_added_in_rows_that_cannot_run() -> None:
    schedule = one_forward_one_backward(2, 2)
    turned = edited(schedule, 1, lambda row: row.reverse())
    with pytest.raises(ConfigError, match=r"schedule 1f1b cannot run, so no W can be placed; see check\(\)"):
        fill_weights(turned, "filled", most=2)
    lacking = edited(schedule, 0, lambda row: row.remove(Action(Kind.F, 0, 1)))
    with pytest.raises(ConfigError, match=r"rank 1: no rank sends what F1\.1 needs"):
        add_communication(lacking)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_survives_its_text(name: str, tmp_path: Path) -> None:
    schedule = build(name, 3, 5)
    path = tmp_path / "mine.txt"
    for written in (schedule, add_communication(schedule)):
        path.write_text(f"# {name}\n\n{written}\n", encoding="utf-8")
        assert load_schedule(path) == replace(written, name="mine")
    layout = Layout(pp=3, microbatches=5, schedule=f"file:{path}")
    assert make_schedule(layout).rows == written.rows
    path.write_text(str(schedule).replace("rank ", "# rank ").replace(": ", "\n").replace(" ", ",,"), encoding="utf-8")
    assert load_schedule(path).rows == schedule.rows


def test_cells_of_pytorch_schedule_files(tmp_path: Path) -> None:
    path = tmp_path / "torch.csv"
    path.write_text("0F0,0F1,,,0B0,0B1\n,1F0,1I0,1F1,1I1,1W0,1W1\n", encoding="utf-8")
    assert str(load_schedule(path)) == ("rank 0: F0.0 F0.1 BW0.0 BW0.1\nrank 1: F1.0 B1.0 F1.1 B1.1 W1.0 W1.1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 BW0.0\nF1.0 X1.0", "mine.txt:2: 'X1.0' is no action; write for instance F0.3"),
        ("F0.0 BW0.0\n\nF1.0 F0.0", "mine.txt:3: F0.0 is on rank 1, but line 1 has stage 0 on rank 0"),
        ("rank 1: F0.0 BW0.0", "mine.txt:1: rank 1 stands where rank 0 is due"),
        ("# nothing", "mine.txt: holds no actions"),
        ("F0.0 BW0.0\nF2.0 BW2.0", "mine.txt: no rank has stage 1, though stage 2 is there"),
        ("F0.0 BW0.0 F0.999999999999", "mine.txt: no rank has micro-batch 1, though micro-batch 999999999999 is there"),
        (
            "F0.0 BW0.0\n# two\nBW1.0 F1.0",
            r"mine.txt:1: rank 0 is stuck at BW0.0: what it needs never comes (and 1 more)",
        ),
        ("F0.0 BW0.0\nF1.0", "mine.txt:2: stage 1, micro-batch 0: needs F and B W (or BW) once, has F (and 1 more)"),
    ],
)
def test_errors_of_a_file_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_schedule(path)
    assert message in str(error.value)


def test_a_file_for_another_layout_or_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(str(zero_bubble_v(2, 4)), encoding="utf-8")
    name = f"file:{path}"
    assert make_schedule(Layout(pp=2, microbatches=4, virtual=2, schedule=name)).num_stages == 4
    for layout, wrong in (
        (Layout(pp=4, microbatches=4, schedule=name), "pp=2, not 4; set pp=2"),
        (Layout(pp=2, microbatches=8, schedule=name), "microbatches=4, not 8; set microbatches=4"),
        (Layout(pp=2, microbatches=4, virtual=3, schedule=name), "virtual=2, not 3; set virtual=2"),
    ):
        with pytest.raises(LayoutError, match=wrong):
            make_schedule(layout)
    with pytest.raises(ConfigError, match=r"schedule file .*gone cannot be read"):
        read_schedule(tmp_path / "gone")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_schedule(path)


def test_interleaved_zero_bubble_is_ahead_by_less_than_interleaved() -> None:
    assert max(in_flight(interleaved_zero_bubble(4, 8, 2))) == 8 < max(in_flight(interleaved(4, 8, 2)))
