"""Autograd pairs: each collective of a forward pass with the collective of its backward, side by side.

Each end of a pair has a type. *varying*: ranks hold different pieces. *partial*: the sum over ranks is the value.
*replicated*: equal on all ranks, its gradient is partial. *invariant*: equal on all ranks, and so is its gradient.

=====================  ============  ============  ==================  ==================
pair                   input         output        forward             backward
=====================  ============  ============  ==================  ==================
copy_to_region (f)     invariant     replicated    identity            all-reduce
reduce_from_region(g)  partial       invariant     all-reduce          identity
scatter_to_region      invariant     varying       own slice           all-gather
gather_from_region     varying       invariant     all-gather          own slice
gather_tokens          varying       replicated    all-gather          reduce-scatter
reduce_scatter_tokens  partial       varying       reduce-scatter      all-gather
exchange_tokens        varying       varying       all-to-all          all-to-all, sizes swapped
TokenExchange          varying       varying       the same, in flight between start and finish in both passes
=====================  ============  ============  ==================  ==================

One adjoint test, ``<y, f(x)> = <f*(y), x>``, covers all pairs: invariant ends count once, others are summed over
ranks. f and g: Shoeybi et al. 2019, section 3; the token pairs: Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.comm.base import Comm, Work


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, name: str) -> Tensor:
        ctx.comm, ctx.name = comm, name
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_reduce(dy.contiguous().clone(), name=ctx.name), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, name: str) -> Tensor:
        return comm.all_reduce(x.contiguous().clone(), name=name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, name: str) -> Tensor:
        ctx.comm, ctx.name = comm, name
        return _own_rows(x, comm).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_gather(dy.contiguous(), name=ctx.name), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, name: str) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x.contiguous(), name=name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(dy, ctx.comm), None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, name: str) -> Tensor:
        ctx.comm, ctx.name = comm, name
        return comm.all_gather(x.contiguous(), name=name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.reduce_scatter(dy.contiguous(), name=ctx.name), None, None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, name: str) -> Tensor:
        ctx.comm, ctx.name = comm, name
        return comm.reduce_scatter(x.contiguous(), name=name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_gather(dy.contiguous(), name=ctx.name), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, send: Sequence[int], receive: Sequence[int], name: str) -> Tensor:
        ctx.comm, ctx.send, ctx.receive, ctx.name = comm, send, receive, name
        return comm.all_to_all(x.contiguous(), send, receive, name=name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        dx = ctx.comm.all_to_all(dy.contiguous(), ctx.receive, ctx.send, name=ctx.name)
        return dx, None, None, None, None


class TokenExchange:
    """One exchange of rows in flight: forward between :meth:`start` and :meth:`finish`, backward the other way round.

    What runs between the two, in either pass, runs beside the message. Autograd goes back in the reverse order of the calls,
    which is the same on all ranks that make the same calls. What is between the two is a ticket without elements.
    """

    def __init__(self, comm: Comm, send: Sequence[int], receive: Sequence[int], name: str) -> None:
        self.comm, self.send, self.receive, self.name = comm, send, receive, name
        self._under_way: tuple[Work, Tensor, Tensor] | None = None

    def start(self, x: Tensor) -> Tensor:
        """Start to send the rows of x; what it returns is for :meth:`finish`."""
        return x if self.comm.size == 1 else _StartExchange.apply(x, self)

    def finish(self, ticket: Tensor) -> Tensor:
        """The rows that have come."""
        return ticket if self.comm.size == 1 else _FinishExchange.apply(ticket, self)

    def launch(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Start one direction, without autograd; returns a ticket."""
        x = x.contiguous()
        output = x.new_empty((sum(receive), *x.shape[1:]))
        self._under_way = self.comm.all_to_all_start(output, x, send, receive, name=self.name), x, output
        return x.new_empty(0)

    def land(self) -> Tensor:
        """What the direction that was launched last has brought."""
        assert self._under_way is not None, f"{self.name}: nothing was launched"
        work, _, output = self._under_way
        work.wait()
        self._under_way = None
        return output


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.launch(x, exchange.send, exchange.receive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.land(), None


class _FinishExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.launch(dy, ctx.exchange.receive, ctx.exchange.send), None


def _own_rows(x: Tensor, comm: Comm) -> Tensor:
    assert x.shape[0] % comm.size == 0, f"{x.shape[0]} rows do not divide over {comm.axis}={comm.size}"
    rows = x.shape[0] // comm.size
    return x[comm.rank * rows : (comm.rank + 1) * rows]


def copy_to_region(x: Tensor, comm: Comm, name: str) -> Tensor:
    """f: identity forward, all-reduce of the gradient backward."""
    return x if comm.size == 1 else _Copy.apply(x, comm, name)


def reduce_from_region(x: Tensor, comm: Comm, name: str) -> Tensor:
    """g: all-reduce forward, identity backward."""
    return x if comm.size == 1 else _Reduce.apply(x, comm, name)


def scatter_to_region(x: Tensor, comm: Comm, name: str) -> Tensor:
    """Own rows of an invariant (N*k, ...) forward, all-gather of the gradient backward."""
    return x if comm.size == 1 else _Scatter.apply(x, comm, name)


def gather_from_region(x: Tensor, comm: Comm, name: str) -> Tensor:
    """All-gather rows forward into an invariant, own rows of the gradient backward."""
    return x if comm.size == 1 else _Gather.apply(x, comm, name)


def gather_tokens(x: Tensor, comm: Comm, name: str) -> Tensor:
    """All-gather rows forward, reduce-scatter of the partial gradient backward."""
    return x if comm.size == 1 else _GatherTokens.apply(x, comm, name)


def reduce_scatter_tokens(x: Tensor, comm: Comm, name: str) -> Tensor:
    """Reduce-scatter partial rows forward, all-gather of the gradient backward."""
    return x if comm.size == 1 else _ReduceScatterTokens.apply(x, comm, name)


def exchange_tokens(x: Tensor, comm: Comm, send: Sequence[int], receive: Sequence[int], name: str) -> Tensor:
    """All-to-all of rows with these sizes forward, with the sizes swapped backward."""
    return x if comm.size == 1 else _Exchange.apply(x, comm, send, receive, name)
