"""Shared memory between the ranks of one host: the same results as gloo, no hang, nothing left behind.

What every rank must hold is computed from seeds, in rank order, so that comparisons are exact for any number of ranks.
"""

from __future__ import annotations

import errno
import gc
import os
import platform
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks.kit import run_ranks
from shardwright.comm import arena, host, inflight, mailbox, shm
from shardwright.comm.base import Comm
from shardwright.comm.dist import DistComm
from shardwright.comm.host import Hosts, open_hosts
from shardwright.comm.mesh import Mesh
from shardwright.comm.shm import ShmComm
from shardwright.comm.waiting import Watch
from shardwright.core.layout import Layout
from shardwright.errors import LayoutError, RankError
from shardwright.launch import RankEnv

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux", reason="shared memory needs Linux on x86-64"
)

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
PLACES = ("private", "own", "mixed")
"""Where the tensors lie: outside shared memory, in it, or in it on every second rank."""


def gloo(env: RankEnv) -> DistComm:
    return DistComm("world", tuple(range(env.world_size)), None)


def open_world(env: RankEnv, ways: tuple[str, ...] = ("memfd",)) -> Hosts:
    return open_hosts(env.rank, env.world_size, gloo(env).gather_objects, ways)


def shared_world(env: RankEnv, ways: tuple[str, ...] = ("memfd",), timeout_s: float = 30.0) -> ShmComm:
    hosts = open_world(env, ways)
    assert hosts.own is not None, hosts.problems
    return ShmComm("world", tuple(range(env.world_size)), hosts.own, 0, timeout_s)


def small_pieces() -> None:
    """Make the transport's sizes small in this rank, so that little data takes every path."""
    inflight.COPY_BYTES = shm.SMALL_BYTES = 1 << 10
    shm.ONE_SHOT_BYTES, shm.PIECE_BYTES, shm.BLOCK_BYTES = 2 << 10, 8 << 10, 2 << 10


def values(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What ``rank`` contributes; every rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(size, generator=generator) * 40 + 50).to(dtype)


