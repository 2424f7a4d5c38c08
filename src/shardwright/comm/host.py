"""The ranks of one host that share memory: who they are, that they can, and how they are doing.

`open_hosts` is called once by all ranks of the world. The first page of each arena is the *page* of its rank: whether it
is well, what it waits for, and where the boards of its communicators lie (`shm`). Only the owner writes there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwright.comm.arena import PAGE, Arena, ArenaHandle, Mapping, file_arena, memory_arena
from shardwright.comm.waiting import Bell, Fence, Watch, unsound_machine
from shardwright.errors import RankError

Exchange = Callable[[Any], list[Any]]
"""Gathers one small picklable value of every rank of the world, in rank order."""

# Words (int64) of a rank's page. Texts are a length and then bytes.
_STATE, _CULPRIT, _BELL, SLEEPS, _DOING, _REASON, _BOARDS = 0, 1, 2, 3, 8, 64, 128
_OPEN, _CLOSED, _FAILED = 0, 1, 2
MAX_COMMS = PAGE // 8 - _BOARDS


class Advancing(Protocol):
    """What may have verbs in flight."""

    def advance(self) -> bool:
        """Move on without waiting; whether anything moved."""
        ...


class Page:
    """What one rank tells about itself; ``words`` are the int64 of its arena."""

    def __init__(self, mapping: Mapping) -> None:
        self.words = mapping.words
        self._bytes = memoryview(mapping.memory)
        self.bell_address = mapping.address + _BELL * 8

    @property
    def doing(self) -> str:
        """What the rank waits for; empty when it does not wait."""
        return self._text(_DOING)

    @doing.setter
    def doing(self, text: str) -> None:
        self._write(_DOING, text, _REASON)

    def close(self) -> None:
        """The rank will not take part any more."""
        if self.words[_STATE] == _OPEN:
            self.words[_STATE] = _CLOSED

    def fail(self, culprit: int, reason: str) -> None:
        """The rank has given up; ``culprit`` is the rank that is to blame (-1: unknown). The first reason stays."""
        if self.words[_STATE] == _OPEN:
            self._write(_REASON, reason, _BOARDS)
            self.words[_CULPRIT] = culprit
            self.words[_STATE] = _FAILED

    @property
    def failure(self) -> tuple[int, str] | None:
        """(culprit, reason) if the rank has given up."""
        return (self.words[_CULPRIT], self._text(_REASON)) if self.words[_STATE] == _FAILED else None

    @property
    def closed(self) -> bool:
        return self.words[_STATE] == _CLOSED

    # Sleeping: the sleeper says on whom, looks again, and sleeps; the other counts, looks who sleeps, and rings. With a
    # fence between the first two of each, one of the two sees the other.

    @property
    def bell(self) -> int:
        """How often the rank has rung."""
        return self.words[_BELL]

    def count_bell(self) -> int:
        """The owner is about to ring; the address to ring at."""
        self.words[_BELL] += 1
        return self.bell_address

    def sleep_on(self, rank: int) -> None:
        """The owner is about to sleep until ``rank`` rings; -1: it is awake. Word ``SLEEPS`` is that rank + 1."""
        self.words[SLEEPS] = rank + 1

    def board(self, index: int) -> int:
        """Where the board of communicator ``index`` lies, 0 if it is not there yet."""
        return self.words[_BOARDS + index]

    def set_board(self, index: int, offset: int) -> None:
        assert index < MAX_COMMS, f"a rank has at most {MAX_COMMS} communicators in shared memory"
        self.words[_BOARDS + index] = offset

    def _text(self, word: int) -> str:
        begin = (word + 1) * 8
        return bytes(self._bytes[begin : begin + self.words[word]]).decode(errors="replace")

    def _write(self, word: int, text: str, end: int) -> None:
        data = text.encode()[: (end - word - 1) * 8]
        self._bytes[(word + 1) * 8 : (word + 1) * 8 + len(data)] = data
        self.words[word] = len(data)


class ShmHost:
    """This rank's arena and the mapped arenas of its host; shared by all communicators of this rank.

    ``note`` says how the memory is held, for logs. Dropping the last reference, or `close`, frees everything but the
    tensors still in use.
    """

    def __init__(self, rank: int, arena: Arena, peers: dict[int, Mapping], pids: dict[int, int], note: str) -> None:
        self.rank, self.arena, self.note = rank, arena, note
        self.mappings: dict[int, Mapping] = {**peers, rank: arena}
        self.pages = {other: Page(mapping) for other, mapping in self.mappings.items()}
        self.page = self.pages[rank]
        self.watch = Watch(pids)
        self.fence = Fence()
        self.failed = False
        self._bell = Bell()
        self.comms: weakref.WeakSet[Advancing] = weakref.WeakSet()
        weakref.finalize(self, self.page.close).atexit = False

    def advance_others(self, comm: Advancing) -> bool:
        """Move on what is in flight on the other communicators: a peer may wait for it before it comes to ``comm``."""
        return any(other.advance() for other in tuple(self.comms) if other is not comm)

    def ring(self) -> None:
        """Wake the ranks that sleep on this one."""
        self._bell.ring(self.page.count_bell())

    def sleep(self, rank: int, seconds: float, over: Callable[[], bool]) -> None:
        """Sleep until ``rank`` rings, at most ``seconds``; not at all if it is ``over``."""
        page = self.pages[rank]
        rung = page.bell
        self.page.sleep_on(rank)
        self.fence()
        try:
            if not over():
                self._bell.sleep(page.bell_address, rung, seconds)
        finally:
            self.page.sleep_on(-1)

    def check(self, ranks: Sequence[int], late: Sequence[int]) -> tuple[int, str] | None:
        """(rank to blame, cause) if one of ``ranks`` has given up, or one of the ``late`` has ended or closed.

        A rank that is not late may have ended: it has done its part. If others still need it, they say so.
        """
        for rank in ranks:
            failure = self.pages[rank].failure
            if failure is not None:
                return failure[0], f"rank {rank} gave up: {failure[1]}"
        dead = self.watch.dead(late)
        if dead is not None:
            return dead, f"rank {dead} has ended (process {self.watch.pids[dead]} is gone)"
        closed = next((rank for rank in late if self.pages[rank].closed), None)
        return None if closed is None else (closed, f"rank {closed} has closed its communicators")

    def give_up(self, message: str, culprit: int) -> None:
        """Tell the peers that this rank takes part no more."""
        self.failed = True
        self.page.fail(culprit, message)
        self.ring()

    def fail(self, message: str, culprit: int) -> RankError:
        """The error for ``message``, after telling the peers that this rank takes part no more."""
        self.give_up(message, culprit)
        return RankError(f"rank {self.rank}: {message}", rank=culprit)

    def close(self) -> None:
        """Say goodbye, and drop the maps; idempotent."""
        self.page.close()
        self.watch.close()


@dataclass
class Hosts:
    """Which ranks of the world share a host, why some cannot share memory, and this rank's own host if it can."""

    keys: list[str]
    problems: list[str | None]
    own: ShmHost | None = None

    def problem(self, ranks: Sequence[int]) -> str | None:
        """Why ``ranks`` cannot share memory; None if they can. Every rank gives the same answer."""
        first = ranks[0]
        for rank in ranks:
            if self.keys[rank] != self.keys[first]:
                return f"ranks {first} and {rank} are on different hosts"
        return next((self.problems[rank] for rank in ranks if self.problems[rank]), None)


