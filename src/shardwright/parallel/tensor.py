"""Tensor and sequence parallelism: matrices split inside a layer, tokens split outside (Shoeybi et al. 2019; Korthikanti
et al. 2022).

TP:  W_qkv[D, heads/tp], W_out[heads/tp, D], W_gate,up[D, F/tp], W_down[F/tp, D], embedding and head [V/tp, D]
SP:  x[T/tp, D] in norms, dropout and residual
sends per layer forward two **all-reduces** of T x D (after attention, after the MLP), or with SP two **all-gathers** and two
**reduce-scatters** at the same volume; as many backward, where SP gathers the two inputs once more, since the gathered
ones are not kept. With ``tp_overlap=N`` each of the layers' messages but that repeated gather goes in N parts.

Every function takes a :class:`Region`; with tp=1 its verbs return their input. Gradients of what is held whole inside the
region (QK norms, a replicated K or V) are partial on each rank; `core.specs` says that they are summed over tp.
Notation: T tokens of the micro-batch, D model dim, I inputs, O outputs (local), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.base import Comm, Work
from shardwright.comm.regions import reduce_from_region, reduce_scatter_tokens
from shardwright.comm.solo import SoloComm
from shardwright.core.chunks import chunk_slices
from shardwright.ops.gradients import first_order
from shardwright.ops.linear import (
    add_bias,
    bias_gradients,
    embedding,
    fused_linear,
    input_gradient,
    product,
    weight_gradients,
)


@dataclass(frozen=True)
class Region:
    """One tensor-parallel region: the tp axis, and whether the tokens outside it are split (``sequence``).

    ``chunks`` > 1: tokens are worked on in that many chunks, and each chunk's collective runs beside the matrix product
    of the next.
    """

    comm: Comm
    sequence: bool
    chunks: int = 1

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def blocks(self) -> int:
        """Blocks of tokens inside the region that belong to different ranks outside it."""
        return self.comm.size if self.sequence else 1

    def own_tokens(self, values: Tensor) -> Tensor:
        """This rank's rows of per-token data (T, ...) outside the region; all of them without sequence parallelism."""
        if not self.sequence or self.size == 1:
            return values
        rows = values.shape[0] // self.size
        return values[self.comm.rank * rows : (self.comm.rank + 1) * rows]

    def leave(self, partial: Tensor, name: str) -> Tensor:
        """The sum of the ranks' partial (T, D): all of it everywhere (g), or this rank's T/tp rows of it."""
        if self.sequence:
            return reduce_scatter_tokens(partial, self.comm, name)
        return reduce_from_region(partial, self.comm, name)

    # -- without autograd, chunk by chunk ----------------------------------------------------------------

    def sent_rows(self, rows: int, like: Tensor, width: int) -> Tensor:
        """An uninitialised (rows, width) that the axis moves best: over shared memory peers read it in place."""
        return self.comm.empty(rows * width, like.dtype, like.device).view(rows, width)

    def pieces(self, rows: int) -> tuple[slice, ...]:
        """The chunks of ``rows`` tokens of one block."""
        return chunk_slices(rows, self.chunks)

    def chunk(self, whole: Tensor, piece: slice) -> Tensor:
        """The rows ``piece`` of each block of (T, I), one block after another; a view where nothing must be moved."""
        if piece == slice(0, whole.shape[0] // self.blocks):
            return whole
        if self.blocks == 1:
            return whole[piece]
        return whole.reshape(self.blocks, -1, whole.shape[1])[:, piece].reshape(-1, whole.shape[1])

    def merged(self, chunks: Sequence[Tensor], pieces: Sequence[slice]) -> Tensor:
        """The reverse of :meth:`chunk`: (T, I) from all chunks."""
        if len(chunks) == 1:
            return chunks[0]
        if self.blocks == 1:
            return torch.cat(list(chunks))
        rows, width = pieces[-1].stop, chunks[0].shape[1]
        whole = chunks[0].new_empty((self.blocks, rows, width))
        for chunk, piece in zip(chunks, pieces, strict=True):
            whole[:, piece] = chunk.view(self.blocks, -1, width)
        return whole.view(self.blocks * rows, width)

    def start_sum(self, partial: Tensor, name: str) -> _Summing:
        """Start to sum a chunk's partial rows over ranks; with sequence parallelism only this rank's block is kept."""
        if not self.sequence:
            return _Summing(self.comm.all_reduce_start(partial, name=name), partial, partial)
        total = partial.new_empty((partial.shape[0] // self.size, partial.shape[1]))
        return _Summing(self.comm.reduce_scatter_start(total, partial, name=name), total, partial)

    def start_gather(self, own: Tensor, name: str) -> tuple[Tensor, Work]:
        """Start to gather a chunk's rows (k, I) of every rank's block -> (tp k, I)."""
        whole = self.sent_rows(own.shape[0] * self.size, own, own.shape[1])
        return whole, self.comm.all_gather_start(whole, own.contiguous(), name=name)


@dataclass
class _Summing:
    """A sum on its way; ``partial`` must live until it has arrived."""

    work: Work
    total: Tensor
    partial: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.total


SOLO = Region(SoloComm("tp"), False)
"""The region of tp=1."""


class _ColumnLinear(torch.autograd.Function):
    """Enter the region and multiply by the local columns: f (or the token gather) and the product in one.

    The gathered input is not kept for backward but gathered again, beside the input gradient's product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region, name: str, num_weights: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        ctx.save_for_backward(x, *weights)
        ctx.region, ctx.name, ctx.parameters, ctx.num_weights = region, name, parameters, num_weights
        if not region.sequence:
            return product(x, weights, biases)
        pieces = region.pieces(x.shape[0])
        chunks = []
        for whole, gathering in [region.start_gather(x[piece], name) for piece in pieces]:
            gathering.wait()
            chunks.append(product(whole, weights, biases))
        return region.merged(chunks, pieces)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        region, count, wanted = ctx.region, ctx.num_weights, ctx.needs_input_grad[4:]
        whole, gathering = x, None
        if region.sequence and any(wanted[:count]):
            whole, gathering = region.start_gather(x, f"{ctx.name} again")
        reducing = []
        if ctx.needs_input_grad[0]:
            for piece in region.pieces(x.shape[0]):
                chunk = region.chunk(dy, piece)
                partial = input_gradient(chunk, weights, region.sent_rows(chunk.shape[0], x, x.shape[1]))
                reducing.append(region.start_sum(partial, f"{ctx.name} gradient"))
        if gathering is not None:
            gathering.wait()
        gradients = weight_gradients(ctx.parameters[:count], wanted[:count], dy, whole, None if gathering is None else whole)
        gradients += bias_gradients(ctx.parameters[count:], wanted[count:], dy)
        dx = _joined_rows([summing.wait() for summing in reducing])
        return (dx, None, None, None, *gradients)


class _RowLinear(torch.autograd.Function):
    """Multiply by the local input features and leave the region: the product and g (or the token scatter) in one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, region: Region, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.region, ctx.name, ctx.weight = region, name, weight
        pieces = region.pieces(x.shape[0] // region.blocks)
        summing = []
        for piece in pieces:
            chunk = region.chunk(x, piece)
            partial = product(chunk, [weight], out=region.sent_rows(chunk.shape[0], x, weight.shape[0]))
            summing.append(region.start_sum(partial, name))
        y = _joined_rows([part.wait() for part in summing])
        assert y is not None
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        region = ctx.region
        pieces = region.pieces(dy.shape[0])
        if region.sequence:
            arriving = [region.start_gather(dy[piece], ctx.name) for piece in pieces]
        else:
            pieces, arriving = (slice(0, dy.shape[0]),), [(dy, Work())]
        gathered, dx_chunks = [], []
        for chunk, work in arriving:
            work.wait()
            gathered.append(chunk)
            if ctx.needs_input_grad[0]:
                dx_chunks.append(input_gradient(chunk, [weight]))
        dx = region.merged(dx_chunks, pieces) if dx_chunks else None
        wanted = [ctx.needs_input_grad[1]]
        if not wanted[0]:
            return dx, None, None, None
        whole = region.merged(gathered, pieces)
        (d_weight,) = weight_gradients([ctx.weight], wanted, whole, x, whole if region.sequence else None)
        return dx, d_weight, None, None


def _joined_rows(chunks: Sequence[Tensor]) -> Tensor | None:
    if len(chunks) > 1:
        return torch.cat(list(chunks))
    return chunks[0] if chunks else None


def column_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], region: Region, name: str
) -> Tensor:
    """x (T, I), or its own T/tp rows with sequence parallelism -> (T, O): every rank its own output features."""
    if region.size == 1:
        return fused_linear(x, weights, biases)
    return _ColumnLinear.apply(x, region, name, len(weights), *weights, *biases)  # type: ignore[no-any-return]


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, region: Region, name: str) -> Tensor:
    """x (T, I) with this rank's input features, weight (D, I) -> the sum over ranks (T, D), or its own T/tp rows.

    The bias is added once, after the sum.
    """
    if region.size == 1:
        return fused_linear(x, [weight], [] if bias is None else [bias])
    y = _RowLinear.apply(x, weight, region, name)
    return y if bias is None else add_bias(y, bias)


def vocab_embedding(tokens: Tensor, weight: Tensor, first_row: int, region: Region, name: str) -> Tensor:
    """tokens (T,) -> (T, D), or its own T/tp rows: each id is held by one rank, the others add zeros."""
    if region.size == 1:
        return embedding(tokens, weight)
    return region.leave(embedding(tokens, weight, first_row), name)
