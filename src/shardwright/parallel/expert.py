"""Expert parallelism: experts split over ranks, tokens sent to their experts and back (Shazeer et al. 2017, section 3.1;
Lepikhin et al. 2021, section 3.2).

EP:   W_up[E/ep, 2F, D], W_down[E/ep, D, F]  |  router W[E, D] on every rank  |  x[N, D], each rank's own tokens
sends per layer forward two **all-to-alls** (dispatch, combine) of the rows whose expert lives on another rank, on average
N k (ep-1)/ep x D each, and E counts; backward the same two. What stays on the rank moves no bytes.

A dispatch is *route -> plan -> move*: each rank sorts its pairs (a token and one of its experts) by expert, counts are
exchanged and read once on the host (`core.dispatch.DispatchPlan`), and from there on nothing depends on data any more: a
rank without tokens takes part with sizes of 0, forward and backward.

``ep_deduplicate``: a token goes once to each rank, however many of its experts live there, with places and weights of its
pairs; their outputs are added up there, and one row comes back. ``ep_overlap``: the tokens go in two halves, and each half
travels while the experts work on the other one.

Notation: N tokens of this rank, D model dim, k choices of each token, E experts, M pairs sent, R pairs received.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.base import Comm
from shardwright.comm.mesh import Mesh
from shardwright.comm.regions import TokenExchange
from shardwright.core.dispatch import DispatchPlan
from shardwright.ops.gradients import first_order
from shardwright.ops.routing import (
    Exchange,
    Experts,
    LocalExchange,
    LocalSums,
    RouterSums,
    Routing,
    RowGroups,
    RowOrder,
    combine_rows,
    sort_by_expert,
    take_rows,
)


def make_exchange(mesh: Mesh, num_experts: int) -> Exchange:
    """Dispatch and combine over the ``ep`` axis."""
    return LocalExchange() if mesh.ep.size == 1 else ExpertExchange(mesh, num_experts)


def make_sums(mesh: Mesh) -> RouterSums:
    """Sums over the ranks that hold tokens of the same micro-batch or sequence."""
    return LocalSums() if mesh.stage.size == 1 else StageSums(mesh)


class StageSums:
    """The sums that a router needs, over the ranks of its pipeline stage: each of them routes tokens of its own.

    A name begins with the layer's; in the ledger all layers are one.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._stage, self._sequence = mesh.stage, mesh.tp_cp

    def microbatch(self, values: Tensor, name: str) -> Tensor:
        """The sum over tp (sequence parallelism), cp and dp."""
        return self._stage.all_reduce(values.contiguous().clone(), name=_kind(name))

    def sequences(self, values: Tensor, name: str) -> Tensor:
        """The sum over tp (sequence parallelism) and cp."""
        return self._sequence.all_reduce(values.contiguous().clone(), name=_kind(name))

    def same_sequences(self, rows: Tensor, name: str) -> tuple[Tensor, slice]:
        """rows (N, ...) -> those of all ranks of tp and cp, in rank order, and where this rank's are."""
        comm, count = self._sequence, rows.shape[0]
        whole = comm.all_gather(rows.contiguous(), name=_kind(name))
        return whole, slice(comm.rank * count, (comm.rank + 1) * count)


def _kind(name: str) -> str:
    return name.partition(" ")[2] or name


