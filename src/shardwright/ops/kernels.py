"""Elementwise kernels with hand-written backwards: gated activation and counter-based dropout.

Notation: T tokens, F ffn, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.ops.gradients import first_order


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=1)
        gradient = torch.empty_like(gate_up)
        d_gate, d_up = gradient.chunk(2, dim=1)
        torch.ops.aten.silu.out(gate, out=d_up).mul_(dy)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
        return gradient


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up (T, 2F), gate first -> silu(gate) * up (T, F) (Shazeer 2020)."""
    if torch.compiler.is_compiling():
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate) * up
    return _SwiGLU.apply(gate_up)  # type: ignore[no-any-return]


def _mixed(x: Tensor) -> Tensor:
    """A 64-bit integer hash (the finaliser of SplitMix64, Steele et al. 2014); arithmetic wraps."""
    mask = (1 << 34) - 1
    x = x ^ ((x >> 30) & mask)
    x = x * -4658895280553007687
    x = x ^ ((x >> 27) & ((1 << 37) - 1))
    x = x * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def dropout(x: Tensor, rate: float, token_index: Tensor, key: int, first_feature: int = 0) -> Tensor:
    """Zero each element of x (T, D) with probability ``rate`` and scale the rest by 1/(1-rate).

    The mask is a function of (key, global token index, global feature) only: the same in every layout, and the same
    again in a recomputation, without any generator. ``token_index`` (T,) int64 are the tokens' places in the data.
    """
    if rate == 0.0:
        return x
    features = torch.arange(first_feature, first_feature + x.shape[1], device=x.device)
    return x * keep_mask(rate, token_index.unsqueeze(1), features, key) / (1.0 - rate)


def keep_mask(rate: float, tokens: Tensor, features: Tensor, key: int) -> Tensor:
    """True with probability 1 - ``rate``, from (key, token, feature) alone; int64 shapes that broadcast."""
    bits = _mixed(_mixed(tokens + key) + features * 0x632BE59BD9B4E019) & ((1 << 53) - 1)
    return bits >= int(rate * (1 << 53))


def jitter(x: Tensor, width: float, token_index: Tensor, key: int) -> Tensor:
    """x (T, D) times uniform noise in [1 - width, 1 + width], a function of (key, token, feature) as in :func:`dropout`."""
    features = torch.arange(x.shape[1], device=x.device)
    rows = _mixed(token_index + key)
    bits = _mixed(rows.unsqueeze(1) + features * 0x632BE59BD9B4E019) & ((1 << 53) - 1)
    noise = bits.to(torch.float64).mul_(2.0 * width / (1 << 53)).add_(1.0 - width)
    return x * noise.to(x.dtype)


def dropout_key(seed: int, step: int, layer: int, site: int) -> int:
    """One 62-bit key for each place that drops, each step: splits the counter space of :func:`dropout`."""
    value = seed & ((1 << 62) - 1)
    for part in (step, layer, site):
        value = (value * 6364136223846793005 + part + 1442695040888963407) & ((1 << 62) - 1)
        value ^= value >> 29
    return value
