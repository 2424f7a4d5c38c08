"""Context parallelism: the tokens of a sequence split over ranks, also inside attention.

CP:  tokens[T/c], so every activation [T/c, ...]; weights whole, their gradients summed over cp as over dp
sends per layer, t = T/c tokens of a rank, K KV heads of its own (with tp: K/tp):

=========  ============================================  ====================================================================
cp_kind    forward                                       backward
=========  ============================================  ====================================================================
ring       c-1 **sends** of 2 t K H                      c-1 sends of 2 t K H, c sends of 2 t K H in the accumulation dtype
allgather  one **all-gather** of 2 T K H                 the same again, one **reduce-scatter** of 2 T K H, accumulation dtype
ulysses    **all-to-all** of t (N + 2 K) H and of t N H  the same
=========  ============================================  ====================================================================

Ring: Liu et al. 2023; gathered keys and values: Grattafiori et al. 2024, section 3.3.2; ulysses: Jacobs et al. 2023. For the
first two a rank computes one block of keys and values at a time, its own first, and merges by log-sum-exp in fp32 (fp64 for
fp64); `core.segments` says which rectangles. Kept for backward are q, k, v, the output and the log-sum-exp: full
recomputation keeps the last two, so it does not send the blocks a third time. Ulysses computes whole sequences on N/c heads
with the ordinary attention, and full recomputation exchanges again.

Notation: T tokens, t = T/c of a rank, N query heads, K KV heads, H head dim, c ranks of cp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.comm.base import Comm, Work
from shardwright.comm.mesh import Mesh
from shardwright.comm.regions import exchange_tokens
from shardwright.core.segments import Range, Segments, choose_split, contiguous, zigzag
from shardwright.ops.attention import Attend, CausalAttend
from shardwright.ops.flash import block_backward, block_forward, merge, wide_dtype
from shardwright.ops.gradients import first_order

KV, KV_GRADIENT, HEADS_IN, HEADS_OUT = "kv", "kv gradient", "heads in", "heads out"
"""What the ledger calls the messages."""


def cut_segments(lengths: Sequence[int], padding: int, size: int, kind: str) -> Segments:
    """The documents of one micro-batch, the last ``padding`` tokens included, and how the tokens are split over ranks."""
    split = contiguous(sum(lengths), size) if kind == "ulysses" else choose_split(lengths, size, padding)
    return Segments(tuple(lengths), split, padding)


class ContextAttend:
    """Attention of a rank's tokens with those of all ranks of ``comm`` (an `ops.attention.Attend`).

    ``keep``: outputs of passes without gradients are kept for the pass that recomputes them. ``windows`` as in
    `CausalAttend`, for ulysses only: a ring's rectangles have none. ``whole`` attends where a rank has whole sequences
    (ulysses); ``flops`` counts scores and values of the other kinds, forward.
    """

    def __init__(
        self, comm: Comm, segments: Segments, kind: str, *, keep: bool = False, windows: Sequence[int | None] = ()
    ) -> None:
        self.comm, self.segments, self.kind = comm, segments, kind
        self._keep, self._kept = keep, dict[int, tuple[Tensor, Tensor]]()
        self.whole: Attend = CausalAttend(segments.lengths, windows)
        self.flops = 0.0

    def heads(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q (t, N, H), k and v (t, K, H) of the rank's tokens -> (t, N, H)."""
        if self.kind == "ulysses":
            return self._exchanged(q, k, v, layer)
        recomputing = torch.is_grad_enabled()
        kept = self._kept.pop(layer, None) if recomputing else None
        out, lse = _BlockAttention.apply(q, k, v, self, kept)
        if self._keep and not recomputing:
            self._kept[layer] = out, lse
        return out  # type: ignore[no-any-return]

    @property
    def kept_bytes(self) -> int:
        """Of outputs and statistics that wait for their recomputation."""
        return sum(out.nbytes + lse.nbytes for out, lse in self._kept.values())

    def blocks(self, own: Tensor) -> Iterator[Tensor]:
        """Keys and values (2, t, K, H) of the ranks r, r-1, ...: one for each step of `Segments`."""
        return _gathered(self.comm, own) if self.kind == "allgather" else _around(self.comm, own)

    def sums(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> _BlockSums:
        """Where the blocks' gradients are added up."""
        return (_ScatteredSums if self.kind == "allgather" else _RingSums)(self.comm, shape, dtype, device)

    def _exchanged(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Heads for tokens, attention over all T tokens of N/c heads, and back. With K < c KV heads go to several ranks."""
        (tokens, num_heads, head_dim), size = q.shape, self.comm.size
        if k.shape[1] < size:
            k, v = (x.repeat_interleave(size // x.shape[1], 1) for x in (k, v))
        parts = [x.view(tokens, size, -1, head_dim) for x in (q, k, v)]
        packed = torch.cat(parts, 2).transpose(0, 1).reshape(size * tokens, -1)
        rows = [tokens] * size
        mixed = exchange_tokens(packed, self.comm, rows, rows, HEADS_IN).view(size * tokens, -1, head_dim)
        q, k, v = mixed.split([part.shape[2] for part in parts], 1)
        out = self.whole.heads(q, k, v, layer)
        back = exchange_tokens(out.reshape(size * tokens, -1), self.comm, rows, rows, HEADS_OUT)
        return back.view(size, tokens, -1, head_dim).transpose(0, 1).reshape(tokens, num_heads, head_dim)


def attention_balance(attends: Sequence[object]) -> tuple[float, tuple[str, ...]]:
    """Of the micro-batches of a step: scores of the busiest rank of cp over the mean, and each one's split."""
    found = [attend for attend in attends if isinstance(attend, ContextAttend)]
    splits = tuple("heads" if attend.kind == "ulysses" else attend.segments.split.name for attend in found)
    work = [sum(ranks) for ranks in zip(*(a.segments.work for a in found if a.kind != "ulysses"), strict=True)]
    return (max(work) * len(work) / sum(work) if sum(work) else 1.0), splits


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mesh: Mesh, lengths: Sequence[int] | None = None, kind: str = "ring"
) -> Tensor:
    """Causal attention over tokens that are split over ``mesh.cp``, for a module of one's own.

    q (t, N, H), k and v (t, K, H) of this rank's tokens, in the order of :func:`ring_tokens` -> (t, N, H). ``lengths``: the
    documents that all T tokens are packed from; one by default.
    """
    size = mesh.cp.size
    found = tuple(lengths) if lengths is not None else (q.shape[0] * size,)
    segments = Segments(found, contiguous(sum(found), size) if kind == "ulysses" else zigzag(sum(found), size))
    return ContextAttend(mesh.cp, segments, kind).heads(q, k, v, 0)


def ring_tokens(num_tokens: int, mesh: Mesh) -> tuple[Range, ...]:
    """Which of T tokens this rank holds for :func:`ring_attention`: ranges, in the order of its rows. 2 c divides T."""
    return zigzag(num_tokens, mesh.cp.size).ranges[mesh.cp.rank]


# -- one block at a time -------------------------------------------------------------------------------------


class _BlockAttention(torch.autograd.Function):
    """``kept`` is what an earlier pass of the same tokens gave: then nothing is computed or sent again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, attend: ContextAttend, kept: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        kv = torch.stack((k, v))
        out, lse = kept or _attend(q, kv, attend)
        ctx.attend = attend
        ctx.save_for_backward(q, kv, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        attend: ContextAttend = ctx.attend
        wide = wide_dtype(q.dtype)
        d_out, dq = d_out.contiguous(), torch.zeros(q.shape, dtype=wide, device=q.device)
        d_queries = dq.view(q.shape[0], kv.shape[2], -1, q.shape[2])
        sums = attend.sums(kv.shape, wide, q.device)
        for step, block in enumerate(attend.blocks(kv)):
            d_keys, d_values = sums.begin(step)
            for piece in attend.segments.pieces(attend.comm.rank, step):
                rows, keys = slice(*piece.q), slice(*piece.kv)
                part = q[rows], block[0, keys], block[1, keys], out[rows], lse[rows]
                dq_part, dk_part, dv_part = block_backward(d_out[rows], *part, piece.causal)
                d_queries[rows] += dq_part
                d_keys[keys] += dk_part
                d_values[keys] += dv_part
            sums.end(step)
        dk, dv = sums.own().to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _attend(q: Tensor, kv: Tensor, attend: ContextAttend) -> tuple[Tensor, Tensor]:
    """q (t, N, H), own kv (2, t, K, H) -> output (t, N, H) in q's dtype, log-sum-exp (t, N) wide; padding gives zeros."""
    shape, wide = (q.shape[0], kv.shape[2], q.shape[1] // kv.shape[2]), wide_dtype(q.dtype)
    out = torch.zeros((*shape, q.shape[2]), dtype=wide, device=q.device)
    lse = torch.zeros(shape, dtype=wide, device=q.device)
    pairs = attend.segments.work[attend.comm.rank] - q.shape[0] / 2  # of a causal square half
    attend.flops += 4 * q.shape[1] * q.shape[2] * pairs
    for step, block in enumerate(attend.blocks(kv)):
        for piece in attend.segments.pieces(attend.comm.rank, step):
            rows, keys = slice(*piece.q), slice(*piece.kv)
            part, part_lse = block_forward(q[rows], block[0, keys], block[1, keys], piece.causal)
            if step == 0:  # the first that these rows see
                out[rows], lse[rows] = part, part_lse
            else:
                merge(out[rows], lse[rows], part, part_lse)
    return out.view(q.shape).to(q.dtype), lse.view(q.shape[:2])


def _around(comm: Comm, own: Tensor) -> Iterator[Tensor]:
    """The blocks one after another around the ring; each goes on to the next rank while the caller works on it."""
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    block, spare = own, torch.empty_like(own)
    for step in range(comm.size):
        if step + 1 == comm.size:
            yield block
            return
        arriving, leaving = comm.receive(spare, behind, name=KV), comm.send(block, ahead, name=KV)
        yield block
        arriving.wait()
        leaving.wait()
        block, spare = spare, torch.empty_like(own) if block is own else block


def _gathered(comm: Comm, own: Tensor) -> Iterator[Tensor]:
    """The same blocks from one gather."""
    whole = comm.all_gather(own.unsqueeze(0), name=KV)
    for step in range(comm.size):
        yield whole[(comm.rank - step) % comm.size]


class _BlockSums(Protocol):
    """Gradients of keys and values, block by block in the order of the blocks."""

    def begin(self, step: int) -> Tensor:
        """Zeros (2, t, K, H) for this rank's share of the gradient of step ``step``'s block."""
        ...

    def end(self, step: int) -> None:
        """The share is complete."""
        ...

    def own(self) -> Tensor:
        """The gradient of this rank's own block, over all ranks."""
        ...


class _RingSums:
    """A block's gradient travels with the block, one step behind, and comes home after c hops."""

    def __init__(self, comm: Comm, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._comm, self._share = comm, torch.zeros(shape, dtype=dtype, device=device)
        self._arriving: tuple[Work, Tensor] | None = None
        self._leaving: tuple[Work, Tensor] | None = None

    def begin(self, step: int) -> Tensor:
        if step:
            self._share = torch.zeros_like(self._share)
        return self._share

    def end(self, step: int) -> None:
        comm, share = self._comm, self._share
        if comm.size == 1:
            return
        if self._arriving is not None:
            share += self._taken()
        if self._leaving is not None:
            self._leaving[0].wait()
        coming = torch.empty_like(share)
        self._arriving = comm.receive(coming, (comm.rank - 1) % comm.size, name=KV_GRADIENT), coming
        self._leaving = comm.send(share, (comm.rank + 1) % comm.size, name=KV_GRADIENT), share

    def own(self) -> Tensor:
        if self._arriving is None or self._leaving is None:
            return self._share
        total = self._taken()
        self._leaving[0].wait()
        return total

    def _taken(self) -> Tensor:
        assert self._arriving is not None
        work, tensor = self._arriving
        work.wait()
        self._arriving = None
        return tensor


class _ScatteredSums:
    """All blocks' gradients lie side by side and are summed at the end."""

    def __init__(self, comm: Comm, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._comm, self._whole = comm, torch.zeros((comm.size, *shape), dtype=dtype, device=device)

    def begin(self, step: int) -> Tensor:
        return self._whole[(self._comm.rank - step) % self._comm.size]

    def end(self, step: int) -> None:
        """Nothing is sent yet."""

    def own(self) -> Tensor:
        return self._comm.reduce_scatter(self._whole, name=KV_GRADIENT)[0]