def placed(comm: ShmComm, tensor: Tensor, place: str) -> Tensor:
    """A copy of ``tensor`` in shared memory or outside."""
    if place == "private" or (place == "mixed" and comm.rank % 2):
        return tensor.clone()
    return comm.empty(tensor.numel(), tensor.dtype, CPU).copy_(tensor)


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """The sum (average, maximum) in rank order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = torch.maximum(total, part) if op == "max" else total + part
    return total.div_(len(parts)) if op == "avg" else total


def operations(dtype: torch.dtype) -> tuple[str, ...]:
    return ("sum", "max", "avg") if dtype.is_floating_point else ("sum", "max")


# --------------------------------------------------------------------------------------------------- results


def reduce_like_gloo(env: RankEnv) -> None:
    small_pieces()
    comm, other = shared_world(env), gloo(env)
    for dtype in (*FLOATS, *INTEGERS):
        for size in (0, 1, 700, 10_001):
            for op in operations(dtype):
                for place in PLACES:
                    mine = values(env.rank, size, dtype)
                    want = other.all_reduce(mine.clone(), op, name="x")
                    got = comm.all_reduce(placed(comm, mine, place), op, name="x")
                    assert torch.equal(got, want), (dtype, size, op, place)
                    mine = values(env.rank, 2 * size, dtype)
                    want = other.reduce_scatter(mine, op, name="x")
                    got = comm.reduce_scatter(placed(comm, mine, place), op, name="x")
                    assert torch.equal(got, want), (dtype, size, op, place)


def test_reductions_of_two_ranks_are_those_of_gloo_bit_by_bit() -> None:
    run_ranks(reduce_like_gloo, 2)


def move_like_gloo(env: RankEnv) -> None:
    small_pieces()
    comm, other = shared_world(env), gloo(env)
    draw = random.Random(5)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for rows in (0, 1, 300, 5000):
            table = [[draw.randrange(rows + 1) for _ in range(2)] for _ in range(2)]  # table[a][b]: rows from a to b
            send, receive = table[env.rank], [table[0][env.rank], table[1][env.rank]]
            for place in PLACES:
                flat = placed(comm, values(env.rank, rows * 3, dtype), place)
                mine = flat.view(rows, 3)
                assert torch.equal(comm.all_gather(mine, name="x"), other.all_gather(mine, name="x"))
                assert torch.equal(
                    comm.broadcast(placed(comm, flat, place), 1, name="x"), other.broadcast(flat.clone(), 1, name="x")
                )
                mine = placed(comm, values(env.rank, sum(send) * 3, dtype), place).view(sum(send), 3)
                got = comm.all_to_all(mine, send, receive, name="x")
                assert torch.equal(got, other.all_to_all(mine, send, receive, name="x")), (dtype, table, place)
    assert comm.gather_objects({"rank": env.rank}) == other.gather_objects({"rank": env.rank})


def test_other_verbs_of_two_ranks_are_those_of_gloo() -> None:
    run_ranks(move_like_gloo, 2)


def every_verb(env: RankEnv) -> None:
    small_pieces()
    comm, size = shared_world(env), env.world_size
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (0, 1, size - 1, 257, 9001):
            for place in PLACES:
                check_verbs(comm, dtype, count, place)
    comm.barrier()


def check_verbs(comm: ShmComm, dtype: torch.dtype, count: int, place: str) -> None:
    """All verbs with ``count`` elements of every rank, against what follows from the seeds."""
    size, rank = comm.size, comm.rank
    parts = [values(k, count, dtype) for k in range(size)]
    for op in operations(dtype):
        got = comm.all_reduce(placed(comm, parts[rank], place), op, name="reduce")
        assert torch.equal(got, reduced(parts, op)), (dtype, count, op, place)
    got = comm.all_gather(placed(comm, parts[rank], place), name="gather")
    assert torch.equal(got, torch.cat(parts)), (dtype, count, place)
    in_place = comm.empty(size * count, dtype, CPU).zero_()
    own = in_place[rank * count : (rank + 1) * count].copy_(parts[rank])
    comm.all_gather_start(in_place, own, name="gather in place").wait()
    assert torch.equal(in_place, torch.cat(parts)), (dtype, count)
    rows = [values(k, size * count, dtype, seed=1) for k in range(size)]
    source = placed(comm, rows[rank], place)
    target = source[rank * count : (rank + 1) * count] if count % 2 else torch.empty(count, dtype=dtype)
    comm.reduce_scatter_start(target, source, name="scatter").wait()
    assert torch.equal(target, reduced([row.view(size, count)[rank] for row in rows], "sum")), (dtype, count, place)
    got = comm.broadcast(placed(comm, parts[rank], place), size - 1, name="broadcast")
    assert torch.equal(got, parts[-1]), (dtype, count, place)
    sizes = [[(a * 7 + b * count) % (count + 3) for b in range(size)] for a in range(size)]
    tensors = [values(k, sum(sizes[k]), dtype, seed=2) for k in range(size)]
    receive = [sizes[k][rank] for k in range(size)]
    got = comm.all_to_all(placed(comm, tensors[rank], place), sizes[rank], receive, name="exchange")
    assert torch.equal(got, torch.cat([tensors[k].split(sizes[k])[rank] for k in range(size)])), (dtype, count, place)


@pytest.mark.parametrize("world", [3, 4, 8])
def test_every_verb_of_more_ranks(world: int) -> None:
    run_ranks(every_verb, world)


def large_tensors(env: RankEnv) -> int:
    comm = shared_world(env)
    for place in ("private", "mixed"):
        check_verbs(comm, torch.float32, 1_200_001, place)
    before = comm.moved_bytes
    comm.all_reduce(comm.empty(1 << 18, torch.float32, CPU).zero_(), name="counted")
    return comm.moved_bytes - before


def test_tensors_larger_than_a_piece() -> None:
    # Of one MiB each rank reads its half twice, and writes it twice.
    assert run_ranks(large_tensors, 2) == [2 << 20, 2 << 20]


def moved_beside_sent(env: RankEnv) -> tuple[int, dict[str, int]]:
    mesh = Mesh.distributed(Layout.parse("dp=2,comm=shm"), env.rank, 30.0)
    buffer = mesh.dp.empty(1 << 18, torch.float32, CPU).zero_()
    mesh.recorder.take()
    mesh.dp.all_reduce(buffer, name="gradients")
    with mesh.recorder.aside():
        mesh.world.all_reduce(buffer, name="not a part of the step")
    ledger = mesh.recorder.take()
    assert mesh.recorder.take().moved_bytes == {"dp": 0}
    return ledger.total_bytes, ledger.moved_bytes


def test_the_ledger_counts_what_memory_moved_beside_what_the_strategy_sends() -> None:
    assert run_ranks(moved_beside_sent, 2) == [(1 << 20, {"dp": 2 << 20})] * 2


# ---------------------------------------------------------------------------------------------------- groups


def sums_of_groups(env: RankEnv, layout: str) -> dict[str, tuple[int, ...]]:
    mesh = Mesh.distributed(Layout.parse(layout), env.rank, 30.0)
    found = {}
    for axis in ("tp", "cp", "dp", "pp", "dp_cp", "world", "ep", "edp"):
        comm: Comm = mesh.axis(axis)
        seen = comm.all_gather(torch.tensor([env.rank]), name=axis).tolist()
        assert tuple(seen) == comm.ranks
        total = comm.all_reduce(torch.full((40_000,), float(env.rank)), name=axis)
        assert torch.equal(total, torch.full((40_000,), float(sum(seen))))
        if comm.size > 1:
            assert isinstance(comm.inner, ShmComm if "gloo" not in layout else DistComm)
        found[axis] = tuple(seen)
    return found


def test_groups_of_every_axis() -> None:
    shared = run_ranks(sums_of_groups, 8, "tp=2,dp=2,pp=2,ep=2")
    assert shared[5]["dp"] == (5, 7)
    assert shared[5]["dp_cp"] == (5, 7)
    assert shared[5]["pp"] == (1, 5)
    assert shared[5]["world"] == tuple(range(8))


def test_gloo_if_asked_for() -> None:
    run_ranks(sums_of_groups, 2, "dp=2,comm=gloo")


def two_hosts(env: RankEnv, comm: str) -> tuple[str, str]:
    key = host._host_key
    host._host_key = lambda: f"{key()} {env.rank // 2}"  # ranks 0 and 1 on one host, 2 and 3 on another
    mesh = Mesh.distributed(Layout.parse(f"tp=2,dp=2,comm={comm}"), env.rank, 30.0)
    for axis in (mesh.tp, mesh.dp):
        assert axis.all_gather(torch.tensor([env.rank]), name="ranks").tolist() == list(axis.ranks)
    return type(mesh.tp.inner).__name__, type(mesh.dp.inner).__name__


def test_inside_hosts_and_across() -> None:
    assert run_ranks(two_hosts, 4, "auto") == [("ShmComm", "DistComm")] * 4


def test_across_hosts_is_refused_if_shared_memory_is_asked_for() -> None:
    with pytest.raises(LayoutError, match="dp cannot use shared memory: ranks 0 and 2 are on different hosts"):
        run_ranks(two_hosts, 4, "shm")


def other_machine(env: RankEnv, comm: str) -> str:
    if env.rank == 1:
        platform.machine = lambda: "aarch64"
    return type(Mesh.distributed(Layout.parse(f"dp=2,comm={comm}"), env.rank, 30.0).dp.inner).__name__


def test_machines_without_ordered_stores_use_gloo() -> None:
    assert run_ranks(other_machine, 2, "auto") == ["DistComm", "DistComm"]
    with pytest.raises(LayoutError, match="sound on x86-64 only, this is aarch64"):
        run_ranks(other_machine, 2, "shm")


# ----------------------------------------------------------------------------------------------- in flight


def many_outstanding(env: RankEnv) -> None:
    comm = shared_world(env)
    done: list[int] = []
    buffers = [
        placed(comm, values(env.rank, 5000 * (index % 5), torch.float32, index), PLACES[index % 3])
        for index in range(400)
    ]
    works = [comm.all_reduce_start(buffer, name=f"bucket.{index}") for index, buffer in enumerate(buffers)]
    for index, work in enumerate(works):
        work.on_done(lambda index=index: done.append(index))
    order = list(range(400))
    random.Random(env.rank).shuffle(order)  # ranks wait in different orders
    for index in order:
        works[index].wait()
        want = reduced([values(k, 5000 * (index % 5), torch.float32, index) for k in range(comm.size)], "sum")
        assert torch.equal(buffers[index], want), index
    assert done == list(range(400))


@pytest.mark.parametrize("world", [2, 4])
def test_many_outstanding_waited_for_in_any_order(world: int) -> None:
    run_ranks(many_outstanding, world)


def wait_in_another_comm(env: RankEnv) -> float:
    hosts = open_world(env)
    first, second = (ShmComm(f"axis{index}", (0, 1), hosts.own, index, 20.0) for index in range(2))
    bucket, message = first.empty(1 << 20, torch.float32, CPU).fill_(1.0), torch.full((10,), 7.0)
    work = first.all_reduce_start(bucket, name="bucket")
    if env.rank == 0:
        work.wait()  # needs rank 1, which waits for something else first
        second.send(message, 1, name="message").wait()
    else:
        second.receive(message.zero_(), 0, name="message").wait()
        work.wait()
    return bucket.mean().item() + message.mean().item()


def test_a_wait_moves_on_what_is_in_flight_elsewhere() -> None:
    assert run_ranks(wait_in_another_comm, 2, time_limit=20.0) == [9.0, 9.0]


def reuse_buffers(env: RankEnv) -> None:
    comm, draw = shared_world(env), random.Random(env.rank)
    own, private = comm.empty(30_000, torch.float32, CPU), torch.empty(30_000)
    gathered, small = comm.empty(30_000 * comm.size, torch.float32, CPU), torch.empty(3)
    rank_column = torch.arange(comm.size, dtype=torch.float32).unsqueeze(1)
    for turn in range(1000):
        buffer = (own, private, small)[turn % 3].fill_(env.rank + turn)
        if draw.random() < 0.1:
            time.sleep(draw.random() * 1e-3)
        comm.all_reduce(buffer, name="x")
        total = sum(k + turn for k in range(comm.size))
        assert buffer.min().item() == buffer.max().item() == total, turn
        if turn % 4 == 0:
            comm.all_gather_start(gathered, own.fill_(env.rank - turn), name="y").wait()
            own.fill_(-1.0)  # at once, while slower peers might still read it
            assert torch.equal(gathered.view(comm.size, -1), (rank_column - turn).expand(-1, 30_000)), turn


@pytest.mark.parametrize("world", [2, 4])
def test_buffers_reused_back_to_back(world: int) -> None:
    run_ranks(reuse_buffers, world)


def arrive_first(env: RankEnv) -> None:
    comm, gloo_barrier = shared_world(env), gloo(env).barrier
    own = comm.empty(30_000, torch.float32, CPU).fill_(env.rank)
    whole = comm.empty(30_000 * comm.size, torch.float32, CPU)
    expected = torch.arange(comm.size, dtype=torch.float32).repeat_interleave(30_000)
    gather = comm.all_gather_start(whole, own, name="weights")
    gloo_barrier()
    if env.rank == 0:
        gather.arrive()  # nobody else has looked at it yet
        assert torch.equal(whole, expected) and not gather.done
    gloo_barrier()
    comm.all_reduce(torch.ones(3), name="gradients")
    own.fill_(-1.0)
    gather.arrive()
    assert torch.equal(whole, expected)


def test_a_gather_arrives_before_peers_have_read() -> None:
    """Ranks of which one is faster need not go in step."""
    run_ranks(arrive_first, 3, time_limit=20.0)


def read_late(env: RankEnv) -> None:
    comm, gloo_barrier = shared_world(env), gloo(env).barrier
    own = comm.empty(30_000, torch.float32, CPU).fill_(env.rank)
    whole, ones = comm.empty(30_000 * comm.size, torch.float32, CPU), torch.ones(3)
    if env.rank == 1:  # both verbs are called before it can read
        works = [comm.all_gather_start(whole, own, name="weights"), comm.all_reduce_start(ones, name="gradients")]
    gloo_barrier()
    if env.rank != 1:
        works = [comm.all_gather_start(whole, own, name="weights"), comm.all_reduce_start(ones, name="gradients")]
    gloo_barrier()
    if env.rank == 1:
        time.sleep(0.3)
    works[1].wait()
    own.fill_(-1.0)
    works[0].arrive()
    assert torch.equal(whole, torch.arange(comm.size, dtype=torch.float32).repeat_interleave(30_000))


def test_a_later_verb_is_done_when_peers_have_read() -> None:
    run_ranks(read_late, 3, time_limit=20.0)


def show_parts(env: RankEnv, refuse: bool) -> list[bool]:
    """What parts of several sizes show after each rank has changed its own; ``refuse``: one rank cannot map them."""
    comm = shared_world(env)
    if refuse and env.rank == 1:

        def no_window(*args: Any) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        shm.Window = no_window
    kinds = [(5000, torch.float32), (4096, torch.bfloat16), (1 << 18, torch.float32), (7777, torch.float64), (99, torch.int64)]
    found = []
    for size, dtype in kinds:
        placed = comm.side_by_side(size, dtype, CPU)
        found.append(placed is not None)
        if placed is None:
            continue
        own, whole = placed
        before = comm.moved_bytes
        for turn in range(3):
            own.copy_(values(env.rank, size, dtype, turn))
            comm.all_gather_start(whole, own, name="parts").arrive()
            expected = torch.cat([values(rank, size, dtype, turn) for rank in range(comm.size)])
            assert torch.equal(whole, expected), (size, dtype, turn)
            comm.barrier()
        assert comm.moved_bytes - before <= 3 * 2 * 2 * comm.size * arena.PAGE
        del own, whole, placed
    assert not comm._windows
    return found


def test_parts_side_by_side_are_seen_without_copies() -> None:
    assert run_ranks(show_parts, 3, False) == [[True, True, True, True, False]] * 3
    assert run_ranks(show_parts, 2, True) == [[False] * 5] * 2


# ------------------------------------------------------------------------------------------------- messages


def messages(env: RankEnv) -> None:
    mailbox.MAILBOX_BYTES = 1 << 20
    comm, peer = shared_world(env), 1 - env.rank
    sizes = [0, 1, 1000, 600_000, 5, 70_000] * 12  # more messages and more bytes than there is room for
    sent = [
        placed(comm, values(env.rank, size, torch.float32, index), PLACES[index % 3])
        for index, size in enumerate(sizes)
    ]
    begin = time.perf_counter()
    sends = [comm.send(tensor, peer, name=f"message.{index}") for index, tensor in enumerate(sent)]
    assert time.perf_counter() - begin < 5.0
    outputs = [torch.full((size,), -1.0) for size in sizes]
    receives = [comm.receive(output, peer, name=f"message.{index}") for index, output in enumerate(outputs)]
    for index in (50, 3, *range(len(sizes))):
        receives[index].wait()
        assert torch.equal(outputs[index], values(peer, sizes[index], torch.float32, index)), index
    for work in sends:
        work.wait()
    comm.barrier()


def test_both_send_first_more_than_there_is_room_for() -> None:
    run_ranks(messages, 2)


def ring(env: RankEnv) -> list[float]:
    comm = shared_world(env)
    value, seen = torch.full((5000,), float(env.rank)), [float(env.rank)]
    for _ in range(comm.size - 1):
        work = comm.send(value, (comm.rank + 1) % comm.size, name="block")
        received = torch.empty(5000)
        comm.receive(received, (comm.rank - 1) % comm.size, name="block").wait()
        work.wait()
        value = received
        seen.append(value.mean().item())
    return seen


def test_ring() -> None:
    assert run_ranks(ring, 4)[0] == [0.0, 3.0, 2.0, 1.0]


# --------------------------------------------------------------------------------------------------- errors


def call_wrongly(env: RankEnv, case: str) -> str:
    comm, x = shared_world(env, timeout_s=10.0), torch.ones(6)
    with pytest.raises(RankError) as error:
        if case == "verb":
            comm.all_reduce(x, name="gradients") if env.rank else comm.all_gather(x, name="metrics")
        elif case == "size":
            comm.all_reduce(torch.ones(6 + env.rank), name="gradients")
        elif case == "operation":
            comm.all_reduce(x, "max" if env.rank else "sum", name="gradients")
        elif case == "root":
            comm.broadcast(x, env.rank, name="weights")
            comm.barrier()  # both are roots and go on; here they meet
            raise AssertionError("not noticed")
        elif case == "exchange":
            comm.all_to_all(x, [3, 3], [3 + env.rank, 3], name="tokens")
            comm.barrier()
        elif case == "message":
            comm.send(torch.ones(5), 1, name="a").wait() if env.rank == 0 else comm.receive(x, 0, name="b").wait()
            comm.barrier()
    with pytest.raises(RankError, match="given up already"):
        comm.barrier()
    return str(error.value)


@pytest.mark.parametrize("case", ["verb", "size", "operation", "exchange", "message"])
def test_calls_that_do_not_fit_are_named(case: str) -> None:
    told = run_ranks(call_wrongly, 2, case)
    words = {
        "verb": ["all_reduce (sum) of 6 float32 for 'gradients'", "all_gather of 6 float32 for 'metrics'"],
        "size": ["all_reduce (sum) of 6 float32", "all_reduce (sum) of 7 float32"],
        "operation": ["all_reduce (max)", "all_reduce (sum)"],
        "exchange": ["all_to_all", "'tokens'", "it sends 12 bytes, expected 16"],
        "message": ["receive from rank 0 of 'b'", "send of 5 float32 for 'a'", "expected send of 6 float32 for 'b'"],
    }[case]
    assert any(all(word in text for word in words) for text in told), told
    assert all("rank 0" in text and "rank 1" in text for text in told), told


def wait_too_long(env: RankEnv) -> str:
    comm = shared_world(env, timeout_s=0.5)
    comm.barrier(name="start")
    if env.rank == 1:
        time.sleep(1.5)
    with pytest.raises(RankError) as error:
        comm.all_reduce(torch.ones(3), name="gradients.7")
        comm.barrier()  # what rank 0 had announced before it gave up was still there
    return str(error.value)


def test_a_late_peer_is_named_with_what_it_did_last() -> None:
    waited, late = run_ranks(wait_too_long, 2)
    assert "all_reduce of 'gradients.7' over world timed out after 0.5 s: rank 1 called barrier for 'start'" in waited
    assert "rank 0 gave up" in late and "timed out" in late


def wait_for_each_other(env: RankEnv) -> str:
    comm = shared_world(env, timeout_s=1.0 + env.rank)
    with pytest.raises(RankError) as error:
        comm.receive(torch.ones(3), 1 - env.rank, name="activations").wait()
    return str(error.value)


def test_a_deadlock_shows_both_waits() -> None:
    told = run_ranks(wait_for_each_other, 2)[0]
    assert "receive from rank 1 of 'activations' over world timed out after 1 s" in told
    assert "rank 1 waits in receive from rank 0 of 'activations' over world" in told


def lose_a_peer(env: RankEnv, folder: Path, case: str) -> None:
    comm = shared_world(env)
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # the starter ends the others at once, but they shall see it themselves
    comm.barrier()
    if env.rank == 1:
        (folder / "killed").write_text(str(time.time()), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if case == "receive" and env.rank == 0:
            comm.receive(torch.ones(4), 1, name="activations").wait()
        comm.all_reduce(comm.empty(100_000, torch.float32, CPU), name="gradients.3")
    except RankError as error:
        (folder / f"rank{env.rank}").write_text(f"{time.time()} {error.rank} {error}", encoding="utf-8")


@pytest.mark.parametrize("case", ["all_reduce", "receive"])
def test_a_dead_peer_is_named_at_once(tmp_path: Path, case: str) -> None:
    with pytest.raises(RankError, match=r"^rank 1 "):
        run_ranks(lose_a_peer, 4, tmp_path, case)
    killed = float((tmp_path / "killed").read_text(encoding="utf-8"))
    for rank in (0, 2, 3):
        seen, culprit, message = (tmp_path / f"rank{rank}").read_text(encoding="utf-8").split(" ", 2)
        assert float(seen) - killed < 1.0
        assert culprit == "1"
        what = (
            "receive from rank 1 of 'activations'" if (case, rank) == ("receive", 0) else "all_reduce of 'gradients.3'"
        )
        assert f"rank {rank}: {what} over world: rank" in message
        assert "rank 1 has ended (process" in message


def leave_early(env: RankEnv) -> str:
    hosts = open_world(env)
    comm = ShmComm("world", (0, 1), hosts.own, 0, 20.0)
    comm.barrier()
    if env.rank == 1:
        hosts.own.close()
        return ""
    with pytest.raises(RankError) as error:
        comm.barrier(name="again")
    return str(error.value)


def test_a_peer_that_has_closed_is_named() -> None:
    told = run_ranks(leave_early, 2)[0]  # on a busy machine the process may be gone before anybody looks
    assert "barrier of 'again' over world: rank 1 has " in told and ("has closed" in told or "has ended" in told)


def test_processes_are_watched_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    monkeypatch.setattr(os, "pidfd_open", refused)
    watch = Watch({0: os.getpid(), 1: child})
    assert watch.dead((0, 1)) is None
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while watch.dead((0, 1)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watch.dead((0, 1)) == 1  # ended, although nobody has reaped it yet
    os.waitpid(child, 0)


# --------------------------------------------------------------------------------------------------- memory


def held() -> tuple[int, int]:
    """Open files and mapped arenas of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len(os.listdir("/proc/self/fd")), maps.count("shardwright")


