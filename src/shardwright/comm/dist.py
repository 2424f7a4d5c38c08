"""`DistComm`: the verbs over ``torch.distributed``, gloo on CPU and NCCL on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.base import Comm, ReduceOp, Work
from shardwright.errors import RankError

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


class DistWork(Work):
    """A ``torch.distributed`` work object with the verb's name for its errors."""

    def __init__(self, work: dist.Work, what: str) -> None:
        self._work, self._what, self._done = work, what, False
        self._when_waited: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        return self._done  # gloo tells of a send or a receive in no other way than by wait

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


class DistComm(Comm):
    """One axis backed by a process group. ``group`` of None is the world."""

    def __init__(self, axis: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        self.axis, self.ranks, self.group = axis, ranks, group
        self.rank = ranks.index(dist.get_rank())

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return self._start("all_reduce", name, dist.all_reduce, tensor, _OPS[op])

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return self._start("reduce_scatter", name, dist.reduce_scatter_single, output, tensor, _OPS[op])

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        return self._start("all_gather", name, dist.all_gather_single, output, tensor)

    def all_to_all(
        self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Tensor:
        output = tensor.new_empty((sum(receive_sizes), *tensor.shape[1:]))
        sizes = (list(receive_sizes), list(send_sizes))
        self._start("all_to_all", name, dist.all_to_all_single, output, tensor.contiguous(), *sizes).wait()
        return output

    def broadcast(self, tensor: Tensor, root: int = 0, *, name: str) -> Tensor:
        self._start("broadcast", name, dist.broadcast, tensor, self.ranks[root]).wait()
        return tensor

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        return self._started("send", name, dist.isend(tensor, self.ranks[to], self.group))

    def receive(self, output: Tensor, source: int, *, name: str) -> Work:
        return self._started("receive", name, dist.irecv(output, self.ranks[source], self.group))

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
        return DistWork(work, f"{verb} of {name!r} over {self.axis}")


def make_groups(groups: Sequence[tuple[int, ...]], timeout_s: float) -> dist.ProcessGroup | None:
    """Create the process groups of one axis (every rank calls this for every axis, in one order) and return this rank's."""
    mine: dist.ProcessGroup | None = None
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
        if dist.get_rank() in ranks:
            mine = group
    return mine


def dist_comm(axis: str, groups: Sequence[tuple[int, ...]], timeout_s: float) -> DistComm:
    """The communicator of this rank on ``axis``; the world's own group is used when the axis covers all ranks."""
    rank = dist.get_rank()
    ranks = next(group for group in groups if rank in group)
    covers_all = ranks == tuple(range(dist.get_world_size()))
    return DistComm(axis, ranks, None if covers_all else make_groups(groups, timeout_s))


def _peer_error(what: str, error: RuntimeError) -> RankError:
    rank = dist.get_rank() if dist.is_initialized() else -1
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RankError(f"rank {rank}: {what} failed, a peer is gone or too late: {first_line}", rank=-1)


def device_of_backend() -> torch.device:
    """The device whose tensors the initialised process group moves."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
