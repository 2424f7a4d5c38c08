"""Generation with a cache equals recomputing the whole text, for each kind of model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.comm.mesh import Mesh
from shardwright.core.model_config import ModelConfig
from shardwright.errors import ConfigError
from shardwright.model.generate import cache_for, generate, generate_by_recomputing
from shardwright.model.transformer import Transformer
from shardwright.ops.attention import CausalAttend
from shardwright.ops.latent import absorbed, expanded, expanding_is_cheaper

SHAPE: dict[str, Any] = {"vocab_size": 50, "dim": 32, "num_layers": 3, "num_heads": 4, "ffn_dim": 48, "init_std": 0.2}
GPT2: dict[str, Any] = {
    "family": "gpt2",
    "norm": "layernorm",
    "position": "learned",
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "max_positions": 40,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gqa": {"num_kv_heads": 2, "head_dim": 10},
    "one-kv-head": {"num_kv_heads": 1},
    "qwen3": {"family": "qwen3", "num_kv_heads": 2, "qk_norm": True},
    "gpt2": GPT2,
    "experts": {"family": "mixtral", "moe": {"num_experts": 4, "top_k": 2, "expert_dim": 24}},
    "latent": {
        "family": "deepseek_v2",
        "mla": {"kv_lora_rank": 12, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 14},
    },
    "latent, narrow values": {
        "family": "deepseek_v3",
        "mla": {"kv_lora_rank": 12, "q_lora_rank": 9, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 2},
        "rope_scaling": {
            "kind": "yarn",
            "factor": 4.0,
            "original_max_positions": 8,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
    },
    "latent, window": {
        "family": "deepseek_v2",
        "mla": {"kv_lora_rank": 12, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 8},
        "sliding_window": 5,
        "sliding_layers": (0, 2),
    },
    "window": {"num_kv_heads": 2, "sliding_window": 5},
    "window-in-some-layers": {"num_kv_heads": 2, "sliding_window": 5, "sliding_layers": (0, 2)},
}
MODEL = ModelConfig.load("deepseek-v2")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def make(name: str, dtype: torch.dtype = torch.float32) -> Transformer:
    return Transformer(ModelConfig(**{**SHAPE, **MODELS[name]}), Mesh.solo(), dtype).initialise(seed=7)


@pytest.mark.parametrize("name", MODELS)
def test_cached_equals_recomputed(name: str) -> None:
    model = make(name)
    cached = list(generate(model, PROMPT, 30))
    assert len(cached) == 30 and len(set(cached)) > 3
    assert cached == list(generate_by_recomputing(model, PROMPT, 30))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cut", [1, 4, 9, 10])
def test_prefill_in_two_calls_equals_one(name: str, cut: int) -> None:
    model = make(name, torch.float64)
    tokens = torch.tensor(PROMPT)
    positions = torch.arange(len(PROMPT))
    cache = cache_for(model, len(PROMPT))
    windows = [model.config.layer_window(layer) for layer in range(model.config.num_layers)]
    with torch.no_grad():
        whole = model(tokens, positions, CausalAttend([len(PROMPT)], windows))
        pieces = []
        for part in (slice(0, cut), slice(cut, None)):
            pieces.append(model(tokens[part], positions[part], cache))
            cache.advance(len(tokens[part]))
    assert cache.length == len(PROMPT)
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in MODELS if "latent" in name])
def test_the_logits_of_every_new_token_are_those_of_the_whole_text(name: str) -> None:
    model = make(name, torch.float64)
    tokens, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))
    windows = [model.config.layer_window(layer) for layer in range(model.config.num_layers)]
    cache, found = cache_for(model, len(PROMPT)), []
    with torch.no_grad():
        whole = model(tokens, positions, CausalAttend([len(PROMPT)], windows))
        for part in (slice(0, 4), *(slice(start, start + 1) for start in range(4, len(PROMPT)))):
            found.append(model(tokens[part], positions[part], cache))
            cache.advance(len(found[-1]))
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_takes_the_bytes_that_the_planner_counts(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = cache_for(make(name, dtype), 7)
        kept = [value for value in vars(cache).values() if isinstance(value, torch.Tensor)]
        assert sum(value.nbytes for value in kept) == 7 * ModelConfig(**{**SHAPE, **MODELS[name]}).kv_bytes_per_token(
            dtype.itemsize
        )
        assert {value.dtype for value in kept} == {dtype}


def test_both_ways_to_attend_to_latents_are_one_and_each_is_taken_where_it_is_cheaper() -> None:
    generator = torch.Generator().manual_seed(1)
    heads, plain, turned, value, rank = 3, 8, 4, 6, 10
    shapes = ((heads, plain, rank), (heads, value, rank), (9, rank + turned))
    w_uk, w_uv, latents = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    for num_new in (1, 2, 9):
        q = torch.randn(num_new, heads, plain + turned, generator=generator, dtype=torch.float64)
        for window in (None, 3):
            keys = latents if window is None else latents[max(0, 9 - num_new + 1 - window) :]
            found = expanded(q, keys, w_uk, w_uv, window), absorbed(q, keys, w_uk, w_uv, window)
            torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    mla = MODEL.mla
    assert mla is not None
    w_uk, w_uv = (torch.empty(1, size, mla.kv_lora_rank, device="meta") for size in (mla.nope_head_dim, mla.v_head_dim))

    def cheaper(num_new: int, num_keys: int) -> bool:
        return expanding_is_cheaper(num_new, num_keys, w_uk, w_uv)

    assert cheaper(1, 1) and cheaper(5000, 5000) and cheaper(1000, 5000)
    assert not cheaper(1, 2) and not cheaper(1, 5000) and not cheaper(64, 5000)


def test_a_cache_of_latents_is_for_latent_attention_only() -> None:
    tokens = torch.tensor(PROMPT)
    with pytest.raises(AssertionError, match="gives latents to a cache of latents"):
        make("llama")(tokens, torch.arange(len(tokens)), cache_for(make("latent"), 20))


def test_a_window_changes_the_text() -> None:
    """The window reaches attention at all: with one of 5 tokens the logits are others than without."""
    config = ModelConfig(**{**SHAPE, **MODELS["window"]})
    narrow = make("window")
    wide = Transformer(config.model_copy(update={"sliding_window": None}), Mesh.solo()).initialise(seed=7)
    assert list(generate(narrow, PROMPT, 30)) != list(generate(wide, PROMPT, 30))


def test_sampling_is_reproducible_and_equal_with_and_without_cache() -> None:
    model = make("gqa", torch.float64)
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}
    first = list(generate(model, PROMPT, 20, seed=1, **options))
    assert first == list(generate(model, PROMPT, 20, seed=1, **options))
    assert first == list(generate_by_recomputing(model, PROMPT, 20, seed=1, **options))
    assert first != list(generate(model, PROMPT, 20, seed=2, **options))
    assert list(generate(model, PROMPT, 20, temperature=1.0, top_p=1e-6)) == list(generate(model, PROMPT, 20))


def test_tokens_come_one_by_one_and_leave_gradients_on() -> None:
    model = make("llama")
    expected = list(generate(model, PROMPT, 4))
    stream = generate(model, PROMPT, 4)
    assert next(stream) == expected[0]
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert list(stream) == expected[1:]
    assert list(generate(model, PROMPT, 0)) == []


@pytest.mark.parametrize("several", [False, True])
def test_ends_after_eos(several: bool) -> None:
    model = make("llama")
    text = list(generate(model, PROMPT, 12))
    eos = text[5]
    ended = list(generate(model, PROMPT, 12, eos_id=[eos, 49] if several else eos))
    assert ended == text[: text.index(eos) + 1]


def test_bfloat16() -> None:
    model = make("gqa", torch.bfloat16)
    assert cache_for(model, 4).keys.dtype == torch.bfloat16
    assert len(list(generate(model, PROMPT, 5))) == 5


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "no tokens"),
        ([1, 50], {}, r"id 50.*0 to 49"),
        ([-1], {}, "id -1"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ([1], {"temperature": -0.5}, r"temperature=-0\.5"),
        ([1], {"top_p": 0.0}, r"top_p=0\.0"),
        ([1] * 41, {"max_new_tokens": 0}, r"41 prompt tokens.*learned 40"),
        ([1] * 11, {"max_new_tokens": 31}, r"need 41 positions.*learned 40"),
    ],
)
@pytest.mark.parametrize("function", [generate, generate_by_recomputing])
def test_a_prompt_that_cannot_be_read_is_refused_at_once(
    function: Any, prompt: list[int], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        function(make("gpt2"), prompt, **{"max_new_tokens": 1, **options})


def test_learned_positions_can_be_filled() -> None:
    assert len(list(generate(make("gpt2"), [1] * 11, 30))) == 30
