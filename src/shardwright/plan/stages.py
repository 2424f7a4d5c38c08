"""Which layers a pipeline stage holds, and how many parameters a rank of it has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwright.core import stages as core_stages
from shardwright.core.layout import V_SHAPED, Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import bucket_members, parameter_specs
from shardwright.plan.buffers import Part
from shardwright.plan.compute import LayerKind


def layers_per_stage(model: ModelConfig, layout: Layout) -> tuple[int, ...]:
    """Layers of each stage, in order, as the run splits them."""
    return tuple(core_stages.layers_per_stage(model, layout.num_stages, layout.stages))


def chunks_per_rank(layout: Layout) -> int:
    return layout.num_stages // layout.pp


def stages_of_rank(layout: Layout, rank: int) -> tuple[int, ...]:
    """Stages that pipeline rank ``rank`` holds: every pp-th, or a V."""
    stages = layout.num_stages
    if layout.schedule in V_SHAPED and layout.pp > 1:
        return (rank, stages - 1 - rank)
    return tuple(range(rank, stages, layout.pp))


@dataclass(frozen=True)
class RankUnits:
    """What one pipeline rank holds: how many layers of each kind, the embedding, the head."""

    layers: tuple[tuple[LayerKind, int], ...]
    embedding: bool
    head: bool

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.layers)

    @property
    def num_units(self) -> int:
        return self.num_layers + self.embedding + self.head


def rank_units(layout: Layout, rank: int, counts: tuple[int, ...], kinds: tuple[LayerKind, ...]) -> RankUnits:
    """The units of pipeline rank ``rank``; ``kinds`` are those of all layers, ``counts`` the layers per stage."""
    stages = stages_of_rank(layout, rank)
    held: dict[LayerKind, int] = {}
    for stage in stages:
        start = sum(counts[:stage])
        for kind in kinds[start : start + counts[stage]]:
            held[kind] = held.get(kind, 0) + 1
    return RankUnits(tuple(held.items()), 0 in stages, len(counts) - 1 in stages)


@dataclass(frozen=True)
class Parameters:
    """Parameters of a unit on one rank before any ZeRO sharding; ``experts`` are those that ep divides."""

    dense: int
    experts: int = 0

    def times(self, count: int) -> Parameters:
        return Parameters(self.dense * count, self.experts * count)

    def plus(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


class ParameterTable:
    """Parameters of each kind of unit on a rank, for any tp and ep; dense parts come from the spec table."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        dense = {"num_layers": 1, "sliding_layers": None, "moe": None, "attention_sinks": False, "swiglu_limit": None}
        twin = model if model.mla is None else _without_latent(model)
        self._twin = twin.model_copy(update=dense)
        self._count = lru_cache(maxsize=None)(self._count_units)
        self._unit_parts = lru_cache(maxsize=None)(self._parts_of_unit)

    def _count_units(self, tp: int) -> dict[str, int]:
        """Elements by unit of a one-layer dense twin on tp rank 0, which has the largest slice."""
        layout = Layout(tp=tp)
        found = {"embedding": 0, "attention": 0, "mlp": 0, "head": 0, "norms": 0, "vocab": 0}
        for spec in parameter_specs(self._twin).values():
            size = 1
            for part in spec.local_shape(layout, {"tp": 0}):
                size *= part
            part_name = spec.unit if spec.unit in ("embedding", "head") else spec.name.split(".")[2]
            found[part_name if part_name in found else "norms"] += size
            if spec.name == "embedding.token.weight":
                found["vocab"] = size
        return found

    def layer(self, kind: LayerKind, tp: int, ep: int) -> Parameters:
        """One block."""
        model, count = self.model, self._count(tp)
        attention = count["attention"] if model.mla is None else _latent(model, tp)
        if model.attention_sinks:
            attention += -(-model.num_heads // tp)
        dense = count["norms"] + attention
        if not kind.moe:
            return Parameters(dense + count["mlp"])
        moe = model.moe
        assert moe is not None
        inward = 2 if model.activation == "swiglu" else 1
        dense += model.dim * moe.num_experts + moe.num_experts * (moe.router_bias + moe.bias_correction)
        dense += model.dim * moe.shared_gate
        if moe.shared_dim:
            dense += (inward + 1) * model.dim * -(-moe.shared_dim // tp)
            dense += inward * -(-moe.shared_dim // tp) + model.dim if model.mlp_bias else 0
        one = (inward + 1) * model.dim * moe.expert_dim
        one += inward * moe.expert_dim + model.dim if model.mlp_bias else 0
        return Parameters(dense, one * (moe.num_experts // ep))

    def parts(self, units: RankUnits, layout: Layout) -> list[list[Part]]:
        """Parameters of each of a rank's units, in order of use (layers of one kind together), by who reduces them."""
        layers = {kind: self._layer_parts(kind, layout) for kind, _ in units.layers}
        found = [self._dense_parts("embedding", layout, units)] if units.embedding else []
        for kind, count in units.layers:
            found += [layers[kind]] * count
        return [*found, self._dense_parts("head", layout, units)] if units.head else found

    def _layer_parts(self, kind: LayerKind, layout: Layout) -> list[Part]:
        if not kind.moe and self.model.mla is None and not self.model.attention_sinks:
            return self._dense_parts("blocks.0", layout, RankUnits((), False, False))
        held = self.layer(kind, layout.tp, layout.ep)
        return [Part("dense", held.dense), *([Part("experts", held.experts)] if held.experts else [])]

    def _dense_parts(self, unit: str, layout: Layout, held: RankUnits) -> list[Part]:
        """Parameters of a unit of the dense twin; a tied table is the embedding's where the rank holds both ends."""
        both = held.embedding and held.head and unit != "blocks.0"
        return list(self._unit_parts(unit, both, layout.tp, layout.sp))

    def _parts_of_unit(self, unit: str, both_ends: bool, tp: int, sp: str) -> tuple[Part, ...]:
        names = ["embedding", "head"] if both_ends else [unit]
        members = bucket_members(self._twin, Layout(tp=tp, dp=2, sp=sp), {"tp": 0}, names)
        return tuple(
            Part(member.group, member.numel, len(member.units) == 2) for member in members if member.units[0] == unit
        )

    def embedding(self, tp: int) -> Parameters:
        return Parameters(self._count(tp)["embedding"])

    def head(self, tp: int, *, with_embedding: bool) -> Parameters:
        """The final norm and the output matrix; a tied matrix is the embedding's where a rank holds both ends."""
        count = self._count(tp)
        tied = count["vocab"] if self.model.tied_head and not with_embedding else 0
        return Parameters(count["head"] + tied)

    def of_rank(self, units: RankUnits, tp: int, ep: int) -> Parameters:
        """All parameters of one rank of a pipeline rank with these units."""
        total = Parameters(0)
        for kind, count in units.layers:
            total = total.plus(self.layer(kind, tp, ep).times(count))
        if units.embedding:
            total = total.plus(self.embedding(tp))
        if units.head:
            total = total.plus(self.head(tp, with_embedding=units.embedding))
        return total


def _without_latent(model: ModelConfig) -> ModelConfig:
    """The same model with plain attention, whose norms, MLP and tables are the same."""
    return model.model_copy(update={"mla": None})


def _latent(model: ModelConfig, tp: int) -> int:
    """Latent attention on one of tp ranks: heads are split, the down-projections and their norms are replicated."""
    mla = model.mla
    assert mla is not None
    heads = -(-model.num_heads // tp)
    if mla.q_lora_rank is None:
        size = model.dim * heads * model.head_dim
    else:
        size = mla.q_lora_rank * (model.dim + 1) + mla.q_lora_rank * heads * model.head_dim
    size += model.dim * (mla.kv_lora_rank + mla.rope_head_dim) + mla.kv_lora_rank
    size += mla.kv_lora_rank * heads * (mla.nope_head_dim + mla.v_head_dim)
    return size + heads * mla.v_head_dim * model.dim
