"""`ShmComm`: the verbs between CPU ranks of one host, over memory that they share. No sockets, no threads.

A verb goes like this. *Start* writes a record (what is called, where this rank's tensor lies) and counts *announced*: a
tensor in the arena (`ShmComm.empty`) is read where it is, of any other the first piece is copied into the arena. *Wait*
does the work when all peers have announced: each rank reads what it needs from its peers' arenas. Verbs are done in the
order in which they were started, whichever is waited for, and a wait also moves on what is in flight on the rank's other
communicators: a peer may need it first. Starting a verb moves on what can be done without waiting.

Sums are made in rank order and in the tensor's dtype, so that results are the same on all ranks and do not depend on sizes
or pieces; with two ranks they are those of gloo. A maximum with a NaN is NaN (in gloo that depends on the order).

``send`` copies into the arena and never waits; beyond `MAILBOX_BYTES` or `MAILS` messages under way to one peer the copy
is made later, in any wait of this rank. Such a send, like one of a tensor in the arena, ends only when the peer receives:
wait for sends after the receives that they answer.

One thread at a time may use the communicators of a rank. After a `RankError` none of them can be used any more.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.arena import PAGE
from shardwright.comm.base import Comm, ReduceOp, Work
from shardwright.comm.board import EXTRA, OP_NAMES, encode
from shardwright.comm.host import ShmHost
from shardwright.comm.inflight import InFlight, Steps, Verb
from shardwright.comm.mailbox import Mailboxes, Message
from shardwright.comm.window import LEAST_BYTES, Window

SMALL_BYTES = 64 << 10
"""Up to this size one copy takes less time than to leave something out."""
ONE_SHOT_BYTES = 512 << 10
"""All-reduces of copies up to this size, divided by the number of peers: every rank adds up everything. Others: its share,
which it gives to the others."""
PIECE_BYTES = 4 << 20
"""Of a tensor outside the arena, as much as this is under way at a time."""
BLOCK_BYTES = 512 << 10
"""Reductions work on this much at a time, so that it stays in the core's cache."""

_COMBINE: Mapping[str, Callable[..., Tensor]] = {"sum": torch.add, "avg": torch.add, "max": torch.maximum}
_OP_CODES = {name: code for code, name in enumerate(OP_NAMES)}


