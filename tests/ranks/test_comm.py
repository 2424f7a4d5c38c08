"""Every verb over real ranks against numpy, over every axis of a mesh, and what the recorder books."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ranks.kit import run_ranks
from shardwright.comm.base import Comm, Work
from shardwright.comm.dist import DistComm, dist_comm
from shardwright.comm.dry import DryComm
from shardwright.comm.mesh import MESH_AXES, Mesh
from shardwright.comm.record import RecordComm, Recorder
from shardwright.comm.solo import SoloComm
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger, ring_bytes
from shardwright.errors import RankError
from shardwright.launch import RankEnv

DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int64": torch.int64,
}  # fmt: skip
WORLDS = (2, 3, 4)
ROWS, COLUMNS = 12, 3  # 12 rows divide over 2, 3 and 4 ranks


def value(rank: int, dtype: torch.dtype) -> Tensor:
    """(ROWS, COLUMNS) small whole numbers, exact in every dtype even when summed."""
    return ((torch.arange(ROWS * COLUMNS) * (rank + 3) + rank) % 17).view(ROWS, COLUMNS).to(dtype)


def sizes(source: int, target: int) -> int:
    """Rows from one rank to another in the uneven exchange; some are 0."""
    return (source + 2 * target + 1) % 3


# -- what each rank does ---------------------------------------------------------------------------


def reductions(comm: Comm, dtype: torch.dtype) -> dict[str, Tensor]:
    ops = ["sum", "max"] if dtype == torch.int64 else ["sum", "avg", "max"]
    found = {}
    for op in ops:
        found[f"all_reduce {op}"] = comm.all_reduce(value(comm.rank, dtype), op, name="x")  # type: ignore[arg-type]
        found[f"reduce_scatter {op}"] = comm.reduce_scatter(value(comm.rank, dtype), op, name="x")  # type: ignore[arg-type]
    return found


def movements(comm: Comm, dtype: torch.dtype) -> dict[str, Tensor]:
    mine = value(comm.rank, dtype)
    send = [sizes(comm.rank, target) for target in range(comm.size)]
    receive = [sizes(source, comm.rank) for source in range(comm.size)]
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    from_left, second = torch.empty_like(mine), torch.empty(2, dtype=dtype)
    works = [
        comm.send(mine, right, name="first"), comm.send(mine[0, :2].contiguous(), right, name="second"),
        comm.receive(from_left, left, name="first"), comm.receive(second, left, name="second"),
    ]  # fmt: skip
    for work in works:
        work.wait()
    return {
        "all_gather": comm.all_gather(mine[:2], name="x"),
        "all_to_all": comm.all_to_all(mine[: sum(send)], send, receive, name="x"),
        "broadcast": comm.broadcast(mine.clone(), comm.size - 1, name="x"),
        "received": from_left,
        "received second": second,
    }


def exercise(env: RankEnv) -> dict[str, dict[str, Tensor]]:
    comm = dist_comm("dp", [tuple(range(env.world_size))], 30.0)
    assert (comm.size, comm.rank, comm.axis) == (env.world_size, env.rank, "dp")
    return {name: {**reductions(comm, dtype), **movements(comm, dtype)} for name, dtype in DTYPES.items()}


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, dict[str, Tensor]]]]:
    return request.param, run_ranks(exercise, request.param)


# -- against numpy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_equal_numpy(world: tuple[int, list[dict[str, dict[str, Tensor]]]], dtype: str) -> None:
    size, results = world
    stack = np.stack([value(rank, torch.float64).numpy() for rank in range(size)])
    expected = {"sum": stack.sum(0), "avg": stack.mean(0), "max": stack.max(0)}
    exact = 1e-2 if dtype in ("bf16", "fp16") else 1e-6
    piece = ROWS // size
    for rank, found in enumerate(results):
        ops = {name.split()[1] for name in found[dtype] if name.startswith("all_reduce")}
        assert ops == ({"sum", "max"} if dtype == "int64" else {"sum", "avg", "max"})
        for op in ops:
            for verb, whole in (("all_reduce", expected[op]), ("reduce_scatter", expected[op][rank * piece :][:piece])):
                ours = found[dtype][f"{verb} {op}"]
                assert ours.dtype == DTYPES[dtype]
                rtol = exact if op == "avg" else 0  # whole numbers are exact
                np.testing.assert_allclose(ours.double().numpy(), whole, rtol=rtol, err_msg=f"{verb} {op}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_movements_equal_numpy(world: tuple[int, list[dict[str, dict[str, Tensor]]]], dtype: str) -> None:
    size, results = world
    values = [value(rank, DTYPES[dtype]) for rank in range(size)]
    starts = {(s, t): sum(sizes(s, earlier) for earlier in range(t)) for s in range(size) for t in range(size)}
    for rank, result in enumerate(results):
        found = result[dtype]
        left = (rank - 1) % size
        exchanged = [values[s][starts[s, rank] : starts[s, rank] + sizes(s, rank)] for s in range(size)]
        expected = {
            "all_gather": torch.cat([v[:2] for v in values]),
            "all_to_all": torch.cat(exchanged),
            "broadcast": values[size - 1],
            "received": values[left],
            "received second": values[left][0, :2],
        }
        for verb, tensor in expected.items():
            assert torch.equal(found[verb], tensor), verb


def test_the_uneven_exchange_has_empty_pieces() -> None:
    assert all(any(sizes(s, t) == 0 for s in range(size) for t in range(size)) for size in WORLDS)


# -- asynchronous verbs, control traffic, lost peers -----------------------------------------------


def known_to_be_over(work: Work) -> bool:
    """Whether a reduction says so by itself, without a wait."""
    limit = time.monotonic() + 10
    while not work.done and time.monotonic() < limit:
        time.sleep(0.001)
    return work.done


def start_and_wait(env: RankEnv) -> dict[str, Any]:
    comm = dist_comm("dp", [tuple(range(env.world_size))], 30.0)
    tensors = [torch.full((1000,), float(env.rank + i)) for i in range(4)]
    done = [threading.Event() for _ in tensors]
    works = [comm.all_reduce_start(tensor, name=f"bucket {i}") for i, tensor in enumerate(tensors)]
    for work, event in zip(works, done, strict=True):
        work.on_done(event.set)
    for work in reversed(works):
        work.wait()
    sums = [tensor[0].item() for tensor in tensors]
    piece, whole = torch.empty(2), torch.empty(2 * comm.size)
    comm.reduce_scatter_start(piece, torch.arange(2.0 * comm.size), name="piece").wait()
    comm.all_gather_start(whole, piece, name="whole").wait()
    untold = [
        comm.all_reduce_start(tensors[0], name="told"),
        comm.reduce_scatter_start(piece.clone(), torch.arange(2.0 * comm.size), name="told"),
    ]
    told = [known_to_be_over(work) for work in untold]
    for work in untold:
        work.wait()
    comm.barrier()
    return {
        "sums": sums,
        "told": told,
        "called back": [event.wait(5) for event in done],
        "whole": whole,
        "objects": comm.gather_objects({"rank": env.rank, "text": "é" * env.rank}),
        "empty": comm.empty(7, torch.bfloat16, torch.device("cpu")).shape,
    }


def test_verbs_in_flight_and_control_traffic() -> None:
    for result in run_ranks(start_and_wait, 3):
        assert result["sums"] == [3.0, 6.0, 9.0, 12.0]
        assert result["called back"] == [True] * 4
        assert result["told"] == [True] * 2
        assert torch.equal(result["whole"], 3 * torch.arange(6.0))
        assert result["objects"] == [{"rank": r, "text": "é" * r} for r in range(3)]
        assert result["empty"] == (7,)


def lose_a_peer(env: RankEnv) -> str:
    comm = dist_comm("dp", [tuple(range(env.world_size))], 5.0)
    comm.barrier()
    if env.rank == 1:
        return ""
    try:
        comm.all_reduce(torch.ones(4), name="gradients.0")
    except RankError as error:
        return str(error)
    return "nothing was noticed"


def test_a_lost_peer_is_an_error_that_names_the_verb_the_tensor_and_the_axis() -> None:
    message, _ = run_ranks(lose_a_peer, 2)
    assert message.startswith("rank 0: all_reduce of 'gradients.0' over dp failed, a peer is gone or too late")


# -- every axis of a mesh --------------------------------------------------------------------------


def visit_axes(env: RankEnv, text: str) -> dict[str, dict[str, Any]]:
    mesh = Mesh.distributed(Layout.parse(text), env.rank)
    found = {}
    for axis in MESH_AXES:
        comm = mesh.axis(axis)
        here = torch.tensor([[env.rank]])
        with mesh.recorder.phase("F" if axis == "tp" else "B"):
            gathered = comm.all_gather(here, name=axis).flatten().tolist()
        scattered = comm.reduce_scatter(torch.arange(comm.size).unsqueeze(1), name=axis)
        found[axis] = {
            "axis": comm.axis, "ranks": comm.ranks, "rank": comm.rank, "gathered": gathered,
            "sum": comm.all_reduce(here.clone(), name=axis).item(),
            "piece": scattered.item(),
            "root": comm.broadcast(here.clone(), comm.size - 1, name=axis).item(),
            "objects": comm.gather_objects(env.rank),
            "ring": comm.all_to_all(here.repeat(comm.size, 1), [1] * comm.size, [1] * comm.size, name=axis)
            .flatten().tolist(),
        }  # fmt: skip
    return found


@pytest.mark.parametrize(
    "text",
    ["dp=2,tp=2", "dp=2,cp=2,ep=2", "tp=2,pp=2", "dp=2,pp=2,order=tp-cp-pp-dp"],
)
def test_every_axis_moves_bytes_between_its_own_ranks(text: str) -> None:
    layout = Layout.parse(text)
    results = run_ranks(visit_axes, layout.world_size, text)
    for axis in MESH_AXES:
        groups = layout.grid.axis_groups(axis)
        for rank, result in enumerate(results):
            found = result[axis]
            ranks = next(group for group in groups if rank in group)
            place = ranks.index(rank)
            assert (found["axis"], found["ranks"], found["rank"]) == (axis, ranks, place)
            assert found["gathered"] == found["objects"] == found["ring"] == list(ranks)
            assert (found["sum"], found["root"], found["piece"]) == (sum(ranks), ranks[-1], place * len(ranks))


# -- the recorder ----------------------------------------------------------------------------------


def booked(comm: Comm, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Each verb once, over a wrapped comm; what the ledger then holds."""
    recorder = Recorder()
    recorded = RecordComm(comm, recorder)
    big, small = torch.zeros(ROWS, COLUMNS, dtype=dtype), torch.zeros(2, COLUMNS, dtype=dtype)
    with recorder.phase("F"):
        recorded.all_gather(small, name="weights")
        with recorder.phase("recompute"):
            recorded.all_gather(small, name="weights")
        recorded.reduce_scatter(big, name="rows")
    recorded.all_reduce(big, name="gradients")
    recorded.all_reduce(big, name="gradients")
    recorded.broadcast(big, name="state")
    send = [sizes(comm.rank, target) for target in range(comm.size)]
    receive = [sizes(source, comm.rank) for source in range(comm.size)]
    recorded.all_to_all(big[: sum(send)], send, receive, name="tokens")
    works = [recorded.send(big, (comm.rank + 1) % comm.size, name="next")]
    works.append(recorded.receive(torch.empty_like(big), (comm.rank - 1) % comm.size, name="next"))
    for work in works:
        work.wait()
    recorded.barrier()
    assert recorded.gather_objects(comm.rank)[comm.rank] == comm.rank
    ledger = recorder.take()
    assert recorder.take().entries == {}
    return ledger


