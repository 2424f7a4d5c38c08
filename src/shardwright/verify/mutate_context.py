"""Mutations of context parallelism: blocks and heads that never come, gradients that stay, tokens out of order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from shardwright.core.segments import Range
from shardwright.model.context import Context
from shardwright.train.data import MicroBatch
from shardwright.train.step import Trainer
from shardwright.verify.mutate import Mutation, left_out_over


def _local_positions(trainer: Trainer) -> None:
    """Each rank counts its own tokens from 0."""
    context = trainer.model.context

    def counted(tokens: Tensor, positions: Tensor, *args: Any, **kwargs: Any) -> Context:
        return context(tokens, torch.arange(len(positions)), *args, **kwargs)

    trainer.model.context = counted  # type: ignore[method-assign]


@dataclass(frozen=True, eq=False)
class _ReversedCut(MicroBatch):
    """A rank's tokens in descending order, with all that belongs to each."""

    def cut(self, ranges: Sequence[Range]) -> MicroBatch:
        return super().cut(ranges)._map(lambda tensor: tensor.flip(0))


def _reversed_cut(batch: MicroBatch) -> MicroBatch:
    return _ReversedCut(**{field.name: getattr(batch, field.name) for field in fields(batch)})


CONTEXT_MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        left_out_over("cp", "lose-kv", "kv", "keys and values of other ranks never come"),
        left_out_over("cp", "lose-kv-gradients", "kv gradient", "keys and values learn from the rank's own queries only"),
        left_out_over("cp", "drop-heads-in", "heads in", "attention over one rank's tokens, several times"),
        left_out_over("cp", "drop-heads-out", "heads out", "heads and tokens change places"),
        left_out_over("cp", "drop-cp-gradients", "gradients", "each rank of cp trains on its own tokens"),
        left_out_over("dp_cp", "drop-dp-cp-gradients", "gradients", "each rank of dp x cp trains on its own tokens"),
        Mutation("local-positions", "positions counted on the rank instead of in the document", trainer=_local_positions),
        Mutation("reversed-cut", "tokens cut in another order than attention is told", batch=_reversed_cut),
    )
}
"""Those that need cp > 1: ring or gathered keys and values, or the exchange of heads."""
