"""`Comm`: the verbs of one axis. The only way bytes move between ranks.

Every verb takes the tensor's ``name`` for the ledger and for error messages. Reductions work in place on
contiguous tensors. ``*_start`` returns a :class:`Work`; ``wait`` returns the seconds the caller stood still.
Sizes are along dim 0, the packed-token dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

ReduceOp = Literal["sum", "avg", "max"]


class Work:
    """A verb in flight. The default is one that is already done."""

    def wait(self) -> None:
        """Return when the result is there; raises :class:`RankError` when a peer is gone or time is up."""

    def arrive(self) -> None:
        """As `wait`, but peers may still read what this rank gave: that must stay as it is until a later verb of the axis is
        done. Ranks need not go in step, then. No `wait` has to follow."""
        self.wait()

    @property
    def done(self) -> bool:
        """Whether `wait` is known to return without waiting for a peer; False where only `wait` can tell."""
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the result is there (for timing; from any thread)."""
        callback()


class AllOf(Work):
    """Several works that are waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    @property
    def done(self) -> bool:
        return all(work.done for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def on_done(self, callback: Callable[[], None]) -> None:
        self._works[-1].on_done(callback)


class Comm(ABC):
    """One axis of ranks. ``rank`` is the position on the axis, ``ranks`` the world ranks on it."""

    axis: str
    rank: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def moved_bytes(self) -> int | None:
        """Bytes of memory that this rank has read and written for verbs so far; None where the transport does not tell."""
        return None

    # -- reductions and gathers ----------------------------------------------------------------------

    @abstractmethod
    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        """Reduce ``tensor`` over the axis, in place, and return at once."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Tensor:
        """Reduce ``tensor`` over the axis in place and return it."""
        self.all_reduce_start(tensor, op, name=name).wait()
        return tensor

    @abstractmethod
    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        """``tensor`` (N*k, ...) -> ``output`` (k, ...): rank r gets the reduced r-th piece."""

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Tensor:
        """(N*k, ...) -> (k, ...): rank r gets the reduced r-th piece."""
        output = tensor.new_empty(_divided(tensor, self.size, self.axis, name))
        self.reduce_scatter_start(output, tensor, op, name=name).wait()
        return output

    @abstractmethod
    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """``tensor`` (k, ...) of each rank, one after another -> ``output`` (N*k, ...)."""

    def all_gather(self, tensor: Tensor, *, name: str) -> Tensor:
        """(k, ...) -> (N*k, ...), in rank order."""
        output = tensor.new_empty((tensor.shape[0] * self.size, *tensor.shape[1:]))
        self.all_gather_start(output, tensor, name=name).wait()
        return output

    @abstractmethod
    def all_to_all_start(
        self, output: Tensor, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Work:
        """Rows ``send_sizes[r]`` of ``tensor`` go to rank r; ``receive_sizes[r]`` rows come from it into ``output``, in rank
        order. Sizes may be 0. Both tensors must stay until ``wait``.
        """

    def all_to_all(
        self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Tensor:
        """As :meth:`all_to_all_start`; returns the rows that came."""
        output = tensor.new_empty((sum(receive_sizes), *tensor.shape[1:]))
        self.all_to_all_start(output, tensor.contiguous(), send_sizes, receive_sizes, name=name).wait()
        return output

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0, *, name: str) -> Tensor:
        """``tensor`` of the axis' rank ``root`` to all, in place."""

    # -- neighbours ----------------------------------------------------------------------------------

    @abstractmethod
    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        """Start sending ``tensor`` to the axis' rank ``to``; never blocks. The tensor must stay until ``wait``."""

    @abstractmethod
    def receive(self, output: Tensor, source: int, *, name: str) -> Work:
        """Start receiving into ``output`` from the axis' rank ``source``."""

    # -- control -------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self, *, name: str = "barrier") -> None:
        """Return when all ranks of the axis have called it."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Small Python values of all ranks, in rank order (control traffic: not in the ledger)."""

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat buffer that the verbs of this axis move best; uninitialised."""
        return torch.empty(size, dtype=dtype, device=device)

    def side_by_side(self, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """(this rank's part of ``size`` elements, the parts of all in rank order): an all-gather of the first into the second
        moves next to nothing. None where the transport cannot do that. Collective; the same on all ranks.

        Nobody may write to the second, nor to its part while peers read theirs: from their all-gather to a later verb.
        """
        return None


def _divided(tensor: Tensor, size: int, axis: str, name: str) -> tuple[int, ...]:
    assert tensor.shape[0] % size == 0, f"{name}: {tensor.shape[0]} rows do not divide over {axis}={size}"
    return (tensor.shape[0] // size, *tensor.shape[1:])