def booked_on_ranks(env: RankEnv) -> Ledger:
    comm = dist_comm("dp", [tuple(range(env.world_size))], 30.0)
    ledger: Ledger = booked(comm)
    return ledger


def expected_ledger(rank: int, size: int) -> Ledger:
    ledger, elements, row = Ledger(), ROWS * COLUMNS, COLUMNS * 2
    add = ledger.add
    for phase in ("F", "recompute"):
        add(phase, "all_gather", "dp", "weights", ring_bytes("all_gather", 2 * COLUMNS * size, 2, size))
    add("F", "reduce_scatter", "dp", "rows", ring_bytes("reduce_scatter", elements, 2, size))
    add("setup", "all_reduce", "dp", "gradients", 2 * ring_bytes("all_reduce", elements, 2, size), count=2)
    add("setup", "broadcast", "dp", "state", ring_bytes("broadcast", elements, 2, size))
    others = sum(sizes(rank, target) for target in range(size) if target != rank)
    add("setup", "all_to_all", "dp", "tokens", others * row)
    add("setup", "send", "dp", "next", elements * 2)
    add("setup", "recv", "dp", "next", 0)
    add("setup", "barrier", "dp", "barrier", 0)
    return ledger


@pytest.mark.parametrize("size", [2, 3])
def test_the_recorder_books_what_was_sent_in_its_phase(size: int) -> None:
    for rank, ledger in enumerate(run_ranks(booked_on_ranks, size)):
        assert ledger.differences(expected_ledger(rank, size)) == []
        entries = ledger.entries.values()
        assert all(0 <= entry.exposed_seconds <= entry.seconds + 1e-6 for entry in entries)
        assert sum(entry.seconds for entry in entries) > 0


