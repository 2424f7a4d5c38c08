"""Latent attention with a cache of latents (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A token is cached as its latent and one rotated key that all heads share, C + R values a layer instead of N (H + V). New tokens
meet earlier ones in one of two ways with the same result. *Expanded*: keys and values of all heads are made of the latents again
(prompts). *Absorbed*: the matrices that would make them go to the query and to the output instead, (W_uk c) q = c (W_uk^T q), so
that heads attend to the latents themselves, as if these were one KV head (decode).

Notation: T new tokens, S tokens that they may see, N heads, P and R channels of a head without and with rotation, H = P + R, V
value dim of a head, C rank of the latent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.ops.attention import attend_to, filled, may_see


class CachedLatents:
    """Generation of one sequence: as `CachedAttend`, for latent attention. ``latents`` (layers, max_tokens, C + R)."""

    def __init__(
        self,
        num_layers: int,
        max_tokens: int,
        latent_dim: int,
        rope_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        windows: Sequence[int | None] = (),
    ) -> None:
        self.latents = torch.empty((num_layers, max_tokens, latent_dim + rope_dim), dtype=dtype, device=device)
        self.length, self._windows = 0, tuple(windows)

    def latent(self, q: Tensor, c_kv: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor, layer: int) -> Tensor:
        """See `ops.attention.LatentAttend`."""
        num_new, end = q.shape[0], self.length + q.shape[0]
        assert end <= self.latents.shape[1], f"the cache has room for {self.latents.shape[1]} tokens, {end} are needed"
        window = self._windows[layer] if self._windows else None
        self.latents[layer, self.length : end] = torch.cat([c_kv, k_rope], dim=1)
        start = 0 if window is None else max(0, end - num_new + 1 - window)
        attend = expanded if expanding_is_cheaper(num_new, end - start, w_uk, w_uv) else absorbed
        return attend(q, self.latents[layer, start:end], w_uk, w_uv, window)

    def heads(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        raise AssertionError("a model with latent attention gives latents to a cache of latents")

    def advance(self, num_new: int) -> None:
        """The model has read ``num_new`` tokens in every layer."""
        self.length += num_new


def expanding_is_cheaper(num_new: int, num_keys: int, w_uk: Tensor, w_uv: Tensor) -> bool:
    """Which way has fewer products for T = ``num_new`` and S = ``num_keys``. In each head they are, expanded,
    (P + V) C S + (P + R + V) T S; absorbed, (P + V) C T + (2 C + R) T S."""
    (_, plain, rank), value = w_uk.shape, w_uv.shape[1]
    saved = (2 * rank - plain - value) * num_new * num_keys
    return (plain + value) * rank * (num_keys - num_new) <= saved


def expanded(q: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, window: int | None) -> Tensor:
    """q (T, N, H) of the last T of S tokens, ``latents`` (S, C + R), w_uk (N, P, C), w_uv (N, V, C) -> (T, N, V)."""
    (num_heads, _, rank), size, value = w_uk.shape, q.shape[2], w_uv.shape[1]
    c_kv, k_rope = latents[:, :rank], latents[:, rank:]
    k = torch.cat([torch.einsum("sc,npc->snp", c_kv, w_uk), k_rope.unsqueeze(1).expand(-1, num_heads, -1)], dim=2)
    v = torch.einsum("sc,nvc->snv", c_kv, w_uv)
    width = max(size, value)
    q = q if width == size else q * math.sqrt(width / size)
    return attend_to(filled(q, width), filled(k, width), filled(v, width), window)[..., :value]


def absorbed(q: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, window: int | None) -> Tensor:
    """The same without a key or value of any head."""
    (num_heads, plain, rank), num_new, num_keys = w_uk.shape, q.shape[0], latents.shape[0]
    queries = torch.cat([torch.einsum("tnp,npc->tnc", q[..., :plain], w_uk), q[..., plain:]], dim=2)
    mask = None
    if num_new > 1:
        mask = may_see(num_new, num_keys, window, q.device).repeat_interleave(num_heads, 0)
    rows, keys, values = queries.flatten(0, 1).unsqueeze(0), latents.unsqueeze(0), latents[:, :rank].unsqueeze(0)
    mixed = F.scaled_dot_product_attention(rows, keys, values, mask, scale=1 / math.sqrt(q.shape[2]))
    return torch.einsum("tnc,nvc->tnv", mixed.view(num_new, num_heads, rank), w_uv)
