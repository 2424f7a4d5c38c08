"""Next-token loss: head product and cross entropy in one step, so that logits exist once and become their gradient.

With tensor parallelism each rank holds the logits of its own vocabulary rows and nothing of shape [T, V] is sent: three
reductions of [T] (maximum, sum of exponentials, target logit) make the loss, and the gradient, softmax minus one-hot,
is local (Shoeybi et al. 2019, section 3).

Notation: T tokens, D model dim, V vocabulary rows of the rank. Targets of -100 do not count.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.ops.gradients import first_order, slot_of, write_linear
from shardwright.parallel.tensor import SOLO, Region

IGNORE = -100
_CHUNK_BYTES = 2 << 20
"""Rows are worked on in pieces that stay in a core's cache."""


def _rows_in_cache(logits: Tensor) -> int:
    return max(1, _CHUNK_BYTES // (max(1, logits.shape[1]) * logits.element_size()))


def cross_entropy_rows(logits: Tensor, targets: Tensor, want_gradient: bool) -> Tensor:
    """Sum over valid tokens of -log softmax(logits)[target], a scalar in fp32 (fp64 for fp64 logits).

    logits (T, V), targets (T,). With ``want_gradient`` the logits are overwritten by their gradient, softmax minus
    one-hot (zero rows where the target does not count).
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=wide, device=logits.device)
    rows = _rows_in_cache(logits)
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


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, first_row: int, region: Region) -> Tensor:
    """As :func:`cross_entropy_rows` with ``want_gradient``, for logits (T, V/tp) of rows from ``first_row`` on.

    The loss is the same on every rank of the region; the logits become this rank's part of their gradient.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    tokens = logits.shape[0]
    if logits.shape[1]:
        peak = logits.amax(1).to(wide)
    else:  # more ranks than vocabulary rows
        peak = torch.full((tokens,), -torch.inf, dtype=wide, device=logits.device)
    region.comm.all_reduce(peak, "max", name="loss maximum")
    valid = (targets != IGNORE).to(wide)
    local = targets - first_row
    held = (local >= 0) & (local < logits.shape[1])
    index = torch.where(held, local, 0).unsqueeze(1)
    mine = held.to(wide)
    picked, denominator = torch.zeros_like(peak), torch.zeros_like(peak)
    rows = _rows_in_cache(logits)
    for start in range(0, tokens if logits.shape[1] else 0, rows):
        part = slice(start, start + rows)
        work = logits[part].to(wide).sub_(peak[part].unsqueeze(1))
        picked[part] = work.gather(1, index[part]).squeeze(1) * mine[part]
        denominator[part] = work.exp_().sum(1)
        if work.dtype != logits.dtype:
            logits[part] = work
    region.comm.all_reduce(denominator, name="loss denominator")
    region.comm.all_reduce(picked, name="loss target")
    logits.mul_((valid / denominator).unsqueeze(1).to(logits.dtype))
    if logits.shape[1]:
        logits.scatter_add_(1, index, -(valid * mine).unsqueeze(1).to(logits.dtype))
    return ((denominator.log() - picked) * valid).sum()


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, first_row: int, region: Region, want: bool
    ) -> Tensor:
        whole = region.comm.all_gather(x.contiguous(), name="head") if region.sequence and region.size > 1 else x
        logits = whole @ weight.t()
        if region.size > 1:
            loss = vocab_parallel_cross_entropy(logits, targets, first_row, region)
        else:
            loss = cross_entropy_rows(logits, targets, want)
        if want:
            ctx.save_for_backward(whole, weight)
            ctx.gradient, ctx.weight, ctx.region = logits, weight, region
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        whole, weight = ctx.saved_tensors
        gradient, ctx.gradient = ctx.gradient, None
        scale = d_loss.to(whole.dtype)
        dx = _head_input_gradient(gradient, weight, ctx.region) if ctx.needs_input_grad[0] else None
        if dx is not None:
            dx.mul_(scale)
        d_weight = None
        if ctx.needs_input_grad[1]:
            scaled = whole.detach() * scale
            slot = slot_of(ctx.weight)
            if slot is None:
                d_weight = gradient.t() @ scaled
            else:
                split = ctx.region.sequence and ctx.region.size > 1
                slot.queue.submit(partial(write_linear, [slot], gradient, scaled), scaled if split else None)
        return dx, d_weight, None, None, None, None


def _head_input_gradient(gradient: Tensor, weight: Tensor, region: Region) -> Tensor:
    """(T, V/tp) -> the sum over ranks of (T, D), or this rank's T/tp rows of it."""
    return _head_sum(gradient @ weight, region)