@pytest.mark.parametrize("size", [2, 3, 6])
def test_a_dry_run_books_the_same(size: int) -> None:
    for rank in range(size):
        ledger = booked(DryComm("dp", rank, tuple(range(size))))
        assert ledger.differences(expected_ledger(rank, size)) == []


# -- shapes only, and one rank ---------------------------------------------------------------------


def shapes(comm: Comm, device: str) -> dict[str, tuple[Any, ...]]:
    big, small = torch.zeros(ROWS, COLUMNS, device=device), torch.zeros(2, COLUMNS, device=device)
    send = [sizes(comm.rank, target) for target in range(comm.size)]
    receive = [sizes(source, comm.rank) for source in range(comm.size)]
    results = {
        "all_reduce": comm.all_reduce(big, name="x"),
        "reduce_scatter": comm.reduce_scatter(big, name="x"),
        "all_gather": comm.all_gather(small, name="x"),
        "all_to_all": comm.all_to_all(big[: sum(send)], send, receive, name="x"),
        "broadcast": comm.broadcast(big, name="x"),
    }
    assert len(comm.gather_objects("x")) == comm.size
    comm.barrier()
    return {verb: (tuple(tensor.shape), tensor.dtype) for verb, tensor in results.items()}


def real_shapes(env: RankEnv) -> dict[str, tuple[Any, ...]]:
    return shapes(dist_comm("dp", [tuple(range(env.world_size))], 30.0), "cpu")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dry_verbs_give_the_shapes_of_real_ones(device: str) -> None:
    for rank, real in enumerate(run_ranks(real_shapes, 3)):
        assert shapes(DryComm("dp", rank, (0, 1, 2)), device) == real


