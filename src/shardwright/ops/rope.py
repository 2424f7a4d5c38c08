"""Rotary positions (Su et al. 2021) in the half-split form, with linear, llama3 and YaRN scaling.

Notation: T tokens, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwright.core.model_config import ModelConfig, RopeScaling
from shardwright.ops.gradients import first_order

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each (T, 1, H/2)."""


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """The H/2 angular frequencies in fp64 and the factor on cos and sin (1 but for YaRN); H is what is rotated of a head."""
    size = _rotated(config)
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, scaling, config)


def _rotated(config: ModelConfig) -> int:
    return config.head_dim if config.mla is None else config.mla.rope_head_dim


def softmax_scale(config: ModelConfig) -> float:
    """What latent attention's scores are multiplied by beside 1 / sqrt(H): with YaRN and ``mscale_all_dim`` the square of its
    scale, as DeepSeek-V2 and V3 do."""
    scaling = config.rope_scaling
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return math.pow(_yarn_scale(scaling.factor, scaling.mscale_all_dim), 2)


def rotation(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """cos and sin at ``positions`` (T,), computed in fp32 at least and rounded to ``dtype``."""
    frequencies, factor = inverse_frequencies(config)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = positions.to(wide).unsqueeze(1) * frequencies.to(device=positions.device, dtype=wide)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's smooth change from kept (short waves) to divided (long waves) frequencies."""
    original = scaling.original_max_positions
    assert original is not None
    turns = original * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, section 3.2 and 3.4): a ramp by dim between divided and kept frequencies."""
    size, original = _rotated(config), scaling.original_max_positions or config.max_positions

    def dim_of(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    divided = ramp.clamp(0, 1)
    factor = scaling.attention_factor
    if factor is None:
        factor = _yarn_scale(scaling.factor, 1.0)
        if scaling.mscale and scaling.mscale_all_dim:
            factor = _yarn_scale(scaling.factor, scaling.mscale) / _yarn_scale(scaling.factor, scaling.mscale_all_dim)
    return divided * frequencies / scaling.factor + (1 - divided) * frequencies, factor


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rotate(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> None:
    """out = x turned by +angle (sign 1) or -angle (sign -1); x and out (T, heads, H)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    torch.mul(x, torch.cat((cos, cos), -1), out=out)
    out[..., :half].addcmul_(b, sin, value=-sign)
    out[..., half:].addcmul_(a, sin, value=sign)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.rotation = (cos, sin)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _rotate(out, x, cos, sin, 1)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
        cos, sin = ctx.rotation
        _rotate(dx, dy, cos, sin, -1)
        return dx, None, None


def apply_rope(x: Tensor, rotate: Rotation) -> Tensor:
    """x (T, heads, H) turned by its positions' angles."""
    cos, sin = rotate
    if torch.compiler.is_compiling():
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return _Rope.apply(x, cos, sin)  # type: ignore[no-any-return]


class _SplitRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.rotation, ctx.heads, ctx.shape = (cos, sin), (num_heads, num_kv_heads), qkv.shape
        num_turned = num_heads + num_kv_heads
        turned = torch.empty((qkv.shape[0], num_turned, qkv.shape[2]), dtype=qkv.dtype, device=qkv.device)
        _rotate(turned, qkv[:, :num_turned], cos, sin, 1)
        return turned[:, :num_heads], turned[:, num_heads:], qkv[:, num_turned:]

    @staticmethod
    @first_order
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None, None]:
        num_heads, num_kv_heads = ctx.heads
        num_turned = num_heads + num_kv_heads
        dqkv = torch.empty(ctx.shape, dtype=dq.dtype, device=dq.device)
        cos, sin = ctx.rotation
        _rotate(dqkv[:, :num_heads], dq, cos, sin, -1)
        _rotate(dqkv[:, num_heads:num_turned], dk, cos, sin, -1)
        dqkv[:, num_turned:].copy_(dv)
        return dqkv, None, None, None, None


def split_rope(qkv: Tensor, rotate: Rotation, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv (T, N+2K, H) -> rotated q (T, N, H), rotated k (T, K, H) and v (T, K, H), one backward without copies."""
    if torch.compiler.is_compiling():
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return apply_rope(q, rotate), apply_rope(k, rotate), v
    return _SplitRope.apply(qkv, *rotate, num_heads, num_kv_heads)  # type: ignore[no-any-return]
