"""The sum of a residual stream and what a layer adds to it, in the layer's own memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _AddInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        y.add_(x)  # raises y's version, so a backward that saved y would say so
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor, Tensor]:
        return d_sum, d_sum


def add_into(x: Tensor, y: Tensor) -> Tensor:
    """x + y, both (T, D), written to y: for a y that is new and that nothing else reads, as what a linear layer has made."""
    if torch.compiler.is_compiling():
        return x + y
    return _AddInto.apply(x, y)  # type: ignore[no-any-return]
