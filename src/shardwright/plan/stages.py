"""Which layers a pipeline stage holds, and how many parameters a rank of it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from shardwright.core import stages as core_stages
from shardwright.core.layout import V_SHAPED, Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import bucket_members, parameter_specs
from shardwright.plan.buffers import Part
from shardwright.plan.compute import LayerKind, layer_kind


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
    """What one pipeline rank holds: how many layers of each kind, the embedding, the head.

    ``order``: the layers as the rank uses them, as runs of one kind; by default those of a kind together. ``counts``: units
    of each of its stages, where it has several.
    """

    layers: tuple[tuple[LayerKind, int], ...]
    embedding: bool
    head: bool
    order: tuple[tuple[LayerKind, int], ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def stages(self) -> tuple[int, ...]:
        """Units of each stage."""
        return self.counts or (self.num_units,)

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
    order: list[tuple[LayerKind, int]] = []
    for stage in stages:
        start = sum(counts[:stage])
        for kind, run in groupby(kinds[start : start + counts[stage]]):
            count = len(list(run))
            held[kind] = held.get(kind, 0) + count
            if order and order[-1][0] == kind:
                count += order.pop()[1]
            order.append((kind, count))
    runs = tuple(order) if len(order) > len(held) else ()
    last = len(counts) - 1
    each = tuple(counts[stage] + (stage == 0) + (stage == last) for stage in stages) if len(stages) > 1 else ()
    return RankUnits(tuple(held.items()), 0 in stages, last in stages, runs, each)


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


def layer_kinds(model: ModelConfig, frozen: Sequence[str] = ()) -> tuple[LayerKind, ...]:
    """The kind of every layer, where parameters whose name begins with one of ``frozen`` are not trained."""
    kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
    if not frozen:
        return kinds
    kept: dict[str, list[str]] = {}
    for spec in parameter_specs(model).values():
        if spec.name.startswith(tuple(frozen)):
            kept.setdefault(spec.unit, []).append(spec.name.removeprefix(f"{spec.unit}."))
    return tuple(replace(kind, frozen=tuple(kept.get(f"blocks.{layer}", ()))) for layer, kind in enumerate(kinds))


class ParameterTable:
    """Parameters of each kind of unit on a rank, for any tp and ep; dense parts come from the spec table.

    ``frozen``: prefixes of names that are not trained; those of layers are in their kinds (:func:`layer_kinds`).
    """

    def __init__(self, model: ModelConfig, frozen: Sequence[str] = ()) -> None:
        self.model, self._prefixes = model, tuple(frozen)
        dense = {"num_layers": 1, "sliding_layers": None, "moe": None, "attention_sinks": False, "swiglu_limit": None}
        self._twin = model.model_copy(update=dense)
        everywhere = {"first_dense_layers": 0, "layer_step": 1, "dense_layers": ()}
        self._expert_twin = self._twin
        if model.moe is not None:
            experts = {"moe": model.moe.model_copy(update=everywhere), "mlp_bias": False}
            self._expert_twin = self._twin.model_copy(update=experts)
        self._count = lru_cache(maxsize=None)(self._count_units)
        self._unit_parts = lru_cache(maxsize=None)(self._parts_of_unit)
        self._of_rank = lru_cache(maxsize=None)(self._parameters_of_rank)
        self._unit_frozen = lru_cache(maxsize=None)(self._frozen_of_unit)

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
        dense = count["norms"] + count["attention"]
        if model.attention_sinks:
            dense += -(-model.num_heads // tp)
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

    def parts(self, units: RankUnits, layout: Layout) -> list[tuple[Part, ...]]:
        """Parameters of each of a rank's units, in order of use, by who reduces them; a tied table is the embedding's where
        the rank holds both ends."""
        both = units.embedding and units.head
        degrees = (layout.tp, layout.cp, layout.dp, layout.ep, layout.dp_replicate, layout.sequence_parallel)
        found = [self._unit_parts("embedding", (), both, *degrees)] if units.embedding else []
        for kind, count in units.order or units.layers:
            found += [self._unit_parts("experts" if kind.moe else "dense", kind.frozen, False, *degrees)] * count
        return [*found, self._unit_parts("head", (), both, *degrees)] if units.head else found

    def _parts_of_unit(
        self, what: str, frozen: tuple[str, ...], both_ends: bool, tp: int, cp: int, dp: int, ep: int, replicas: int, sp: bool
    ) -> tuple[Part, ...]:
        """Of the embedding, the head, or a layer (``dense``, ``experts``); attention sinks and biases of experts are left out."""
        layout = Layout(tp=tp, cp=cp, dp=dp, ep=ep, dp_replicate=replicas, sp="on" if sp else "off", zero=3)
        unit = what if what in ("embedding", "head") else "blocks.0"
        held = ["embedding", "head"] if both_ends else [unit]
        members = bucket_members(self._expert_twin if what == "experts" else self._twin, layout, {"tp": 0}, held)
        found = []
        for member in members:
            if member.units[0] == unit:
                shards, at_once = layout.num_shards(member.shard_over), unit == "embedding" or not member.decay
                kept = self._is_frozen(member.name, unit, frozen)
                found.append(Part(member.group, member.numel, len(member.units) == 2, shards, at_once, kept))
        return tuple(found)

    def _is_frozen(self, name: str, unit: str, frozen: tuple[str, ...]) -> bool:
        """Of a layer by its kind's names, of the ends by the prefixes."""
        if unit.startswith("blocks"):
            return name.removeprefix(f"{unit}.") in frozen
        return bool(self._prefixes) and name.startswith(self._prefixes)

    def _frozen_of_unit(self, what: str, frozen: tuple[str, ...], with_embedding: bool, tp: int, ep: int) -> Parameters:
        """What is not trained of the embedding, the head, or a layer (``dense``, ``experts``) on a rank."""
        layout, total = Layout(tp=tp, dp=ep, ep=ep), Parameters(0)
        unit = what if what in ("embedding", "head") else "blocks.0"
        held = ["embedding", "head"] if with_embedding else [unit]
        for member in bucket_members(self._expert_twin if what == "experts" else self._twin, layout, {"tp": 0}, held):
            if member.units[0] == unit and self._is_frozen(member.name, unit, frozen):
                expert = member.shard_over == "edp_shard"
                total = total.plus(Parameters(0, member.numel) if expert else Parameters(member.numel))
        return total

    def frozen_layer(self, kind: LayerKind, tp: int, ep: int) -> Parameters:
        """What is not trained of one block."""
        return self._unit_frozen("experts" if kind.moe else "dense", kind.frozen, False, tp, ep) if kind.frozen else Parameters(0)

    def frozen_end(self, what: str, tp: int, *, with_embedding: bool = False) -> Parameters:
        """What is not trained of the ``embedding`` or the ``head``."""
        return self._unit_frozen(what, (), with_embedding, tp, 1) if self._prefixes else Parameters(0)

    def trained_of_rank(self, units: RankUnits, tp: int, ep: int) -> Parameters:
        """The parameters of a rank that have gradients and optimizer state."""
        held, frozen = self.of_rank(units, tp, ep), Parameters(0)
        if not self._prefixes:
            return held
        for kind, count in units.layers:
            frozen = frozen.plus(self.frozen_layer(kind, tp, ep).times(count))
        if units.embedding:
            frozen = frozen.plus(self.frozen_end("embedding", tp))
        if units.head:
            frozen = frozen.plus(self.frozen_end("head", tp, with_embedding=units.embedding))
        return Parameters(held.dense - frozen.dense, held.experts - frozen.experts)

    def embedding(self, tp: int) -> Parameters:
        return Parameters(self._count(tp)["embedding"])

    def head(self, tp: int, *, with_embedding: bool) -> Parameters:
        """The final norm and the output matrix; a tied matrix is the embedding's where a rank holds both ends."""
        count = self._count(tp)
        tied = count["vocab"] if self.model.tied_head and not with_embedding else 0
        return Parameters(count["head"] + tied)

    def of_rank(self, units: RankUnits, tp: int, ep: int) -> Parameters:
        """All parameters of one rank of a pipeline rank with these units."""
        return self._of_rank(units, tp, ep)

    def _parameters_of_rank(self, units: RankUnits, tp: int, ep: int) -> Parameters:
        total = Parameters(0)
        for kind, count in units.layers:
            total = total.plus(self.layer(kind, tp, ep).times(count))
        if units.embedding:
            total = total.plus(self.embedding(tp))
        if units.head:
            total = total.plus(self.head(tp, with_embedding=units.embedding))
        return total
