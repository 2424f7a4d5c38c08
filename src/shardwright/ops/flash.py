"""Attention of some queries with one block of keys, with its log-sum-exp, so that blocks can be merged exactly.

On a CPU PyTorch's fused kernel is called directly: it gives the log-sum-exp, and its backward takes that of all blocks
together, which makes each block's share of the gradients exact (Dao et al. 2022, appendix B). Elsewhere the same is computed
in rows of scores of bounded size. GQA copies nothing: the G queries of a KV head are a batch over one stride-0 key.

Notation: S queries, R keys, N query heads, K KV heads, G = N/K, H head dim. Accumulators are *wide*: fp32, or fp64 for fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORE_BYTES = 64 << 20
"""Of scores that exist at a time where no fused kernel is called."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are merged and gradients added."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """q (S, N, H), k and v (R, K, H) -> attention (S, K, G, H) in q's dtype, log-sum-exp (S, K, G) wide.

    ``causal`` needs S = R: row i sees the keys up to i.
    """
    heads = _heads(q, k, v)
    if _fused(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal)
    else:
        out, lse = _plain_forward(*heads, causal)
    return out.permute(2, 1, 0, 3), lse.permute(2, 1, 0)


def block_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's share of the gradients, from ``out`` (S, N, H) and ``lse`` (S, N) over all blocks.

    Returns those of q (S, K, G, H) in its dtype, of k and v (R, K, H) summed over G wide.
    """
    heads, kv_heads = _heads(q, k, v), k.shape[1]
    whole, d_whole = _grouped(out, kv_heads), _grouped(d_out, kv_heads)
    statistics = lse.view(lse.shape[0], kv_heads, -1).permute(2, 1, 0)
    if _fused(q):
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(d_whole, *heads, whole, statistics, 0.0, causal)
    else:
        dq, dk, dv = _plain_backward(d_whole, *heads, whole, statistics, causal)
    wide = wide_dtype(q.dtype)
    dk, dv = (gradient.sum(0, dtype=wide).transpose(0, 1) for gradient in (dk, dv))
    return dq.permute(2, 1, 0, 3), dk, dv


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a further block's result to ``out`` (S, K, G, H) and ``lse`` (S, K, G), wide, in place.

    Softmax over both: out = (e^lse out + e^part_lse part) / (e^lse + e^part_lse) (Milakov and Gimelshein 2018).
    """
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _fused(q: Tensor) -> bool:
    return q.is_cpu or q.is_meta


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """(S, N, H) -> (G, K, S, H), a view."""
    return x.view(x.shape[0], kv_heads, -1, x.shape[2]).permute(2, 1, 0, 3)


def _heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (G, K, S, H), k and v (G, K, R, H): views."""
    queries = _grouped(q, k.shape[1])
    keys, values = (x.transpose(0, 1).expand(queries.shape[0], -1, -1, -1) for x in (k, v))
    return queries, keys, values


# -- where no fused kernel is called -------------------------------------------------------------------------


def _rows(q: Tensor, num_keys: int) -> int:
    """Queries whose scores fit `SCORE_BYTES`."""
    return max(1, SCORE_BYTES // (q.shape[0] * q.shape[1] * max(1, num_keys) * wide_dtype(q.dtype).itemsize))


def _scores(q: Tensor, k: Tensor, first_row: int, causal: bool) -> Tensor:
    """Scaled scores (G, K, rows, R) of some rows, -inf where a row sees nothing."""
    wide = wide_dtype(q.dtype)
    scores = (q.to(wide) * float(q.shape[-1] ** -0.5)) @ k.to(wide).transpose(-1, -2)
    if causal:
        rows = torch.arange(first_row, first_row + q.shape[2], device=q.device).unsqueeze(1)
        scores.masked_fill_(torch.arange(k.shape[2], device=q.device) > rows, -torch.inf)
    return scores


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    size, outs, statistics = _rows(q, k.shape[2]), [], []
    for start in range(0, q.shape[2], size):
        scores = _scores(q[:, :, start : start + size], k, start, causal)
        lse = scores.logsumexp(-1)
        outs.append((scores - lse.unsqueeze(-1)).exp_() @ v.to(scores.dtype))
        statistics.append(lse)
    return torch.cat(outs, 2).to(q.dtype), torch.cat(statistics, 2)


def _plain_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide, size, scale = lse.dtype, _rows(q, k.shape[2]), q.shape[-1] ** -0.5
    dk, dv = torch.zeros(k.shape, dtype=wide, device=k.device), torch.zeros(v.shape, dtype=wide, device=v.device)
    dqs = []
    for start in range(0, q.shape[2], size):
        part = slice(start, start + size)
        d_part, queries = d_out[:, :, part].to(wide), q[:, :, part]
        weights = (_scores(queries, k, start, causal) - lse[:, :, part].unsqueeze(-1)).exp_()
        dv += weights.transpose(-1, -2) @ d_part
        delta = (d_part * out[:, :, part].to(wide)).sum(-1, keepdim=True)
        d_scores = weights * (d_part @ v.to(wide).transpose(-1, -2) - delta) * scale
        dqs.append(d_scores @ k.to(wide))
        dk += d_scores.transpose(-1, -2) @ queries.to(wide)
    return torch.cat(dqs, 2).to(q.dtype), dk, dv
