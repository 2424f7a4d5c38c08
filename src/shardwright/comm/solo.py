"""`SoloComm`: an axis of one rank. Every verb returns its input, so size 1 is not special anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwright.comm.base import Comm, ReduceOp, Work


class SoloComm(Comm):
    """The verbs of an axis of size 1."""

    def __init__(self, axis: str, world_rank: int = 0) -> None:
        self.axis, self.rank, self.ranks = axis, 0, (world_rank,)

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return Work()

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        output.copy_(tensor)
        return Work()

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Tensor:
        return tensor

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        output.copy_(tensor)
        return Work()

    def all_gather(self, tensor: Tensor, *, name: str) -> Tensor:
        return tensor

    def all_to_all_start(
        self, output: Tensor, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Work:
        output.copy_(tensor)
        return Work()

    def all_to_all(
        self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, root: int = 0, *, name: str) -> Tensor:
        return tensor

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        raise AssertionError(f"{name}: an axis of one rank has no neighbour to send to")

    def receive(self, output: Tensor, source: int, *, name: str) -> Work:
        raise AssertionError(f"{name}: an axis of one rank has no neighbour to receive from")

    def barrier(self, *, name: str = "barrier") -> None:
        return None

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]