def open_hosts(rank: int, world_size: int, exchange: Exchange, ways: Sequence[str] = ("memfd", "file")) -> Hosts:
    """Agree with all ranks of the world who shares memory with whom; collective. ``ways``: what to try, in this order."""
    peers: list[tuple[str, int]] = exchange((_host_key(), os.getpid()))
    keys = [key for key, _ in peers]
    hosts = Hosts(keys, ["it was not tried"] * world_size)
    here = [other for other in range(world_size) if keys[other] == keys[rank]]
    reason = ""
    for way in ways:
        if not any(hosts.problems):
            break
        attempt = _Attempt(way, rank, world_size) if hosts.own is None else None
        try:
            offers = exchange(attempt and attempt.offer)
            if attempt is not None:
                attempt.map(here, offers)
            verdicts: list[str | None] = exchange(attempt and attempt.problem)
        finally:
            if attempt is not None:
                attempt.unlink()
        failed = {keys[other]: verdict for other, verdict in reversed(list(enumerate(verdicts))) if verdict}
        hosts.problems = [failed.get(key) for key in keys]
        if attempt is not None and attempt.arena is not None and keys[rank] not in failed:
            pids = {other: peers[other][1] for other in here if other != rank}
            hosts.own = ShmHost(rank, attempt.arena, attempt.mappings, pids, _NOTES[way] + reason)
        reason = f", because {hosts.problems[rank]}"
    return hosts


_NOTES = {"memfd": "shared memory without a name", "file": "shared memory in unlinked temporary files"}


class _Attempt:
    """One rank's try to share memory in one way: its own arena, the others' mappings, or why it did not work."""

    def __init__(self, way: str, rank: int, world_size: int) -> None:
        self.arena: Arena | None = None
        self.offer: ArenaHandle | None = None
        self.mappings: dict[int, Mapping] = {}
        self.problem = unsound_machine()
        self._rank = rank
        self._path: str | None = None
        if self.problem is not None:
            return
        try:
            if way == "file":
                self.arena, self._path = file_arena(world_size)
            else:
                self.arena = memory_arena(world_size)
            assert self.arena.take(PAGE) == 0
            self.offer = self.arena.handle(self._path)
        except (OSError, RankError) as error:
            self.problem = f"rank {rank} could not make it ({error})"

    def map(self, ranks: Sequence[int], offers: Sequence[ArenaHandle | None]) -> None:
        """Map the arenas of ``ranks``, unless one of them has none."""
        for rank in ranks:
            offer = offers[rank]
            if self.problem is not None or offer is None:
                return
            if rank != self._rank:
                try:
                    self.mappings[rank] = Mapping.of_peer(offer)
                except OSError as error:
                    self.problem = f"rank {self._rank} could not open {offer.path} ({error.strerror or error})"

    def unlink(self) -> None:
        """Take the file's name away: from now on it ends with the last process that has mapped it."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def _host_key() -> str:
    """Equal for processes that see each other's ids: the host's boot and its name, and the name space of process ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
