"""Next-token loss: head product and cross entropy in one step, so that logits exist once and become their gradient.

Notation: T tokens, D model dim, V vocabulary. Targets of -100 do not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.ops.gradients import first_order, slot_of, write_linear

IGNORE = -100
_CHUNK_BYTES = 2 << 20
"""Rows are worked on in pieces that stay in a core's cache."""


def cross_entropy_rows(logits: Tensor, targets: Tensor, want_gradient: bool) -> Tensor:
    """Sum over valid tokens of -log softmax(logits)[target], a scalar in fp32 (fp64 for fp64 logits).

    logits (T, V), targets (T,). With ``want_gradient`` the logits are overwritten by their gradient, softmax minus
    one-hot (zero rows where the target does not count).
    """
    rows = max(1, _CHUNK_BYTES // (logits.shape[1] * logits.element_size()))
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=wide, device=logits.device)
    for piece, target in zip(logits.split(rows), targets.split(rows), strict=True):
        valid = (target != IGNORE).to(wide)
        index = target.clamp_min(0).unsqueeze(1)
        work = piece.to(wide)  # the piece itself when it is already wide
        if not want_gradient:
            work = work - work.amax(1, keepdim=True)
        else:
            work.sub_(work.amax(1, keepdim=True))
        picked = work.gather(1, index).squeeze(1)
        work.exp_()
        denominator = work.sum(1)
        total += ((denominator.log() - picked) * valid).sum()
        if want_gradient:
            work.mul_((valid / denominator).unsqueeze(1))
            work.scatter_add_(1, index, -valid.unsqueeze(1))
            if work.dtype != piece.dtype:
                piece.copy_(work)
    return total


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, want: bool) -> Tensor:
        logits = x @ weight.t()
        loss = cross_entropy_rows(logits, targets, want)
        if want:
            ctx.save_for_backward(x, weight)
            ctx.gradient, ctx.weight = logits, weight
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        gradient, ctx.gradient = ctx.gradient, None
        scale = d_loss.to(x.dtype)
        dx = (gradient @ weight).mul_(scale) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None
        scaled = x.detach() * scale
        slot = slot_of(ctx.weight)
        if slot is None:
            return dx, gradient.t() @ scaled, None, None
        slot.queue.submit(lambda: write_linear([slot], gradient, scaled))
        return dx, None, None, None


def head_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """x (T, D), weight (V, D), targets (T,) -> the summed loss over valid targets, a scalar."""
    want = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _HeadLoss.apply(x, weight, targets, want)  # type: ignore[no-any-return]