def open_and_drop(env: RankEnv, ways: tuple[str, ...], times: int) -> None:
    kept = []
    for turn in range(times):
        comm = shared_world(env, ways)
        buffer = comm.empty(50_000, torch.float32, CPU).fill_(1.0)
        assert comm.all_reduce(buffer, name="x")[-1] == 2.0
        if turn == times - 1:
            kept.append(buffer)
        if turn % 2:
            comm.barrier()  # nobody closes while another still waits
            comm._host.close()
        if turn == 0:
            del comm, buffer
            before = held()
    del comm, buffer
    files, maps = held()
    assert files <= before[0] + 2 and maps == before[1] + 1, (files, maps, before)  # the kept tensor holds its arena
    assert kept[0][0] == 2.0
    kept.clear()
    files, maps = held()
    assert files <= before[0] and maps == before[1], (files, maps, before)


@pytest.mark.parametrize("ways", [("memfd",), ("file",)])
def test_nothing_is_left_after_two_hundred_times(ways: tuple[str, ...]) -> None:
    before = set(os.listdir("/dev/shm"))
    run_ranks(open_and_drop, 2, ways, 200 if ways == ("memfd",) else 20)
    assert {name for name in os.listdir("/dev/shm") if name.startswith("shardwright")} <= before


def refuse(env: RankEnv, what: str) -> str:
    if env.rank == 1 and what == "memfd":

        def no_memfd(*args: Any) -> int:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        os.memfd_create = no_memfd
    if env.rank == 1 and what == "proc":
        map_peer = arena.Mapping.of_peer

        def no_proc(handle: arena.ArenaHandle) -> arena.Mapping:
            if handle.path.startswith("/proc"):
                raise PermissionError(errno.EACCES, "Permission denied")
            return map_peer(handle)

        arena.Mapping.of_peer = no_proc
    comm = shared_world(env, ("memfd", "file"))
    assert comm.all_reduce(torch.ones(100_000), name="x").sum() == 200_000
    return comm.note


