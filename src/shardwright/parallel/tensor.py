"""Tensor and sequence parallelism: matrices split inside a layer, tokens split outside (Shoeybi et al. 2019; Korthikanti
et al. 2022).

TP:  W_qkv[D, heads/tp], W_out[heads/tp, D], W_gate,up[D, F/tp], W_down[F/tp, D], embedding and head [V/tp, D]
SP:  x[T/tp, D] in norms, dropout and residual
sends per layer forward two **all-reduces** of T x D (after attention, after the MLP), or with SP two **all-gathers** and two
**reduce-scatters** at the same volume; as many backward, where SP gathers the two inputs once more, since the gathered
ones are not kept.

Every function takes a :class:`Region`; with tp=1 its verbs return their input. Gradients of what is held whole inside the
region (QK norms, a replicated K or V) are partial on each rank; `core.specs` says that they are summed over tp.
Notation: T tokens of the micro-batch, D model dim, I inputs, O outputs (local), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.base import Comm
from shardwright.comm.regions import reduce_from_region, reduce_scatter_tokens
from shardwright.comm.solo import SoloComm
from shardwright.ops.gradients import first_order
from shardwright.ops.linear import (
    add_bias,
    bias_gradients,
    embedding,
    fused_linear,
    input_gradient,
    product,
    weight_gradients,
)


@dataclass(frozen=True)
class Region:
    """One tensor-parallel region: the tp axis, and whether the tokens outside it are split (``sequence``)."""

    comm: Comm
    sequence: bool

    @property
    def size(self) -> int:
        return self.comm.size

    def own_tokens(self, values: Tensor) -> Tensor:
        """This rank's rows of per-token data (T, ...) outside the region; all of them without sequence parallelism."""
        if not self.sequence or self.size == 1:
            return values
        rows = values.shape[0] // self.size
        return values[self.comm.rank * rows : (self.comm.rank + 1) * rows]

    def leave(self, partial: Tensor, name: str) -> Tensor:
        """The sum of the ranks' partial (T, D): all of it everywhere (g), or this rank's T/tp rows of it."""
        if self.sequence:
            return reduce_scatter_tokens(partial, self.comm, name)
        return reduce_from_region(partial, self.comm, name)


SOLO = Region(SoloComm("tp"), False)
"""The region of tp=1."""


class _ColumnLinear(torch.autograd.Function):
    """Enter the region and multiply by the local columns: f (or the token gather) and the product in one.

    The gathered input is not kept for backward but gathered again, beside the input gradient's product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region, name: str, num_weights: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        ctx.save_for_backward(x, *weights)
        ctx.region, ctx.name, ctx.parameters, ctx.num_weights = region, name, parameters, num_weights
        whole = region.comm.all_gather(x.contiguous(), name=name) if region.sequence else x
        return product(whole, weights, biases)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        region, count, wanted = ctx.region, ctx.num_weights, ctx.needs_input_grad[4:]
        whole, gathering = x, None
        if region.sequence and any(wanted[:count]):
            whole = x.new_empty((x.shape[0] * region.size, x.shape[1]))
            gathering = region.comm.all_gather_start(whole, x.contiguous(), name=f"{ctx.name} again")
        dx, reducing = None, None
        if ctx.needs_input_grad[0]:
            partial = input_gradient(dy, weights)
            if region.sequence:
                dx = torch.empty_like(x)
                reducing = region.comm.reduce_scatter_start(dx, partial, name=f"{ctx.name} gradient")
            else:
                dx = partial
                reducing = region.comm.all_reduce_start(dx, name=f"{ctx.name} gradient")
        if gathering is not None:
            gathering.wait()
        gradients = weight_gradients(ctx.parameters[:count], wanted[:count], dy, whole)
        gradients += bias_gradients(ctx.parameters[count:], wanted[count:], dy)
        if reducing is not None:
            reducing.wait()
        return (dx, None, None, None, *gradients)


def column_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], region: Region, name: str
) -> Tensor:
    """x (T, I), or its own T/tp rows with sequence parallelism -> (T, O): every rank its own output features."""
    if region.size == 1:
        return fused_linear(x, weights, biases)
    return _ColumnLinear.apply(x, region, name, len(weights), *weights, *biases)  # type: ignore[no-any-return]


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, region: Region, name: str) -> Tensor:
    """x (T, I) with this rank's input features, weight (D, I) -> the sum over ranks (T, D), or its own T/tp rows.

    The bias is added once, after the sum.
    """
    if region.size == 1:
        return fused_linear(x, [weight], [] if bias is None else [bias])
    y = region.leave(fused_linear(x, [weight]), name)
    return y if bias is None else add_bias(y, bias)


def vocab_embedding(tokens: Tensor, weight: Tensor, first_row: int, region: Region, name: str) -> Tensor:
    """tokens (T,) -> (T, D), or its own T/tp rows: each id is held by one rank, the others add zeros."""
    if region.size == 1:
        return embedding(tokens, weight)
    return region.leave(embedding(tokens, weight, first_row), name)
