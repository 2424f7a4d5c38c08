"""The `Spec` table: counts, slices of every rank, and over which axes each gradient is summed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.presets import preset
from shardwright.core.specs import Spec, bucket_members, parameter_specs, unit_names
from shardwright.errors import LayoutError, ModelConfigError
from shardwright.model.init import full_value
from shardwright.model.transformer import Transformer

SMALL: dict[str, Any] = {
    "vocab_size": 11, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 10, "max_positions": 8,
}  # fmt: skip
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
GPT2 = {
    **BIASES, "family": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "position": "learned",
    "tied_head": True, "num_kv_heads": 4,
}  # fmt: skip
QWEN3 = {"family": "qwen3", "qk_norm": True, "head_dim": 8}
EXPERTS = ["tiny-moe", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3"]
MOE = {"num_experts": 4, "top_k": 2, "expert_dim": 6, "bias_correction": True, "num_shared_experts": 1}
DATA, ALL = ("cp", "dp"), ("tp", "cp", "dp")


def specs(**changes: Any) -> dict[str, Spec]:
    return parameter_specs(ModelConfig(**{**SMALL, **changes}))


def slices_of_all(spec: Spec, layout: Layout) -> list[tuple[slice, ...]]:
    return [spec.slices(layout, layout.grid.coordinates(rank)) for rank in range(layout.world_size)]


@pytest.mark.parametrize("name", ["tiny", "demo", "bench-25m", "llama-3.1-8b", "qwen2-0.5b", "qwen3-0.6b", "gpt2-124m", *EXPERTS])
def test_the_table_holds_every_parameter_of_the_model(name: str) -> None:
    config = preset(name)
    table = parameter_specs(config)
    assert sum(spec.numel for spec in table.values()) == config.num_parameters()
    assert {spec.unit for spec in table.values()} <= set(unit_names(config))
    for spec in table.values():
        assert len(spec.shape) == len(spec.dims) == len(spec.pieces)
        assert all(size % pieces == 0 for size, pieces in zip(spec.shape, spec.pieces, strict=True))


def test_only_matrices_decay() -> None:
    for changes in (BIASES, GPT2, QWEN3):
        assert all(spec.decay == (len(spec.shape) == 2) for spec in specs(**changes).values())


@pytest.mark.parametrize("changes", [BIASES, GPT2, QWEN3], ids=["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("text", ["dp=1", "tp=2", "tp=4", "tp=2,cp=2", "tp=2,dp=2,pp=2,order=tp-cp-pp-dp"])
def test_slices_of_all_ranks_cover_each_tensor_evenly(changes: dict[str, Any], text: str) -> None:
    layout = Layout.parse(text)
    for spec in specs(**changes).values():
        seen = np.zeros(spec.shape, dtype=int)
        for part in slices_of_all(spec, layout):
            seen[part] += 1
        replicas = spec.replicas(layout, "tp") if spec.shard_axes() else layout.tp
        assert (seen == replicas * layout.cp * layout.dp * layout.pp).all(), spec.name


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_uneven_slices_are_contiguous_and_differ_by_less_than_one_share(pieces: int, tp: int, width: int) -> None:
    spec = Spec("w", (pieces * width, 2), ("ffn", "embed"), (pieces, 2), "u", decay=True)
    parts = [part[0] for part in slices_of_all(spec, Layout(tp=tp))]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(pieces * width))
    assert max(part.stop - part.start for part in parts) == -(-pieces // tp) * width
    assert all(part.start % width == 0 for part in parts)  # a head or a channel is never cut
    assert spec.local_shape(Layout(tp=tp), {"tp": tp - 1}) == (parts[-1].stop - parts[-1].start, 2)


def test_a_vocabulary_that_does_not_divide_is_cut_without_padding() -> None:  # US-01
    table = specs()
    layout = Layout.parse("tp=2")
    for name in ("embedding.token.weight", "head.weight"):
        first, second = (part[0] for part in slices_of_all(table[name], layout))
        assert (first, second) == (slice(0, 6), slice(6, 11))
        owners = {target: [target in range(p.start, p.stop) for p in (first, second)] for target in (0, 5, 6, 10)}
        assert owners == {0: [True, False], 5: [True, False], 6: [False, True], 10: [False, True]}


def test_fewer_kv_heads_than_ranks_are_held_by_all() -> None:  # US-04
    table = specs(num_heads=8, head_dim=4)
    layout = Layout.parse("tp=4")
    for name in ("blocks.0.attention.k.weight", "blocks.1.attention.v.weight"):
        assert [part[0] for part in slices_of_all(table[name], layout)] == [slice(0, 8)] * 4
        assert table[name].replicas(layout, "tp") == 4
        assert table[name].reduce_axes(layout) == ALL  # each rank's gradient is that of one head
    with pytest.raises(LayoutError, match=r"3 kv_heads cannot be shared by tp=4 ranks evenly; use a tp that divides 3"):
        specs(num_heads=12, num_kv_heads=3, head_dim=4)["blocks.0.attention.k.weight"].slices(layout, {"tp": 0})


# Decision 5: summed over the axes that split the tokens where it is used, plus tp if used inside a tensor-parallel
# region, minus the axes that shard it. For each parameter: with sequence parallelism, without.
REDUCE = {
    "embedding.token.weight": (DATA, DATA),
    "embedding.position.weight": (ALL, DATA),
    "blocks.0.attention_norm.weight": (ALL, DATA),
    "blocks.0.attention_norm.bias": (ALL, DATA),
    "blocks.0.attention.q.weight": (DATA, DATA),
    "blocks.0.attention.q.bias": (DATA, DATA),
    "blocks.0.attention.k.weight": (DATA, DATA),
    "blocks.0.attention.v.bias": (DATA, DATA),
    "blocks.0.attention.q_norm.weight": (ALL, ALL),
    "blocks.0.attention.k_norm.bias": (ALL, ALL),
    "blocks.0.attention.out.weight": (DATA, DATA),
    "blocks.0.attention.out.bias": (ALL, DATA),
    "blocks.0.mlp_norm.weight": (ALL, DATA),
    "blocks.0.mlp.up.weight": (DATA, DATA),
    "blocks.0.mlp.up.bias": (DATA, DATA),
    "blocks.0.mlp.down.weight": (DATA, DATA),
    "blocks.0.mlp.down.bias": (ALL, DATA),
    "head.norm.weight": (ALL, DATA),
    "head.weight": (DATA, DATA),
}


@pytest.mark.parametrize("name", REDUCE)
def test_gradients_are_summed_over_these_axes(name: str) -> None:
    every_switch = {**GPT2, "family": "llama", "num_kv_heads": 2, "tied_head": False, "qk_norm": True, "head_dim": 8}
    spec = specs(**every_switch)[name]
    with_sp, without = REDUCE[name]
    assert spec.reduce_axes(Layout.parse("tp=2,dp=2")) == with_sp
    assert spec.reduce_axes(Layout.parse("tp=2,dp=2,sp=off")) == without


@pytest.mark.parametrize("sp", ["on", "off"])
def test_one_kv_head_is_summed_over_all_of_tp(sp: str) -> None:
    spec = specs(num_kv_heads=1)["blocks.0.attention.k.weight"]
    layout = Layout(tp=4, sp=sp)
    assert len({str(part) for part in slices_of_all(spec, layout)}) == 1
    assert spec.replicas(layout, "tp") == 4
    assert spec.reduce_axes(layout) == ALL


def test_members_of_some_units_and_of_a_tied_head() -> None:
    config = ModelConfig(**{**SMALL, **GPT2})
    layout = Layout.parse("tp=2")
    members = {m.name: m for m in bucket_members(config, layout, {"tp": 1})}
    assert set(members) == set(parameter_specs(config))
    assert members["embedding.token.weight"].units == ("embedding", "head")
    assert members["embedding.token.weight"].shape == (5, 16)  # the second rank's share of 11 rows
    assert members["blocks.0.mlp.down.weight"].shape == (16, 5)
    last = bucket_members(config, layout, {"tp": 0}, ["blocks.1", "head"])
    assert Counter(unit for m in last for unit in m.units)["head"] == 3  # norm weight and bias, and the tied weight
    assert next(m for m in last if m.name == "embedding.token.weight").units == ("head",)
    assert not any(m.name.startswith("blocks.0.") for m in last)


def test_experts_see_the_ranks_of_a_stage_another_way() -> None:
    table = specs(moe=MOE)
    layout = Layout.parse("tp=2,dp=4,pp=2,ep=4")
    experts = table["blocks.0.moe.experts.up.weight"]
    assert experts.shape == (4, 12, 16) and experts.reduce_axes(layout) == ("edp",)
    first = [part[0].start for part in slices_of_all(experts, layout)]
    assert first == [0, 1, 2, 3] * 4  # ep innermost over tp, then dp; the same on every stage
    assert table["blocks.0.moe.router.weight"].reduce_axes(layout) == ALL
    assert table["blocks.0.moe.shared.up.weight"].reduce_axes(layout) == DATA
    members = {m.name: m for m in bucket_members(ModelConfig(**SMALL, moe=MOE), layout, layout.grid.coordinates(3))}
    assert members["blocks.1.moe.experts.down.weight"].shape == (1, 16, 6)
    assert members["blocks.1.moe.experts.down.weight"].shard_axes == ("ep",)
    assert "blocks.0.moe.router.correction" in table and not any("correction" in name for name in members)


def test_latent_attention_is_split_by_heads() -> None:
    mla = {"kv_lora_rank": 8, "q_lora_rank": 6, "nope_head_dim": 6, "rope_head_dim": 2, "v_head_dim": 4}
    table = parameter_specs(ModelConfig(**{**SMALL, "num_kv_heads": 4}, mla=mla))
    layout, place = Layout.parse("tp=2"), {"tp": 1}
    shapes = {name.removeprefix("blocks.0.attention."): spec.local_shape(layout, place) for name, spec in table.items()}
    assert shapes["q_down.weight"] == (6, 16) and shapes["kv_down.weight"] == (10, 16)
    assert shapes["q_up.weight"] == (16, 6) and shapes["kv_up.weight"] == (20, 8) and shapes["out.weight"] == (16, 8)
    for name, axes in (("kv_down", ALL), ("q_norm", ALL), ("kv_up", DATA), ("out", DATA)):  # held whole in the region: summed
        assert table[f"blocks.0.attention.{name}.weight"].reduce_axes(Layout.parse("tp=2,sp=off")) == axes


def test_what_cannot_be_run_is_refused_by_name() -> None:
    with pytest.raises(ModelConfigError, match=r"gpt-oss-20b: attention sinks, .* can be planned but not run"):
        parameter_specs(preset("gpt-oss-20b"))


def test_shards_of_one_matrix_differ_and_make_up_the_whole() -> None:  # RN-06
    config = ModelConfig(**{**SMALL, "qk_norm": True})
    whole = dict(Transformer(config, Mesh.solo()).initialise(3).named_parameters())
    shards = [
        dict(Transformer(config, Mesh.dry(Layout.parse("tp=2"), rank)).initialise(3).named_parameters())
        for rank in range(2)
    ]
    for name, spec in parameter_specs(config).items():
        dim = spec.shard_axes().get("tp")
        pieces = [shard[name] for shard in shards]
        made = pieces[0] if dim is None else torch.cat(pieces, dim)
        assert torch.equal(made, whole[name]), name
        if dim is not None and spec.init == "normal":
            common = min(piece.shape[dim] for piece in pieces)
            assert not torch.equal(*(piece.narrow(dim, 0, common) for piece in pieces)), name
    assert not torch.equal(whole["blocks.0.mlp.up.weight"], whole["blocks.1.mlp.up.weight"])
    spec = parameter_specs(config)["blocks.0.mlp.up.weight"]
    assert torch.equal(full_value(spec, 3), whole[spec.name]) and not torch.equal(full_value(spec, 4), whole[spec.name])
