"""Attention over packed tokens: causal inside each segment, and cached for generation.

An `attend` object is what a model is told about attention (decision 3). ``heads(q, k, v, layer)`` takes rotated
q (T, N, H), k and v (T, K, H) and gives (T, N, H). Notation: T tokens, N query heads, K KV heads, H head dim,
S length of a segment, B segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.ops.kernels import keep_mask


class Attend(Protocol):
    """What differs between causal, ring, cached and paged attention."""

    def heads(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q (T, N, H), k and v (T, K, H) -> (T, N, H)."""
        ...


@runtime_checkable
class LatentAttend(Protocol):
    """An `Attend` that keeps what latent attention makes keys and values of, not these: the model gives it that instead."""

    def latent(self, q: Tensor, c_kv: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor, layer: int) -> Tensor:
        """q (T, N, P + R), its last R channels rotated; latents c_kv (T, C) and rotated keys k_rope (T, R) of the same tokens;
        w_uk (N, P, C) and w_uv (N, V, C), which make keys and values of c_kv -> (T, N, V). Scores are q k / sqrt(P + R)."""
        ...


def filled(x: Tensor, width: int) -> Tensor:
    """x (T, N, H) with zeros up to ``width`` channels, which change no product."""
    return x if x.shape[2] == width else F.pad(x, (0, width - x.shape[2]))


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


def may_see(num_new: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """(T, S) bool: which of S keys each of T queries meets, whose own keys are the last T."""
    query = torch.arange(num_keys - num_new, num_keys, device=device).unsqueeze(1)
    key = torch.arange(num_keys, device=device).unsqueeze(0)
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def attend_to(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """q (T, N, H) of the last T of the S tokens whose k and v (S, K, H) are given -> (T, N, H)."""
    num_new, num_keys = q.shape[0], k.shape[0]
    if num_new == num_keys:
        return _batched(q, k, v, num_new, True, window)
    if num_new == 1:
        return _batched(q, k, v, 1, False, None)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        may_see(num_new, num_keys, window, q.device),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(0, 1)


class CausalAttend:
    """Causal attention inside each of the packed segments; nothing crosses a segment's border.

    ``lengths`` are the segments' token counts, in order; they sum to T. ``windows``: for each layer, attend to at most
    that many last tokens (sliding window; None: all).
    """

    def __init__(self, lengths: Sequence[int], windows: Sequence[int | None] = ()) -> None:
        self.lengths, self.windows = tuple(lengths), tuple(windows)
        self._runs = [(length, len(list(same))) for length, same in groupby(self.lengths)]

    def heads(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        window = self.windows[layer] if self.windows else None
        if len(self._runs) == 1:
            return _batched(q, k, v, self._runs[0][0], True, window)
        sizes = [length * count for length, count in self._runs]
        pieces = zip(q.split(sizes), k.split(sizes), v.split(sizes), self._runs, strict=True)
        return torch.cat([_batched(a, b, c, length, True, window) for a, b, c, (length, _) in pieces])


@dataclass(frozen=True)
class ScoreDropout:
    """Dropout of attention probabilities by counter: of (layer's key, query token, head, key's place in the segment).

    ``token_index`` (T,) int64 are the tokens' places in the data, ``keys`` one number for each layer, ``first_head`` the
    number of this rank's first query head.
    """

    rate: float
    token_index: Tensor
    keys: Sequence[int]
    first_head: int = 0

    def __call__(self, probabilities: Tensor, first_token: int, layer: int) -> Tensor:
        """(B, N, S, S) of B segments from ``first_token`` on -> the same with zeros, the rest scaled by 1/(1-rate)."""
        batch, heads, length, _ = probabilities.shape
        tokens = self.token_index[first_token : first_token + batch * length].view(batch, 1, length, 1)
        numbers = torch.arange(self.first_head, self.first_head + heads, device=tokens.device)
        features = (numbers << 32).view(heads, 1, 1) + torch.arange(length, device=tokens.device)
        return probabilities * keep_mask(self.rate, tokens, features, self.keys[layer]) / (1.0 - self.rate)


class ScoresAttend:
    """As `CausalAttend`, with the scores as tensors of N x S x S and dropout on their softmax: attention as GPT-2 and the
    Megatron-LM of its time computed it. For comparisons: softmax, mask and dropped probabilities are kept for backward.
    """

    def __init__(
        self, lengths: Sequence[int], windows: Sequence[int | None] = (), dropout: ScoreDropout | None = None
    ) -> None:
        self.lengths, self._windows, self._dropout = tuple(lengths), tuple(windows), dropout
        self._runs = [(length, len(list(same))) for length, same in groupby(self.lengths)]

    def heads(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) if x.shape[1] < q.shape[1] else x for x in (k, v))
        outputs, first = [], 0
        for length, count in self._runs:
            part = slice(first, first + length * count)
            outputs.append(self._run(q[part], k[part], v[part], length, first, layer))
            first = part.stop
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _run(self, q: Tensor, k: Tensor, v: Tensor, length: int, first_token: int, layer: int) -> Tensor:
        """Segments of one length: (B*S, N, H) -> (B*S, N, H)."""
        num_heads, size = q.shape[1:]
        queries, keys, values = (
            x.reshape(-1, length, num_heads, size).transpose(1, 2).reshape(-1, length, size) for x in (q, k, v)
        )
        index = torch.arange(length, device=q.device)
        distance = index.unsqueeze(1) - index
        window = self._windows[layer] if self._windows else None
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        mask = torch.zeros(length, length, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
        scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=size**-0.5)
        probabilities = scores.softmax(-1).view(-1, num_heads, length, length)
        if self._dropout is not None:
            probabilities = self._dropout(probabilities, first_token, layer)
        out = torch.bmm(probabilities.view(-1, length, length), values)
        return out.view(-1, num_heads, length, size).transpose(1, 2).reshape(q.shape)


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
        start = 0 if window is None else max(0, end - num_new + 1 - window)
        return attend_to(q, self.keys[layer, start:end], self.values[layer, start:end], window)

    def advance(self, num_new: int) -> None:
        """The model has read ``num_new`` tokens in every layer."""
        self.length += num_new
