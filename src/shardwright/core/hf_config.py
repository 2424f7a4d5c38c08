"""Hugging Face ``config.json`` to the fields of `ModelConfig` and back.

`fields_from_hf` and `hf_from_model` are each other's inverse for what both can hold; `ModelConfig.to_hf` checks it.
Keys that change no shape and no number (architectures, dtype, use_cache, ...) are ignored; keys that would change the
model in a way that is not offered are refused. The older keys rope_theta and rope_scaling are written, because every
version of transformers reads them; the newer rope_parameters is read as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardwright.core.suggest import did_you_mean
from shardwright.errors import ModelConfigError

if TYPE_CHECKING:
    from shardwright.core.model_config import ModelConfig, MoEConfig, RopeScaling

Fields = dict[str, Any]
Raw = Mapping[str, Any]


@dataclass(frozen=True)
class _Family:
    """What the format of one family means when a key is absent, and which switches it has at all."""

    architecture: str
    max_positions: int = 32768
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    attention_bias: str | bool = False  # a key that sets it, or a fixed value
    attention_bias_default: bool = False
    out_bias: bool = False  # the key sets the output projection's bias too
    qk_norm: bool = False
    experts: str = ""  # which of the expert formats below
    aux_coefficient: float = 0.001
    latent: bool = False


FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "llama": _Family("LlamaForCausalLM", max_positions=2048, attention_bias="attention_bias", out_bias=True),
        "qwen2": _Family("Qwen2ForCausalLM", attention_bias=True),
        "qwen3": _Family(
            "Qwen3ForCausalLM", head_dim=128, attention_bias="attention_bias", out_bias=True, qk_norm=True
        ),
        "gpt2": _Family("GPT2LMHeadModel", max_positions=1024, norm_eps=1e-5),
        "mixtral": _Family(
            "MixtralForCausalLM", max_positions=131072, norm_eps=1e-5, rope_theta=1e6, experts="mixtral"
        ),
        "qwen2_moe": _Family(
            "Qwen2MoeForCausalLM", attention_bias="qkv_bias", attention_bias_default=True, experts="qwen"
        ),
        "qwen3_moe": _Family(
            "Qwen3MoeForCausalLM", attention_bias="attention_bias", out_bias=True, qk_norm=True, experts="qwen"
        ),
        "deepseek_v2": _Family("DeepseekV2ForCausalLM", max_positions=2048, latent=True, experts="deepseek"),
        "deepseek_v3": _Family(
            "DeepseekV3ForCausalLM", max_positions=4096, latent=True, experts="deepseek", aux_coefficient=0.0
        ),
        "gpt_oss": _Family(
            "GptOssForCausalLM", max_positions=131072, norm_eps=1e-5, rope_theta=150000.0, head_dim=64,
            attention_bias="attention_bias", attention_bias_default=True, out_bias=True, experts="mixtral",
        ),
    }
)  # fmt: skip
SAME_FORMAT: Mapping[str, str] = MappingProxyType({"kimi_k2": "deepseek_v3"})

# Our field -> the key in every family but gpt2; both directions read it.
_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "dim": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn_dim": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
        "tied_head": "tie_word_embeddings",
        "dropout": "attention_dropout",
        "init_std": "initializer_range",
        "bos_id": "bos_token_id",
    }
)
_GPT2_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "dim": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "ffn_dim": "n_inner",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tied_head": "tie_word_embeddings",
        "dropout": "resid_pdrop",
        "init_std": "initializer_range",
        "bos_id": "bos_token_id",
    }
)
_GPT2_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
)
_ORIGINAL = {"factor": "factor", "original_max_positions": "original_max_position_embeddings"}
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
_ROPE_KEYS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "linear": _ORIGINAL,
        "llama3": {**_ORIGINAL, "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
        "yarn": {**_ORIGINAL, **{name: name for name in _YARN}},
    }
)

# Keys that change the model: the only value that is offered.
_ONLY: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "partial_rotary_factor": 1,
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "swiglu_alpha": 1.702,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
)


def fields_from_hf(raw: Raw) -> Fields:
    """Constructor arguments of `ModelConfig` for the content of a ``config.json``.

    Raises `ModelConfigError` for an unknown ``model_type``, a missing shape or a value that is not offered.
    """
    name = raw.get("model_type")
    family = SAME_FORMAT.get(str(name), str(name))
    if family not in FAMILIES:
        supported = ", ".join([*FAMILIES, *SAME_FORMAT])
        given = "has no model_type" if name is None else f"has model_type {name!r}, {did_you_mean(str(name), FAMILIES)}"
        raise ModelConfigError(f"config.json {given}; supported: {supported}")
    for key, value in _ONLY.items():
        if raw.get(key) is not None and raw[key] != value:
            raise ModelConfigError(f"config.json: {key}={raw[key]!r} is not offered for {family}; only {value!r} is")
    read = _read_gpt2 if family == "gpt2" else _read_rotary
    end = raw.get("eos_token_id")
    ends = list(end) if isinstance(end, list) else [] if end is None else [end]
    fields = {
        "name": PurePath(str(raw.get("_name_or_path") or name)).name,
        "family": family,
        "eos_id": ends[0] if ends else None,
        "extra_eos_ids": tuple(ends[1:]),
    }
    return fields | read(raw, family)


def hf_from_model(model: ModelConfig) -> Fields:
    """The content of a ``config.json`` for the model; what its family cannot hold is left out."""
    ends = [] if model.eos_id is None else [model.eos_id, *model.extra_eos_ids]
    write = _write_gpt2 if model.family == "gpt2" else _write_rotary
    return {
        "architectures": [FAMILIES[model.family].architecture],
        "model_type": model.family,
        **write(model),
        "eos_token_id": ends if len(ends) > 1 else model.eos_id,
    }


def _need(raw: Raw, key: str) -> Any:
    if raw.get(key) is None:
        raise ModelConfigError(f"config.json of type {raw.get('model_type')!r} lacks {key!r}; add it")
    return raw[key]


def _size(raw: Raw, key: str) -> int:
    value = _need(raw, key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelConfigError(f"config.json: {key}={value!r} must be a whole number")
    return value


def _given(raw: Raw, keys: Mapping[str, str]) -> Fields:
    """Our fields for those of the keys that are there and not null."""
    return {field: raw[key] for field, key in keys.items() if raw.get(key) is not None}


# -- gpt2 ------------------------------------------------------------------------------------------


def _read_gpt2(raw: Raw, family: str) -> Fields:
    """Learned positions, LayerNorm, biases everywhere; the general key names are read where GPT-2's own are absent."""
    general = {key: raw[_KEYS[field]] for field, key in _GPT2_KEYS.items() if raw.get(_KEYS[field]) is not None}
    raw = general | {key: value for key, value in raw.items() if value is not None}
    for field in ("vocab_size", "dim", "num_layers", "num_heads"):
        _size(raw, _GPT2_KEYS[field])
    fields = _given(raw, _GPT2_KEYS)
    activation = raw.get("activation_function", "gelu_new")
    if activation not in _GPT2_ACTIVATIONS:
        raise ModelConfigError(
            f"config.json: activation_function={activation!r} is not offered; known: {', '.join(_GPT2_ACTIVATIONS)}"
        )
    defaults = {"ffn_dim": 4 * fields["dim"], "max_positions": FAMILIES[family].max_positions, "tied_head": True}
    switches = {"norm": "layernorm", "position": "learned", "activation": _GPT2_ACTIVATIONS[activation]}
    biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    return defaults | fields | switches | biases


