"""What one rank has in flight on one shared-memory communicator: verbs in order, and how they move on without threads.

A verb's work is a generator that yields what it *needs*: a counter on its peers' boards that has to reach a value.
`InFlight.advance` runs the oldest verb for as long as its needs are met; `complete` repeats that until a given work is
done, standing still in between and looking after its peers.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from torch import Tensor

from shardwright.comm.base import Work
from shardwright.comm.board import (
    ANNOUNCED,
    CHECK,
    EXECUTED,
    FIRST,
    SECOND,
    STEP,
    VERBS,
    Board,
    num_words,
)
from shardwright.comm.host import SLEEPS, ShmHost
from shardwright.comm.waiting import Backoff
from shardwright.errors import RankError

COPY_BYTES = 64 << 10
"""Tensors up to this size are copied into the arena even where they could be read in place."""
UNREAD_BYTES = 256 << 20
"""Starting a verb waits while peers have yet to read this much."""

STREAM_BYTES = 1 << 20
"""From this size on a copy goes past the caches, where the C library does that (``launch.MEMORY_SETTINGS``)."""

Need = tuple[int, int, Sequence[int]]
"""Until the counter (a word of the board) has reached a value, on these members of the axis."""
Steps = Generator[Need, None, None]


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy one tensor in memory into another. A large one by memmove: PyTorch's copy reads each line of the target before
    it writes it, which takes twice the time (docs/log.md)."""
    same = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    if same and source.nbytes >= STREAM_BYTES:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


class ShmWork(Work):
    """A verb, a send or a receive under way."""

    done = False
    arrived = False
    """The result is there; peers may still read what this rank gave."""

    def __init__(self, flight: InFlight, what: str, name: str) -> None:
        self.flight, self.what, self.name = flight, what, name
        self.done = self.arrived = False
        self._callbacks: list[Callable[[], None]] | None = None

    def wait(self) -> None:
        if not self.done:
            self.flight.complete(self, lambda: self.done)

    def arrive(self) -> None:
        if not self.arrived:
            self.flight.complete(self, lambda: self.arrived)

    def on_done(self, callback: Callable[[], None]) -> None:
        if self.done:
            callback()
        else:
            self._callbacks = [*(self._callbacks or ()), callback]

    def finish(self) -> None:
        """Nothing is left to do."""
        self.done = self.arrived = True
        for callback in self._callbacks or ():
            callback()

    def late(self) -> Sequence[int]:
        """The members of the axis that are waited for."""
        return ()

    def __str__(self) -> str:
        return f"{self.what} of {self.name!r} over {self.flight.axis}"


class Verb(ShmWork):
    """The ``number``-th verb; ``record`` is the first word of its record on every board of the axis.

    ``location``: twice the offset of this rank's data in its arena, plus 1 if that is the caller's own tensor.
    """

    def __init__(self, flight: InFlight, what: str, name: str, number: int) -> None:
        self.flight, self.what, self.name, self.number = flight, what, name, number
        self.done = self.arrived = False
        self._callbacks = None
        self.record = flight.own.verb(number)
        self.location = 0
        self.blocks: list[tuple[int, int]] = []
        self.need: Need = (ANNOUNCED, number, flight.others)
        self.steps: Steps

    @property
    def direct(self) -> bool:
        """Peers read this rank's own tensor, not a copy."""
        return bool(self.location & 1)

    def late(self) -> Sequence[int]:
        word, value, members = self.need
        return [member for member in members if self.flight.words[member][word] < value]


class Mover(Protocol):
    """What else moves on in a wait: the mailboxes."""

    def advance(self) -> bool: ...


