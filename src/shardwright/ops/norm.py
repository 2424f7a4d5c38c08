"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016) over the last dim, statistics in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.ops.gradients import first_order, slot_of


def _give(parameter: Tensor, gradient: Tensor) -> Tensor | None:
    """Write a norm parameter's gradient into its slot, or hand it to autograd."""
    slot = slot_of(parameter)
    if slot is None:
        return gradient.to(parameter.dtype)
    slot.add(gradient)
    return None


class _RMSNorm(torch.autograd.Function):
    """Gives x too, for the residual: the gradients of both are added where they are made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x32 = _wide(x)
        size = x.shape[-1]
        rstd = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd)
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        y: Tensor = (x32 * rstd).mul_(weight)
        return y.to(x.dtype), x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None, d_beside: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if dy is None:
            return d_beside, None, None
        x, rstd = ctx.saved_tensors
        beside = None if d_beside is None else d_beside.reshape(-1, x.shape[-1])
        rows = (x.reshape(-1, x.shape[-1]), rstd.reshape(-1, 1), dy.reshape(-1, x.shape[-1]))
        dx, d_weight = _rms_backward(*rows, beside, ctx.weight, ctx.needs_input_grad[1])
        return dx.view(x.shape), None if d_weight is None else _give(ctx.weight, d_weight), None


def _rms_backward(
    x: Tensor, rstd: Tensor, dy: Tensor, beside: Tensor | None, weight: Tensor, want_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """x, dy and what is added, ``beside``, (R, D), rstd (R, 1) -> dx (R, D), and dW (D) wide if wanted."""
    scale, gradient, wide = _wide(weight.detach()), _wide(dy), _wide(x)
    product = gradient * wide
    d_weight = torch.mv(product.t(), rstd.squeeze(1)) if want_weight else None
    mean = torch.mv(product, scale).unsqueeze(1).mul_(rstd.square()).div_(x.shape[1])
    dx = torch.mul(gradient, scale, out=product).addcmul_(wide, mean, value=-1)
    dx = dx.mul_(rstd) if beside is None else torch.addcmul(_wide(beside), dx, rstd, out=dx)
    return dx.to(x.dtype), d_weight


def rms_norm_beside(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """:func:`rms_norm` of x, and x itself for what else uses it: in backward their gradients are added in one pass."""
    if torch.compiler.is_compiling():
        return rms_norm(x, weight, eps), x
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., D) / sqrt(mean(x^2) + eps) * weight (D)."""
    if torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return rms_norm_beside(x, weight, eps)[0]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, (x.shape[-1],), weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias = weight, bias
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, mean, rstd = ctx.saved_tensors
        shape = (x.shape[-1],)
        mask = [True, True, True]
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(dy, x, shape, mean, rstd, ctx.weight, ctx.bias, mask)
        dw = _give(ctx.weight, dw) if ctx.needs_input_grad[1] else None
        db = _give(ctx.bias, db) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim of x (..., D)."""
    if torch.compiler.is_compiling():
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return]


def _wide(x: Tensor) -> Tensor:
    """fp32 for half precision, else as it is (fp64 stays)."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