def _write_gpt2(model: ModelConfig) -> Fields:
    written = {key: getattr(model, field) for field, key in _GPT2_KEYS.items()}
    dropouts = {"embd_pdrop": model.dropout, "attn_pdrop": model.dropout}
    return written | dropouts | {"activation_function": "gelu" if model.activation == "gelu" else "gelu_new"}


# -- every other family ----------------------------------------------------------------------------


def _read_rotary(raw: Raw, family: str) -> Fields:
    facts = FAMILIES[family]
    for field in ("vocab_size", "dim", "num_layers", "num_heads", "ffn_dim"):
        _size(raw, _KEYS[field])
    if family == "gpt_oss" and not raw.get("rope_parameters"):
        _need(raw, "rope_scaling")
    defaults: Fields = {"max_positions": facts.max_positions, "norm_eps": facts.norm_eps}
    if facts.head_dim is not None:
        defaults["head_dim"] = facts.head_dim
    fields = defaults | _given(raw, _KEYS)
    fields["rope_theta"], fields["rope_scaling"] = _read_rope(raw, facts)
    fields["qkv_bias"] = bool(_bias(raw, facts))
    fields["out_bias"] = fields["qkv_bias"] and facts.out_bias
    fields["mlp_bias"] = family == "gpt_oss" or (family == "llama" and bool(raw.get("mlp_bias")))
    fields["qk_norm"] = facts.qk_norm
    fields["sliding_window"], fields["sliding_layers"] = _read_sliding(raw, family)
    if facts.experts:
        fields["moe"] = _EXPERTS[facts.experts][0](raw, facts)
    if facts.latent:
        fields |= _read_latent(raw)
        for derived in ("head_dim", "num_kv_heads"):
            fields.pop(derived, None)
    if family == "gpt_oss":
        fields |= {"attention_sinks": True, "swiglu_limit": raw.get("swiglu_limit", 7.0)}
        fields["moe"]["router_bias"] = True
    return fields