@pytest.mark.parametrize(
    ("what", "reason"), [("memfd", "rank 1 could not make it"), ("proc", "rank 1 could not open /proc/")]
)
def test_files_where_memory_without_a_name_is_refused(what: str, reason: str) -> None:
    before = os.listdir("/dev/shm")
    for note in run_ranks(refuse, 2, what):
        assert note.startswith("shared memory in unlinked temporary files, because ")
        assert reason in note
    assert os.listdir("/dev/shm") == before


@pytest.mark.parametrize("calls", [1, 2])
def test_a_file_is_unlinked_if_the_agreement_fails(calls: int) -> None:
    before, left = os.listdir("/dev/shm"), calls

    def exchange(value: Any) -> list[Any]:
        nonlocal left
        if left == 0:
            raise RankError("a peer is gone")
        left -= 1
        return [value]

    with pytest.raises(RankError, match="a peer is gone"):
        open_hosts(0, 1, exchange, ("file",))
    assert os.listdir("/dev/shm") == before


def fill_up(env: RankEnv) -> str:
    comm = shared_world(env)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.posix_fallocate = full
    with pytest.raises(RankError) as error:
        comm.empty(1 << 20, torch.float32, CPU)
    return str(error.value)


def test_full_memory_is_an_error() -> None:
    assert "no room for 4194304 bytes of shared memory: No space left" in run_ranks(fill_up, 2)[0]


