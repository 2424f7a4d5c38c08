"""Communicators that do one thing wrong, for mutations: all else is passed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.base import Comm, ReduceOp, Work


class ForwardingComm(Comm):
    """Passes every verb on; a mutation overrides one."""

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.axis, self.rank, self.ranks = inner.axis, inner.rank, inner.ranks

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return self.inner.all_reduce_start(tensor, op, name=name)

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return self.inner.reduce_scatter_start(output, tensor, op, name=name)

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        return self.inner.all_gather_start(output, tensor, name=name)

    def all_to_all_start(
        self, output: Tensor, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Work:
        return self.inner.all_to_all_start(output, tensor, send_sizes, receive_sizes, name=name)

    def broadcast(self, tensor: Tensor, root: int = 0, *, name: str) -> Tensor:
        return self.inner.broadcast(tensor, root, name=name)

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        return self.inner.send(tensor, to, name=name)

    def receive(self, output: Tensor, source: int, *, name: str) -> Work:
        return self.inner.receive(output, source, name=name)

    def barrier(self, *, name: str = "barrier") -> None:
        self.inner.barrier(name=name)

    def gather_objects(self, value: Any) -> list[Any]:
        return self.inner.gather_objects(value)

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.empty(size, dtype, device)


class DropAllReduce(ForwardingComm):
    """Leaves out all-reduces whose tensor's name starts with ``prefix``."""

    def __init__(self, inner: Comm, prefix: str) -> None:
        super().__init__(inner)
        self.prefix = prefix

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return Work() if name.startswith(self.prefix) else super().all_reduce_start(tensor, op, name=name)


class LeaveOut(ForwardingComm):
    """Leaves out the collectives over ``axis`` whose tensor has this name (or one that goes on with a dot).

    A reduction then keeps the rank's own part, a gather repeats it, an exchange gives back what was put in, and a send
    brings zeros.
    """

    def __init__(self, inner: Comm, tensor: str, axis: str = "tp") -> None:
        super().__init__(inner)
        self.tensor, self.meant_axis = tensor, axis

    def _meant(self, name: str) -> bool:
        return self.axis == self.meant_axis and (name == self.tensor or name.startswith(f"{self.tensor}."))

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return Work() if self._meant(name) else super().all_reduce_start(tensor, op, name=name)

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        if not self._meant(name):
            return super().reduce_scatter_start(output, tensor, op, name=name)
        output.copy_(tensor.view(self.size, *output.shape)[self.rank])
        return Work()

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        if not self._meant(name):
            return super().all_gather_start(output, tensor, name=name)
        output.view(self.size, *tensor.shape).copy_(tensor.expand(self.size, *tensor.shape))
        return Work()

    def all_to_all(
        self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Tensor:
        if not self._meant(name):
            return super().all_to_all(tensor, send_sizes, receive_sizes, name=name)
        return tensor

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        return super().send(torch.zeros_like(tensor) if self._meant(name) else tensor, to, name=name)


class LoseSends(ForwardingComm):
    """Sends zeros instead of the tensors whose name starts with ``prefix``."""

    def __init__(self, inner: Comm, prefix: str) -> None:
        super().__init__(inner)
        self.prefix = prefix

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        return super().send(torch.zeros_like(tensor) if name.startswith(self.prefix) else tensor, to, name=name)


class OwnPart(ForwardingComm):
    """Leaves out all-reduces over one axis whose tensor's name starts with ``prefix``: the rank's own part stays."""

    def __init__(self, inner: Comm, axis: str, prefix: str) -> None:
        super().__init__(inner)
        self.meant, self.prefix = axis, prefix

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        if self.axis == self.meant and name.startswith(self.prefix):
            return Work()
        return super().all_reduce_start(tensor, op, name=name)


class ScaleAllReduce(ForwardingComm):
    """Averages where a sum is due (the classic factor of the data-parallel size)."""

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        if name.startswith("gradients"):
            tensor.div_(self.size)
        return super().all_reduce_start(tensor, op, name=name)

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        if name.startswith("gradients"):
            tensor.div_(self.size)
        return super().reduce_scatter_start(output, tensor, op, name=name)


class OthersShard(ForwardingComm):
    """Gathers parameters as if each rank had the next one's shard."""

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        work = super().all_gather_start(output, tensor, name=name)
        if name.startswith("parameters") and self.size > 1:
            work.wait()
            rows = output.view(self.size, *tensor.shape)
            rows.copy_(rows.roll(1, 0))
            return Work()
        return work


class BordersLeftOut(ForwardingComm):
    """Shows the shards of all ranks side by side, and never copies what lies between their pages."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self._shown: list[int] = []

    def side_by_side(self, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        placed = self.inner.side_by_side(size, dtype, device)
        if placed is None:
            placed = self.empty(size, dtype, device), torch.zeros(size * self.size, dtype=dtype, device=device)
        self._shown.append(placed[1].data_ptr())
        return placed

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        if output.data_ptr() in self._shown:
            return Work()
        return super().all_gather_start(output, tensor, name=name)


class ReduceTwice(ForwardingComm):
    """Reduces what is reduced already."""

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        if name.startswith("gradients"):
            super().all_reduce_start(tensor, op, name=name).wait()
        return super().all_reduce_start(tensor, op, name=name)


class HalfWire(ForwardingComm):
    """Sends gradients in bf16 although fp32 was asked for."""

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        if not name.startswith("gradients"):
            return super().all_reduce_start(tensor, op, name=name)
        small = tensor.bfloat16()
        super().all_reduce_start(small, op, name=name).wait()
        tensor.copy_(small)
        return Work()


class Drift(ForwardingComm):
    """The last rank's reduced gradients differ from the others' by one rounding."""

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        super().all_reduce_start(tensor, op, name=name).wait()
        if name.startswith("gradients") and self.rank == self.size - 1:
            tensor.mul_(1 + torch.finfo(tensor.dtype).eps)
        return Work()


class SwapMetrics(ForwardingComm):
    """Every rank reports its own loss as if it were everybody's."""

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        work = super().all_gather_start(output, tensor, name=name)
        work.wait()
        output.copy_(tensor.repeat(self.size, *[1] * (tensor.dim() - 1)))
        return Work()
