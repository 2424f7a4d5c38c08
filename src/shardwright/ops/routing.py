"""A token's experts, and the order in which its rows reach them: values and row moves that know no ranks.

Notation: N tokens, k choices of each, M rows (one per choice that is not dropped), E experts, D model dim.

A layer with experts is  route -> dispatch -> experts -> combine:

    router(x)              -> Routing
    dispatch(x, routing)   -> Dispatched: rows (M, D), those of one local expert side by side, and how many each has
    experts(rows, groups)  -> rows (M, D)
    combine(rows, sent)    -> y (N, D), weighed in fp32

Router and experts are the model's; an :class:`Exchange` supplies dispatch and combine (:class:`LocalExchange` in one
process, `parallel.expert` between ranks), and a :class:`RouterSums` what a router must know of other ranks' tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.ops.gradients import first_order


@dataclass
class Routing:
    """Which experts N tokens go to. ``expert_ids`` (N, k) int64, ``num_experts`` for a choice that was dropped; ``weights``
    (N, k) fp32 with gradient, 0 where dropped. ``may_drop``: some choices may be dropped, so M must be read on the host."""

    expert_ids: Tensor
    weights: Tensor
    num_experts: int
    may_drop: bool = False


class RowGroups:
    """How many rows each local expert has: ``counts`` (E_local,) int64 on the device, ``num_rows`` M in all."""

    def __init__(self, counts: Tensor, num_rows: int, sizes: tuple[int, ...] | None = None) -> None:
        self.counts, self.num_rows, self._sizes = counts, num_rows, sizes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The counts on the host, read once; spread evenly where there are shapes only."""
        if self._sizes is None:
            self._sizes = host_counts(self.counts, self.num_rows)
        return self._sizes

    def ends(self) -> Tensor:
        """Where each expert's rows end (E_local,) int32, for grouped matrix products."""
        return self.counts.cumsum(0, dtype=torch.int32)


