"""Expert capacity: how many tokens of a sequence each expert takes, and what becomes of the others.

capacity = ceil(k S / E * factor) for a sequence of S tokens (GShard, arXiv 2006.16668, section 2.2; Switch is k = 1),
counted over the whole sequence in its own order, so that every layout keeps the same tokens. All tokens of the sequences
must be given, from whatever ranks; padding has sequence -1 and is never counted.

Notation: T tokens, k choices of each, E experts, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-9
"""What k S factor / E may be above a whole number by rounding alone."""


@dataclass
class Limit:
    """What limits choices. ``factor`` of the capacity; ``reroute``: a full expert's tokens go to their next-best one with
    room; ``by_score``: a full expert keeps the tokens that score it highest, not the first ones."""

    factor: float
    reroute: bool = False
    by_score: bool = False

    @classmethod
    def of(cls, capacity: tuple[float, str] | None, drop_by: str) -> Limit | None:
        """From ``Layout.capacity`` and ``RouterConfig.drop_by``; None where nothing is limited."""
        return None if capacity is None else cls(capacity[0], capacity[1] == "reroute", drop_by == "probability")

    @property
    def needs_scores(self) -> bool:
        return self.reroute or self.by_score


def capacities(sequence: Tensor, num_sequences: int, top_k: int, num_experts: int, factor: float) -> Tensor:
    """The capacity of each expert in each sequence (S,) int64, from the sequence of each token (T,)."""
    tokens = _per_sequence(torch.ones_like(sequence).unsqueeze(1), sequence, num_sequences).squeeze(1)
    return ((tokens.double() * (top_k * factor) / num_experts) - ROUNDING).ceil().long()


def limit_choices(
    expert_ids: Tensor, choice: Tensor | None, sequence: Tensor, place: Tensor, num_sequences: int, num_experts: int,
    limit: Limit,
) -> Tensor:  # fmt: skip
    """expert_ids (T, k) with E where a choice found no room, or with the expert that took its place.

    ``choice`` (T, E): what experts are ranked by, -inf for those that a token may not take; ``place`` (T,): the tokens' order.
    """
    order = torch.argsort(place, stable=True)
    order = order[torch.argsort(sequence[order], stable=True)]  # padding first
    queue = _Queue(sequence[order], num_sequences)
    room = capacities(sequence, num_sequences, expert_ids.shape[1], num_experts, limit.factor)
    room = torch.cat([room, room.new_zeros(1)])[queue.number].unsqueeze(1)  # (T, 1); 0 for padding
    ids = expert_ids[order]
    ranked = choice[order] if choice is not None else None
    priority = ranked if limit.by_score else None
    chosen = torch.zeros((len(ids), num_experts), dtype=torch.bool, device=ids.device).scatter_(1, ids, True)
    rank = queue.ranks(chosen & queue.valid, priority)
    kept = chosen & queue.valid & (rank < room)
    limited = torch.where(kept.gather(1, ids), ids, num_experts)
    if limit.reroute:
        assert ranked is not None
        limited = _reroute(limited, ranked, kept, queue, room, priority)
    return torch.empty_like(limited).index_copy_(0, order, limited)


class _Queue:
    """Tokens in order of sequence and place: where each sequence starts, and places in the queue before each expert."""

    def __init__(self, sequence: Tensor, num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.number = torch.where(sequence < 0, num_sequences, sequence)
        self.valid = (sequence >= 0).unsqueeze(1)
        tokens = _per_sequence(torch.ones_like(sequence).unsqueeze(1), sequence, num_sequences).squeeze(1)
        num_padding = sequence.shape[0] - tokens.sum()
        starts = num_padding + torch.cat([tokens.new_zeros(1), tokens.cumsum(0)])
        self.start = torch.where(self.number == num_sequences, 0, starts[self.number])
        """(T,): where the token's sequence starts."""

    def ranks(self, wanted: Tensor, priority: Tensor | None) -> Tensor:
        """How many tokens of the sequence stand before each token in each expert's queue (T, E); ``wanted`` (T, E) bool."""
        if priority is None:
            before = wanted.long().cumsum(0) - wanted.long()
            return before - before[self.start]
        first = torch.where(wanted, priority, -torch.inf).argsort(dim=0, descending=True, stable=True)
        order = first.gather(0, self.number[first].argsort(dim=0, stable=True))
        if len(order) == 0:
            return order
        lines = torch.arange(len(order), device=order.device).unsqueeze(1).expand_as(order)
        padding = (self.number == self.num_sequences).sum()  # they come last here, and first in ``start``
        return torch.empty_like(order).scatter_(0, order, lines) - (self.start - padding).unsqueeze(1)

    def per_sequence(self, values: Tensor) -> Tensor:
        """values (T, E) summed over each sequence's tokens, given to each token (T, E)."""
        sums = values.new_zeros((self.num_sequences + 1, values.shape[1])).index_add_(0, self.number, values)
        return sums[self.number]


def _reroute(ids: Tensor, ranked: Tensor, kept: Tensor, queue: _Queue, room: Tensor, priority: Tensor | None) -> Tensor:
    """Each choice without room goes to the token's next-best expert with room: rank by rank, in the queue's order."""
    num_experts, top_k = ranked.shape[1], ids.shape[1]
    preferred = ranked.argsort(dim=1, descending=True, stable=True)
    taken = kept.long()
    for rank in range(top_k, num_experts):
        candidate = preferred[:, rank : rank + 1]
        open_slot = ids == num_experts
        allowed = open_slot.sum(1, keepdim=True).clamp(max=1).bool() & queue.valid
        allowed = allowed & torch.isfinite(ranked.gather(1, candidate))
        wanted = torch.zeros_like(kept).scatter_(1, candidate, allowed)
        free = room - queue.per_sequence(taken)
        accepted = wanted & (queue.ranks(wanted, priority) < free)
        taken = taken + accepted.long()
        slot = open_slot.long().argmax(1, keepdim=True)
        given = torch.where(accepted.gather(1, candidate), candidate, ids.gather(1, slot))
        ids = ids.scatter(1, slot, given)
    return ids


def _per_sequence(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """values (T, C) summed over the tokens of each sequence (S, C)."""
    number = torch.where(sequence < 0, num_sequences, sequence)
    return values.new_zeros((num_sequences + 1, values.shape[1])).index_add_(0, number, values)[:num_sequences]