def one_rank(env: RankEnv) -> dict[str, tuple[Any, ...]]:
    return shapes(DistComm("dp", (0,), None), "cpu")


def test_one_rank_is_not_special() -> None:
    (real,) = run_ranks(one_rank, 1)
    assert shapes(SoloComm("dp"), "cpu") == shapes(DryComm("dp", 0, (0,)), "cpu") == real
    solo, x = SoloComm("dp", world_rank=5), torch.arange(6.0).view(3, 2)
    results: Sequence[Tensor] = [
        solo.all_reduce(x, "avg", name="x"), solo.reduce_scatter(x, name="x"), solo.all_gather(x, name="x"),
        solo.all_to_all(x, [3], [3], name="x"), solo.broadcast(x, name="x"),
    ]  # fmt: skip
    assert all(torch.equal(result, x) for result in results)
    assert (solo.ranks, solo.rank, solo.size, solo.gather_objects("a")) == ((5,), 0, 1, ["a"])
    for start in (solo.reduce_scatter_start, solo.all_gather_start):
        output = torch.empty_like(x)
        start(output, x, name="x").wait()
        assert torch.equal(output, x)


def test_the_dry_mesh_of_any_size_has_every_axis() -> None:
    layout = Layout.parse("tp=8,cp=2,dp=16,pp=4,ep=32")
    mesh = Mesh.dry(layout, rank=777)
    sizes = {axis: layout.grid.degree(axis) for axis in MESH_AXES if axis != "tied"}
    assert {axis: mesh.axis(axis).size for axis in MESH_AXES} == {**sizes, "tied": 2}
    assert mesh.tied.ranks == (777 - 3 * 256, 777)  # the last stage and the first
    assert Mesh.dry(layout, rank=300).tied.size == 1  # a stage between them
    assert all(mesh.axis(axis).ranks[mesh.axis(axis).rank] == 777 for axis in MESH_AXES)
    assert [comm.axis for comm in mesh.reduce_comms(("tp", "cp", "dp"))] == ["tp", "dp_cp"]
    assert [comm.axis for comm in mesh.reduce_comms(("dp",))] == ["dp"]
    assert Mesh.solo().reduce_comms(("tp", "cp", "dp")) == []


def meshes_in_turn(env: RankEnv, kind: str) -> list[list[float]]:
    """Meshes after one that leaves the middle ranks of a pipeline alone on an axis (the ends of a tied weight)."""
    found = []
    for text in ("pp=4", "dp=2,tp=2", "pp=2,dp=2", "pp=4"):
        mesh = Mesh.distributed(Layout.parse(f"{text},comm={kind}"), env.rank, 20.0)
        found.append([mesh.world.all_reduce(torch.ones(3), name="x")[0].item(), float(mesh.tied.size), float(mesh.dp.size)])
        mesh.tp.all_reduce(torch.ones(3), name="y")
    return found


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_ranks_alone_on_an_axis_count_its_groups_too(kind: str) -> None:
    results = run_ranks(meshes_in_turn, 4, kind)
    assert [row[1:] for row in results[0]] == [[2.0, 1.0], [1.0, 2.0], [2.0, 2.0], [2.0, 1.0]]
    assert [row[1:] for row in results[1]] == [[1.0, 1.0], [1.0, 2.0], [2.0, 2.0], [1.0, 1.0]]
    assert all(row[0] == 4.0 for found in results for row in found)
