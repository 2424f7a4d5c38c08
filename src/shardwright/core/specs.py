"""`Spec`: what each parameter is, once, for everybody.

A parameter has logical dims and one rules table maps them to mesh axes. Initialisation, slicing, ZeRO grouping,
gradient reduction, checkpoint resharding, Hugging Face import and export and the memory model all read this
table. Notation of shapes: V vocab, D dim, N query heads, K KV heads, H head dim, F ffn, E experts.

Gradients are sums (decision 5): a parameter's gradient is summed over the axes that split the tokens where it is
used, plus tp if it is used inside a tensor-parallel region, minus the axes that shard it. Experts see the ranks of a
stage as (edp, ep): their tokens come from all of ``ep``, so they are summed over ``edp`` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.core.buckets import Member
from shardwright.core.layout import Layout
from shardwright.core.model_config import MLAConfig, ModelConfig, MoEConfig
from shardwright.errors import ConfigError, LayoutError, ModelConfigError

RULES: Mapping[str, str | None] = {
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "ffn": "tp",
    "expert": "ep",
    "embed": None,
    "head_dim": None,
    "positions": None,
    "latent": None,
    "expert_ffn": None,
    "router": None,
}
"""Logical dim -> the mesh axis that shards it (None: kept whole)."""

REPLICATED = frozenset({"kv_heads"})
"""Dims whose pieces are held by several ranks each where there are more ranks than pieces; of others some ranks get none."""

TIED = "embedding.token.weight"
"""The weight that a tied head shares with the embedding."""


@dataclass(frozen=True)
class Spec:
    """One parameter: global shape, logical dims, how it starts, whether it decays and where it is used.

    ``pieces`` counts the indivisible pieces of each dim (a head, a channel, a vocabulary row). ``in_tp_region``:
    used after f/gather and before g/scatter. ``unit``: the first unit that uses it (``embedding``, ``blocks.3``, ``head``).
    ``buffer``: no gradient changes it and it is never below fp32 (a router's correction bias); it is in no bucket.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    pieces: tuple[int, ...]
    unit: str
    decay: bool
    init: str = "normal"
    std: float = 0.02
    in_tp_region: bool = False
    buffer: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def shard_axes(self) -> dict[str, int]:
        """Axis -> the tensor dim that it shards."""
        return {axis: dim for dim, name in enumerate(self.dims) if (axis := RULES[name]) is not None}

    def slices(self, layout: Layout, coordinates: Mapping[str, int]) -> tuple[slice, ...]:
        """The part of the global tensor that a rank holds. Fewer KV heads than ranks: every rank holds all of them."""
        found = [slice(0, size) for size in self.shape]
        for axis, dim in self.shard_axes().items():
            found[dim] = self._slice(dim, layout.grid.degree(axis), axis_index(layout, coordinates, axis))
        return tuple(found)

    def local_shape(self, layout: Layout, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.slices(layout, coordinates))

    def replicas(self, layout: Layout, axis: str) -> int:
        """How many ranks of ``axis`` hold the same slice (1: all slices are distinct, or the axis does not shard it)."""
        dim = self.shard_axes().get(axis)
        degree = layout.grid.degree(axis)
        if dim is None or self.pieces[dim] >= degree or self.dims[dim] not in REPLICATED:
            return 1
        return degree

    def reduce_axes(self, layout: Layout) -> tuple[str, ...]:
        """Mesh axes over which this parameter's gradient is summed; axes of size 1 are left in.

        Of KV heads that all ranks of tp hold each uses one, so its gradient of the others is zero and the sum is right.
        """
        if "ep" in self.shard_axes():
            return ("edp",)
        axes = ["cp", "dp"]
        if layout.sequence_parallel or self.in_tp_region:
            axes.insert(0, "tp")
        sharded = {axis for axis in self.shard_axes() if self.replicas(layout, axis) == 1}
        return tuple(axis for axis in axes if axis not in sharded)

    def _slice(self, dim: int, degree: int, index: int) -> slice:
        size, pieces = self.shape[dim], self.pieces[dim]
        width = size // pieces
        if pieces < degree and self.dims[dim] in REPLICATED:
            if degree % pieces:
                raise LayoutError(
                    f"{self.name}: {pieces} {self.dims[dim]} cannot be shared by tp={degree} ranks evenly; "
                    f"use a tp that divides {pieces}, or a multiple of it"
                )
            return slice(0, size)
        each = -(-pieces // degree)
        return slice(min(index * each, pieces) * width, min((index + 1) * each, pieces) * width)


def axis_index(layout: Layout, coordinates: Mapping[str, int], axis: str) -> int:
    """A rank's place on ``axis``; on ``ep`` and ``edp`` from its place in the stage, tp innermost, then cp, then dp."""
    if axis not in ("ep", "edp"):
        return coordinates[axis]
    tp, cp, dp = (coordinates.get(name, 0) for name in ("tp", "cp", "dp"))
    place = tp + layout.tp * (cp + layout.cp * dp)
    return place % layout.ep if axis == "ep" else place // layout.ep


def parameter_specs(config: ModelConfig) -> dict[str, Spec]:
    """The table of a decoder, in order of use; a tied head has no entry of its own. Raises `ModelConfigError`."""
    if config.attention_sinks or config.swiglu_limit is not None or (config.moe is not None and config.mlp_bias):
        raise ModelConfigError(
            f"{config.name}: attention sinks, the clamped SwiGLU and biases of experts (gpt_oss) can be planned but not run; "
            "use another family"
        )
    specs = [*_embedding(config)]
    for layer in range(config.num_layers):
        specs += _block(config, layer)
    specs += _head(config)
    return {spec.name: spec for spec in specs}


def _embedding(config: ModelConfig) -> Iterator[Spec]:
    yield Spec(
        "embedding.token.weight",
        (config.vocab_size, config.dim),
        ("vocab", "embed"),
        (config.vocab_size, config.dim),
        "embedding",
        decay=True,
        std=config.init_std,
        in_tp_region=True,
    )
    if config.position == "learned":
        yield Spec(
            "embedding.position.weight",
            (config.max_positions, config.dim),
            ("positions", "embed"),
            (config.max_positions, config.dim),
            "embedding",
            decay=True,
            std=config.init_std,
        )


def _norm(config: ModelConfig, name: str, unit: str, size: int | None = None, in_tp: bool = False) -> Iterator[Spec]:
    size = size or config.dim
    dim = "embed" if size == config.dim and not in_tp else "head_dim"
    yield Spec(f"{name}.weight", (size,), (dim,), (size,), unit, decay=False, init="ones", in_tp_region=in_tp)
    if config.norm == "layernorm":
        yield Spec(f"{name}.bias", (size,), (dim,), (size,), unit, decay=False, init="zeros", in_tp_region=in_tp)


def _linear(
    name: str, unit: str, out: tuple[str, int, int], into: tuple[str, int, int], bias: bool, std: float
) -> Iterator[Spec]:
    """A linear layer's weight ``(out, in)`` and bias; ``out`` and ``into`` are (logical dim, size, pieces)."""
    yield Spec(
        f"{name}.weight",
        (out[1], into[1]),
        (out[0], into[0]),
        (out[2], into[2]),
        unit,
        decay=True,
        std=std,
        in_tp_region=True,
    )
    if bias:  # a row-parallel bias is added once, after the reduction: outside the tensor-parallel region
        inside = RULES[out[0]] is not None
        yield Spec(
            f"{name}.bias", (out[1],), (out[0],), (out[2],), unit, decay=False, init="zeros", in_tp_region=inside
        )


def _block(config: ModelConfig, layer: int) -> Iterator[Spec]:
    unit = f"blocks.{layer}"
    yield from _norm(config, f"{unit}.attention_norm", unit)
    yield from _attention(config, unit) if config.mla is None else _latent_attention(config, config.mla, unit)
    yield from _norm(config, f"{unit}.mlp_norm", unit)
    if config.moe is not None and config.is_moe_layer(layer):
        yield from _experts(config, config.moe, unit)
    else:
        yield from _mlp(config, f"{unit}.mlp", unit, config.ffn_dim)


def _out_std(config: ModelConfig) -> float:
    """Of what is added to the residual: GPT-2 (Radford et al. 2019, section 2.3)."""
    return config.init_std / float((2 * config.num_layers) ** 0.5)


def _attention(config: ModelConfig, unit: str) -> Iterator[Spec]:
    std = config.init_std
    heads = ("heads", config.num_heads * config.head_dim, config.num_heads)
    kv_heads = ("kv_heads", config.num_kv_heads * config.head_dim, config.num_kv_heads)
    embed = ("embed", config.dim, config.dim)
    yield from _linear(f"{unit}.attention.q", unit, heads, embed, config.qkv_bias, std)
    yield from _linear(f"{unit}.attention.k", unit, kv_heads, embed, config.qkv_bias, std)
    yield from _linear(f"{unit}.attention.v", unit, kv_heads, embed, config.qkv_bias, std)
    if config.qk_norm:
        yield from _norm(config, f"{unit}.attention.q_norm", unit, config.head_dim, in_tp=True)
        yield from _norm(config, f"{unit}.attention.k_norm", unit, config.head_dim, in_tp=True)
    yield from _linear(f"{unit}.attention.out", unit, embed, heads, config.out_bias, _out_std(config))


def _latent_attention(config: ModelConfig, mla: MLAConfig, unit: str) -> Iterator[Spec]:
    """Latent attention. The projections to the latents are held whole and used inside the tensor-parallel region, on all
    tokens; those from the latents to the heads are split by heads."""
    name, std, num_heads = f"{unit}.attention", config.init_std, config.num_heads
    embed = ("embed", config.dim, config.dim)
    heads = ("heads", num_heads * config.head_dim, num_heads)
    if mla.q_lora_rank is None:
        yield from _linear(f"{name}.q", unit, heads, embed, False, std)
    else:
        latent = ("latent", mla.q_lora_rank, mla.q_lora_rank)
        yield from _linear(f"{name}.q_down", unit, latent, embed, False, std)
    rows = mla.kv_lora_rank + mla.rope_head_dim
    yield from _linear(f"{name}.kv_down", unit, ("latent", rows, rows), embed, False, std)
    if mla.q_lora_rank is not None:
        yield from _norm(config, f"{name}.q_norm", unit, mla.q_lora_rank, in_tp=True)
        latent = ("latent", mla.q_lora_rank, mla.q_lora_rank)
        yield from _linear(f"{name}.q_up", unit, heads, latent, False, std)
    latent = ("latent", mla.kv_lora_rank, mla.kv_lora_rank)
    yield from _norm(config, f"{name}.kv_norm", unit, mla.kv_lora_rank, in_tp=True)
    width = num_heads * (mla.nope_head_dim + mla.v_head_dim)
    yield from _linear(f"{name}.kv_up", unit, ("heads", width, num_heads), latent, False, std)
    values = ("heads", num_heads * mla.v_head_dim, num_heads)
    yield from _linear(f"{name}.out", unit, embed, values, False, _out_std(config))


def _mlp(config: ModelConfig, name: str, unit: str, width: int) -> Iterator[Spec]:
    embed, ffn = ("embed", config.dim, config.dim), ("ffn", width, width)
    if config.activation == "swiglu":
        yield from _linear(f"{name}.gate", unit, ffn, embed, config.mlp_bias, config.init_std)
    yield from _linear(f"{name}.up", unit, ffn, embed, config.mlp_bias, config.init_std)
    yield from _linear(f"{name}.down", unit, embed, ffn, config.mlp_bias, _out_std(config))


def _experts(config: ModelConfig, moe: MoEConfig, unit: str) -> Iterator[Spec]:
    """Router and its gate on own tokens outside the tensor-parallel region; routed experts stacked, gate rows before up rows."""
    name, std, count, dim = f"{unit}.moe", config.init_std, moe.num_experts, config.dim
    yield Spec(f"{name}.router.weight", (count, dim), ("router", "embed"), (count, dim), unit, decay=True, std=std)
    if moe.router_bias:
        yield Spec(f"{name}.router.bias", (count,), ("router",), (count,), unit, decay=False, init="zeros")
    if moe.bias_correction:
        yield Spec(
            f"{name}.router.correction", (count,), ("router",), (count,), unit, decay=False, init="zeros", buffer=True
        )
    inward, width = (2 if config.activation == "swiglu" else 1) * moe.expert_dim, moe.expert_dim
    shapes = (("up", (count, inward, dim), ("expert", "expert_ffn", "embed"), std),
              ("down", (count, dim, width), ("expert", "embed", "expert_ffn"), _out_std(config)))  # fmt: skip
    for part, shape, dims, part_std in shapes:
        yield Spec(f"{name}.experts.{part}.weight", shape, dims, shape, unit, decay=True, std=part_std)
    if moe.shared_dim:
        yield from _mlp(config, f"{name}.shared", unit, moe.shared_dim)
    if moe.shared_gate:
        yield Spec(f"{name}.shared_gate.weight", (1, dim), ("router", "embed"), (1, dim), unit, decay=True, std=std)


def _head(config: ModelConfig) -> Iterator[Spec]:
    yield from _norm(config, "head.norm", "head")
    if not config.tied_head:
        vocab = ("vocab", config.vocab_size, config.vocab_size)
        yield from _linear("head", "head", vocab, ("embed", config.dim, config.dim), False, config.init_std)


def unit_names(config: ModelConfig) -> tuple[str, ...]:
    """The units (embedding, blocks, head) in order of use."""
    return ("embedding", *(f"blocks.{layer}" for layer in range(config.num_layers)), "head")


def held_specs(config: ModelConfig, units: Sequence[str]) -> dict[str, Spec]:
    """The parameters that a rank with these units holds; the head of a tied model holds a copy of the embedding."""
    specs = parameter_specs(config)
    tied_head = config.tied_head and "head" in units
    return {
        name: spec for name, spec in specs.items() if spec.unit in units or (tied_head and name == TIED)
    }


def check_frozen(patterns: Sequence[str], names: Iterable[str]) -> None:
    """Refuse a prefix of ``train.freeze`` that no parameter's name begins with."""
    known = tuple(names)
    for pattern in patterns:
        if not any(name.startswith(pattern) for name in known):
            raise ConfigError(
                f"train.freeze={pattern!r} matches no parameter; names look like blocks.0.attention.q.weight"
            )


def bucket_members(
    config: ModelConfig, layout: Layout, coordinates: Mapping[str, int], units: Sequence[str] | None = None
) -> list[Member]:
    """The parameters of ``units`` (all by default) as one rank holds them, without buffers, which no gradient changes.

    A tied weight is used by both ends. Where these lie on different pipeline ranks, each has a copy, and the copies'
    gradients are summed over the axis ``tied``.
    """
    held = set(unit_names(config) if units is None else units)
    members = []
    for spec in held_specs(config, tuple(held)).values():
        if spec.buffer:
            continue
        tied = config.tied_head and spec.name == TIED
        used_by = tuple(unit for unit in ((spec.unit, "head") if tied else (spec.unit,)) if unit in held)
        reduce_axes = tuple(axis for axis in spec.reduce_axes(layout) if layout.grid.degree(axis) > 1)
        if tied and len(used_by) == 1:
            reduce_axes = (*reduce_axes, "tied")
        shard_axes = tuple(
            axis for axis in spec.shard_axes() if layout.grid.degree(axis) > 1 and spec.replicas(layout, axis) == 1
        )
        shape = spec.local_shape(layout, coordinates)
        copy = tied and spec.unit not in held
        over = "edp_shard" if "ep" in spec.shard_axes() else "dp_shard"
        members.append(Member(spec.name, shape, used_by, spec.decay, reduce_axes, shard_axes, copy, over))
    return members
