"""Shared-memory transport under stress: long random runs with checked results, and ranks killed at random moments.

    python benchmarks/shm_stress.py                      # 200,000 verbs on 8 ranks, then 200 kills
    python benchmarks/shm_stress.py --verbs 5000 --kills 10 --ranks 4 --json stress.json

*Verbs*: all ranks draw the same sequence of (group, verb, sizes, place of the tensors) from one seed; each takes part where
it is in the group, sleeps now and then, keeps works outstanding, and compares every result with what follows from the seed.
At the end no file is open that was not open half-way, and at most a quarter more memory is held.

*Kills*: the same, until one rank ends itself by SIGKILL at a random moment. Every other rank must end within five seconds
with an error that names it, and nothing may be left in /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.base import ReduceOp, Work
from shardwright.comm.dist import DistComm
from shardwright.comm.host import open_hosts
from shardwright.comm.shm import ShmComm
from shardwright.errors import RankError
from shardwright.launch import RankEnv, init_process_group, run_local_ranks

CPU = torch.device("cpu")
SIZES = (0, 1, 5, 300, 5_000, 40_000, 200_000, 1_500_000)
WEIGHTS = (1, 4, 6, 20, 12, 8, 2, 0.05)
LIMIT_S = 5.0

Pending = tuple[Work, Callable[[], None]]


class Player:
    """One rank's part in a random sequence of verbs that all ranks draw alike."""

    def __init__(self, env: RankEnv, seed: int, num_groups: int = 16) -> None:
        world = tuple(range(env.world_size))
        hosts = open_hosts(env.rank, env.world_size, DistComm("world", world, None).gather_objects)
        assert hosts.own is not None, hosts.problems
        self.rank, self.host = env.rank, hosts.own
        self.shared, self.own = random.Random(seed), random.Random(seed + 1 + env.rank)
        groups = [world, *(self._group(world) for _ in range(num_groups - 1))]
        self.groups = groups
        self.comms = {
            index: ShmComm(f"group{index}", ranks, self.host, index, 60.0)
            for index, ranks in enumerate(groups)
            if env.rank in ranks
        }
        self.pending: list[Pending] = []
        self.played = 0

    def _group(self, world: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(self.shared.sample(world, self.shared.randint(2, len(world)))))

    # -- one verb --------------------------------------------------------------------------------------

    def play(self) -> None:
        """Draw a verb; take part in it if this rank is in the group."""
        draw = self.shared
        group = draw.randrange(len(self.groups))
        verb = draw.choices(list(_VERBS), [weight for _, weight in _VERBS.values()])[0]
        size = draw.choices(SIZES, WEIGHTS)[0]
        dtype = draw.choice((torch.float32, torch.int64, torch.float64))
        number, detail = draw.randrange(1 << 16), draw.randrange(1 << 30)
        if group not in self.comms:
            return
        self.played += 1
        if self.own.random() < 0.01:
            time.sleep(self.own.random() * 3e-3)
        pending = _VERBS[verb][0](self, self.comms[group], size, dtype, number, random.Random(detail))
        if pending is not None:
            self.pending.append(pending)
        if len(self.pending) > 20 or self.own.random() < 0.2:
            self.settle(self.own.randrange(len(self.pending) + 1))

    def settle(self, leave: int = 0) -> None:
        """Wait for works, in any order, until ``leave`` are outstanding, and check their results."""
        while len(self.pending) > leave:
            work, check = self.pending.pop(self.own.randrange(len(self.pending)))
            work.wait()
            check()

    def tensor(self, size: int, dtype: torch.dtype, number: int, rank: int) -> Tensor:
        """What a rank contributes: whole numbers, so that sums are exact."""
        return torch.arange(size, dtype=dtype).remainder_(11).add_(number % 1000 + 3 * rank)

    def place(self, tensor: Tensor) -> Tensor:
        """``tensor``, now and then in shared memory."""
        if self.own.random() < 0.5:
            return tensor
        return self.host.arena.empty(tensor.numel(), tensor.dtype).copy_(tensor)


def _all_reduce(
    player: Player, comm: ShmComm, size: int, dtype: torch.dtype, number: int, draw: random.Random
) -> Pending:
    op: ReduceOp = draw.choice(("sum", "max"))
    mine = player.place(player.tensor(size, dtype, number, player.rank))
    total = sum(comm.ranks) if op == "sum" else max(comm.ranks)
    parts = comm.size if op == "sum" else 1
    want = player.tensor(size, dtype, number, 0).mul_(parts).add_(3 * total)
    return comm.all_reduce_start(mine, op, name=f"reduce.{number}"), lambda: _same(mine, want, "all_reduce")


