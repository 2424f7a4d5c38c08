"""Mutations: break one thing at a time and see that verification turns red.

A check that no mutation can turn red proves nothing. Each mutation wraps the communicators of a mesh; new collectives
add their own here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.base import Comm, ReduceOp, Work
from shardwright.core.suggest import did_you_mean
from shardwright.errors import ConfigError


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

    def all_to_all(
        self, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Tensor:
        return self.inner.all_to_all(tensor, send_sizes, receive_sizes, name=name)

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


class _DropAllReduce(ForwardingComm):
    """Leaves out all-reduces whose tensor's name starts with ``prefix``."""

    def __init__(self, inner: Comm, prefix: str) -> None:
        super().__init__(inner)
        self.prefix = prefix

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return Work() if name.startswith(self.prefix) else super().all_reduce_start(tensor, op, name=name)


class _ScaleAllReduce(ForwardingComm):
    """Averages where a sum is due (the classic factor of the data-parallel size)."""

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        if name.startswith("gradients"):
            tensor.div_(self.size)
        return super().all_reduce_start(tensor, op, name=name)


class _SwapMetrics(ForwardingComm):
    """Every rank reports its own loss as if it were everybody's."""

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        work = super().all_gather_start(output, tensor, name=name)
        work.wait()
        output.copy_(tensor.repeat(self.size, *[1] * (tensor.dim() - 1)))
        return Work()


@dataclass(frozen=True)
class Mutation:
    """A named defect and what it stands for."""

    name: str
    stands_for: str
    wrap: Callable[[Comm], Comm]


MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        Mutation("drop-gradient-all-reduce", "replicas train on their own batch only", lambda c: _DropAllReduce(c, "gradients")),
        Mutation("drop-first-bucket", "one bucket is never reduced", lambda c: _DropAllReduce(c, "gradients.0")),
        Mutation("local-token-count", "the loss is divided by the rank's own tokens", lambda c: _DropAllReduce(c, "tokens")),
        Mutation("average-gradients", "gradients averaged although the loss is normalised", _ScaleAllReduce),
        Mutation("local-loss", "the reported loss is one rank's own", _SwapMetrics),
    )
}


def find_mutation(name: str) -> Mutation:
    """The mutation of that name; raises `ConfigError` with the known ones."""
    if name not in MUTATIONS:
        raise ConfigError(f"mutation {name!r} is not known; {did_you_mean(name, MUTATIONS)}")
    return MUTATIONS[name]