def host_counts(counts: Tensor, total: int) -> tuple[int, ...]:
    """The one place where counts of rows are read on the host; in a dry run ``total`` is spread evenly."""
    if counts.is_meta:
        num = counts.numel()
        return tuple(total // num + (index < total % num) for index in range(num))
    return tuple(counts.tolist())


@dataclass
class RowOrder:
    """The rows of a routing sorted by expert, then token. ``order`` (M,) the number token * k + slot of each row; ``place``
    (N, k) the row of each choice, M for a dropped one; ``counts`` (E,) int64 rows of each expert."""

    order: Tensor
    place: Tensor
    counts: Tensor
    dropping: bool = False

    @property
    def num_rows(self) -> int:
        return self.order.shape[0]


def sort_by_expert(routing: Routing) -> RowOrder:
    """The order of a routing's rows; a rank of expert parallelism holds neighbouring experts, so it is by rank too."""
    flat = routing.expert_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = count_experts(flat, routing.num_experts)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    if routing.may_drop:
        num_rows = sum(host_counts(counts, order.shape[0]))
        order, place = order[:num_rows], place.clamp_(max=num_rows)
    return RowOrder(order, place.view(routing.expert_ids.shape), counts, routing.may_drop)


def count_experts(expert_ids: Tensor, num_experts: int) -> Tensor:
    """How often each of ``num_experts`` experts is chosen (E,) int64; dropped choices are left out."""
    flat = expert_ids.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.index_add_(0, flat, torch.ones_like(flat))[:num_experts]


def _with_zero_row(rows: Tensor, dropping: bool) -> Tensor:
    return torch.cat([rows, rows.new_zeros((1, rows.shape[1]))]) if dropping else rows


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return x.index_select(0, order.order // order.place.shape[1])

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        rows = _with_zero_row(dy, ctx.order.dropping)
        dx = rows.index_select(0, ctx.order.place[:, 0])
        for slot in range(1, ctx.order.place.shape[1]):
            dx += rows.index_select(0, ctx.order.place[:, slot])
        return dx, None


def take_rows(x: Tensor, order: RowOrder) -> Tensor:
    """x (N, D) -> one row per choice (M, D) in ``order``; the gradient of a token is the sum over its rows."""
    return _TakeRows.apply(x, order)  # type: ignore[no-any-return]


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.order = order
        padded, place = _with_zero_row(rows, order.dropping), order.place
        y = weights[:, :1] * padded.index_select(0, place[:, 0])
        for slot in range(1, place.shape[1]):
            y.addcmul_(weights[:, slot : slot + 1], padded.index_select(0, place[:, slot]).to(y.dtype))
        return y.to(rows.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        order: RowOrder = ctx.order
        top_k = order.place.shape[1]
        wide = dy.to(weights.dtype)
        d_rows = wide.index_select(0, order.order // top_k).mul_(weights.reshape(-1)[order.order].unsqueeze(1))
        padded = _with_zero_row(rows, order.dropping)
        d_weights = torch.empty_like(weights)
        for slot in range(top_k):
            picked = padded.index_select(0, order.place[:, slot]).to(weights.dtype)
            d_weights[:, slot] = torch.linalg.vecdot(picked, wide, dim=-1)
        return d_rows.to(rows.dtype), d_weights, None


def combine_rows(rows: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
    """rows (M, D) in ``order``, weights (N, k) fp32 -> each token's weighed sum (N, D); 0 for what was dropped."""
    return _CombineRows.apply(rows, weights, order)  # type: ignore[no-any-return]


# -- what other ranks have to do with it ------------------------------------------------------------------------


@dataclass
class Dispatched:
    """Rows (M, D) that this rank's experts work on, ``groups`` how many each of them has, and ``plan``, what the exchange
    needs to bring them back."""

    rows: Tensor
    groups: RowGroups
    plan: Any = field(repr=False)


Experts = Callable[[Tensor, RowGroups], Tensor]
"""(rows (M, D) sorted by local expert, rows of each) -> (M, D)."""


class Exchange(Protocol):
    """Brings tokens to the ranks of their experts and back; both ways are differentiable."""

    def run(self, x: Tensor, routing: Routing, experts: Experts, name: str) -> Tensor:
        """x (N, D) of this rank -> (N, D), each token's weighed sum of what its experts make of it. ``name``: of the layer.

        ``experts`` is called once, or once for each part in which tokens are sent.
        """
        ...


class RouterSums(Protocol):
    """Sums over the ranks whose tokens a router's auxiliary loss and capacity are about. No gradient passes."""

    def microbatch(self, values: Tensor, name: str) -> Tensor:
        """The sum over the ranks that hold tokens of the same micro-batch: tp (sequence parallelism), cp and dp."""
        ...

    def sequences(self, values: Tensor, name: str) -> Tensor:
        """The sum over the ranks that hold tokens of the same sequences: tp (sequence parallelism) and cp."""
        ...

    def same_sequences(self, rows: Tensor, name: str) -> tuple[Tensor, slice]:
        """rows (N, ...), one per token -> those of all ranks that hold tokens of the same sequences, one rank after
        another, and where this rank's are."""
        ...


class LocalExchange:
    """All experts are here: dispatch is a permutation of rows."""

    def dispatch(self, x: Tensor, routing: Routing, name: str) -> Dispatched:
        order = sort_by_expert(routing)
        return Dispatched(take_rows(x, order), RowGroups(order.counts, order.num_rows), order)

    def combine(self, rows: Tensor, sent: Dispatched, routing: Routing, name: str) -> Tensor:
        return combine_rows(rows, routing.weights, sent.plan)

    def run(self, x: Tensor, routing: Routing, experts: Experts, name: str) -> Tensor:
        sent = self.dispatch(x, routing, name)
        return self.combine(experts(sent.rows, sent.groups), sent, routing, name)


class LocalSums:
    """All tokens are here."""

    def microbatch(self, values: Tensor, name: str) -> Tensor:
        return values

    def sequences(self, values: Tensor, name: str) -> Tensor:
        return values

    def same_sequences(self, rows: Tensor, name: str) -> tuple[Tensor, slice]:
        return rows, slice(0, rows.shape[0])