def _head_sum(dx: Tensor, region: Region) -> Tensor:
    """Each rank's partial (T, D) -> their sum, or this rank's T/tp rows of it."""
    if region.size == 1:
        return dx
    if region.sequence:
        return region.comm.reduce_scatter(dx, name="head gradient")
    return region.comm.all_reduce(dx, name="head gradient")


class _ChunkedHeadLoss(torch.autograd.Function):
    """As `_HeadLoss` with the logits of ``chunk`` tokens at a time; backward makes them again from x and the
    log-sum-exp of each token, so it sends no more. Weight gradients are written at once: deferred they would hold them all.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, first_row: int, region: Region, chunk: int
    ) -> Tensor:
        whole = region.comm.all_gather(x.contiguous(), name="head") if region.sequence and region.size > 1 else x
        wide = torch.float64 if whole.dtype == torch.float64 else torch.float32
        peak, denominator, picked = _local_statistics(whole, weight, targets - first_row, chunk, wide)
        top = region.comm.all_reduce(peak.clone(), "max", name="loss maximum")
        denominator.mul_((peak - top).exp_())
        region.comm.all_reduce(denominator, name="loss denominator")
        _, mine = _held(targets - first_row, weight.shape[0])
        picked = region.comm.all_reduce((picked - top) * mine, name="loss target")
        log_sum = denominator.log_()
        ctx.save_for_backward(whole, weight, targets, top + log_sum)
        ctx.first_row, ctx.region, ctx.chunk, ctx.weight = first_row, region, chunk, weight
        return ((log_sum - picked) * (targets != IGNORE)).sum()

    @staticmethod
    @first_order
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        whole, weight, targets, log_sum_exp = ctx.saved_tensors
        want_x, want_weight = ctx.needs_input_grad[:2]
        dx = torch.empty_like(whole) if want_x else None
        slot = slot_of(ctx.weight)
        d_weight = torch.zeros_like(weight) if want_weight and slot is None else None
        for start in range(0, whole.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            x, target = whole[rows], targets[rows]
            index, mine = _held(target - ctx.first_row, weight.shape[0])
            scale = (target != IGNORE).to(log_sum_exp.dtype) * d_loss
            gradient = (x @ weight.t()).to(log_sum_exp.dtype).sub_(log_sum_exp[rows].unsqueeze(1)).exp_()
            gradient.mul_(scale.unsqueeze(1))
            if weight.shape[0]:
                gradient.scatter_add_(1, index.unsqueeze(1), -(scale * mine).unsqueeze(1))
            gradient = gradient.to(whole.dtype)
            if dx is not None:
                torch.mm(gradient, weight, out=dx[rows])
            if d_weight is not None:
                d_weight.addmm_(gradient.t(), x)
            elif want_weight and slot is not None:
                write_linear([slot], gradient, x)
        return _head_sum(dx, ctx.region) if dx is not None else None, d_weight, None, None, None, None


def _held(local: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Targets as numbers of the rank's own rows (T,), 0 where another rank holds them; and whether it holds them."""
    held = (local >= 0) & (local < rows)
    return torch.where(held, local, 0), held


def _local_statistics(
    whole: Tensor, weight: Tensor, local: Tensor, chunk: int, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum of each token's logits over the rank's rows, the sum of exponentials below it, the target's logit."""
    peak = torch.full((whole.shape[0],), -torch.inf, dtype=wide, device=whole.device)
    denominator, picked = torch.zeros_like(peak), torch.zeros_like(peak)
    if not weight.shape[0]:  # more ranks than vocabulary rows
        return peak, denominator, picked
    index, _ = _held(local, weight.shape[0])
    for start in range(0, whole.shape[0], chunk):
        rows = slice(start, start + chunk)
        logits = (whole[rows] @ weight.t()).to(wide)
        peak[rows] = logits.amax(1)
        picked[rows] = logits.gather(1, index[rows].unsqueeze(1)).squeeze(1)
        denominator[rows] = logits.sub_(peak[rows].unsqueeze(1)).exp_().sum(1)
    return peak, denominator, picked


def head_loss(
    x: Tensor, weight: Tensor, targets: Tensor, region: Region = SOLO, first_row: int = 0, chunk: int = 0
) -> Tensor:
    """x (T, D), or its own T/tp rows; weight (V/tp, D); targets (T,) -> the summed loss over valid targets, a scalar.

    ``chunk`` > 0: never more than the logits of so many tokens at a time, for one more product in backward.
    """
    if chunk:
        return _ChunkedHeadLoss.apply(x, weight, targets, first_row, region, chunk)  # type: ignore[no-any-return]
    want = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _HeadLoss.apply(x, weight, targets, first_row, region, want)  # type: ignore[no-any-return]