def allocated(comm: ShmComm) -> int:
    """Bytes of pages that this rank's arena holds."""
    return os.fstat(comm._host.arena._file).st_blocks * 512


def allocate_and_free(env: RankEnv) -> None:
    arena.KEEP_BYTES = 8 << 20
    comm = shared_world(env)
    start = allocated(comm)
    large = comm.empty(16 << 20, torch.float32, CPU)
    view = large[5:10]
    assert allocated(comm) - start >= 64 << 20
    del large
    gc.collect()
    assert allocated(comm) - start >= 64 << 20  # a view holds it
    if os.fork() == 0:
        del view
        gc.collect()
        os._exit(0)
    os.wait()
    assert allocated(comm) - start >= 64 << 20  # a child's end does not free it
    view.fill_(3.0)
    del view
    gc.collect()
    assert allocated(comm) - start < 1 << 20
    for _ in range(300):
        comm.empty(1 << 18, torch.float32, CPU)
    assert allocated(comm) - start < 16 << 20  # one block, again and again
    for _ in range(3000):  # verbs take no more memory the longer it goes on
        comm.broadcast(torch.ones(20_000), name="x")
    assert allocated(comm) - start < inflight.VERBS * 100_000 + (16 << 20)


def test_memory_is_given_back() -> None:
    run_ranks(allocate_and_free, 2)
