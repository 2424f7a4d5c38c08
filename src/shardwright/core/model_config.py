"""`ModelConfig`: the shape of one decoder-only transformer, for training, planning and serving alike.

Every count that follows from the shape is here: parameters (all, active per token, per layer), weights in matrix
products, FLOPs per token, bytes of KV cache per token. Notation: D dim, N query heads, K KV heads, H head dim,
F ffn, E experts, V vocab, L layers.

>>> config = ModelConfig.load("bench-25m")
>>> config.num_parameters(), config.kv_bytes_per_token()
(29368832, 16384)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from shardwright.core import hf_config
from shardwright.core.suggest import did_you_mean
from shardwright.errors import ModelConfigError

Size = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Family = Literal[
    "llama", "qwen2", "qwen3", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"
]


class _Shape(BaseModel):
    """A frozen pydantic model whose every error is a one-line `ModelConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _one_line_errors(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise ModelConfigError(_explain(cls, error)) from None


class RopeScaling(_Shape):
    """How rotary frequencies are stretched beyond the length of pre-training.

    ``linear`` reads `factor`; ``llama3`` also the two `*_freq_factor`; ``yarn`` the betas, `mscale*`,
    `attention_factor` (None: derived from factor and mscale) and `truncate` (round the correction range outwards).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: Positive
    original_max_positions: Size | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind != "linear" and self.original_max_positions is None:
            raise ModelConfigError(
                f"rope_scaling kind={self.kind} needs original_max_positions, the length of pre-training (8192, say)"
            )
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelConfigError(
                f"rope_scaling: high_freq_factor={self.high_freq_factor} must be above "
                f"low_freq_factor={self.low_freq_factor}; Llama 3.1 uses 4 and 1"
            )
        return self


class MoEConfig(_Shape):
    """Routed experts, and which layers have them.

    Layer i has experts if i >= first_dense_layers, (i + 1) % layer_step == 0 and i is not in dense_layers.
    A token takes the `top_k` best of E scores; with ``groups > 1`` only within its `top_groups` best groups, ranked by
    their best score or, with `bias_correction`, by the sum of their two best. `bias_correction` adds a bias to the
    scores for choosing only, not for weighing. `shared_dim` is the width of all shared experts together.
    """

    num_experts: Size
    top_k: Size
    expert_dim: Size
    num_shared_experts: Count = 0
    shared_dim: Count = Field(default_factory=lambda data: data["num_shared_experts"] * data["expert_dim"])
    shared_gate: bool = False
    first_dense_layers: Count = 0
    layer_step: Size = 1
    dense_layers: tuple[Count, ...] = ()
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise_top_k: bool = True
    groups: Size = 1
    top_groups: Size = 1
    routed_scale: Positive = 1.0
    aux_coefficient: Annotated[float, Field(ge=0)] = 0.0
    bias_correction: bool = False
    router_bias: bool = False

    def mean_tokens(self, num_tokens: int) -> float:
        """Rows per expert when ``num_tokens`` tokens are spread evenly."""
        return num_tokens * self.top_k / self.num_experts

    def capacity(self, num_tokens: int, factor: float) -> int:
        """Rows that each expert takes of a sequence of ``num_tokens`` tokens: the mean times ``factor``, rounded up."""
        return ceil(self.mean_tokens(num_tokens) * factor - 1e-9)  # less what rounding may have added

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_experts % self.groups:
            raise ModelConfigError(f"moe: groups={self.groups} must divide num_experts={self.num_experts}")
        if self.top_groups > self.groups:
            raise ModelConfigError(f"moe: top_groups={self.top_groups} must be at most groups={self.groups}")
        choice = self.num_experts // self.groups * self.top_groups
        if self.top_k > choice:
            raise ModelConfigError(
                f"moe: top_k={self.top_k} must be at most {choice}, the experts a token may choose of"
            )
        if (self.num_shared_experts > 0) != (self.shared_dim > 0) or (self.shared_gate and not self.shared_dim):
            raise ModelConfigError(
                f"moe: num_shared_experts={self.num_shared_experts}, shared_dim={self.shared_dim} and "
                f"shared_gate={self.shared_gate} contradict each other; set num_shared_experts to 1 or drop all"
            )
        return self


class MLAConfig(_Shape):
    """Latent attention: keys and values come from one vector of kv_lora_rank, plus a rotated key of rope_head_dim that
    all heads share. `q_lora_rank` None: queries straight from the hidden state."""

    kv_lora_rank: Size
    q_lora_rank: Size | None = None
    nope_head_dim: Size
    rope_head_dim: Size
    v_head_dim: Size


_FREE = frozenset(
    {"name", "family", "dropout", "init_std", "bos_id", "eos_id", "extra_eos_ids", "max_positions", "moe.aux_coefficient"}
)
"""Fields that say nothing about what trained weights compute; `max_positions` only of rotary positions, and only upwards."""


class _Weights(NamedTuple):
    """Parameters of one part: those in matrix products, and the rest (biases, norms, tables)."""

    matrices: int
    others: int

    def plus(self, other: _Weights) -> _Weights:
        return _Weights(self.matrices + other.matrices, self.others + other.others)

    def times(self, count: int) -> _Weights:
        return _Weights(self.matrices * count, self.others * count)


def _default_head_dim(data: dict[str, Any]) -> int:
    if data["mla"] is not None:
        return int(data["mla"].nope_head_dim + data["mla"].rope_head_dim)
    if data["dim"] % data["num_heads"]:
        raise ModelConfigError(
            f"num_heads={data['num_heads']} does not divide dim={data['dim']}; give head_dim or another num_heads"
        )
    return int(data["dim"] // data["num_heads"])


class ModelConfig(_Shape):
    """One decoder-only transformer with switches; raises `ModelConfigError` for shapes that no model can have.

    `num_kv_heads` defaults to `num_heads`, `head_dim` to dim // num_heads (with `mla`: nope + rope, the width of a
    query head). `family` only decides the Hugging Face names. `mlp_bias` includes the experts. `dropout` is the
    probability in training. `swiglu_limit` gives the clamped SwiGLU of gpt-oss: with up clamped to [-limit, limit] and
    gate to at most limit, (up + 1) * gate * sigmoid(1.702 gate). `attention_sinks`: one learned logit per head in each
    softmax. `sliding_window` (tokens, the own one included) holds for `sliding_layers`, or for all if that is None.
    `extra_eos_ids` are further tokens that end a text.
    """

    name: str = "model"
    family: Family = "llama"
    vocab_size: Size
    dim: Size
    num_layers: Size
    num_heads: Size
    mla: MLAConfig | None = None
    num_kv_heads: Size = Field(default_factory=lambda data: data["num_heads"])
    head_dim: Size = Field(default_factory=_default_head_dim)
    ffn_dim: Size
    max_positions: Size = 2048
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: Positive = 1e-5
    activation: Literal["swiglu", "gelu_tanh", "gelu"] = "swiglu"
    swiglu_limit: Positive | None = None
    position: Literal["rope", "learned"] = "rope"
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_sinks: bool = False
    tied_head: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    init_std: Positive = 0.02
    bos_id: Count | None = None
    eos_id: Count | None = None
    extra_eos_ids: tuple[Count, ...] = ()
    sliding_window: Size | None = None
    sliding_layers: tuple[Count, ...] | None = None
    moe: MoEConfig | None = None

    # -- checks ------------------------------------------------------------------------------------

    @model_validator(mode="after")
    def _check_attention(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            near = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ModelConfigError(
                f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}; use one of {near}"
            )
        rotated = self.mla.rope_head_dim if self.mla else self.head_dim
        if self.position == "rope" and rotated % 2:
            raise ModelConfigError(
                f"rope turns pairs of channels, so the head dim must be even, not {rotated}; "
                "change head_dim or use position='learned'"
            )
        if self.position == "learned" and self.rope_scaling is not None:
            raise ModelConfigError("rope_scaling was given with position='learned'; drop one of them")
        if self.mla is None:
            return self
        width = self.mla.nope_head_dim + self.mla.rope_head_dim
        if self.head_dim != width or self.num_kv_heads != self.num_heads:
            raise ModelConfigError(
                f"with mla, head_dim is nope_head_dim + rope_head_dim = {width} and num_kv_heads is num_heads = "
                f"{self.num_heads}, not {self.head_dim} and {self.num_kv_heads}; leave both out"
            )
        odd = [name for name in ("qkv_bias", "out_bias", "qk_norm", "attention_sinks") if getattr(self, name)]
        if odd or self.position != "rope":
            raise ModelConfigError(
                f"mla needs position='rope' and cannot be combined with {odd or 'learned positions'}"
            )
        return self

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.swiglu_limit is not None and self.activation != "swiglu":
            raise ModelConfigError(f"swiglu_limit needs activation='swiglu', not {self.activation!r}")
        if self.sliding_layers is not None and self.sliding_window is None:
            raise ModelConfigError("sliding_layers was given without sliding_window; give its length in tokens")
        for what, layers in (("sliding_layers", self.sliding_layers), ("moe.dense_layers", self._dense_layers)):
            if layers and (max(layers) >= self.num_layers or len(set(layers)) != len(layers)):
                raise ModelConfigError(
                    f"{what}={list(layers)} must be distinct layers below num_layers={self.num_layers}"
                )
        if self.moe is not None and not any(map(self.is_moe_layer, range(self.num_layers))):
            raise ModelConfigError(
                f"moe leaves none of the {self.num_layers} layers with experts; lower first_dense_layers or layer_step "
                "or drop moe"
            )
        return self

    @property
    def _dense_layers(self) -> tuple[int, ...]:
        return self.moe.dense_layers if self.moe else ()

    # -- what a layer is ---------------------------------------------------------------------------

    @property
    def is_moe(self) -> bool:
        """True if any layer has experts."""
        return self.moe is not None

    def is_moe_layer(self, layer: int) -> bool:
        """True if layer number ``layer`` (from 0) has experts in place of a dense MLP."""
        moe = self.moe
        if moe is None or layer < moe.first_dense_layers or layer in moe.dense_layers:
            return False
        return (layer + 1) % moe.layer_step == 0

    def layer_window(self, layer: int) -> int | None:
        """Tokens that layer number ``layer`` looks back on, the own one included; None: all."""
        if self.sliding_layers is not None and layer not in self.sliding_layers:
            return None
        return self.sliding_window

    def changes_from(self, trained: ModelConfig) -> list[str]:
        """What makes this another model than ``trained``, so that its weights would compute something else: each field
        with both values. Names, dropout, initial values and balancing may change, and rotary positions may become more."""
        mine, theirs = _fields(self.model_dump()), _fields(trained.model_dump())
        free = _FREE
        if self.position == "learned" or self.max_positions < trained.max_positions:
            free = _FREE - {"max_positions"}
        return [
            f"model.{field} is {mine.get(field)} instead of {theirs.get(field)}"
            for field in (mine | theirs)
            if field not in free and mine.get(field) != theirs.get(field)
        ]

    # -- parameters --------------------------------------------------------------------------------

    def num_parameters(self) -> int:
        """All parameters; a tied head is counted once. A router's correction bias counts, multi-token heads do not."""
        layers = sum(self.num_layer_parameters(layer) for layer in range(self.num_layers))
        return layers + self._outside_layers()

    def num_active_parameters(self) -> int:
        """Parameters that one token meets: `top_k` experts instead of all, embedding and head included."""
        layers = sum(sum(self._layer(layer, active=True)) for layer in range(self.num_layers))
        return layers + self._outside_layers()

    def num_non_embedding_parameters(self) -> int:
        """Blocks and final norm, without token and position tables and without the head, tied or not."""
        return self.num_parameters() - self._tables()

    def num_layer_parameters(self, layer: int) -> int:
        """All parameters of layer number ``layer`` (from 0)."""
        return sum(self._layer(layer, active=False))

    def matmul_parameters(self) -> int:
        """Weights in the matrix products of one token: `top_k` experts, the head once even if tied; no biases, norms
        or embedding lookup."""
        layers = sum(self._layer(layer, active=True).matrices for layer in range(self.num_layers))
        return layers + self.dim * self.vocab_size

    def _tables(self) -> int:
        vocab = self.vocab_size * self.dim * (1 if self.tied_head else 2)
        return vocab + (self.max_positions * self.dim if self.position == "learned" else 0)

    def _outside_layers(self) -> int:
        return self._tables() + self._norm_parameters()

    def _norm_parameters(self) -> int:
        return self.dim * (2 if self.norm == "layernorm" else 1)

    def _layer(self, layer: int, *, active: bool) -> _Weights:
        if not 0 <= layer < self.num_layers:
            raise ModelConfigError(f"layer {layer} does not exist: {self.name} has layers 0 to {self.num_layers - 1}")
        mlp = self._experts(active) if self.is_moe_layer(layer) else self._mlp(self.ffn_dim)
        attention = self._attention() if self.mla is None else self._latent_attention(self.mla)
        return attention.plus(mlp).plus(_Weights(0, 2 * self._norm_parameters()))

    def _attention(self) -> _Weights:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        others = (queries + 2 * keys) * self.qkv_bias + self.dim * self.out_bias
        others += 2 * self.head_dim * self.qk_norm + self.num_heads * self.attention_sinks
        return _Weights(self.dim * (2 * queries + 2 * keys), others)

    def _latent_attention(self, mla: MLAConfig) -> _Weights:
        queries = self.num_heads * self.head_dim
        if mla.q_lora_rank is None:
            matrices, norms = self.dim * queries, 0
        else:
            matrices, norms = mla.q_lora_rank * (self.dim + queries), mla.q_lora_rank
        matrices += self.dim * (mla.kv_lora_rank + mla.rope_head_dim)
        matrices += mla.kv_lora_rank * self.num_heads * (mla.nope_head_dim + mla.v_head_dim)
        matrices += self.num_heads * mla.v_head_dim * self.dim
        return _Weights(matrices, norms + mla.kv_lora_rank)

    def _mlp(self, width: int) -> _Weights:
        inward = 2 if self.activation == "swiglu" else 1
        biases = inward * width + self.dim if self.mlp_bias else 0
        return _Weights((inward + 1) * self.dim * width, biases)

    def _experts(self, active: bool) -> _Weights:
        moe = self.moe
        assert moe is not None
        routed = self._mlp(moe.expert_dim).times(moe.top_k if active else moe.num_experts)
        router = _Weights(self.dim * moe.num_experts, moe.num_experts * (moe.router_bias + moe.bias_correction))
        shared = self._mlp(moe.shared_dim) if moe.shared_dim else _Weights(0, 0)
        return routed.plus(router).plus(shared).plus(_Weights(self.dim * moe.shared_gate, 0))

    # -- work and memory per token -----------------------------------------------------------------

    def flops_per_token(
        self,
        seq_len: int,
        *,
        convention: Literal["causal", "full"] = "causal",
        backward: bool = True,
        embedding: bool = False,
    ) -> float:
        """Model FLOPs per token of a sequence of ``seq_len`` tokens; recomputation is never included.

        6 FLOPs per matmul parameter (2 without ``backward``; head included, embedding lookup not) plus attention. Each
        query meets ``seq_len`` keys in the convention "full" (Megatron's), half as many in "causal", which gives 12 or
        6 x L x N x H x seq_len. In a sliding layer of window w < seq_len it meets w keys, or w - w^2 / (2 seq_len).
        ``embedding`` counts the look-up as if it were a product, as 6 N does with all parameters N (a tied table is the
        head's product already).
        """
        if seq_len < 1:
            raise ModelConfigError(f"seq_len={seq_len} must be at least 1")
        per_key = self.num_heads * (self.head_dim + (self.mla.v_head_dim if self.mla else self.head_dim))
        keys = sum(self._mean_keys(layer, seq_len, convention) for layer in range(self.num_layers))
        table = self.vocab_size * self.dim if embedding and not self.tied_head else 0
        return (6 if backward else 2) * (self.matmul_parameters() + table + per_key * keys)

    def _mean_keys(self, layer: int, seq_len: int, convention: Literal["causal", "full"]) -> float:
        window = min(self.layer_window(layer) or seq_len, seq_len)
        return window if convention == "full" else window - window * window / (2 * seq_len)

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes of cache that one token takes in all layers together: keys and values, or the latent with `mla`.
        (A sliding layer may drop tokens, which caps the number of tokens, not their size.)"""
        if self.mla is not None:
            return self.num_layers * (self.mla.kv_lora_rank + self.mla.rope_head_dim) * bytes_per_value
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    # -- in and out --------------------------------------------------------------------------------

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the content of a Hugging Face ``config.json``; raises `ModelConfigError` for what is not supported."""
        return cls(**hf_config.fields_from_hf(config))

    def to_hf(self) -> dict[str, Any]:
        """The content of a Hugging Face ``config.json`` of this family.

        Raises `ModelConfigError` if the family's format cannot hold the model (QK norm in a llama, say).
        """
        config = hf_config.hf_from_model(self)
        kept = ModelConfig.from_hf(config)
        lost = [field for field in ModelConfig.model_fields if getattr(kept, field) != getattr(self, field)]
        if lost := [field for field in lost if field != "name"]:
            pairs = ", ".join(f"{field}={getattr(self, field)!r}" for field in lost)
            raise ModelConfigError(
                f"{self.name}: a config.json of family {self.family!r} cannot hold {pairs}; choose a family that can"
            )
        return config

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """From a preset's name, the path of a Hugging Face ``config.json`` or model folder, or a mapping of fields.

        In a mapping ``preset`` may name a preset whose other fields are kept. Raises `ModelConfigError`.
        """
        from shardwright.core.presets import PRESETS, preset  # presets are made of ModelConfig, so not at the top

        if isinstance(source, Mapping):
            fields = dict(source)
            base = fields.pop("preset", None)
            return cls(**fields) if base is None else preset(str(base), **fields)
        if isinstance(source, str) and source in PRESETS:
            return preset(source)
        path = Path(source)
        if not path.exists():
            raise ModelConfigError(
                f"model {str(source)!r} is neither a preset nor a file or folder; {did_you_mean(str(source), PRESETS)}"
            )
        file = path / "config.json" if path.is_dir() else path
        name = file.resolve().parent.name if file.name == "config.json" else file.stem
        return cls.from_hf(_read_json(file)).model_copy(update={"name": name})


def _fields(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Fields by their names; those of a part of the model behind its name and a dot."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _fields(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelConfigError(
            f"cannot read {path}: {error.strerror}; give a model folder or its config.json"
        ) from None
    except ValueError as error:  # both bad JSON and bad UTF-8
        raise ModelConfigError(f"{path} is not JSON ({error}); give a Hugging Face config.json") from None
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path} holds a JSON {type(content).__name__}, not an object; give a config.json")
    return content


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    """The first complaint of pydantic in one line, with the nearest right name for an unknown one."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    where = "" if model is ModelConfig else f"{model.__name__}: "
    if first["type"] == "extra_forbidden":
        return f"{where}unknown field {field!r}; {did_you_mean(field, model.model_fields)}"
    if first["type"] == "missing":
        return f"{where}{field!r} is missing; add it"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{where}{field}={first['input']!r}: {message}" if field else f"{where}{message}"