class ExpertExchange:
    """Brings tokens to the ranks of their experts and back, over the ``ep`` axis of ``mesh``.

    Every plan goes into the mesh's ledger; in a dry run `Mesh.assume_dispatch` makes it.
    """

    def __init__(self, mesh: Mesh, num_experts: int) -> None:
        layout = mesh.layout
        self.mesh, self.comm, self.num_experts = mesh, mesh.ep, num_experts
        self.num_local = num_experts // self.comm.size
        self.deduplicate, self.num_parts = layout.ep_deduplicate, 2 if layout.ep_overlap else 1

    def run(self, x: Tensor, routing: Routing, experts: Experts, name: str) -> Tensor:
        """Dispatch, ``experts`` (once for each half with ``ep_overlap``) and combine: x (N, D) -> (N, D)."""
        flights = self._send(x, routing, name, self.num_parts)
        for flight in flights:
            rows = flight.rows()
            flight.give_back(experts(rows, flight.groups()))
        results = [flight.result() for flight in flights]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _send(self, x: Tensor, routing: Routing, name: str, num_parts: int) -> list[_Flight]:
        """Route and plan the parts of x, and start all of them on their way."""
        parts = [_Part(x[rows], _rows_of(routing, rows)) for rows in _parts(x.shape[0], num_parts)]
        kind: type[_Flight] = _TokenFlight if self.deduplicate else _PairFlight
        flights = [kind(part, plan, self.comm) for part, plan in zip(parts, self._plans(parts, name), strict=True)]
        for flight in flights:
            flight.send()
        return flights

    def _plans(self, parts: Sequence[_Part], name: str) -> list[DispatchPlan]:
        """The plan of each part: one exchange of counts and one host read for all of them."""
        size = self.comm.size
        counts = [part.counts(size, self.deduplicate) for part in parts]
        own = torch.cat(counts, dim=1)
        others = self.comm.all_to_all(own, [1] * size, [1] * size, name="expert counts")
        if own.is_meta:
            plans = [self._assume(part, name) for part in parts]
        else:
            plans = self._read(own, others, len(parts))
        for plan in plans:
            self.mesh.recorder.book_dispatch(name, plan)
        return plans

    def _assume(self, part: _Part, name: str) -> DispatchPlan:
        tokens, top_k = part.routing.expert_ids.shape
        return self.mesh.assume_dispatch(
            name,
            ep=self.comm.size,
            rank=self.comm.rank,
            num_experts=self.num_experts,
            tokens=tokens,
            top_k=top_k,
            deduplicate=self.deduplicate,
        )

    def _read(self, own: Tensor, others: Tensor, num_parts: int) -> list[DispatchPlan]:
        """The one place where a dispatch is read on the host (`_assume` answers for it in a dry run)."""
        sent, received = torch.stack([own, others]).tolist()
        width, local = len(sent[0]) // num_parts, self.num_local
        plans = []
        for first in range(0, width * num_parts, width):
            pairs = tuple(count for row in sent for count in row[first : first + local])
            came = tuple(tuple(row[first : first + local]) for row in received)
            plan = DispatchPlan(self.comm.rank, pairs, came)
            if self.deduplicate:
                to, of = (tuple(row[first + local] for row in rows) for rows in (sent, received))
                plan = replace(plan, tokens_sent=to, tokens_received=of)
            plans.append(plan)
        return plans