class InFlight:
    """The boards of an axis, this rank's verbs in flight and the arena blocks that its peers have yet to read."""

    def __init__(self, axis: str, ranks: tuple[int, ...], host: ShmHost, index: int, timeout_s: float) -> None:
        self.axis, self.ranks, self.host, self.timeout_s = axis, ranks, host, timeout_s
        self.rank, size = ranks.index(host.rank), len(ranks)
        self.others = tuple((self.rank + step) % size for step in range(1, size))
        self._peers = [rank for rank in ranks if rank != host.rank]
        self._peer_pages = [host.pages[rank].words for rank in self._peers]
        self._sleeps_on_me = host.rank + 1
        self.moved_bytes = 0
        self.movers: list[Mover] = []
        self._queue: deque[Verb] = deque()
        self._unread: deque[tuple[int, int, int]] = deque()  # number of the verb, offset and bytes of a block
        self._unread_bytes = 0
        self._number = self._step = self._read_by_all = 0
        offset = host.arena.take(num_words(size) * 8)
        self.own = Board(host.arena, offset, size)
        self.own.clear()
        host.fence()
        host.page.set_board(index, offset)
        self.boards = [self.own if rank == host.rank else self._meet(rank, index) for rank in ranks]
        self.words = [board.words for board in self.boards]
        host.comms.add(self)

    def _meet(self, rank: int, index: int) -> Board:
        """The board of a peer, as soon as it is there."""
        page, work, backoff = self.host.pages[rank], ShmWork(self, "setup", self.axis), Backoff()
        while not page.board(index):
            if backoff.pause():
                time.sleep(backoff.sleep_seconds)
                if backoff.slept():
                    self._look(work, [self.ranks.index(rank)], backoff)
        return Board(self.host.mappings[rank], page.board(index), len(self.ranks))

    # -- moving on -------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Do what can be done without waiting; whether that was anything."""
        moved = False
        words = self.words
        while self._queue:
            verb = self._queue[0]
            word, value, members = verb.need
            for member in members:
                if words[member][word] < value:
                    break
            else:
                moved = True
                self._run(verb)
                continue
            break
        for mover in self.movers:
            moved = mover.advance() or moved
        return moved

    def _run(self, verb: Verb) -> None:
        """Let a verb, whose needs are met, do its work up to its next need."""
        try:
            verb.need = next(verb.steps)
        except StopIteration:
            self.executed(verb)
            self._queue.popleft()
            for offset, num_bytes in verb.blocks:
                self._unread.append((verb.number, offset, num_bytes))
                self._unread_bytes += num_bytes
            verb.finish()
        except BaseException as error:  # a verb that stops half-way would leave its peers waiting without a word
            if not self.host.failed:
                self.host.give_up(str(error) or type(error).__name__, self.host.rank)
            raise

    def complete(self, work: ShmWork, over: Callable[[], bool]) -> None:
        """Return when it is ``over``; ``work`` is what the caller waits for."""
        if self.host.failed:
            self._refuse()
        if self.advance() and over():
            return
        self._stand_still(work, over)

    def _refuse(self) -> None:
        culprit, reason = self.host.page.failure or (-1, "")
        raise RankError(f"rank {self.host.rank} has given up already: {reason}", rank=culprit)

    def _stand_still(self, work: ShmWork, over: Callable[[], bool]) -> None:
        """Move on what can be moved until it is ``over``; ``work`` is what the caller waits for."""
        backoff, page, told = Backoff(), self.host.page, False
        try:
            while not over():
                if self.advance():
                    backoff.restart()
                elif backoff.pause():
                    if not told:
                        page.doing, told = str(work), True
                    if self._sleep(work, backoff) or self.host.advance_others(self):
                        backoff.restart()
                    elif backoff.slept():
                        self._look(work, self._late(work), backoff)
        finally:
            if told:
                page.doing = ""

    def _sleep(self, work: ShmWork, backoff: Backoff) -> bool:
        """Sleep until a late peer counts something; whether this rank moved on instead of sleeping."""
        late, moved = self._late(work), False

        def over() -> bool:
            nonlocal moved
            moved = self.advance()
            return moved

        if late:
            self.host.sleep(self.ranks[late[0]], backoff.sleep_seconds, over)
        return moved

    def _late(self, work: ShmWork) -> Sequence[int]:
        """Who is waited for: by the oldest verb, if ``work`` is a verb, as verbs are done in order."""
        return self._queue[0].late() if self._queue and isinstance(work, Verb) else work.late()

    def _look(self, work: ShmWork, late: Sequence[int], backoff: Backoff) -> None:
        """Raise `RankError` if a peer has ended or given up, or if the time is up."""
        late_ranks = [self.ranks[member] for member in late]
        found = self.host.check(self._peers, late_ranks)
        if found is not None:
            if not self.advance():  # it may have done its part before it ended
                culprit, cause = found
                raise self.host.fail(f"{work}: {cause}", culprit)
        elif backoff.seconds > self.timeout_s:
            waited = f"timed out after {self.timeout_s:g} s"
            seen = "; ".join(f"rank {self.ranks[member]} {self._seen(member)}" for member in late)
            error = self.host.fail(f"{work} {waited}: {seen}", late_ranks[0] if len(late_ranks) == 1 else -1)
            raise error from TimeoutError(waited)

    def _seen(self, member: int) -> str:
        """Reads on after "rank 1 ": what it waits for, or what it called last."""
        doing = self.host.pages[self.ranks[member]].doing
        return f"waits in {doing}" if doing else self.boards[member].last()

    # -- verbs -----------------------------------------------------------------------------------------

    def begin_message(self) -> None:
        """A send or a receive begins."""
        if self.host.failed:
            self._refuse()

    def begin(self, what: str, name: str) -> Verb:
        """The next verb; waits if too much is in flight."""
        if self.host.failed:
            self._refuse()
        self._number += 1
        verb = Verb(self, what, name, self._number)
        if not self._room():
            verb.need = (EXECUTED, self._number - 1, self.others)
            self._stand_still(verb, self._room)
            verb.need = (ANNOUNCED, self._number, self.others)
        return verb

    def _room(self) -> bool:
        """Now and then take back the blocks that all peers have read; whether one more verb may be in flight."""
        if self._number - self._read_by_all <= 4 and self._unread_bytes <= 1 << 20:
            return True
        self._read_by_all = min([words[EXECUTED] for words in self.words])
        while self._unread and self._unread[0][0] <= self._read_by_all:
            _, offset, num_bytes = self._unread.popleft()
            self._unread_bytes -= num_bytes
            self.host.arena.give(offset, num_bytes)
        return self._unread_bytes <= UNREAD_BYTES and self._number - self._read_by_all < VERBS

    def announce(self, verb: Verb, check: int, steps: Steps, extra: int = 0, table: Sequence[int] = ()) -> Verb:
        """Show a verb to the peers; ``steps`` is its work once they have announced theirs. What peers wait for is done first."""
        if self._queue:
            self.advance()
        verb.steps = steps
        self.own.write(verb.record, check, verb.name, verb.location, extra, table)
        self.show(ANNOUNCED, verb.number)
        self._queue.append(verb)
        return verb

    def check(self, verb: Verb, members: Sequence[int]) -> None:
        """Raise if one of ``members`` has called something else in its place."""
        word = verb.record + CHECK
        mine = self.own.words[word]
        for member in members:
            if self.words[member][word] != mine:
                raise self.mismatch(verb, member)

    def mismatch(self, verb: Verb, member: int, why: str = "") -> RankError:
        """The error for a peer that calls something else: it names both calls."""
        mine, other = (board.describe(verb.record) for board in (self.own, self.boards[member]))
        return self.host.fail(
            f"verb {verb.number} over {self.axis} is {mine} on rank {self.host.rank} but {other} on rank "
            f"{self.ranks[member]}{why}; all ranks of an axis must call the same verbs, with fitting sizes, in one order",
            -1,
        )

    def step(self) -> Need:
        """Show that a piece is done; what to yield before the next."""
        self._step += 1
        self.show(STEP, self._step)
        return STEP, self._step, self.others

    def executed(self, verb: Verb) -> None:
        """Show that this rank reads nothing more for ``verb``."""
        if self.own.words[EXECUTED] != verb.number:
            self.show(EXECUTED, verb.number)

    def show(self, word: int, value: int) -> None:
        """Count on this rank's board: what was written before is then seen by whoever sees the count."""
        fence = self.host.fence
        fence.acquire()
        fence.release()
        self.own.words[word] = value
        fence.acquire()
        fence.release()
        for words in self._peer_pages:
            if words[SLEEPS] == self._sleeps_on_me:
                self.host.ring()
                break

    def released(self, verb: Verb) -> Steps:
        """The last step: the caller may change its tensor when no peer reads it any more."""
        verb.arrived = True
        if verb.direct:
            self.executed(verb)
            yield EXECUTED, verb.number, self.others

    # -- memory ----------------------------------------------------------------------------------------

    def direct(self, tensor: Tensor) -> int:
        """The location of a tensor that lies in the arena and is worth reading in place, else 0."""
        return self.place(tensor) if tensor.nbytes > COPY_BYTES else 0

    def place(self, tensor: Tensor) -> int:
        """The location of a tensor that lies in the arena, to be read in place, else 0."""
        offset = self.host.arena.offset_of(tensor)
        return 0 if offset is None else offset << 1 | 1

    def block(self, verb: Verb, piece: int, like: Tensor, count: int) -> Tensor:
        """This rank's block for ``count`` elements of a piece of ``verb``: two blocks take turns."""
        num_bytes = count * like.element_size()
        if piece == len(verb.blocks) < 2:
            verb.blocks.append((self.host.arena.take(num_bytes), num_bytes))
        offset = verb.blocks[piece & 1][0]
        if piece == 0:
            verb.location = offset << 1
        elif piece == 1:
            self.own.words[verb.record + SECOND] = offset << 1
        return self.host.arena.view(offset, count, like.dtype)

    def part(self, member: int, verb: Verb, piece: int, like: Tensor, count: int, whole: int, block: int = 0) -> Tensor:
        """``count`` elements of a member's tensor, in the arena: in the tensor itself, where they begin at element
        ``whole``, or in the block that holds the piece, where they begin at element ``block``.
        """
        words, record, item = self.words[member], verb.record, like.element_size()
        location = words[record + FIRST]
        if location & 1:
            offset = (location >> 1) + whole * item
        else:
            offset = ((words[record + SECOND] if piece & 1 else location) >> 1) + block * item
        return self.boards[member].mapping.view(offset, count, like.dtype)

    def is_direct(self, member: int, verb: Verb) -> bool:
        """Whether a member's own tensor is read, and not a copy."""
        return bool(self.words[member][verb.record + FIRST] & 1)

    def all_direct(self, verb: Verb) -> bool:
        """No rank's tensor goes through copies, so there is one piece."""
        word = verb.record + FIRST
        return all(words[word] & 1 for words in self.words)

    def any_direct(self, verb: Verb) -> bool:
        """Some rank's tensor is read itself."""
        word = verb.record + FIRST
        return any(words[word] & 1 for words in self.words)

    def copy(self, target: Tensor, source: Tensor) -> None:
        copy_bytes(target, source)
        self.moved_bytes += 2 * target.nbytes
