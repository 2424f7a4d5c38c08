"""Attention over packed tokens: causal inside each segment, and cached for generation.

An `attend` object is what a model is told about attention (decision 3). ``heads(q, k, v, layer)`` takes rotated
q (T, N, H), k and v (T, K, H) and gives (T, N, H). Notation: T tokens, N query heads, K KV heads, H head dim,
S length of a segment, B segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Attend(Protocol):
    """What differs between causal, ring, cached and paged attention."""

    def heads(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q (T, N, H), k and v (T, K, H) -> (T, N, H)."""
        ...


def _batched(q: Tensor, k: Tensor, v: Tensor, length: int, causal: bool, window: int | None) -> Tensor:
    """B segments of one length: (B*S, heads, H) -> (B*S, N, H) through PyTorch's fused attention."""
    batch, (num_heads, num_kv_heads, size) = q.shape[0] // length, (q.shape[1], k.shape[1], q.shape[2])
    qb = q.reshape(batch, length, num_heads, size).transpose(1, 2)
    kb = k.reshape(batch, -1, num_kv_heads, size).transpose(1, 2)
    vb = v.reshape(batch, -1, num_kv_heads, size).transpose(1, 2)
    mask = None
    if causal and window is not None and window < length:
        index = torch.arange(length, device=q.device)
        distance = index.unsqueeze(1) - index.unsqueeze(0)
        mask, causal = (distance >= 0) & (distance < window), False
    out = F.scaled_dot_product_attention(qb, kb, vb, mask, is_causal=causal, enable_gqa=num_heads != num_kv_heads)
    return out.transpose(1, 2).reshape(q.shape)


class CausalAttend:
    """Causal attention inside each of the packed segments; nothing crosses a segment's border.

    ``lengths`` are the segments' token counts, in order; they sum to T. ``windows``: for each layer, attend to at most
    that many last tokens (sliding window; None: all).
    """

    def __init__(self, lengths: Sequence[int], windows: Sequence[int | None] = ()) -> None:
        self.lengths, self._windows = tuple(lengths), tuple(windows)
        self._runs = [(length, len(list(same))) for length, same in groupby(self.lengths)]

    def heads(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        window = self._windows[layer] if self._windows else None
        if len(self._runs) == 1:
            return _batched(q, k, v, self._runs[0][0], True, window)
        sizes = [length * count for length, count in self._runs]
        pieces = zip(q.split(sizes), k.split(sizes), v.split(sizes), self._runs, strict=True)
        return torch.cat([_batched(a, b, c, length, True, window) for a, b, c, (length, _) in pieces])


class CachedAttend:
    """Generation of one sequence: new tokens attend to all earlier ones, kept per layer in a plain cache.

    The tokens of one call follow those of the calls before. ``max_tokens`` is the room of the cache; ``length`` counts
    the tokens in it and grows with :meth:`advance` after each call of the model.
    """

    def __init__(
        self,
        num_layers: int,
        max_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        windows: Sequence[int | None] = (),
    ) -> None:
        shape = (num_layers, max_tokens, num_kv_heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length, self._windows = 0, tuple(windows)

    def heads(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        num_new = q.shape[0]
        end = self.length + num_new
        assert end <= self.keys.shape[1], f"the cache has room for {self.keys.shape[1]} tokens, {end} are needed"
        window = self._windows[layer] if self._windows else None
        self.keys[layer, self.length : end] = k
        self.values[layer, self.length : end] = v
        if self.length == 0:
            return _batched(q, k, v, num_new, True, window)
        start = 0 if window is None else max(0, end - num_new + 1 - window)
        keys, values = self.keys[layer, start:end], self.values[layer, start:end]
        if num_new == 1:
            return _batched(q, keys, values, 1, False, None)
        query = torch.arange(self.length, end, device=q.device).unsqueeze(1)
        key = torch.arange(start, end, device=q.device).unsqueeze(0)
        mask = key <= query
        if window is not None:
            mask &= key > query - window
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), mask, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(0, 1)

    def advance(self, num_new: int) -> None:
        """The model has read ``num_new`` tokens in every layer."""
        self.length += num_new
