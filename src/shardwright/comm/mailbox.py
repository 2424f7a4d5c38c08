"""Messages between two ranks of an axis: `send` copies into the sender's arena, `receive` copies out of it.

Messages from one rank to another are numbered and are received in order. The sender counts *posted*, the receiver counts
*consumed*, and then the sender takes the memory back. Two ranks that first send and then receive never block each other.
"""

from __future__ import annotations

import weakref
from collections import deque

from torch import Tensor

from shardwright.comm.board import CHECK, FIRST, MAILS, consumed, decode, encode, posted
from shardwright.comm.inflight import InFlight, ShmWork

MAILBOX_BYTES = 64 << 20
"""Sends are copied at once while less than this is under way to the peer; one message of any size always is."""


class Message(ShmWork):
    """A send or a receive of ``tensor`` (flat) to or from the member ``peer`` of the axis."""

    def __init__(self, flight: InFlight, what: str, name: str, peer: int, tensor: Tensor) -> None:
        super().__init__(flight, what, name)
        self.peer, self.tensor = peer, tensor
        self.number = 0  # once posted
        self.offset = 0
        self.direct = False  # the receiver reads the tensor itself

    def late(self) -> tuple[int, ...]:
        return (self.peer,)


class Mailboxes:
    """This rank's sends and receives on one axis."""

    def __init__(self, flight: InFlight) -> None:
        self._flight: InFlight = weakref.proxy(flight)  # which holds this object: without cycles all goes at once
        self._size = len(flight.ranks)
        self._waiting: dict[int, deque[Message]] = {}  # sends that have no room yet
        self._posted: dict[int, deque[Message]] = {}  # sends that the peer has yet to consume
        self._wanted: dict[int, deque[Message]] = {}  # receives
        self._numbers: dict[int, int] = {}
        self._consumed: dict[int, int] = {}

    def send(self, message: Message) -> None:
        """Post a message, now if there is room."""
        self._begin()
        self._waiting.setdefault(message.peer, deque()).append(message)
        self._post(message.peer)

    def receive(self, message: Message) -> None:
        """Expect a message; it is taken in a wait."""
        self._begin()
        self._wanted.setdefault(message.peer, deque()).append(message)

    def _begin(self) -> None:
        self._flight.begin_message()
        if self not in self._flight.movers:
            self._flight.movers.append(self)

    def advance(self) -> bool:
        """Take what has come and post what there is room for; whether that was anything."""
        moved = False
        for peer, messages in self._wanted.items():
            while messages and self._arrived(peer):
                self._take(messages.popleft())
                moved = True
        for peer, messages in self._waiting.items():
            moved = bool(messages and self._post(peer)) or moved
        for peer, messages in self._posted.items():
            moved = bool(messages and self._reclaim(peer)) or moved
        return moved

    # -- sending ---------------------------------------------------------------------------------------

    def _post(self, peer: int) -> bool:
        """Post the messages to ``peer`` for which there is room; whether that was any."""
        waiting, moved = self._waiting[peer], self._reclaim(peer)
        under_way = self._posted.setdefault(peer, deque())
        while waiting:
            num_bytes = waiting[0].tensor.nbytes + sum(message.tensor.nbytes for message in under_way)
            if len(under_way) >= MAILS or (under_way and num_bytes > MAILBOX_BYTES):
                break
            message = waiting.popleft()
            self._write(message)
            under_way.append(message)
            moved = True
            if not message.direct:
                message.finish()
        return moved

    def _write(self, message: Message) -> None:
        flight, tensor = self._flight, message.tensor
        location = flight.direct(tensor)
        message.direct = bool(location)
        if not location:
            message.offset = flight.host.arena.take(tensor.nbytes)
            location = message.offset << 1
            flight.copy(flight.host.arena.view(message.offset, tensor.numel(), tensor.dtype), tensor)
        message.number = self._numbers[message.peer] = self._numbers.get(message.peer, 0) + 1
        record = flight.own.mail(message.peer, message.number)
        flight.own.write(record, encode("send", 0, tensor.dtype, tensor.numel()), message.name, location)
        flight.show(posted(message.peer), message.number)

    def _reclaim(self, peer: int) -> bool:
        """Take back the memory of consumed messages; whether there were any."""
        under_way = self._posted.get(peer)
        if not under_way:
            return False
        flight = self._flight
        last = flight.words[peer][consumed(flight.rank, self._size)]
        moved = False
        while under_way and under_way[0].number <= last:
            message = under_way.popleft()
            if message.direct:
                message.finish()
            else:
                flight.host.arena.give(message.offset, message.tensor.nbytes)
            moved = True
        return moved

    # -- receiving -------------------------------------------------------------------------------------

    def _arrived(self, peer: int) -> bool:
        flight = self._flight
        return flight.words[peer][posted(flight.rank)] > self._consumed.get(peer, 0)

    def _take(self, message: Message) -> None:
        flight, peer, tensor = self._flight, message.peer, message.tensor
        number = self._consumed.get(peer, 0) + 1
        board = flight.boards[peer]
        record = board.mail(flight.rank, number)
        expected = encode("send", 0, tensor.dtype, tensor.numel())
        if board.words[record + CHECK] != expected:
            raise flight.host.fail(
                f"{message}: message {number} from rank {flight.ranks[peer]} is {board.describe(record)}, expected "
                f"{decode(expected)} for {message.name!r}; sends and receives must match in order, size and dtype",
                -1,
            )
        flight.copy(tensor, board.mapping.view(board.words[record + FIRST] >> 1, tensor.numel(), tensor.dtype))
        self._consumed[peer] = number
        flight.show(consumed(peer, self._size), number)
        message.finish()
