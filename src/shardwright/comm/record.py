"""`RecordComm` wraps any `Comm` and writes the `Ledger`: what was sent, how long it took, how long the caller waited.

Beside what the strategy sends the recorder counts what memory really moved, as far as a transport tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwright.comm.base import Comm, ReduceOp, Work
from shardwright.comm.flight import FlightRecorder
from shardwright.core.dispatch import DispatchPlan
from shardwright.core.ledger import Ledger, LedgerEntry, Wait, ring_bytes

_T = TypeVar("_T")


class Recorder:
    """The ledger that all axes of one rank write into, and the phase that the step is in."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.flight: FlightRecorder | None = None
        """Where every verb is written too, if anywhere."""
        self.waits: list[Wait] | None = None
        """Each wait as it ends, if somebody keeps them."""
        self._phase = "setup"
        self._transports: dict[str, Comm] = {}
        self._seen: dict[str, int] = {}

    def watch(self, axis: str, transport: Comm) -> None:
        """Count what ``transport`` moves in memory under ``axis``, from now on."""
        moved = transport.moved_bytes
        if moved is not None:
            self._transports[axis], self._seen[axis] = transport, moved

    def _count_moved(self) -> None:
        for axis, transport in self._transports.items():
            now = transport.moved_bytes or 0
            self.ledger.moved_bytes[axis] = self.ledger.moved_bytes.get(axis, 0) + now - self._seen[axis]
            self._seen[axis] = now

    @property
    def current(self) -> str:
        """The phase that the step is in."""
        return self._phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Entries made inside are booked under this phase."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def take(self) -> Ledger:
        """The ledger so far; recording goes on in a new one."""
        self._count_moved()
        ledger, self.ledger = self.ledger, Ledger()
        return ledger

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Entries made inside are in no ledger (looking at state, not a part of the step)."""
        self._count_moved()
        kept = self.ledger
        self.ledger = Ledger()
        try:
            yield
        finally:
            self._count_moved()
            self.ledger = kept

    def book_dispatch(self, layer: str, plan: DispatchPlan) -> None:
        """Keep how a layer's tokens went to their experts; a forward pass that is repeated, or of evaluation, is not kept."""
        if self._phase == "F":
            self.ledger.dispatches.setdefault(layer, []).append(plan)

    def begin(self, verb: str, axis: str, tensor: str, num_bytes: int, peer: int = -1) -> int:
        """A verb begins; its count in the flight record."""
        return self.flight.begin(axis, verb, tensor, self._phase, num_bytes, peer) if self.flight is not None else 0

    def book(self, verb: str, axis: str, tensor: str, num_bytes: int) -> LedgerEntry:
        return self.ledger.add(self._phase, verb, axis, tensor, num_bytes)


class _RecordedWork(Work):
    def __init__(self, work: Work, entry: LedgerEntry, recorder: Recorder, count: int) -> None:
        self._work, self._entry, self._recorder, self._count = work, entry, recorder, count
        self._start = time.perf_counter()

    def wait(self) -> None:
        self._timed(self._work.wait)

    def arrive(self) -> None:
        self._timed(self._work.arrive)

    def _timed(self, wait: Callable[[], None]) -> None:
        before = time.perf_counter()
        flight = self._recorder.flight
        if flight is not None:
            flight.wait(self._count)
        wait()
        if flight is not None:  # not after an error: the record shows what was not done
            flight.end(self._count)
        now = time.perf_counter()
        self._entry.exposed_seconds += now - before
        self._entry.seconds += now - self._start
        if (waits := self._recorder.waits) is not None:
            waits.append(Wait(self._entry.verb, self._entry.axis, self._entry.tensor, self._start, before, now))

    @property
    def done(self) -> bool:
        return self._work.done

    def on_done(self, callback: Callable[[], None]) -> None:
        self._work.on_done(callback)


class RecordComm(Comm):
    """``inner`` with every verb booked in ``recorder``; bytes follow from the real call's tensor."""

    def __init__(self, inner: Comm, recorder: Recorder) -> None:
        self.inner, self.recorder = inner, recorder
        self.axis, self.rank, self.ranks = inner.axis, inner.rank, inner.ranks

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return self._start("all_reduce", name, tensor, lambda: self.inner.all_reduce_start(tensor, op, name=name))

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        inner = self.inner
        return self._start("reduce_scatter", name, tensor, lambda: inner.reduce_scatter_start(output, tensor, op, name=name))

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        return self._start("all_gather", name, output, lambda: self.inner.all_gather_start(output, tensor, name=name))

    def all_to_all_start(
        self, output: Tensor, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Work:
        row_bytes = tensor[:1].numel() * tensor.element_size() if tensor.shape[0] else 0
        sent = (sum(send_sizes) - send_sizes[self.rank]) * row_bytes
        entry = self.recorder.book("all_to_all", self.axis, name, sent)
        count = self.recorder.begin("all_to_all", self.axis, name, 0)  # ranks may send different amounts
        work = self.inner.all_to_all_start(output, tensor, send_sizes, receive_sizes, name=name)
        return _RecordedWork(work, entry, self.recorder, count)

    def broadcast(self, tensor: Tensor, root: int = 0, *, name: str) -> Tensor:
        entry = self._book("broadcast", name, tensor)
        return self._timed(entry, lambda: self.inner.broadcast(tensor, root, name=name), tensor.nbytes)

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        return self._start("send", name, tensor, lambda: self.inner.send(tensor, to, name=name), self.ranks[to])

    def receive(self, output: Tensor, source: int, *, name: str) -> Work:
        peer = self.ranks[source]
        return self._start("recv", name, output, lambda: self.inner.receive(output, source, name=name), peer)

    def barrier(self, *, name: str = "barrier") -> None:
        entry = self.recorder.book("barrier", self.axis, name, 0)
        self._timed(entry, lambda: self.inner.barrier(name=name), 0)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._stand("gather_objects", "objects", lambda: self.inner.gather_objects(value), 0)

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.empty(size, dtype, device)

    def side_by_side(self, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor] | None:
        return self.inner.side_by_side(size, dtype, device)

    @property
    def moved_bytes(self) -> int | None:
        return self.inner.moved_bytes

    def _book(self, verb: str, name: str, full: Tensor) -> LedgerEntry:
        sent = ring_bytes(verb, full.numel(), full.element_size(), self.size)
        return self.recorder.book(verb, self.axis, name, sent)

    def _start(self, verb: str, name: str, full: Tensor, call: Callable[[], Work], peer: int = -1) -> Work:
        entry = self._book(verb, name, full)
        count = self.recorder.begin(verb, self.axis, name, full.nbytes, peer)
        return _RecordedWork(call(), entry, self.recorder, count)

    def _timed(self, entry: LedgerEntry, call: Callable[[], _T], num_bytes: int) -> _T:
        start = time.perf_counter()
        result = self._stand(entry.verb, entry.tensor, call, num_bytes)
        end = time.perf_counter()
        entry.seconds += end - start
        entry.exposed_seconds += end - start
        if self.recorder.waits is not None:
            self.recorder.waits.append(Wait(entry.verb, entry.axis, entry.tensor, start, start, end))
        return result

    def _stand(self, verb: str, name: str, call: Callable[[], _T], num_bytes: int) -> _T:
        """A verb that the caller stands still for."""
        count, flight = self.recorder.begin(verb, self.axis, name, num_bytes), self.recorder.flight
        if flight is not None:
            flight.wait(count)
        result = call()
        if flight is not None:
            flight.end(count)
        return result
