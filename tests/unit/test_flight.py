"""Flight records: what is on the disk at any moment, and what the records of several ranks say of a hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from shardwright.comm.flight import (
    VERBS,
    FlightRecorder,
    clear_flight,
    file_of,
    hang_report,
    read_flight,
    report_file,
    reports,
)
from shardwright.comm.mesh import MESH_AXES, Mesh
from shardwright.core.axes import RankGrid
from shardwright.core.layout import Layout

GRID = RankGrid(pp=3)


def recorders(folder: Path, num_ranks: int = 3) -> list[FlightRecorder]:
    return [FlightRecorder(folder, rank, GRID) for rank in range(num_ranks)]


def call(flight: FlightRecorder, name: str, verb: str = "all_reduce", *, done: bool = True, size: int = 8) -> None:
    count = flight.begin("world", verb, name, "reduce", size)
    flight.wait(count)
    if done:
        flight.end(count)


def test_a_record_tells_what_was_done_and_what_is_waited_for(tmp_path: Path) -> None:
    flight = FlightRecorder(tmp_path, 1, GRID)
    call(flight, "norm")
    flight.at("step 3, reduction and update")
    call(flight, "tokens", done=False)
    record = read_flight(file_of(tmp_path, 1))  # while it is being written
    assert (record.rank, record.grid, record.place) == (1, GRID, "step 3, reduction and update")
    first, second = record.entries
    assert (first.call, first.number, first.end > first.begin) == ("all_reduce of 'norm' (8 bytes)", 1, True)
    assert record.waiting == second and (second.number, second.end) == (2, 0.0)
    assert abs(second.begin - time.time()) < 60


def test_only_the_last_verbs_are_kept(tmp_path: Path) -> None:
    flight = FlightRecorder(tmp_path, 0, GRID)
    late = flight.begin("world", "all_reduce", "late", "B", 8)
    for index in range(VERBS + 5):
        call(flight, f"gradients.{index}")
    flight.end(late)  # its place is another verb's by now
    record = read_flight(file_of(tmp_path, 0))
    assert len(record.entries) == VERBS and record.entries[-1].name == f"gradients.{VERBS + 4}"
    assert all(entry.end for entry in record.entries) and record.waiting is None
    assert "late" not in {entry.name for entry in record.entries}


def test_a_rank_that_does_not_come_is_named_with_what_it_is_at(tmp_path: Path) -> None:
    flights = recorders(tmp_path)
    for flight in flights:
        call(flight, "tokens")
    for rank in (0, 2):
        flights[rank].at("step 5, reduction and update")
        call(flights[rank], "norm", done=False)
    flights[1].at("step 5, the next batch")
    report = hang_report(tmp_path, 3).lines
    assert report[0] == (
        "rank 1 has not come to all_reduce of 'norm' (8 bytes), number 2 over world in reduce; it is at step 5, the next batch"
    )
    assert len([line for line in report if "has not come" in line]) == 1
    states = report[-3:]
    assert states[0].startswith("rank 0 has waited 0.") and "'norm'" in states[0]
    assert states[1].startswith("rank 1 waits for nobody, at step 5, the next batch; its last verb was all_reduce of 'tokens'")


@pytest.mark.parametrize(
    ("verb", "name", "size", "words"),
    [
        ("barrier", "stray", 0, "barrier of 'stray' on rank 2"),
        ("all_reduce", "norm", 16, "all_reduce of 'norm' (16 bytes) on rank 2"),
        ("all_reduce", "gradients.0", 8, "all_reduce of 'gradients.0' (8 bytes) on rank 2"),
    ],
)
def test_another_verb_or_shape_in_the_same_place(verb: str, name: str, size: int, words: str, tmp_path: Path) -> None:
    flights = recorders(tmp_path)
    for rank, flight in enumerate(flights):
        flight.at(f"place {rank}")
        if rank < 2:
            call(flight, "norm", done=False)
        else:
            call(flight, name, verb, done=False, size=size)
    (found,) = hang_report(tmp_path, 3).differ
    assert found == (
        "ranks 0 and 2 differ: number 1 over world is all_reduce of 'norm' (8 bytes) on rank 0 (at place 0) "
        f"but {words} (at place 2); 2 ranks have called the one, 1 the other"
    )


def test_lh_01_a_rank_that_was_lost_without_waiting_is_compared_too(tmp_path: Path) -> None:
    """As gloo aborts a process: from a thread of its own. Rank 2 has gone on from what was wrong."""
    flights = recorders(tmp_path)
    for flight in flights:
        call(flight, "tokens")
    for flight in flights[:2]:
        flight.begin("world", "all_reduce", "norm", "reduce", 8)
    call(flights[2], "norm", size=16)
    call(flights[2], "norm", done=False)  # all after it is a consequence
    (found,) = hang_report(tmp_path, 3).differ
    assert found.startswith("ranks 0 and 2 differ: number 2 over world is all_reduce of 'norm' (8 bytes) on rank 0")


def test_what_all_have_ended_differs_in_nothing(tmp_path: Path) -> None:
    flights = recorders(tmp_path, 2)
    call(flights[0], "a copy")
    call(flights[1], "the copy")
    assert hang_report(tmp_path, 2).differ == []


@pytest.mark.parametrize(("name", "size"), [("activations.1", 64), ("activations.0", 32)])
def test_a_message_that_is_sent_as_another_one(name: str, size: int, tmp_path: Path) -> None:
    flights = recorders(tmp_path, 2)
    flights[0].begin("pp", "send", name, "F", size, peer=1)
    flights[1].wait(flights[1].begin("pp", "recv", "activations.0", "F", 64, peer=0))
    (found,) = hang_report(tmp_path, 2).differ
    assert found.startswith(
        f"ranks 0 and 1 differ: message 1 from rank 0 to rank 1 over pp is send of {name!r} ({size} bytes) on rank 0"
    )


def test_of_many_ranks_some_report() -> None:
    for num_ranks in (1, 2, 64, 65, 1000, 16384):
        num_reporters = sum(reports(rank, num_ranks) for rank in range(num_ranks))
        assert min(num_ranks, 32) <= num_reporters <= 64 and reports(0, num_ranks)


def test_records_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    recorders(tmp_path)
    report_file(tmp_path, 1).write_text("old")
    clear_flight(tmp_path, 1)
    assert len(list(tmp_path.iterdir())) == 2
    now = time.time()
    assert len(hang_report(tmp_path, 3, since=now - 60).states) == 2
    late = hang_report(tmp_path, 3, since=now + 60)
    assert not late.states
    assert late.lines[0] == "rank 0 has left no record (the one that is there is of an earlier run)"


def test_messages_are_numbered_by_pair(tmp_path: Path) -> None:
    """Rank 1 waits for a second message of rank 0, which has sent one and waits for an answer."""
    flights = recorders(tmp_path)
    flights[0].end(flights[0].begin("pp", "send", "activations", "F", 64, peer=1))
    flights[1].end(flights[1].begin("pp", "recv", "activations", "F", 64, peer=0))
    for rank, peer in ((0, 1), (1, 0)):
        count = flights[rank].begin("pp", "recv", "more", "B", 64, peer=peer)
        flights[rank].wait(count)
    report = hang_report(tmp_path, 3).lines
    waits = "recv of 'more' (64 bytes) with rank"
    first = f"rank 0 has not come to {waits} 0, number 2 over pp in B; it waits in {waits} 1"
    assert any(line.startswith(first) for line in report)
    assert any(line.startswith(f"rank 1 has not come to {waits} 1, number 1 over pp in B") for line in report)


def test_a_rank_without_a_record_is_told(tmp_path: Path) -> None:
    recorders(tmp_path, 2)
    assert any(line.startswith("rank 2 has left no record") for line in hang_report(tmp_path, 3).lines)


def test_every_verb_of_a_mesh_is_recorded(tmp_path: Path) -> None:
    mesh = Mesh.dry(Layout.parse("dp=2,tp=2"))
    mesh.recorder.flight = FlightRecorder(tmp_path, 0, mesh.grid)
    tensor = torch.ones(4, device="meta")
    mesh.dp.all_reduce(tensor, name="a")
    mesh.dp.reduce_scatter(tensor, name="b")
    mesh.tp.all_gather(tensor, name="c")
    mesh.dp.all_to_all(tensor, [2, 2], [2, 2], name="d")
    mesh.dp.broadcast(tensor, name="e")
    mesh.dp.send(tensor, 1, name="f").wait()
    mesh.dp.receive(tensor, 1, name="g").wait()
    mesh.world.barrier(name="h")
    mesh.world.gather_objects(1)
    entries = read_flight(file_of(tmp_path, 0)).entries
    assert [(entry.verb, entry.name) for entry in entries] == [
        ("all_reduce", "a"), ("reduce_scatter", "b"), ("all_gather", "c"), ("all_to_all", "d"), ("broadcast", "e"),
        ("send", "f"), ("recv", "g"), ("barrier", "h"), ("gather_objects", "objects"),
    ]  # fmt: skip
    assert all(entry.end for entry in entries)
    assert [entry.number for entry in entries if entry.axis == "dp"] == [1, 2, 3, 4, 1, 1]


@pytest.mark.parametrize(
    "layout",
    ["dp=512", "tp=8,dp=512", "tp=8,pp=16,dp=128,order=tp-cp-pp-dp", "tp=4,cp=4,pp=8,dp=128,ep=64,dp_replicate=2,zero=3"],
)
def test_a_record_of_a_large_run_knows_its_groups(layout: str, tmp_path: Path) -> None:
    """Up to 16,384 ranks, whose numbers fill no file."""
    rank = 131
    mesh = Mesh.dry(Layout.parse(layout), rank)
    flight = FlightRecorder(tmp_path, rank, mesh.grid)
    flight.at("step 0")
    call(flight, "tokens", done=False)
    path = file_of(tmp_path, rank)
    record = read_flight(path)
    assert {axis: record.group(axis) for axis in MESH_AXES} == {axis: tuple(mesh.axis(axis).ranks) for axis in MESH_AXES}
    assert (record.rank, record.place) == (rank, "step 0") and record.waiting is not None
    assert path.stat().st_size < 100_000
