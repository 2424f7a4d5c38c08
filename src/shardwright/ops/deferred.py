"""`nn.Linear` layers of a user's own module with their weight gradient left for W, the second half of backward.

While `deferring` is on, the layers' ``forward`` is one whose backward submits the weight gradient to a `GradQueue`. When that
is due, autograd adds it to ``weight.grad`` itself, so that hooks on the parameter see it like any other gradient.

Notation: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.ops.gradients import GradQueue, first_order


class _DeferredLinear(torch.autograd.Function):
    """y = x W^T + b, with dW submitted to ``queue``.

    The weight is no input, so that autograd does not tell its hooks of a gradient that is not there yet; ``anchor`` is one,
    so that there is a graph where x needs no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, anchor: Tensor, layer: nn.Linear, queue: GradQueue) -> Tensor:
        ctx.save_for_backward(x, layer.weight)
        ctx.weight, ctx.bias_dtype, ctx.queue = layer.weight, None if bias is None else bias.dtype, queue
        return F.linear(x, layer.weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_bias, *_ = ctx.needs_input_grad
        dx = (dy @ weight.to(dy.dtype)).to(x.dtype) if wants_x else None  # under autocast y is not as wide as x and W
        db = _rows(dy).sum(0).to(ctx.bias_dtype) if wants_bias else None
        ctx.queue.submit(partial(_write, ctx.weight, dy, x))
        return dx, db, None, None, None


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _write(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add dy^T x of dy (..., O) and x (..., I) to ``weight.grad`` (O, I)."""
    gradient = _rows(dy).t() @ _rows(x).to(dy.dtype)
    torch.autograd.backward([weight], [gradient.to(weight.dtype)])


def _forward(layer: nn.Linear, queue: GradQueue, input: Tensor) -> Tensor:
    own = layer.weight.is_leaf and layer.weight.requires_grad  # not so where a parametrization makes the weight
    if not own or torch.compiler.is_compiling():
        return F.linear(input, layer.weight, layer.bias)
    anchor = torch.empty(0, device=input.device, requires_grad=True)
    return _DeferredLinear.apply(input, layer.bias, anchor, layer, queue)  # type: ignore[no-any-return]


def deferrable(module: nn.Module) -> list[nn.Linear]:
    """The layers of ``module`` that `deferring` takes: each `nn.Linear` whose ``forward`` is PyTorch's own."""
    linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
    return [child for child in linears if type(child).forward is nn.Linear.forward and "forward" not in vars(child)]


@contextmanager
def deferring(layers: Sequence[nn.Linear], queue: GradQueue) -> Iterator[None]:
    """Inside, the layers leave their weight gradients to ``queue``. On in backward too, for forwards that are repeated there."""
    for layer in layers:
        layer.forward = partial(_forward, layer, queue)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
