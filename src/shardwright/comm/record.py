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
from shardwright.core.dispatch import DispatchPlan
from shardwright.core.ledger import Ledger, LedgerEntry, ring_bytes

_T = TypeVar("_T")


class Recorder:
    """The ledger that all axes of one rank write into, and the phase that the step is in."""

    def __init__(self) -> None:
        self.ledger = Ledger()
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

    def book(self, verb: str, axis: str, tensor: str, num_bytes: int) -> LedgerEntry:
        return self.ledger.add(self._phase, verb, axis, tensor, num_bytes)


class _RecordedWork(Work):
    def __init__(self, work: Work, entry: LedgerEntry) -> None:
        self._work, self._entry, self._start = work, entry, time.perf_counter()

    def wait(self) -> None:
        before = time.perf_counter()
        self._work.wait()
        now = time.perf_counter()
        self._entry.exposed_seconds += now - before
        self._entry.seconds += now - self._start

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
        entry = self._book("all_reduce", name, tensor)
        return _RecordedWork(self.inner.all_reduce_start(tensor, op, name=name), entry)

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        entry = self._book("reduce_scatter", name, tensor)
        return _RecordedWork(self.inner.reduce_scatter_start(output, tensor, op, name=name), entry)

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        entry = self._book("all_gather", name, output)
        return _RecordedWork(self.inner.all_gather_start(output, tensor, name=name), entry)

    def all_to_all_start(
        self, output: Tensor, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Work:
        row_bytes = tensor[:1].numel() * tensor.element_size() if tensor.shape[0] else 0
        sent = (sum(send_sizes) - send_sizes[self.rank]) * row_bytes
        entry = self.recorder.book("all_to_all", self.axis, name, sent)
        return _RecordedWork(self.inner.all_to_all_start(output, tensor, send_sizes, receive_sizes, name=name), entry)

    def broadcast(self, tensor: Tensor, root: int = 0, *, name: str) -> Tensor:
        entry = self._book("broadcast", name, tensor)
        return self._timed(entry, lambda: self.inner.broadcast(tensor, root, name=name))

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        return _RecordedWork(self.inner.send(tensor, to, name=name), self._book("send", name, tensor))

    def receive(self, output: Tensor, source: int, *, name: str) -> Work:
        return _RecordedWork(self.inner.receive(output, source, name=name), self._book("recv", name, output))

    def barrier(self, *, name: str = "barrier") -> None:
        entry = self.recorder.book("barrier", self.axis, name, 0)
        self._timed(entry, lambda: self.inner.barrier(name=name))

    def gather_objects(self, value: Any) -> list[Any]:
        return self.inner.gather_objects(value)

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.empty(size, dtype, device)

    @property
    def moved_bytes(self) -> int | None:
        return self.inner.moved_bytes

    def _book(self, verb: str, name: str, full: Tensor) -> LedgerEntry:
        sent = ring_bytes(verb, full.numel(), full.element_size(), self.size)
        return self.recorder.book(verb, self.axis, name, sent)

    def _timed(self, entry: LedgerEntry, call: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
        entry.seconds += seconds
        entry.exposed_seconds += seconds
        return result
