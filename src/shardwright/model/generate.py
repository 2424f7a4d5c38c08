"""Greedy and sampled continuations of one prompt, in one process.

The same model as in training, called with a cache as its `attend`: the prompt once, then one token a call.
Notation: T tokens of a call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from shardwright.core.model_config import ModelConfig
from shardwright.errors import ConfigError
from shardwright.model.transformer import Transformer
from shardwright.ops.attention import Attend, CachedAttend, CausalAttend
from shardwright.ops.latent import CachedLatents
from shardwright.ops.sampling import sample


def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    eos_id: int | Collection[int] | None = None,
) -> Iterator[int]:
    """Yield up to ``max_new_tokens`` ids that follow the prompt; the last one is ``eos_id`` (one id or several) if met.

    ``temperature`` 0 takes the likeliest token, else tokens are drawn from the nucleus ``top_p``, from PyTorch's own
    generator when ``seed`` is None. Raises `ConfigError` at once for a prompt that the model cannot read.
    """
    _check(model.config, prompt_ids, max_new_tokens, temperature, top_p)
    read = _CachedReader(model, len(prompt_ids) + max_new_tokens)
    return _continue(read, prompt_ids, max_new_tokens, _Choice(model, temperature, top_p, seed), eos_id)


def generate_by_recomputing(
    model: Transformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    eos_id: int | Collection[int] | None = None,
) -> Iterator[int]:
    """The same as `generate` without a cache: every token reads the whole text again. To compare with."""
    _check(model.config, prompt_ids, max_new_tokens, temperature, top_p)
    read = _RecomputingReader(model)
    return _continue(read, prompt_ids, max_new_tokens, _Choice(model, temperature, top_p, seed), eos_id)


def cache_for(model: Transformer, max_tokens: int) -> CachedAttend | CachedLatents:
    """An empty cache with room for ``max_tokens`` tokens of the model, on its device and in its dtype: of keys and values, or
    of latents where the model has latent attention."""
    config, weight = model.config, next(model.parameters())
    windows = [config.layer_window(layer) for layer in range(config.num_layers)]
    dtype, device, mla = weight.dtype, weight.device, config.mla
    if mla is not None:
        return CachedLatents(config.num_layers, max_tokens, mla.kv_lora_rank, mla.rope_head_dim, dtype, device, windows)
    return CachedAttend(config.num_layers, max_tokens, config.num_kv_heads, config.head_dim, dtype, device, windows)


class _CachedReader:
    """New tokens -> the logits (V,) that follow all tokens read so far."""

    def __init__(self, model: Transformer, max_tokens: int) -> None:
        self._model, self._cache = model, cache_for(model, max_tokens)

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> Tensor:
        logits = _logits(self._model, tokens, self._cache.length, self._cache)
        self._cache.advance(len(tokens))
        return logits


class _RecomputingReader:
    """As `_CachedReader`, from the beginning each time."""

    def __init__(self, model: Transformer) -> None:
        self._model, self._tokens = model, list[int]()
        config = model.config
        self._windows = [config.layer_window(layer) for layer in range(config.num_layers)]

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> Tensor:
        self._tokens += tokens
        return _logits(self._model, self._tokens, 0, CausalAttend([len(self._tokens)], self._windows))


def _logits(model: Transformer, tokens: Sequence[int], start: int, attend: Attend) -> Tensor:
    """Logits (V,) after the last of ``tokens``, whose positions begin at ``start``."""
    device = next(model.parameters()).device
    ids = torch.tensor(tokens, dtype=torch.int64, device=device)
    positions = torch.arange(start, start + len(tokens), device=device)
    last: Tensor = model(ids, positions, attend)[-1]
    return last


class _Choice:
    """Logits (V,) -> the next id: the one value that generation reads from the device for each token."""

    def __init__(self, model: Transformer, temperature: float, top_p: float, seed: int | None) -> None:
        self._temperature, self._top_p = temperature, top_p
        device = next(model.parameters()).device
        self._generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        return int(sample(logits, self._temperature, self._top_p, self._generator).item())


def _continue(
    read: Callable[[Sequence[int]], Tensor],
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    choose: Callable[[Tensor], int],
    eos_id: int | Collection[int] | None,
) -> Iterator[int]:
    ends = {eos_id} if isinstance(eos_id, int) else set(eos_id or ())
    unread = list(prompt_ids)
    for _ in range(max_new_tokens):
        token = choose(read(unread))
        yield token
        if token in ends:
            return
        unread = [token]


def _check(
    config: ModelConfig, prompt_ids: Sequence[int], max_new_tokens: int, temperature: float, top_p: float
) -> None:
    if not prompt_ids:
        raise ConfigError("the prompt has no tokens; give some text, or the model's bos_id")
    wrong = [token for token in prompt_ids if not 0 <= token < config.vocab_size]
    if wrong:
        raise ConfigError(
            f"the prompt holds id {wrong[0]}, but {config.name} has ids 0 to {config.vocab_size - 1}; use the "
            "tokenizer that belongs to the model"
        )
    if max_new_tokens < 0 or temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens} and temperature={temperature} must not be negative and top_p={top_p} "
            "must be above 0 and at most 1"
        )
    needed = len(prompt_ids) + max(max_new_tokens - 1, 0)  # the last new token is not read
    if config.position == "learned" and needed > config.max_positions:
        raise ConfigError(
            f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones need {needed} positions, but {config.name} "
            f"has learned {config.max_positions}; shorten the prompt or ask for fewer tokens"
        )