def _parts(rows: int, count: int) -> list[slice]:
    """``count`` slices of ``rows``, empty ones too: every rank must have as many."""
    cuts = [rows * index // count for index in range(count + 1)]
    return [slice(low, high) for low, high in pairwise(cuts)]


def _rows_of(routing: Routing, rows: slice) -> Routing:
    return replace(routing, expert_ids=routing.expert_ids[rows], weights=routing.weights[rows])


class _Part:
    """Tokens that are dispatched together. ``pairs``: their choices sorted by expert, dropped ones last. ``seats``: one row
    for each token and rank that it has an expert on, sorted by rank.
    """

    def __init__(self, x: Tensor, routing: Routing) -> None:
        self.x, self.routing = x, routing
        self.pairs = sort_by_expert(replace(routing, may_drop=False))

    def seat(self, ep: int) -> None:
        """Find the seats, and for each choice the first one of its token with the same rank."""
        ids = self.routing.expert_ids
        self.ranks = ids // (self.routing.num_experts // ep)  # ep for a dropped choice
        self.first = (self.ranks.unsqueeze(2) == self.ranks.unsqueeze(1)).int().argmax(2)
        slots = torch.arange(ids.shape[1], device=ids.device)
        distinct = torch.where(self.first == slots, self.ranks, ep)
        self.seats = sort_by_expert(Routing(distinct, self.routing.weights, ep))

    def counts(self, ep: int, deduplicate: bool) -> Tensor:
        """Pairs for each expert of each rank (ep, E_local), and with ``deduplicate`` a column of seats."""
        pairs = self.pairs.counts.view(ep, -1)
        if not deduplicate:
            return pairs
        self.seat(ep)
        return torch.cat([pairs, self.seats.counts.unsqueeze(1)], dim=1)

    def places(self) -> Tensor:
        """(N, k): the seat of each choice, counted from the first one of its rank."""
        starts = self.seats.counts.cumsum(0) - self.seats.counts
        return self.seats.place.gather(1, self.first) - starts[self.ranks.clamp_max(starts.shape[0] - 1)]


def _kept(order: RowOrder, count: int) -> RowOrder:
    """The first ``count`` rows of an order, now that it is known how many choices were not dropped."""
    return RowOrder(order.order[:count], order.place.clamp(max=count), order.counts, count < order.num_rows)


class _Flight(ABC):
    """A part on its way to its experts and back: `send`, `rows`, `give_back`, `result`, in this order."""

    def __init__(self, part: _Part, plan: DispatchPlan, comm: Comm) -> None:
        self.part, self.plan, self.comm = part, plan, comm
        send, receive = plan.row_sizes
        self.out = TokenExchange(comm, send, receive, "dispatch")
        self.back = TokenExchange(comm, receive, send, "combine")
        self.pairs = _kept(part.pairs, sum(plan.sent))
        self.moving: Tensor

    def groups(self) -> RowGroups:
        """How many of the rows each local expert has."""
        sizes = tuple(self.plan.local_counts)
        return RowGroups(_numbers(sizes, self.part.x.device), sum(sizes), sizes)

    @abstractmethod
    def send(self) -> None:
        """Start to send the tokens."""

    @abstractmethod
    def rows(self) -> Tensor:
        """What came, once for each pair (R, D), sorted by local expert."""

    @abstractmethod
    def give_back(self, y: Tensor) -> None:
        """Start to send the experts' outputs (R, D) back."""

    @abstractmethod
    def result(self) -> Tensor:
        """(N, D): the weighed sum of what came back for each token."""


class _PairFlight(_Flight):
    """Tokens travel once for each of their experts."""

    def send(self) -> None:
        self.moving = self.out.start(take_rows(self.part.x, self.pairs))

    def rows(self) -> Tensor:
        return _regrouped(self.out.finish(self.moving), self.plan.received)

    def give_back(self, y: Tensor) -> None:
        by_expert = list(zip(*self.plan.received, strict=True))
        self.moving = self.back.start(_regrouped(y, by_expert))

    def result(self) -> Tensor:
        return combine_rows(self.back.finish(self.moving), self.part.routing.weights, self.pairs)


class _TokenFlight(_Flight):
    """Tokens travel once to each rank that has some of their experts, and one sum comes back from each."""

    def send(self) -> None:
        part, plan = self.part, self.plan
        self._seats = _kept(part.seats, sum(plan.row_sizes[0]))
        weights = part.routing.weights.reshape(-1).index_select(0, self.pairs.order)
        places = part.places().reshape(-1).index_select(0, self.pairs.order)
        weights, places = _ExchangePairs.apply(weights, places, self.comm, plan.send_sizes, plan.receive_sizes)
        self._weights = _regrouped(weights, plan.received)
        self._index = self._among_all(places)
        self.moving = self.out.start(take_rows(part.x, self._seats))

    def _among_all(self, places: Tensor) -> Tensor:
        """Seats of pairs among those of their rank (R,) -> among all that came, sorted by local expert."""
        starts = _numbers(list(accumulate(self.plan.row_sizes[1], initial=0))[:-1], places.device)
        sizes = _numbers(self.plan.receive_sizes, places.device)
        shift = torch.repeat_interleave(starts, sizes, output_size=places.shape[0])
        return _regrouped(places + shift, self.plan.received)

    def rows(self) -> Tensor:
        self._came = self.out.finish(self.moving)
        return self._came.index_select(0, self._index)

    def give_back(self, y: Tensor) -> None:
        weighed = y.to(self._weights.dtype) * self._weights.unsqueeze(1)
        total = weighed.new_zeros(self._came.shape).index_add(0, self._index, weighed)
        self.moving = self.back.start(total.to(y.dtype))

    def result(self) -> Tensor:
        ones = torch.ones_like(self.part.routing.weights)
        return combine_rows(self.back.finish(self.moving), ones, self._seats)


def _regrouped(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Rows in blocks [i][j] of ``counts[i][j]`` rows -> the blocks in the order [j][i]."""
    width = len(counts[0])
    if len(counts) == 1 or width == 1:
        return rows
    blocks = rows.split([count for line in counts for count in line])
    return torch.cat([block for j in range(width) for block in blocks[j::width]])


def _numbers(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)


class _ExchangePairs(torch.autograd.Function):
    """Weights (M,) and seats (M,) of pairs to the ranks of their experts, in one message -> (R,) each."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, places: Tensor, comm: Comm, send: list[int], receive: list[int]
    ) -> tuple[Tensor, Tensor]:
        ctx.comm, ctx.send, ctx.receive = comm, send, receive
        whole = {4: torch.int32, 8: torch.int64}[weights.element_size()]
        both = torch.stack([weights.view(whole), places.to(whole)], dim=1)
        got = comm.all_to_all(both, send, receive, name="dispatch weights")
        came = got[:, 1].to(torch.int64)
        ctx.mark_non_differentiable(came)
        return got[:, 0].contiguous().view(weights.dtype), came

    @staticmethod
    @first_order
    def backward(ctx: Any, d_weights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.comm.all_to_all(d_weights.contiguous(), ctx.receive, ctx.send, name="dispatch weights")
        return back, None, None, None, None
