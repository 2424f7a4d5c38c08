"""`DistComm`: the verbs over ``torch.distributed``, gloo on CPU and NCCL on CUDA.

gloo's own reduce-scatter takes twice the time of an all-reduce, and its all-gather three times that of the sends it is made
of. On gloo a reduce-scatter is therefore an all-to-all and a sum in rank order (as in `comm.shm`), and an all-gather a send
to and a receive from every peer, unless it is small. The bytes that a rank sends are the same: (N-1)/N of the whole buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.base import AllOf, Comm, ReduceOp, Work
from shardwright.comm.solo import SoloComm
from shardwright.errors import RankError

SMALL_BYTES = 64 << 10
"""Below, one call costs less than a message to every peer."""
_GATHER_TAG = 1
"""Of the messages that gathers are made of, so that no send or receive of a caller takes one of them."""
_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


class DistWork(Work):
    """A ``torch.distributed`` work object with the verb's name for its errors. ``tells``: it knows when it is over."""

    def __init__(self, work: dist.Work, what: str, *, tells: bool = False) -> None:
        self._work, self._what, self._tells, self._done = work, what, tells, False
        self._when_waited: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        return self._done or (self._tells and self._work.is_completed())  # gloo's sends and receives tell by wait alone

    def wait(self) -> None:
        if self._done:  # a second wait for one of gloo's sends would wait for another send
            return
        try:
            self._work.wait()
            self._done = True
        except RuntimeError as error:  # gloo and NCCL report lost peers and time-outs as RuntimeError
            raise _peer_error(self._what, error) from error
        while self._when_waited:
            self._when_waited.pop()()

    def on_done(self, callback: Callable[[], None]) -> None:
        try:
            future = self._work.get_future()
        except RuntimeError:  # gloo's reduce-scatter does not tell
            self._when_waited.append(callback)
        else:
            future.then(lambda _: callback())


class _SumOfRows(Work):
    """Reduces the rows (N, ...) that ``work`` brings into ``output`` (...), in rank order."""

    def __init__(self, work: Work, rows: Tensor, output: Tensor, op: ReduceOp) -> None:
        self._work, self._rows, self._output, self._op = work, rows, output, op
        self._waited = False

    @property
    def done(self) -> bool:
        return self._waited or self._work.done

    def wait(self) -> None:
        if self._waited:
            return
        self._work.wait()
        first, *others = self._rows.unbind()
        self._output.copy_(first)
        for row in others:
            if self._op == "max":
                torch.maximum(self._output, row, out=self._output)
            else:
                self._output.add_(row)
        if self._op == "avg":
            self._output.div_(len(self._rows))
        self._waited = True

    def on_done(self, callback: Callable[[], None]) -> None:
        self._work.on_done(callback)


class DistComm(Comm):
    """One axis backed by a process group. ``group`` of None is the world. ``composed``: on gloo, gathers and
    reduce-scatters made of faster verbs instead of its own.
    """

    def __init__(
        self, axis: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None, *, composed: bool = True
    ) -> None:
        self.axis, self.ranks, self.group = axis, ranks, group
        self.rank = ranks.index(dist.get_rank())
        self._composed = composed and dist.get_backend(group) == "gloo" and len(ranks) > 1

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return self._start("all_reduce", name, dist.all_reduce, tensor, _OPS[op])

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        if not self._composed:
            return self._start("reduce_scatter", name, dist.reduce_scatter_single, output, tensor, _OPS[op])
        rows = torch.empty((self.size, *output.shape), dtype=tensor.dtype)
        work = self._start("reduce_scatter", name, dist.all_to_all_single, rows.view(tensor.shape), tensor)
        return _SumOfRows(work, rows, output, op)

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        if not self._composed or output.nbytes < SMALL_BYTES:
            return self._start("all_gather", name, dist.all_gather_single, output, tensor)
        rows = output.view(self.size, *tensor.shape)
        works: list[DistWork] = []
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            works.append(self._message("all_gather", dist.irecv, rows[source], source, name, _GATHER_TAG))
            works.append(self._message("all_gather", dist.isend, tensor, to, name, _GATHER_TAG))
        if rows[self.rank].data_ptr() != tensor.data_ptr():
            rows[self.rank].copy_(tensor)
        return AllOf(works)

    def _message(
        self, verb: str, function: Callable[..., Any], tensor: Tensor, peer: int, name: str, tag: int = 0
    ) -> DistWork:
        what = f"{verb} of {name!r} over {self.axis}"
        try:
            return DistWork(function(tensor, self.ranks[peer], self.group, tag), what)
        except RuntimeError as error:
            raise _peer_error(what, error) from error

    def all_to_all_start(
        self, output: Tensor, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Work:
        sizes = (list(receive_sizes), list(send_sizes))
        return self._start("all_to_all", name, dist.all_to_all_single, output, tensor, *sizes)

    def broadcast(self, tensor: Tensor, root: int = 0, *, name: str) -> Tensor:
        self._start("broadcast", name, dist.broadcast, tensor, self.ranks[root]).wait()
        return tensor

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        return self._message("send", dist.isend, tensor, to, name)

    def receive(self, output: Tensor, source: int, *, name: str) -> Work:
        return self._message("receive", dist.irecv, output, source, name)

    def barrier(self, *, name: str = "barrier") -> None:
        self._start("barrier", name, dist.barrier).wait()

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise _peer_error(f"gather_objects over {self.axis}", error) from error
        return values

    def _start(self, verb: str, name: str, function: Callable[..., Any], *args: Any) -> Work:
        what = f"{verb} of {name!r} over {self.axis}"
        try:
            work = function(*args, group=self.group, async_op=True)
        except RuntimeError as error:
            raise _peer_error(what, error) from error
        return self._started(verb, name, work)

    def _started(self, verb: str, name: str, work: dist.Work | None) -> Work:
        assert work is not None, f"{verb} of {name!r}: this rank is not in the group of {self.axis}"
        return DistWork(work, f"{verb} of {name!r} over {self.axis}", tells=True)


def make_groups(groups: Sequence[tuple[int, ...]], timeout_s: float) -> dist.ProcessGroup | None:
    """Create the process groups of one axis (every rank calls this for every axis, in one order) and return this rank's."""
    mine: dist.ProcessGroup | None = None
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
        if dist.get_rank() in ranks:
            mine = group
    return mine


def dist_comm(axis: str, groups: Sequence[tuple[int, ...]], timeout_s: float) -> Comm:
    """The communicator of this rank on ``axis``; the world's own group is used when the axis covers all ranks.

    All ranks must call, also one that is alone in its group: PyTorch counts groups to tell them apart, so a rank that left
    one out would look for its peers' next group under another name, and wait.
    """
    rank = dist.get_rank()
    ranks = next(group for group in groups if rank in group)
    covers_all = ranks == tuple(range(dist.get_world_size()))
    group = None if covers_all else make_groups(groups, timeout_s)
    return SoloComm(axis, rank) if len(ranks) == 1 else DistComm(axis, ranks, group)


def _peer_error(what: str, error: RuntimeError) -> RankError:
    rank = dist.get_rank() if dist.is_initialized() else -1
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RankError(f"rank {rank}: {what} failed, a peer is gone or too late: {first_line}", rank=-1)


def device_of_backend() -> torch.device:
    """The device whose tensors the initialised process group moves."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
