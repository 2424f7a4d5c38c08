"""`DryComm`: an axis of any size with shapes only. Verbs give the right shapes (on meta tensors) and move nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwright.comm.base import Comm, ReduceOp, Work


class DryComm(Comm):
    """The verbs of an axis of ``len(ranks)`` ranks without the other ranks; values of results are undefined."""

    def __init__(self, axis: str, rank: int, ranks: tuple[int, ...]) -> None:
        self.axis, self.rank, self.ranks = axis, rank, ranks

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return Work()

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        assert output.numel() * self.size == tensor.numel(), name
        return Work()

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        assert output.numel() == tensor.numel() * self.size, name
        return Work()

    def all_to_all_start(
        self, output: Tensor, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Work:
        assert sum(send_sizes) == tensor.shape[0] and sum(receive_sizes) == output.shape[0], name
        return Work()

    def broadcast(self, tensor: Tensor, root: int = 0, *, name: str) -> Tensor:
        return tensor

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        return Work()

    def receive(self, output: Tensor, source: int, *, name: str) -> Work:
        return Work()

    def barrier(self, *, name: str = "barrier") -> None:
        return None

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size
