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
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = _wide(x)
        size = x.shape[-1]
        rstd = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd)
        ctx.weight = weight
        y: Tensor = (x32 * rstd).mul_(weight)
        return y.to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, rstd = ctx.saved_tensors
        weight: Tensor = ctx.weight
        normed = _wide(x) * rstd
        dy32 = _wide(dy)
        gradient = None
        if ctx.needs_input_grad[1]:
            gradient = _give(weight, (dy32 * normed).reshape(-1, x.shape[-1]).sum(0))
        scaled = dy32 * weight
        mean = torch.linalg.vecdot(scaled, normed, dim=-1).div_(x.shape[-1]).unsqueeze(-1)
        dx = scaled.addcmul_(normed, mean, value=-1).mul_(rstd)
        return dx.to(x.dtype), gradient, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., D) / sqrt(mean(x^2) + eps) * weight (D)."""
    if torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


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
