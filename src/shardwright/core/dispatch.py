"""`DispatchPlan`: which rank sends how many tokens to whose experts, as plain lists. Route -> plan -> move.

The routing of a layer decides the sizes of its messages; once they are lists, what moves bytes has no more to decide.
The same value prices a layer's messages in the closed form and stands in for the routing in a dry run.

Notation: N tokens of the rank, k experts of each, E experts, E_local = E / ep on each rank; a *pair* is a token and one of
its experts.

>>> plan = assumed_plan(ep=2, rank=0, num_experts=4, tokens=6, top_k=2)
>>> plan.sent, plan.send_sizes, plan.local_counts
((3, 3, 3, 3), [6, 6], [6, 6])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Protocol

COUNT_BYTES = 8
"""Of a count in the exchange of counts."""


@dataclass(frozen=True)
class DispatchPlan:
    """One dispatch as rank ``rank`` of ``ep`` sees it.

    ``sent``: pairs that this rank has for each of the E experts. ``received``: for each rank, the pairs that it has for each
    of this rank's experts. ``tokens_sent`` and ``tokens_received`` (only where tokens are deduplicated): distinct tokens to
    and from each rank.
    """

    rank: int
    sent: tuple[int, ...]
    received: tuple[tuple[int, ...], ...]
    tokens_sent: tuple[int, ...] | None = None
    tokens_received: tuple[int, ...] | None = None

    @property
    def ep(self) -> int:
        return len(self.received)

    @property
    def num_local(self) -> int:
        """Experts of each rank."""
        return len(self.sent) // self.ep

    @property
    def send_sizes(self) -> list[int]:
        """Pairs for the experts of each rank."""
        local = self.num_local
        return [sum(self.sent[first : first + local]) for first in range(0, len(self.sent), local)]

    @property
    def receive_sizes(self) -> list[int]:
        """Pairs from each rank."""
        return [sum(counts) for counts in self.received]

    @property
    def local_counts(self) -> list[int]:
        """Pairs for each of this rank's experts, from all ranks."""
        return [sum(counts) for counts in zip(*self.received, strict=True)]

    @property
    def row_sizes(self) -> tuple[list[int], list[int]]:
        """Rows of D values to and from each rank: pairs, or distinct tokens."""
        if self.tokens_sent is None or self.tokens_received is None:
            return self.send_sizes, self.receive_sizes
        return list(self.tokens_sent), list(self.tokens_received)

    def remote(self, sizes: Sequence[int]) -> int:
        """How much of ``sizes`` is for other ranks."""
        return sum(sizes) - sizes[self.rank]


def apportioned(total: int, shares: Sequence[float]) -> list[int]:
    """``total`` split in proportion to ``shares``; what is left over goes to the largest remainders, the first ones on a tie."""
    whole = sum(shares)
    exact = [total * share / whole for share in shares]
    counts = [int(value) for value in exact]
    order = sorted(range(len(shares)), key=lambda index: counts[index] - exact[index])
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


def touched_share(num_experts: int, ep: int, top_k: int) -> float:
    """The share of tokens that have some expert on a given rank, if all sets of ``top_k`` experts are equally likely."""
    return 1 - comb(num_experts - num_experts // ep, top_k) / comb(num_experts, top_k)


class AssumeDispatch(Protocol):
    """Makes the plan of a layer's dispatch in a dry run."""

    def __call__(
        self, layer: str, *, ep: int, rank: int, num_experts: int, tokens: int, top_k: int, deduplicate: bool = False
    ) -> DispatchPlan:
        """The plan of rank ``rank`` of ``ep``, with ``tokens`` x ``top_k`` pairs."""
        ...


def assumed_plan(
    layer: str = "",
    *,
    ep: int,
    rank: int,
    num_experts: int,
    tokens: int,
    top_k: int,
    shares: Sequence[float] | None = None,
    deduplicate: bool = False,
) -> DispatchPlan:
    """The plan of a routing that nobody has computed: every rank sends ``tokens`` x ``top_k`` pairs by ``shares`` of the
    experts, evenly by default (a dry run, the closed form before a run). All layers have the same.
    """
    sent = apportioned(tokens * top_k, shares or [1.0] * num_experts)
    local = num_experts // ep
    own = tuple(sent[rank * local : (rank + 1) * local])
    if not deduplicate or ep == 1:
        return DispatchPlan(rank, tuple(sent), (own,) * ep)
    touched = round(tokens * touched_share(num_experts, ep, top_k))
    to = [min(sum(sent[first : first + local]), touched) for first in range(0, num_experts, local)]
    return DispatchPlan(rank, tuple(sent), (own,) * ep, tuple(to), (to[rank],) * ep)