def _write_rotary(model: ModelConfig) -> Fields:
    facts = FAMILIES[model.family]
    written = {key: getattr(model, field) for field, key in _KEYS.items()}
    written |= {"hidden_act": "silu", "rope_scaling": _write_rope(model.rope_scaling, model.family)}
    if isinstance(facts.attention_bias, str):
        written[facts.attention_bias] = model.qkv_bias
    if model.family == "llama":
        written["mlp_bias"] = model.mlp_bias
    written |= _write_sliding(model)
    if facts.experts and model.moe is not None:
        written |= _EXPERTS[facts.experts][1](model.moe, model.family)
    if model.mla is not None:
        written |= {key: getattr(model.mla, field) for field, key in _LATENT_KEYS.items()}
        del written["head_dim"]  # transformers means the rotated part by it, others the whole head
    if model.family == "gpt_oss":
        written["swiglu_limit"] = model.swiglu_limit
    return written


def _bias(raw: Raw, facts: _Family) -> bool:
    if isinstance(facts.attention_bias, bool):
        return facts.attention_bias
    value = raw.get(facts.attention_bias)
    return facts.attention_bias_default if value is None else bool(value)


# -- rotary positions ------------------------------------------------------------------------------


def _read_rope(raw: Raw, facts: _Family) -> tuple[float, Fields | None]:
    """theta and the fields of `RopeScaling`, from rope_parameters (newer) or rope_scaling and rope_theta."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ModelConfigError("config.json: rope parameters per kind of layer are not offered; give one set for all")
    if given.get("partial_rotary_factor", 1) != 1:
        raise ModelConfigError(f"config.json: partial_rotary_factor={given['partial_rotary_factor']} is not offered")
    theta = given.get("rope_theta") or raw.get("rope_theta") or facts.rope_theta
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in _ROPE_KEYS:
        raise ModelConfigError(
            f"config.json: rope type {kind!r} is not offered; known: default, {', '.join(_ROPE_KEYS)}"
        )
    fields = _given(given, _ROPE_KEYS[kind])
    if kind != "linear":
        fields.setdefault("original_max_positions", raw.get("max_position_embeddings", facts.max_positions))
    return theta, {"kind": kind, **fields}


def _write_rope(scaling: RopeScaling | None, family: str) -> Fields | None:
    if scaling is None:  # gpt_oss without the key means yarn
        return {"rope_type": "default"} if family == "gpt_oss" else None
    values = {key: getattr(scaling, field) for field, key in _ROPE_KEYS[scaling.kind].items()}
    return {"rope_type": scaling.kind, **{key: value for key, value in values.items() if value is not None}}


# -- sliding windows -------------------------------------------------------------------------------


def _read_sliding(raw: Raw, family: str) -> tuple[int | None, tuple[int, ...] | None]:
    """The window, and the layers that have it (None: all)."""
    window, num_layers = raw.get("sliding_window"), _size(raw, "num_hidden_layers")
    if family not in _SLIDING_FAMILIES or not window:
        return None, None
    if family.startswith("qwen") and not raw.get("use_sliding_window", False):
        return None, None
    types = raw.get("layer_types")
    if family in _SLIDING_EVERYWHERE:
        layers = list(range(num_layers))
    elif types is not None:
        layers = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    elif family == "gpt_oss":
        layers = list(range(0, num_layers, 2))
    else:
        raise ModelConfigError(
            f"config.json: use_sliding_window in {family} needs layer_types, a list with 'sliding_attention' or "
            "'full_attention' for each layer; older files leave open which layers they mean"
        )
    if not layers:
        return None, None
    return window, None if len(layers) == num_layers else tuple(layers)


def _write_sliding(model: ModelConfig) -> Fields:
    if model.family not in _SLIDING_FAMILIES:
        return {}
    written: Fields = {"sliding_window": model.sliding_window}
    if model.family.startswith("qwen"):
        written["use_sliding_window"] = model.sliding_window is not None
    if model.family not in _SLIDING_EVERYWHERE:
        windows = [model.layer_window(layer) for layer in range(model.num_layers)]
        written["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    return written


_SLIDING_FAMILIES = ("qwen2", "qwen3", "qwen2_moe", "mixtral", "qwen3_moe", "gpt_oss")
_SLIDING_EVERYWHERE = ("mixtral", "qwen3_moe")


# -- experts and latent attention ------------------------------------------------------------------


def _num_experts(raw: Raw) -> Any:
    """The number of routed experts; transformers 5 writes num_local_experts for families that once had another key."""
    for key in ("n_routed_experts", "num_local_experts"):
        if raw.get(key) is not None:
            return raw[key]
    return _need(raw, "num_experts")


def _read_mixtral_experts(raw: Raw, facts: _Family) -> Fields:
    return {
        "num_experts": _num_experts(raw),
        "top_k": _need(raw, "num_experts_per_tok"),
        "expert_dim": raw["intermediate_size"],
        "aux_coefficient": raw.get("router_aux_loss_coef", facts.aux_coefficient),
    }


def _write_mixtral_experts(moe: MoEConfig, family: str) -> Fields:
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.expert_dim,
        "router_aux_loss_coef": moe.aux_coefficient,
    }


def _read_qwen_experts(raw: Raw, facts: _Family) -> Fields:
    fields = {
        "num_experts": _num_experts(raw),
        "top_k": _need(raw, "num_experts_per_tok"),
        "expert_dim": _need(raw, "moe_intermediate_size"),
        "layer_step": raw.get("decoder_sparse_step", 1),
        "dense_layers": tuple(raw.get("mlp_only_layers") or ()),
        "normalise_top_k": raw.get("norm_topk_prob", False),
        "aux_coefficient": raw.get("router_aux_loss_coef", facts.aux_coefficient),
    }
    if raw["model_type"] == "qwen2_moe":
        shared = _need(raw, "shared_expert_intermediate_size")
        fields |= {"num_shared_experts": 1, "shared_dim": shared, "shared_gate": True}
    return fields


def _write_qwen_experts(moe: MoEConfig, family: str) -> Fields:
    written = {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "decoder_sparse_step": moe.layer_step,
        "mlp_only_layers": list(moe.dense_layers),
        "norm_topk_prob": moe.normalise_top_k,
        "router_aux_loss_coef": moe.aux_coefficient,
    }
    return written | ({"shared_expert_intermediate_size": moe.shared_dim} if family == "qwen2_moe" else {})


_DEEPSEEK_DEFAULTS: Mapping[str, Raw] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": {
            "first_k_dense_replace": 0, "scoring_func": "softmax", "norm_topk_prob": False,
            "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        },
        "DeepseekV3ForCausalLM": {
            "first_k_dense_replace": 3, "scoring_func": "sigmoid", "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
        },
    }
)  # fmt: skip


def _read_deepseek_experts(raw: Raw, facts: _Family) -> Fields:
    given = {
        **_DEEPSEEK_DEFAULTS[facts.architecture],
        **{key: value for key, value in raw.items() if value is not None},
    }
    grouped = given["topk_method"] != "greedy"  # greedy chooses among all experts, whatever the groups say
    return {
        "num_experts": _num_experts(raw),
        "top_k": _need(raw, "num_experts_per_tok"),
        "expert_dim": _need(raw, "moe_intermediate_size"),
        "num_shared_experts": given.get("n_shared_experts", 0),
        "first_dense_layers": given["first_k_dense_replace"],
        "score": given["scoring_func"],
        "normalise_top_k": given["norm_topk_prob"],
        "routed_scale": given["routed_scaling_factor"],
        "aux_coefficient": given.get("aux_loss_alpha", facts.aux_coefficient),
        "bias_correction": given["topk_method"] == "noaux_tc",
        "groups": given["n_group"] if grouped else 1,
        "top_groups": given["topk_group"] if grouped else 1,
    }


def _write_deepseek_experts(moe: MoEConfig, family: str) -> Fields:
    method = "noaux_tc" if moe.bias_correction else "group_limited_greedy" if moe.groups > 1 else "greedy"
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": moe.first_dense_layers,
        "moe_layer_freq": 1,
        "scoring_func": moe.score,
        "norm_topk_prob": moe.normalise_top_k,
        "routed_scaling_factor": moe.routed_scale,
        "aux_loss_alpha": moe.aux_coefficient,
        "topk_method": method,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
    }


_EXPERTS: Mapping[str, tuple[Callable[[Raw, _Family], Fields], Callable[[MoEConfig, str], Fields]]] = MappingProxyType(
    {
        "mixtral": (_read_mixtral_experts, _write_mixtral_experts),
        "qwen": (_read_qwen_experts, _write_qwen_experts),
        "deepseek": (_read_deepseek_experts, _write_deepseek_experts),
    }
)

_LATENT_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "kv_lora_rank": "kv_lora_rank",
        "q_lora_rank": "q_lora_rank",
        "nope_head_dim": "qk_nope_head_dim",
        "rope_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    }
)


def _read_latent(raw: Raw) -> Fields:
    for field, key in _LATENT_KEYS.items():
        if field != "q_lora_rank":
            _need(raw, key)
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ModelConfigError(
                f"config.json: {key}=true is not offered for {raw['model_type']}; no known model has it"
            )
    return {"mla": _given(raw, _LATENT_KEYS)}
