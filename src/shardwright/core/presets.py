"""Models by name: small ones to run, and well-known ones to plan with.

Each entry holds fields of `ModelConfig`; what is left out has the default there. The shapes of well-known models are
facts from the files named beside them, and equal what `ModelConfig.from_hf` makes of the published config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardwright.core.model_config import ModelConfig
from shardwright.core.suggest import did_you_mean
from shardwright.errors import ModelConfigError

Fields = dict[str, Any]


def _llama3(rope_factor: float = 8.0, **fields: Any) -> Fields:
    scaling = {"kind": "llama3", "factor": rope_factor, "original_max_positions": 8192}
    common = {"vocab_size": 128256, "max_positions": 131072, "rope_theta": 500000.0, "rope_scaling": scaling}
    return common | {"num_kv_heads": 8, "bos_id": 128000, "eos_id": 128001} | fields


def _qwen2(**fields: Any) -> Fields:
    common = {"family": "qwen2", "vocab_size": 152064, "max_positions": 131072, "norm_eps": 1e-6, "rope_theta": 1e6}
    return common | {"qkv_bias": True, "bos_id": 151643, "eos_id": 151643} | fields


def _qwen3(**fields: Any) -> Fields:
    common = {"family": "qwen3", "vocab_size": 151936, "max_positions": 40960, "norm_eps": 1e-6, "rope_theta": 1e6}
    return common | {"head_dim": 128, "qk_norm": True, "bos_id": 151643, "eos_id": 151645} | fields


def _qwen3_moe(expert_dim: int, **fields: Any) -> Fields:
    moe = {"num_experts": 128, "top_k": 8, "expert_dim": expert_dim, "aux_coefficient": 0.001}
    return _qwen3(family="qwen3_moe", num_kv_heads=4, moe=moe, **fields)


def _gpt2(**fields: Any) -> Fields:
    switches = {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "tied_head": True}
    biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    return {"family": "gpt2", "ffn_dim": 4 * fields["dim"], "vocab_size": 51200, **switches, **biases, **fields}


def _mixtral(aux_coefficient: float, **fields: Any) -> Fields:
    moe = {"num_experts": 8, "top_k": 2, "expert_dim": fields["ffn_dim"], "aux_coefficient": aux_coefficient}
    common = {"family": "mixtral", "vocab_size": 32000, "num_kv_heads": 8, "rope_theta": 1e6, "bos_id": 1, "eos_id": 2}
    return common | {"moe": moe} | fields


def _deepseek(moe: Fields, q_lora_rank: int | None = 1536, yarn: Fields | None = None, **fields: Any) -> Fields:
    mla = {
        "kv_lora_rank": 512, "q_lora_rank": q_lora_rank, "nope_head_dim": 128, "rope_head_dim": 64, "v_head_dim": 128
    }  # fmt: skip
    scaling = {"kind": "yarn", "original_max_positions": 4096, "mscale": 1.0, "mscale_all_dim": 1.0, **(yarn or {})}
    return {"mla": mla, "moe": moe, "norm_eps": 1e-6, "rope_scaling": scaling if yarn else None, **fields}


def _gpt_oss(num_layers: int, num_experts: int) -> Fields:
    moe = {"num_experts": num_experts, "top_k": 4, "expert_dim": 2880, "aux_coefficient": 0.9, "router_bias": True}
    yarn = {"kind": "yarn", "factor": 32.0, "original_max_positions": 4096, "truncate": False}
    return {
        "family": "gpt_oss", "vocab_size": 201088, "dim": 2880, "num_layers": num_layers, "num_heads": 64,
        "num_kv_heads": 8, "head_dim": 64, "ffn_dim": 2880, "max_positions": 131072, "rope_theta": 150000.0,
        "rope_scaling": yarn, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "attention_sinks": True,
        "swiglu_limit": 7.0, "sliding_window": 128, "sliding_layers": tuple(range(0, num_layers, 2)), "moe": moe,
        "eos_id": 200002,
    }  # fmt: skip


_SMALL: Mapping[str, Fields] = {
    "tiny": {
        "vocab_size": 256, "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 128,
        "max_positions": 256,
    },
    "tiny-moe": {
        "family": "mixtral", "vocab_size": 256, "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "ffn_dim": 64, "max_positions": 256,
        "moe": {"num_experts": 8, "top_k": 2, "expert_dim": 64, "aux_coefficient": 0.01},
    },
    "demo": {
        "vocab_size": 4096, "dim": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 384,
        "max_positions": 512, "tied_head": True,
    },
    "bench-25m": {
        "vocab_size": 8192, "dim": 512, "num_layers": 8, "num_heads": 8, "ffn_dim": 1024, "max_positions": 256,
    },
}  # fmt: skip

# "aic": copies of config.json in ai-dynamo/aiconfigurator @ 095f58a51c4c, aic-core/.../model_configs.
# "LLM-Prof": citsjtu2020/LLM-Prof @ 8434c8d19c39, sglang/Model_Config.md. "calculon": calculon-ai/calculon, models/.
_KNOWN: Mapping[str, Fields] = {
    # aic
    "llama-3.1-8b": _llama3(dim=4096, num_layers=32, num_heads=32, ffn_dim=14336),
    "llama-3.1-70b": _llama3(dim=8192, num_layers=80, num_heads=64, ffn_dim=28672),
    "llama-3.1-405b": _llama3(dim=16384, num_layers=126, num_heads=128, ffn_dim=53248),
    # LLM-Prof
    "llama-3.2-3b": _llama3(32.0, dim=3072, num_layers=28, num_heads=24, ffn_dim=8192, tied_head=True),
    # rwth-i6/i6_experiments, users/juanola/experiments/e25_11_13_ctc/configurations/qwen2/qwen2_configs.py
    "qwen2-0.5b": _qwen2(
        vocab_size=151936, dim=896, num_layers=24, num_heads=14, num_kv_heads=2, ffn_dim=4864, tied_head=True
    ),
    # LLM-Prof
    "qwen2.5-3b": _qwen2(
        vocab_size=151936, dim=2048, num_layers=36, num_heads=16, num_kv_heads=2, ffn_dim=11008, tied_head=True,
        max_positions=32768,
    ),
    "qwen2.5-7b": _qwen2(dim=3584, num_layers=28, num_heads=28, num_kv_heads=4, ffn_dim=18944),
    "qwen2.5-14b": _qwen2(dim=5120, num_layers=48, num_heads=40, num_kv_heads=8, ffn_dim=13824, norm_eps=1e-5),
    "qwen2.5-32b": _qwen2(dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, ffn_dim=27648, norm_eps=1e-5),
    # aic
    "qwen3-0.6b": _qwen3(dim=1024, num_layers=28, num_heads=16, num_kv_heads=8, ffn_dim=3072, tied_head=True),
    "qwen3-8b": _qwen3(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, ffn_dim=12288),
    "qwen3-32b": _qwen3(dim=5120, num_layers=64, num_heads=64, num_kv_heads=8, ffn_dim=25600),
    "qwen3-30b-a3b": _qwen3_moe(768, dim=2048, num_layers=48, num_heads=32, ffn_dim=6144),
    "qwen3-235b-a22b": _qwen3_moe(1536, dim=4096, num_layers=94, num_heads=64, ffn_dim=12288),
    "mixtral-8x7b": _mixtral(0.02, dim=4096, num_layers=32, num_heads=32, ffn_dim=14336, max_positions=32768),
    "mixtral-8x22b": _mixtral(0.001, dim=6144, num_layers=56, num_heads=48, ffn_dim=16384, max_positions=65536),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    # copies of the published config.json; sources disagree on yarn's mscale (1.0 here, 0.707 in another copy)
    "deepseek-v2-lite": _deepseek(
        {
            "num_experts": 64, "top_k": 6, "expert_dim": 1408, "num_shared_experts": 2, "first_dense_layers": 1,
            "normalise_top_k": False, "aux_coefficient": 0.001,
        },
        family="deepseek_v2", vocab_size=102400, dim=2048, num_layers=27, num_heads=16, ffn_dim=10944, q_lora_rank=None,
    ),
    "deepseek-v2": _deepseek(
        {
            "num_experts": 160, "top_k": 6, "expert_dim": 1536, "num_shared_experts": 2, "first_dense_layers": 1,
            "normalise_top_k": False, "groups": 8, "top_groups": 3, "routed_scale": 16.0, "aux_coefficient": 0.001,
        },
        family="deepseek_v2", vocab_size=102400, dim=5120, num_layers=60, num_heads=128, ffn_dim=12288,
        max_positions=163840, yarn={"factor": 40.0}, bos_id=100000, eos_id=100001,
    ),
    # aic
    "deepseek-v3": _deepseek(
        {
            "num_experts": 256, "top_k": 8, "expert_dim": 2048, "num_shared_experts": 1, "first_dense_layers": 3,
            "score": "sigmoid", "groups": 8, "top_groups": 4, "routed_scale": 2.5, "bias_correction": True,
        },
        family="deepseek_v3", vocab_size=129280, dim=7168, num_layers=61, num_heads=128, ffn_dim=18432,
        max_positions=163840, yarn={"factor": 40.0}, bos_id=0, eos_id=1,
    ),
    "kimi-k2": _deepseek(
        {
            "num_experts": 384, "top_k": 8, "expert_dim": 2048, "num_shared_experts": 1, "first_dense_layers": 1,
            "score": "sigmoid", "routed_scale": 2.827, "aux_coefficient": 0.001, "bias_correction": True,
        },
        family="deepseek_v3", vocab_size=163840, dim=7168, num_layers=61, num_heads=64, ffn_dim=18432,
        max_positions=131072, rope_theta=50000.0, yarn={"factor": 32.0, "beta_fast": 1.0},
        bos_id=163584, eos_id=163585,
    ),
    # cli99/llm-analysis, llm_analysis/model_configs/gpt2.json
    "gpt2-124m": _gpt2(vocab_size=50257, dim=768, num_layers=12, num_heads=12, max_positions=1024),
    # calculon; vocabulary and norm of GPT-3 as in GPT-2 (the real model alternated dense and sparse attention);
    # 51,200 is the padded GPT-2 vocabulary of the Megatron papers
    "gpt3-175b": _gpt2(vocab_size=50257, dim=12288, num_layers=96, num_heads=96),
    "megatron-22b": _gpt2(dim=6144, num_layers=48, num_heads=64),
    "mt-nlg-530b": _gpt2(dim=20480, num_layers=105, num_heads=128),
    "megatron-1t": _gpt2(dim=25600, num_layers=128, num_heads=160),
}  # fmt: skip

PRESETS: Mapping[str, Fields] = MappingProxyType({**_SMALL, **_KNOWN})


def preset(name: str, /, **changes: Any) -> ModelConfig:
    """The model of that name, with other values for some fields; a `ModelConfigError` names the nearest names."""
    if name not in PRESETS:
        raise ModelConfigError(f"no preset {name!r}; {did_you_mean(name, PRESETS)}")
    return ModelConfig(**{"name": name, **PRESETS[name], **changes})