def _reduce_scatter(
    player: Player, comm: ShmComm, size: int, dtype: torch.dtype, number: int, draw: random.Random
) -> Pending:
    width = size // comm.size
    mine = player.place(player.tensor(width * comm.size, dtype, number, player.rank))
    output = torch.empty(width, dtype=dtype)
    whole = player.tensor(width * comm.size, dtype, number, 0).mul_(comm.size).add_(3 * sum(comm.ranks))
    want = whole[comm.rank * width : (comm.rank + 1) * width]
    work = comm.reduce_scatter_start(output, mine, name=f"scatter.{number}")
    return work, lambda: _same(output, want, "reduce_scatter", mine)


def _all_gather(
    player: Player, comm: ShmComm, size: int, dtype: torch.dtype, number: int, draw: random.Random
) -> Pending:
    width = size // comm.size
    mine = player.place(player.tensor(width, dtype, number, player.rank))
    output = player.place(torch.empty(width * comm.size, dtype=dtype))
    want = torch.cat([player.tensor(width, dtype, number, rank) for rank in comm.ranks])
    work = comm.all_gather_start(output, mine, name=f"gather.{number}")
    return work, lambda: _same(output, want, "all_gather", mine)


def _all_to_all(player: Player, comm: ShmComm, size: int, dtype: torch.dtype, number: int, draw: random.Random) -> None:
    table = [[draw.randrange(size // comm.size + 1) for _ in comm.ranks] for _ in comm.ranks]
    send, receive = table[comm.rank], [row[comm.rank] for row in table]
    mine = player.place(player.tensor(sum(send), dtype, number, player.rank))
    got = comm.all_to_all(mine, send, receive, name=f"exchange.{number}")
    sent = [player.tensor(sum(row), dtype, number, rank) for rank, row in zip(comm.ranks, table, strict=True)]
    want = torch.cat([tensor.split(row)[comm.rank] for tensor, row in zip(sent, table, strict=True)])
    _same(got, want, "all_to_all")


def _broadcast(player: Player, comm: ShmComm, size: int, dtype: torch.dtype, number: int, draw: random.Random) -> None:
    root = draw.randrange(comm.size)
    mine = player.place(player.tensor(size, dtype, number, player.rank))
    comm.broadcast(mine, root, name=f"broadcast.{number}")
    _same(mine, player.tensor(size, dtype, number, comm.ranks[root]), "broadcast")


def _shift(player: Player, comm: ShmComm, size: int, dtype: torch.dtype, number: int, draw: random.Random) -> None:
    """Everybody sends some messages round the group, and receives them."""
    step, count = draw.randrange(1, comm.size), draw.randrange(1, 4)
    to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
    mine = [player.place(player.tensor(size, dtype, number + index, player.rank)) for index in range(count)]
    sends = [comm.send(tensor, to, name=f"shift.{number}") for tensor in mine]
    outputs = [torch.empty(size, dtype=dtype) for _ in mine]
    for work in [comm.receive(output, source, name=f"shift.{number}") for output in outputs]:
        work.wait()
    for index, output in enumerate(outputs):
        _same(output, player.tensor(size, dtype, number + index, comm.ranks[source]), "shift")
    player.pending += [(work, lambda: None) for work in sends]


def _control(player: Player, comm: ShmComm, size: int, dtype: torch.dtype, number: int, draw: random.Random) -> None:
    if draw.random() < 0.5:
        comm.barrier()
    else:
        assert comm.gather_objects((player.rank, number)) == [(rank, number) for rank in comm.ranks]


_VERBS: dict[str, tuple[Callable[..., Pending | None], float]] = {
    "all_reduce": (_all_reduce, 30),
    "reduce_scatter": (_reduce_scatter, 15),
    "all_gather": (_all_gather, 15),
    "all_to_all": (_all_to_all, 8),
    "broadcast": (_broadcast, 8),
    "shift": (_shift, 10),
    "control": (_control, 5),
}


def _same(got: Tensor, want: Tensor, verb: str, source: Tensor | None = None) -> None:
    if not torch.equal(got, want):
        wrong = int((got != want).nonzero()[0])
        raise AssertionError(f"{verb} of {got.numel()} {got.dtype}: element {wrong} is {got[wrong]}, not {want[wrong]}")
    if source is not None:
        source.fill_(-1)  # the verb is over: a peer that still reads this is noticed


# ------------------------------------------------------------------------------------------------------ runs


def play_verbs(env: RankEnv, verbs: int, seed: int) -> dict[str, Any]:
    """Play ``verbs`` verbs; the result says how many this rank took part in, and what it held then and at the end."""
    init_process_group(env)
    player = Player(env, seed)
    begin, held = time.perf_counter(), dict[int, tuple[int, int]]()
    for index in range(verbs):
        player.play()
        if index + 1 in (verbs // 2, verbs):
            player.settle()
            held[index + 1] = (len(os.listdir("/proc/self/fd")), os.fstat(player.host.arena._file).st_blocks * 512)
        if index % 1000 == 999:
            env.send((index + 1, time.perf_counter() - begin))
    player.comms[0].barrier()
    (files, held_bytes), (last_files, last_bytes) = held.values()
    assert files == last_files, f"{last_files} files are open, {files} half-way"
    assert last_bytes <= 1.25 * held_bytes + (16 << 20), f"{last_bytes} bytes are held, {held_bytes} half-way"
    moved = sum(comm.moved_bytes for comm in player.comms.values())
    return {"verbs": player.played, "seconds": time.perf_counter() - begin, "held": held, "moved_bytes": moved}


def play_until_killed(env: RankEnv, folder: str, seed: int, victim: int, after_s: float) -> None:
    """Play until rank ``victim`` ends itself after ``after_s``; the others write what they saw into ``folder``."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the starter would end the others before they see it themselves
    init_process_group(env)
    player = Player(env, seed)
    place = Path(folder)
    if env.rank == victim:
        signal.signal(signal.SIGALRM, lambda *_: _end_here(place))
        signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        while True:
            player.play()
    except RankError as error:
        seen = {"time": time.time(), "rank": error.rank, "message": str(error)}
        (place / f"rank{env.rank}.json").write_text(json.dumps(seen), encoding="utf-8")


def _end_here(place: Path) -> None:
    (place / "killed").write_text(str(time.time()), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


def one_kill(ranks: int, seed: int) -> float:
    """Seconds until the last of the others had noticed; raises if one named another rank, or did not end in time."""
    draw = random.Random(seed)
    victim, after_s = draw.randrange(ranks), draw.random() * 0.3
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_local_ranks(
                play_until_killed, ranks, (folder, seed, victim, after_s), threads_per_rank=1, grace_s=LIMIT_S + 1
            )
        except RankError as error:
            assert error.rank == victim, error
        killed = float((Path(folder) / "killed").read_text(encoding="utf-8"))
        seconds = 0.0
        for rank in set(range(ranks)) - {victim}:
            path = Path(folder) / f"rank{rank}.json"
            assert path.exists(), f"seed {seed}: rank {rank} did not notice that rank {victim} had been killed"
            seen = json.loads(path.read_text(encoding="utf-8"))
            assert seen["rank"] == victim, f"seed {seed}: rank {rank} blamed rank {seen['rank']}: {seen['message']}"
            seconds = max(seconds, seen["time"] - killed)
        assert seconds < LIMIT_S, f"seed {seed}: it took {seconds:.1f} s"
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--verbs", type=int, default=200_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = set(os.listdir("/dev/shm"))
    result: dict[str, Any] = {"ranks": options.ranks, "seed": options.seed}
    if options.verbs:

        def progress(rank: int, message: tuple[int, float]) -> None:
            if rank == 0 and message[0] % 10_000 == 0:
                print(f"{message[0]} verbs, {message[1]:.0f} s", file=sys.stderr, flush=True)

        result["verbs"] = run_local_ranks(
            play_verbs, options.ranks, (options.verbs, options.seed), threads_per_rank=1, on_message=progress
        )
    if options.kills:
        seconds = [one_kill(options.ranks, options.seed + index) for index in range(options.kills)]
        result["kills"] = {
            "count": len(seconds),
            "median_s": sorted(seconds)[len(seconds) // 2],
            "most_s": max(seconds),
        }
    result["left_in_dev_shm"] = sorted(name for name in set(os.listdir("/dev/shm")) - before if "shardwright" in name)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2), encoding="utf-8")
    if result["left_in_dev_shm"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