class ShmComm(Comm):
    """The verbs of one axis whose ranks share memory. ``index`` tells the communicators of a host apart: the same on all.

    ``moved_bytes`` counts what this rank has read and written in memory for verbs. Collective over the axis.
    """

    def __init__(self, axis: str, ranks: tuple[int, ...], host: ShmHost, index: int, timeout_s: float) -> None:
        self.axis, self.ranks, self.rank = axis, ranks, ranks.index(host.rank)
        self._host = host
        self._flight = InFlight(axis, ranks, host, index, timeout_s)
        self._mail = Mailboxes(self._flight)
        self._one_shot_bytes = ONE_SHOT_BYTES // (len(ranks) - 1)
        self._windows: dict[int, Window] = {}

    @property
    def note(self) -> str:
        """How the memory is held, for logs."""
        return self._host.note

    @property
    def moved_bytes(self) -> int:
        return self._flight.moved_bytes

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer in this rank's arena: peers read it in place. It may differ between ranks."""
        return self._host.arena.empty(size, dtype) if device.type == "cpu" else super().empty(size, dtype, device)

    def side_by_side(self, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor] | None:
        num_bytes = size * dtype.itemsize
        if device.type != "cpu" or num_bytes < LEAST_BYTES:
            return None
        arena, shift = self._host.arena, self.rank * num_bytes % PAGE
        own = arena.empty(num_bytes + shift, torch.uint8)[shift:].view(dtype)
        offsets = self.gather_objects(arena.offset_of(own))
        places = [(self._host.mappings[rank], offset) for rank, offset in zip(self.ranks, offsets, strict=True)]
        window = None
        with contextlib.suppress(OSError):
            window = Window(num_bytes, places)
        made = self.gather_objects(window is not None)
        if window is None or not all(made):
            return None
        memory = memoryview(window.memory)
        weakref.finalize(memory, self._windows.pop, window.address, None).atexit = False
        self._windows[window.address] = window
        return own, torch.frombuffer(memory, dtype=dtype, count=size * self.size)

    # -- reductions ------------------------------------------------------------------------------------

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        flat = _flat(tensor, name, op)
        verb = self._flight.begin("all_reduce", name)
        verb.location = self._flight.direct(flat)
        if not verb.direct:
            if flat.nbytes <= self._one_shot_bytes:
                self._stage(verb, 0, flat)
            else:
                self._stage_shares(verb, 0, flat[: _length(flat)])
        check = encode("all_reduce", _OP_CODES[op], flat.dtype, flat.numel())
        return self._flight.announce(verb, check, self._all_reduce(verb, flat, op))

    def _all_reduce(self, verb: Verb, flat: Tensor, op: ReduceOp) -> Steps:
        """Small copies: everybody adds up everything. Else of every piece each rank adds up its share, where nobody else
        reads or writes, and gives it to all others.
        """
        flight = self._flight
        flight.check(verb, flight.others)
        if flat.nbytes <= self._one_shot_bytes and not flight.any_direct(verb):
            parts = [flight.part(k, verb, 0, flat, flat.numel(), 0) for k in range(self.size)]
            flight.moved_bytes += _reduce(op, parts, flat)
            return
        length = flat.numel() if flight.all_direct(verb) else _length(flat)
        pieces = flat.split(length)
        for index, piece in enumerate(pieces):
            if index:
                yield flight.step()
                self._fetch_shares(verb, index - 1, pieces[index - 1])
            low, high = _share(self.rank, self.size, piece.numel())
            begin = index * length + low
            parts = [flight.part(k, verb, index, flat, high - low, begin, low) for k in range(self.size)]
            parts[self.rank] = piece[low:high]
            others = [parts[k] for k in flight.others]
            flight.moved_bytes += _reduce(op, parts, parts[self.rank], others)
            if index + 1 < len(pieces) and not verb.direct:
                self._stage_shares(verb, index + 1, pieces[index + 1])
        yield flight.step()
        self._fetch_shares(verb, len(pieces) - 1, pieces[-1])

    def _stage_shares(self, verb: Verb, index: int, piece: Tensor) -> None:
        """Copy what the others will reduce into this rank's block."""
        block = self._flight.block(verb, index, piece, piece.numel())
        for part in _other_shares(self.rank, self.size, piece.numel()):
            self._flight.copy(block[part], piece[part])

    def _fetch_shares(self, verb: Verb, index: int, piece: Tensor) -> None:
        """Copy what the others have reduced from this rank's block; it is in place already where they wrote there."""
        if not verb.direct:
            block = self._flight.block(verb, index, piece, piece.numel())
            for part in _other_shares(self.rank, self.size, piece.numel()):
                self._flight.copy(piece[part], block[part])

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        flat, out = _flat(tensor, name, op), _flat(output, name)
        assert flat.numel() == out.numel() * self.size and flat.dtype == out.dtype, (name, tensor.shape, output.shape)
        verb = self._flight.begin("reduce_scatter", name)
        rows = flat.view(self.size, out.numel())
        verb.location = self._flight.direct(flat)
        if not verb.direct:
            length = _length(out, self.size)
            self._stage_rows(verb, 0, rows if out.numel() <= length else rows[:, :length])
        check = encode("reduce_scatter", _OP_CODES[op], flat.dtype, flat.numel())
        return self._flight.announce(verb, check, self._reduce_scatter(verb, out, rows, op))

    def _reduce_scatter(self, verb: Verb, out: Tensor, rows: Tensor, op: ReduceOp) -> Steps:
        """Each rank adds up its row of everybody's tensor."""
        flight, width = self._flight, out.numel()
        flight.check(verb, flight.others)
        length = max(1, width) if flight.all_direct(verb) else _length(out, self.size)
        for index, piece in enumerate(out.split(length)):
            if index:
                yield flight.step()
            begin, count = index * length, piece.numel()
            whole, block = self.rank * width + begin, self.rank * count
            parts = [flight.part(k, verb, index, out, count, whole, block) for k in range(self.size)]
            parts[self.rank] = rows[self.rank] if count == width else rows[self.rank][begin : begin + count]
            flight.moved_bytes += _reduce(op, parts, piece)
            if begin + length < width and not verb.direct:
                self._stage_rows(verb, index + 1, rows[:, begin + length : begin + 2 * length])
        yield from flight.released(verb)

    def _stage_rows(self, verb: Verb, index: int, rows: Tensor) -> None:
        """Copy the rows of the others into this rank's block."""
        block = self._flight.block(verb, index, rows, rows.numel()).view(rows.shape)
        if block.nbytes <= SMALL_BYTES:
            self._flight.copy(block, rows)
            return
        for k in self._flight.others:
            self._flight.copy(block[k], rows[k])

    # -- gathers ---------------------------------------------------------------------------------------

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        own, out = _bytes(tensor, name), _bytes(output, name)
        assert out.numel() == own.numel() * self.size and output.dtype == tensor.dtype, (
            name,
            tensor.shape,
            output.shape,
        )
        verb = self._flight.begin("all_gather", name)
        check = encode("all_gather", 0, tensor.dtype, tensor.numel())
        window = self._windows.get(out.data_ptr())
        if window is not None and window.num_bytes == own.numel():
            verb.location = self._flight.place(own)
            return self._flight.announce(verb, check, self._show(verb, out, own, window))
        target = out[self.rank * own.numel() : (self.rank + 1) * own.numel()]
        verb.location = self._flight.direct(own) or self._flight.direct(target)
        if target.data_ptr() != own.data_ptr():
            self._flight.copy(target, own)  # at once: peers may read it there
        if not verb.direct:
            self._stage(verb, 0, own)
        return self._flight.announce(verb, check, self._all_gather(verb, out, own))

    def _show(self, verb: Verb, out: Tensor, own: Tensor, window: Window) -> Steps:
        """Everybody's tensor is there already but for the borders between them."""
        flight, width = self._flight, own.numel()
        flight.check(verb, flight.others)
        for border in window.borders:
            begin, count = border.begin - border.member * width, border.end - border.begin
            flight.copy(out[border.begin : border.end], flight.part(border.member, verb, 0, own, count, begin))
        yield from flight.released(verb)

    def _all_gather(self, verb: Verb, out: Tensor, own: Tensor) -> Steps:
        """Each rank copies everybody's tensor."""
        flight, width = self._flight, own.numel()
        flight.check(verb, flight.others)
        length = max(1, width) if flight.all_direct(verb) else PIECE_BYTES
        for index, begin in enumerate(range(0, width, length)):
            if index:
                yield flight.step()
            count = min(length, width - begin)
            for k in flight.others:
                first = k * width + begin
                flight.copy(out[first : first + count], flight.part(k, verb, index, own, count, begin))
            if begin + length < width and not verb.direct:
                self._stage(verb, index + 1, own)
        yield from flight.released(verb)

    def broadcast(self, tensor: Tensor, root: int = 0, *, name: str) -> Tensor:
        data = _bytes(tensor, name)
        verb = self._flight.begin("broadcast", name)
        if self.rank == root:
            verb.location = self._flight.direct(data)
            if not verb.direct:
                self._stage(verb, 0, data)
        verb.need = (*verb.need[:2], () if self.rank == root else (root,))
        check = encode("broadcast", root, tensor.dtype, tensor.numel())
        self._flight.announce(verb, check, self._broadcast(verb, data, root)).wait()
        return tensor

    def _broadcast(self, verb: Verb, data: Tensor, root: int) -> Steps:
        """Each rank copies the root's tensor; the root waits for the others only before it overwrites what they read."""
        flight, width, is_root = self._flight, data.numel(), self.rank == root
        waits_for = flight.others if is_root else (root,)
        flight.check(verb, () if is_root else (root,))
        length = max(1, width) if flight.is_direct(root, verb) else PIECE_BYTES
        for index, begin in enumerate(range(0, width, length)):
            if index:
                word, value, _ = flight.step()
                yield word, value, waits_for
            count = min(length, width - begin)
            if not is_root:
                flight.copy(data[begin : begin + count], flight.part(root, verb, index, data, count, begin))
            elif begin + length < width:
                self._stage(verb, index + 1, data)
        yield from flight.released(verb)

    def all_to_all_start(
        self, output: Tensor, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Work:
        data, out = _bytes(tensor, name), _bytes(output, name)
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        begins = list(itertools.accumulate([size * row_bytes for size in send_sizes], initial=0))
        fits = len(send_sizes) == len(receive_sizes) == self.size and begins[-1] == data.numel()
        assert fits, (
            f"{name}: {send_sizes} to send and {receive_sizes} to receive of {tensor.shape} by {self.size} ranks"
        )
        assert send_sizes[self.rank] == receive_sizes[self.rank], f"{name}: rank {self.rank} keeps {send_sizes}"
        outputs = list(out.split_with_sizes([size * row_bytes for size in receive_sizes]))
        verb = self._flight.begin("all_to_all", name)
        verb.location = self._flight.direct(data)
        num_pieces = 1 if verb.direct else self._stage_parcels(verb, 0, data, begins)
        steps = self._all_to_all(verb, data, begins, outputs)
        check = encode("all_to_all", 0, tensor.dtype, 0)
        return self._flight.announce(verb, check, steps, num_pieces, begins)

    def _all_to_all(self, verb: Verb, data: Tensor, begins: list[int], outputs: list[Tensor]) -> Steps:
        """Each rank copies its parcel from everybody's tensor."""
        flight, me, parcel = self._flight, self.rank, _parcel(self.size)
        flight.check(verb, flight.others)
        tables = [board.table(verb.record) for board in flight.boards]
        for k in flight.others:
            sent, expected = tables[k][me + 1] - tables[k][me], outputs[k].numel()
            if sent != expected:
                raise flight.mismatch(verb, k, f" (it sends {sent} bytes, expected {expected})")
        if outputs[me].numel():
            flight.copy(outputs[me], data[begins[me] : begins[me + 1]])
        counts = [flight.words[k][verb.record + EXTRA] for k in range(self.size)]
        for index in range(max(counts)):
            if index:
                yield flight.step()
            for k in flight.others:
                target, place, begin = outputs[k], me * parcel, tables[k][me]
                if counts[k] > 1:
                    target = target[index * parcel : (index + 1) * parcel]
                elif index == 0:
                    place = begin
                else:
                    continue
                if target.numel():
                    flight.copy(target, flight.part(k, verb, index, target, target.numel(), begin, place))
            if index + 1 < counts[me]:
                self._stage_parcels(verb, index + 1, data, begins)
        yield from flight.released(verb)

    def _stage_parcels(self, verb: Verb, index: int, data: Tensor, begins: list[int]) -> int:
        """Copy what goes to the others into this rank's block; returns in how many pieces all of it goes.

        What fits goes at once and lies as in the tensor; of more each rank's parcel has its own part of the block.
        """
        flight, parcel = self._flight, _parcel(self.size)
        if data.numel() <= PIECE_BYTES:
            block = flight.block(verb, 0, data, data.numel())
            before, after = slice(begins[self.rank]), slice(begins[self.rank + 1], None)
            for own in (slice(None),) if data.numel() <= SMALL_BYTES else (before, after):
                flight.copy(block[own], data[own])
            return 1
        block = flight.block(verb, index, data, parcel * self.size)
        for k in flight.others:
            part = data[begins[k] : begins[k + 1]][index * parcel : (index + 1) * parcel]
            flight.copy(block[k * parcel :][: part.numel()], part)
        longest = max(begins[k + 1] - begins[k] for k in flight.others)
        return max(2, -(-longest // parcel))

    def _stage(self, verb: Verb, index: int, flat: Tensor) -> None:
        """Copy a piece of ``flat`` into this rank's block."""
        length = _length(flat)
        piece = flat if flat.numel() <= length else flat[index * length : (index + 1) * length]
        self._flight.copy(self._flight.block(verb, index, piece, piece.numel()), piece)

    # -- neighbours ------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        assert to != self.rank, f"{name}: rank {to} sends to itself"
        message = Message(self._flight, f"send to rank {self.ranks[to]}", name, to, _flat(tensor, name))
        self._mail.send(message)
        return message

    def receive(self, output: Tensor, source: int, *, name: str) -> Work:
        assert source != self.rank, f"{name}: rank {source} receives from itself"
        what = f"receive from rank {self.ranks[source]}"
        message = Message(self._flight, what, name, source, _flat(output, name))
        self._mail.receive(message)
        return message

    # -- control ---------------------------------------------------------------------------------------

    def barrier(self, *, name: str = "barrier") -> None:
        verb = self._flight.begin("barrier", name)
        self._flight.announce(verb, encode("barrier", 0, torch.uint8, 0), self._meet(verb)).wait()

    def _meet(self, verb: Verb) -> Steps:
        self._flight.check(verb, self._flight.others)
        return
        yield

    def gather_objects(self, value: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        verb = self._flight.begin("gather_objects", type(value).__name__)
        self._flight.copy(self._flight.block(verb, 0, data, data.numel()), data)
        values: list[Any] = [value] * self.size
        steps, check = self._gather_objects(verb, values, data), encode("gather_objects", 0, torch.uint8, 0)
        self._flight.announce(verb, check, steps, extra=data.numel()).wait()
        return values

    def _gather_objects(self, verb: Verb, values: list[Any], data: Tensor) -> Steps:
        flight = self._flight
        flight.check(verb, flight.others)
        for k in range(self.size):
            source = flight.part(k, verb, 0, data, flight.words[k][verb.record + EXTRA], 0)
            values[k] = pickle.loads(source.numpy().tobytes())
        return
        yield


def _flat(tensor: Tensor, name: str, op: ReduceOp = "sum") -> Tensor:
    """The elements in one row, without a graph."""
    assert tensor.is_cpu and tensor.is_contiguous(), f"{name}: needs a contiguous tensor on the CPU"
    assert op != "avg" or tensor.is_floating_point(), f"{name}: an average needs a floating-point dtype"
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _bytes(tensor: Tensor, name: str) -> Tensor:
    return _flat(tensor, name).view(torch.uint8)


def _length(flat: Tensor, rows: int = 1) -> int:
    """Elements of each of ``rows`` in a piece."""
    return max(1, PIECE_BYTES // rows // flat.element_size())


def _parcel(size: int) -> int:
    """Bytes for each rank in a piece of an all-to-all."""
    return max(64, PIECE_BYTES // size // 64 * 64)


def _share(rank: int, size: int, count: int) -> tuple[int, int]:
    """Begin and end of a rank's part of ``count`` elements; whole cache lines."""
    step = -(-count // size // 64) * 64 if count >= 64 * size else -(-count // size)
    return min(rank * step, count), min((rank + 1) * step, count)


def _other_shares(rank: int, size: int, count: int) -> list[slice]:
    """All but a rank's own part, without empty ones."""
    low, high = _share(rank, size, count)
    return [part for part in (slice(0, low), slice(high, count)) if part.stop > part.start]


def _reduce(op: ReduceOp, parts: Sequence[Tensor], out: Tensor, copies: Sequence[Tensor] = ()) -> int:
    """``parts``, added in their order, into ``out`` (which may be one of them) and ``copies``; returns bytes moved."""
    block = BLOCK_BYTES // out.element_size()
    scratch = out.new_empty(min(block, out.numel())) if len(parts) > 2 else out
    if out.numel() <= block:
        _reduce_block(op, parts, out, copies, scratch)
    else:
        for target, *tensors in zip(*(tensor.split(block) for tensor in (out, *parts, *copies)), strict=True):
            if target.numel() < block:
                scratch = scratch[: target.numel()]
            _reduce_block(op, tensors[: len(parts)], target, tensors[len(parts) :], scratch)
    return out.nbytes * (len(parts) + 1 + len(copies))


def _reduce_block(
    op: ReduceOp, parts: Sequence[Tensor], out: Tensor, copies: Sequence[Tensor], scratch: Tensor
) -> None:
    combine, total = _COMBINE[op], parts[0]
    for part in parts[1:-1]:
        total = combine(total, part, out=scratch)
    combine(total, parts[-1], out=out)
    if op == "avg":
        out.div_(len(parts))
    for copy in copies:
        copy.copy_(out)
