"""Grouped matrix product: rows sorted by expert, each expert's rows times its own weight, none padded.

One signature over two ways: ``torch.nn.functional.grouped_mm`` where the device has it, else a loop over experts. The
weight gradient goes straight into its slot, at once or deferred; an expert without rows gets a written zero.
Notation: M rows, E experts (local), I input features, O output features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.ops.gradients import GradQueue, GradSlot, first_order, slot_of
from shardwright.ops.routing import RowGroups


def has_grouped_gemm(rows: Tensor, weight: Tensor) -> bool:
    """Whether one kernel can do all experts: bf16 on CUDA from compute capability 8.0, sizes of whole 16-byte words."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(rows.device)[0] >= 8 and all(size % 8 == 0 for size in weight.shape[1:])


def _product(rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """rows (M, I) times each expert's weight (E, I, O), which may be a transposed view -> (M, O)."""
    if has_grouped_gemm(rows, weight):
        return F.grouped_mm(rows, weight, offs=groups.ends())
    out = rows.new_empty((rows.shape[0], weight.shape[2]))
    start = 0
    for expert, size in enumerate(groups.sizes):
        if size:
            torch.mm(rows[start : start + size], weight[expert], out=out[start : start + size])
        start += size
    return out


def write_grouped(slot: GradSlot, dy: Tensor, rows: Tensor, groups: RowGroups) -> None:
    """dW (E, O, I) += dy^T rows of each expert, into the slot; zeros where an expert has no rows."""
    view = slot.view
    if has_grouped_gemm(rows, dy):
        slot.add(F.grouped_mm(dy.t(), rows, offs=groups.ends()))
        return
    start = 0
    for expert, size in enumerate(groups.sizes):
        piece, x, target = dy[start : start + size], rows[start : start + size], view[expert]
        start += size
        if not size:
            if not slot.written:
                target.zero_()
        elif slot.written:
            if target.dtype == piece.dtype:
                target.addmm_(piece.t(), x)
            else:
                target.add_(piece.t() @ x)
        elif target.dtype == piece.dtype:
            torch.mm(piece.t(), x, out=target)
        else:
            target.copy_(piece.t() @ x)
    slot.written = True


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.weight, ctx.groups = weight, groups
        return _product(rows, weight.transpose(1, 2), groups)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        dy = dy.contiguous()
        dx = _product(dy, weight, ctx.groups) if ctx.needs_input_grad[0] else None
        gradient = None
        if ctx.needs_input_grad[1]:
            slot = slot_of(ctx.weight)
            if slot is not None:
                slot.queue.submit(partial(write_grouped, slot, dy, rows.detach(), ctx.groups))
            else:
                own = GradSlot(torch.empty_like(weight), GradQueue())
                write_grouped(own, dy, rows, ctx.groups)
                gradient = own.view
        return dx, gradient, None


def grouped_linear(rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """rows (M, I) sorted by expert, weight (E, O, I) -> (M, O): each row times its own expert's weight."""
    return _GroupedLinear.apply(rows, weight, groups)  # type: ignore[no-any-return]
