"""Linear layers and the embedding lookup, with gradients that go straight into their slots.

Notation: T tokens, I input features, O output features (the sum over fused weights), V vocabulary, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.ops.gradients import first_order, joined, slot_of, write_linear


def product(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), out: Tensor | None = None
) -> Tensor:
    """x (T, I) times each weight, outputs side by side (T, O): one matrix product when the weights lie side by side.

    ``out``: where one matrix product without biases is written to; no graph is made.
    """
    if out is not None and len(weights) == 1 and not biases:
        return torch.mm(x, weights[0].t(), out=out)
    bias = (torch.cat(list(biases)) if len(biases) > 1 else biases[0]) if biases else None
    whole = joined(weights)
    if whole is not None:
        return F.linear(x, whole, bias)
    y = torch.cat([F.linear(x, weight) for weight in weights], dim=1)
    return y if bias is None else y.add_(bias)


def input_gradient(dy: Tensor, weights: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """dy (T, O) -> dx (T, I), the sum over the fused weights, written to ``out`` if that is given; no graph is made."""
    whole = joined(weights)
    if whole is not None:
        return torch.mm(dy, whole, out=out)
    first, *others = zip(dy.split([weight.shape[0] for weight in weights], dim=1), weights, strict=True)
    dx = torch.mm(first[0], first[1], out=out)
    for piece, weight in others:
        dx.addmm_(piece, weight)
    return dx


def weight_gradients(
    weights: Sequence[Tensor], wanted: Sequence[bool], dy: Tensor, x: Tensor, gathered: Tensor | None = None
) -> list[Tensor | None]:
    """dW of each wanted weight: through its slot (then None is returned), else as a tensor for autograd.

    ``gathered``: x or dy, where it has the tokens of other ranks too.
    """
    slots = [slot_of(weight) for weight in weights]
    if all(wanted) and all(slot is not None for slot in slots):
        ready = [slot for slot in slots if slot is not None]
        ready[0].queue.submit(partial(write_linear, ready, dy.detach(), x.detach()), gathered)
        return [None] * len(weights)
    gradients: list[Tensor | None] = []
    pieces = dy.split([weight.shape[0] for weight in weights], dim=1)
    for slot, want, piece in zip(slots, wanted, pieces, strict=True):
        if want and slot is not None:
            slot.queue.submit(partial(write_linear, [slot], piece.detach(), x.detach()), gathered)
        gradients.append(piece.t() @ x if want and slot is None else None)
    return gradients


def bias_gradients(biases: Sequence[Tensor], wanted: Sequence[bool], dy: Tensor) -> list[Tensor | None]:
    """db of each wanted bias, the sum over tokens; as :func:`weight_gradients`."""
    gradients: list[Tensor | None] = []
    start = 0
    for bias, want in zip(biases, wanted, strict=True):
        piece = dy[:, start : start + bias.shape[0]].sum(0) if want else None
        start += bias.shape[0]
        slot = slot_of(bias)
        if slot is not None and piece is not None:
            slot.add(piece)
            piece = None
        gradients.append(piece)
    return gradients


class _FusedLinear(torch.autograd.Function):
    """y = x [W1; W2; ...]^T + [b1; b2; ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_weights: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        ctx.save_for_backward(x, *weights)
        ctx.parameters, ctx.num_weights = parameters, num_weights
        return product(x, weights, biases)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        count, wanted = ctx.num_weights, ctx.needs_input_grad[2:]
        dx = input_gradient(dy, weights) if ctx.needs_input_grad[0] else None
        gradients = weight_gradients(ctx.parameters[:count], wanted[:count], dy, x)
        gradients += bias_gradients(ctx.parameters[count:], wanted[count:], dy)
        return (dx, None, *gradients)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, I), weight (O, I), bias (O) -> (T, O)."""
    return fused_linear(x, [weight], [] if bias is None else [bias])


def fused_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Tensor:
    """Several linear layers over one input x (T, I) -> (T, O), outputs side by side in the order of ``weights``.

    Either all weights have a bias or none. One matrix product when the weights are neighbours in memory.
    """
    if torch.compiler.is_compiling():
        bias: list[Tensor | None] = list(biases) if biases else [None] * len(weights)
        return torch.cat([F.linear(x, w, b) for w, b in zip(weights, bias, strict=True)], dim=1)
    return _FusedLinear.apply(x, len(weights), *weights, *biases)  # type: ignore[no-any-return]


class _WideLinear(torch.autograd.Function):
    """y = x W^T + b computed in ``dtype`` whatever the dtype of x and W; dW is written as wide as it was computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.dtype = (weight, bias), dtype
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        own, bias = ctx.parameters
        dx = (dy @ weight.to(ctx.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        (d_weight,) = weight_gradients([own], [ctx.needs_input_grad[1]], dy, x.to(ctx.dtype))
        d_bias = None if bias is None else bias_gradients([bias], [ctx.needs_input_grad[2]], dy)[0]
        return dx, None if d_weight is None else d_weight.to(weight.dtype), d_bias, None


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: str) -> Tensor:
    """x (T, I), weight (O, I), bias (O) -> (T, O) in ``dtype`` ("fp32" or "fp64"), or in fp64 where x is."""
    wide = torch.float64 if dtype == "fp64" or x.dtype == torch.float64 else torch.float32
    return _WideLinear.apply(x, weight, bias, wide)  # type: ignore[no-any-return]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, first_row: int | None) -> Tensor:
        ctx.weight = weight
        if first_row is None:
            ctx.save_for_backward(indices, None)
            return F.embedding(indices, weight)
        local = indices - first_row
        held = (local >= 0) & (local < weight.shape[0])
        local = torch.where(held, local, 0)
        ctx.save_for_backward(local, held)
        return F.embedding(local, weight).mul_(held.unsqueeze(1))

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        indices, held = ctx.saved_tensors
        if held is not None:
            dy = dy * held.unsqueeze(1)
        slot = slot_of(ctx.weight)
        if slot is None:
            return None, torch.zeros_like(ctx.weight).index_add_(0, indices, dy), None
        if not slot.written:
            slot.view.zero_()
            slot.written = True
        slot.view.index_add_(0, indices, dy.to(slot.view.dtype))
        return None, None, None


def embedding(indices: Tensor, weight: Tensor, first_row: int | None = None) -> Tensor:
    """Rows of weight (V, D) at indices (T,) -> (T, D).

    With ``first_row``, weight holds only the rows from there on: an index that another rank holds gives zeros.
    """
    if torch.compiler.is_compiling() and first_row is None:
        return F.embedding(indices, weight)
    return _Embedding.apply(indices, weight, first_row)  # type: ignore[no-any-return]


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias
        return x + bias

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        return dy, bias_gradients([ctx.bias], [ctx.needs_input_grad[1]], dy)[0]


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """x (T, D) + bias (D), with the bias gradient in its slot."""
    return _AddBias.apply(x, bias)  # type: ignore[no-any-return]
