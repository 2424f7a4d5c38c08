"""The memory model: ZeRO's table, Korthikanti's activations, parameters of every preset, worked examples."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.presets import PRESETS, preset
from shardwright.core.specs import parameter_specs
from shardwright.errors import ConfigError
from shardwright.plan.compute import Shape, expert_capacity, forward_flops, layer_kind, tokens_per_expert
from shardwright.plan.memory import (
    MemoryModel,
    bytes_per_parameter,
    host_bytes,
    in_flight,
    layer_activation_bytes,
    least_gpus,
    logits_bytes,
    state_bytes,
    tensor_bytes,
)
from shardwright.plan.rows import gpt
from shardwright.plan.stack import Stack
from shardwright.plan.stages import Parameters, ParameterTable, RankUnits, layers_per_stage, rank_units
from shardwright.plan.step_time import Pricer
from shardwright.schedule.make import make_schedule

GB = 1e9
MIXED = {"precision": "bf16", "reduce_dtype": "bf16"}
UNFUSED, FUSED = Stack(flash=False), Stack(flash=True)


@pytest.fixture(scope="module")
def examples(shared: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shared / "vectors" / "worked_examples.json").read_text())
    return found


# -- worked examples ---------------------------------------------------------------------------------


def test_zero_table(examples: dict[str, Any]) -> None:
    example = examples["zero_model_state"]
    given = example["inputs"]
    for stage in range(4):
        size = bytes_per_parameter(stage, given["data_parallel"], *given["bytes"].values())
        assert sum(size) == pytest.approx(example["bytes_per_parameter"][f"stage{stage}"], rel=example["tol"])
        layout = Layout(dp=given["data_parallel"], zero=stage, **MIXED)
        total = sum(state_bytes(layout, Parameters(int(given["parameters"])), FUSED).values())
        assert total / GB == pytest.approx(example["gb_per_gpu"][f"stage{stage}"], rel=example["tol"])


def test_70b_on_64_gpus(examples: dict[str, Any]) -> None:
    example = examples["layout_70b_64_gpus"]
    given = example["inputs"]
    layout = Layout(tp=given["tp"], pp=given["pp"], dp=given["dp"], zero=given["zero"], **MIXED)
    assert layout.world_size == given["gpus"]
    assert given["parameters"] * sum(bytes_per_parameter(0, 1)) / GB == example["model_state_gb"]
    held = Parameters(int(given["parameters"] / layout.tp / layout.pp))
    assert held.total == example["parameters_per_gpu"]
    state = state_bytes(layout, held, FUSED)
    assert (state["parameters"] + state["gradients"]) / GB == example["weights_and_grads_gb"]
    assert state["optimizer"] / GB == example["optimizer_gb"]
    assert sum(state.values()) / GB == example["state_gb"]
    other = example["fsdp_alternative"]
    fsdp = Layout(tp=other["tp"], dp=other["dp"], zero=other["zero"], **MIXED)
    sharded = state_bytes(fsdp, Parameters(int(given["parameters"] / fsdp.tp)), FUSED)
    assert sum(sharded.values()) / GB == other["state_gb"]


def test_70b_on_256_gpus(examples: dict[str, Any]) -> None:
    example = examples["layout_70b_256_gpus"]
    given = example["inputs"]
    layout = Layout(tp=given["tp"], pp=given["pp"], dp=example["dp"], **MIXED)
    assert layout.world_size == given["gpus"]
    held = Parameters(int(given["parameters"] / layout.tp / layout.pp))
    assert sum(state_bytes(layout, held, FUSED).values()) / GB == example["state_gb_unsharded"]
    model = preset("llama-3.1-70b")
    assert model.num_layers == given["layers"]
    assert set(layers_per_stage(model, layout)) == {example["layers_per_stage"]}


def test_activation_payload(examples: dict[str, Any]) -> None:
    given = examples["activation_payload"]["inputs"]
    one = tensor_bytes(
        given["batch"],
        given["seq"],
        given["hidden"],
        given["heads"],
        given["n_hidden"],
        given["n_score"],
        given["bytes"],
    )
    assert one * given["layers"] == examples["activation_payload"]["bytes"]


def test_offload(examples: dict[str, Any]) -> None:
    held = Parameters(int(13e9))
    assert sum(state_bytes(Layout(**MIXED), held, FUSED).values()) / GB == examples["offload"]["state_gb"]
    offloaded = state_bytes(Layout(offload="optimizer", **MIXED), held, FUSED)
    assert offloaded["parameters"] / GB == examples["offload"]["weights_gb"]
    assert offloaded["optimizer"] == 0
    assert host_bytes(Layout(**MIXED), held) == {}
    on_host = host_bytes(Layout(offload="params", offload_fraction=0.5, zero=3, dp=2, **MIXED), held)
    assert on_host == {"parameters": 13e9 / 2, "gradients": 13e9, "optimizer": 13e9 * 3}
    delayed = host_bytes(Layout(offload="optimizer", delayed_update=True, zero=1, dp=2), held)
    assert delayed == {"gradients": 13e9 * 4, "optimizer": 13e9 / 2 * 12}


def test_moe_serving(examples: dict[str, Any]) -> None:
    example = examples["moe_serving"]
    given = example["inputs"]
    weights = given["total_parameters"] * given["bytes"]
    assert weights / GB == example["weights_gb"]
    assert least_gpus(weights, given["gpu_gb"] * GB) == example["least_gpus"]
    assert forward_flops(given["active_parameters"]) / GB == example["gflop_per_token_active"]
    assert forward_flops(given["total_parameters"]) / GB == example["gflop_per_token_all"]
    case = example["tokens_per_expert"]
    assert tokens_per_expert(case["tokens"], case["top_k"], case["experts"]) == case["value"]
    assert expert_capacity(256, 1, 64, 1.25) == 5
    assert preset("deepseek-v2").num_parameters() == pytest.approx(given["total_parameters"], rel=0.01)
    with pytest.raises(ConfigError, match="a GPU with 0 bytes"):
        least_gpus(weights, 0)


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_parameters_of_one_rank_are_the_models(name: str) -> None:
    model = preset(name)
    kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
    units = rank_units(Layout(), 0, (model.num_layers,), kinds)
    assert ParameterTable(model).of_rank(units, 1, 1).total == model.num_parameters()


@pytest.mark.parametrize(("name", "tp"), [("llama-3.1-70b", 8), ("gpt3-175b", 8), ("qwen3-8b", 4), ("tiny", 4)])
def test_slices_are_those_of_the_specs(name: str, tp: int) -> None:
    model = preset(name)
    layout = Layout(tp=tp)
    right = sum(prod(spec.local_shape(layout, {"tp": 0})) for spec in parameter_specs(model).values())
    kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
    assert ParameterTable(model).of_rank(rank_units(layout, 0, (model.num_layers,), kinds), tp, 1).total == right


def test_experts_divide_by_ep_and_tied_tables_count_once_per_end() -> None:
    model = preset("deepseek-v3")
    table = ParameterTable(model)
    kind = layer_kind(model, 10)
    whole, split = table.layer(kind, 1, 1), table.layer(kind, 1, 32)
    assert split.experts * 32 == whole.experts
    assert split.dense == whole.dense
    gpt3 = preset("gpt3-175b")
    tied, vocab = ParameterTable(gpt3), gpt3.vocab_size * gpt3.dim
    assert tied.head(1, with_embedding=False).total - tied.head(1, with_embedding=True).total == vocab


def test_uneven_stages() -> None:
    model = preset("llama-3.1-405b")
    kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
    layout = Layout(pp=16)
    counts = layers_per_stage(model, layout)
    assert sum(counts) == 126
    assert set(counts) == {7, 8}
    ranks = [rank_units(layout, rank, counts, kinds) for rank in range(16)]
    assert [units.num_layers for units in ranks] == list(counts)
    assert [units.embedding for units in ranks] == [True] + [False] * 15
    assert [units.head for units in ranks] == [False] * 15 + [True]
    total = sum(ParameterTable(model).of_rank(units, 1, 1).total for units in ranks)
    assert total == model.num_parameters()
    folded = rank_units(Layout(pp=2, schedule="zb_v", microbatches=4), 0, (1, 2, 3, 4), kinds)
    assert (folded.num_layers, folded.embedding, folded.head) == (5, True, True)  # the V's ends are on one rank


# -- activations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 8])
def test_korthikanti(tp: int) -> None:
    """Korthikanti et al. 2022, table 2: bytes of one layer of a GPT with dropout and unfused scores."""
    b, s, h, a = 4, 2048, 6144, 64
    model = gpt(48, h, a, 51200, s)
    kind = layer_kind(model, 0)

    def layer(sp: bool, recompute: str) -> float:
        layout = Layout(tp=tp, micro_batch=b, sp="auto" if sp else "off")
        return layer_activation_bytes(model, kind, Shape.of(layout, s), "bf16", UNFUSED, recompute)

    scores = 5 * a * s / h
    unit = s * b * h
    assert layer(False, "none") == pytest.approx(unit * (10 + 24 / tp + scores / tp))
    assert layer(False, "selective") == pytest.approx(unit * (10 + 24 / tp))
    assert layer(False, "full") == pytest.approx(2 * unit)
    assert layer(True, "none") == pytest.approx(unit / tp * (34 + scores))
    assert layer(True, "selective") == pytest.approx(34 * unit / tp)
    assert layer(True, "full") == pytest.approx(2 * unit / tp)


FIGURE_1 = {  # GiB: parameters and optimizer; activations without and with sequence parallelism and selective recomputation
    "megatron-22b": ("tp=8,micro_batch=4", 45.5625, 59.25, 9.5625),
    "gpt3-175b": ("tp=8,pp=8,virtual=3,schedule=interleaved,microbatches=64", 45.5625, 66.84375, 12.3515625),
    "mt-nlg-530b": ("tp=8,pp=35,virtual=3,schedule=interleaved,microbatches=280", 31.640625, 114.0234375, 23.076171875),
    "megatron-1t": ("tp=8,pp=64,microbatches=512", 32.958984375, 131.25, 26.5625),
}
"""Korthikanti et al. 2022, figure 1, as calculon's validation reads it."""


@pytest.mark.parametrize("name", FIGURE_1)
def test_korthikanti_figure_1(name: str) -> None:
    text, states, whole, sparing = FIGURE_1[name]
    shapes = preset(name)
    model = gpt(shapes.num_layers, shapes.dim, shapes.num_heads, 51200, 2048)
    layout = Layout.parse(f"{text},precision=bf16,reduce_dtype=fp32,sp=off")
    memory = MemoryModel(model, ParameterTable(model), UNFUSED)
    kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
    counts = layers_per_stage(model, layout)

    def stage(layout: Layout, rank: int) -> Any:
        units = rank_units(layout, rank, counts, kinds)
        return memory.stage(layout, rank, units, Shape.of(layout, 2048))

    middle = stage(layout, min(1, layout.pp - 1))  # the figure leaves the embedding out
    assert middle.model_state / 2**30 == pytest.approx(states, rel=0.025)
    assert stage(layout, 0).parts["saved by layers"] / 2**30 == pytest.approx(whole, rel=0.025)
    better = layout.with_(sp="on", recompute="selective")
    assert stage(better, 0).parts["saved by layers"] / 2**30 == pytest.approx(sparing, rel=0.025)


def test_modern_layer() -> None:
    """GQA, SwiGLU, fused attention: 139 kB per token and layer for Llama-3 8B, of which fused attention keeps no scores."""
    model = preset("llama-3.1-8b")
    shape = Shape.of(Layout(), 8192)
    size = layer_activation_bytes(model, layer_kind(model, 0), shape, "bf16", FUSED)
    assert size / shape.tokens == pytest.approx(139e3, rel=0.01)
    assert size == layer_activation_bytes(model, layer_kind(model, 0), shape, "bf16", FUSED, "selective")
    assert logits_bytes(model, shape, "bf16") == 8192 * 128256 * 8


def test_experts_activations_follow_top_k() -> None:
    model = preset("mixtral-8x7b")
    shape = Shape.of(Layout(), 4096)
    twice = model.model_copy(update={"moe": model.moe.model_copy(update={"top_k": 4})}) if model.moe else model
    one, two = (layer_activation_bytes(m, layer_kind(m, 0), shape, "bf16", FUSED) for m in (model, twice))
    assert two - one == 2 * shape.tokens * 2 * (2 * model.dim + 3 * 14336)


@pytest.mark.parametrize(
    ("layout", "rank", "held"),
    [
        ("pp=4,microbatches=16,schedule=gpipe", 0, 16),
        ("pp=4,microbatches=16", 0, 4),
        ("pp=4,microbatches=16", 3, 1),
        ("pp=4,microbatches=2", 0, 2),
        ("pp=16,virtual=4,schedule=interleaved,microbatches=144", 0, 79 / 4),
        ("pp=4,schedule=zb_v,microbatches=16", 2, 4),
        ("pp=4,schedule=dualpipe_v,microbatches=16", 0, 4.5),
        ("dp=2,microbatches=8", 0, 1),
    ],
)
def test_in_flight(layout: str, rank: int, held: float) -> None:
    assert in_flight(Layout.parse(layout), rank) == held


# -- one rank --------------------------------------------------------------------------------------


def stage(layout: Layout, name: str = "llama-3.1-8b", seq: int = 4096) -> Any:
    model = preset(name)
    kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
    units = rank_units(layout, 0, layers_per_stage(model, layout), kinds)
    return MemoryModel(model, ParameterTable(model), FUSED).stage(layout, 0, units, Shape.of(layout, seq))


def test_classes_add_up_and_savings_save() -> None:
    plain = stage(Layout(dp=8, **MIXED))
    assert plain.total == plain.model_state + plain.activations + plain.buffers
    assert plain.parameters == 2 * preset("llama-3.1-8b").num_parameters()
    sizes = [stage(Layout(dp=8, zero=zero, **MIXED)).model_state for zero in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    full = stage(Layout(dp=8, recompute="full", **MIXED))
    assert full.parts["saved by layers"] == 32 * 2 * 4096 * 4096 < plain.parts["saved by layers"] / 10
    assert stage(Layout(dp=4, cp=2, **MIXED)).activations < plain.activations
    sharded, kept = (stage(Layout(dp=8, zero=3, reshard=r, **MIXED)) for r in ("always", "after_backward"))
    assert kept.parts["parameters kept gathered"] == plain.parameters > sharded.parts["gathered units"]


def test_each_pipeline_rank_has_its_own_policy_of_recomputation() -> None:
    """The first rank is as with full everywhere, the others as with none; the step lies between."""
    model = preset("llama-3.1-8b")
    pricer = Pricer(model, Cluster.parse("h100-80gb:1x8"), 4096)
    policies = ("none", "full-none-none-none", "full")
    layouts = [Layout(pp=4, dp=2, microbatches=8, recompute=policy, **MIXED) for policy in policies]
    none, mixed, full = (
        [stage.activations for stage in sorted(pricer.stage_memory(layout), key=lambda stage: stage.stage)] for layout in layouts
    )
    assert mixed == [full[0], *none[1:]] and mixed[0] < mixed[1]
    none_s, mixed_s, full_s = (pricer.seconds(layout) for layout in layouts)
    assert none_s < mixed_s < full_s


def test_deferred_gradients_are_whole() -> None:
    """Several micro-batches whose gradients are reduced once keep them unsharded until then."""
    once, deferred, reduced = (
        stage(Layout(dp=8, zero=3, microbatches=m, accumulate=how, **MIXED))
        for m, how in ((1, "defer"), (4, "defer"), (4, "reduce"))
    )
    whole = 2 * preset("llama-3.1-8b").num_parameters()
    assert once.gradients == reduced.gradients == deferred.gradients == whole // 8
    assert deferred.parts["gradient buffers"] == whole > reduced.parts["gradient buffers"]
    assert reduced.parts["gradient buffers"] > once.parts["gradient buffers"]  # and shards that are added
    two = replace(FUSED, two_gradients=True)
    wide = Layout(precision="bf16", reduce_dtype="fp32")
    assert [state_bytes(wide, Parameters(10), stack)["gradients"] for stack in (FUSED, two)] == [40, 60]


def test_software_that_keeps_nothing_for_w_holds_what_f_saved() -> None:
    layout = Layout.parse("pp=4,schedule=zb_h1,microbatches=8")
    ours, theirs = (
        Pricer(preset("llama-3.1-8b"), Cluster.parse("h100-80gb:1x4"), 8192, Stack(keeps_deferred=keeps)).stage_memory(layout)
        for keeps in (True, False)
    )
    assert sum(rank.parts.get("held for W", 0) for rank in ours) > 0
    assert not any("held for W" in rank.parts for rank in theirs)
    assert sorted(rank.parts["saved by layers"] for rank in theirs)[0] > 0  # every rank's fullest moment is one before its B
    assert max(rank.total for rank in theirs) < max(rank.total for rank in ours)


def test_prefetch_and_the_largest_unit_count() -> None:
    model = preset("llama-3.1-8b")
    table = model.vocab_size * model.dim
    one, two = (stage(Layout(dp=8, zero=3, prefetch=prefetch, **MIXED)) for prefetch in (1, 2))
    layer = (model.num_parameters() - 2 * table - model.dim) // model.num_layers
    assert one.parts["gathered units"] == 2 * (table + model.dim + layer)  # the head with its norm is the largest unit
    assert two.parts["gathered units"] - one.parts["gathered units"] == 2 * layer


def test_last_stage_holds_logits_of_its_tokens() -> None:
    model = preset("llama-3.1-8b")
    layout = Layout(tp=2, pp=2, microbatches=4, **MIXED)
    kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
    memory = MemoryModel(model, ParameterTable(model), FUSED)
    first, last = (
        memory.stage(layout, r, rank_units(layout, r, (16, 16), kinds), Shape.of(layout, 4096)) for r in (0, 1)
    )
    assert "logits" not in first.parts
    assert last.parts["logits"] == 4096 * 128256 // 2 * 8
    assert first.parts["saved by layers"] == 2 * last.parts["saved by layers"]
    assert memory.stage(layout, 0, RankUnits((), False, False), Shape.of(layout, 4096)).model_state == 0


def test_a_schedule_from_a_file_holds_what_its_rows_hold(tmp_path: Path) -> None:
    """The rows of 1F1B as a file are 1F1B; those of ZB-H1 wait for W like ZB-H1's."""
    model = preset("llama-3.1-8b")
    kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
    memory = MemoryModel(model, ParameterTable(model), FUSED)
    for name in ("1f1b", "zb_h1"):
        layout = Layout(pp=8, microbatches=32, schedule=name, **MIXED)
        path = tmp_path / f"{name}.txt"
        path.write_text(str(make_schedule(layout)))
        for recompute in ("none", "full"):
            given = layout.with_(recompute=recompute)
            read = given.with_(schedule=f"file:{path}")
            for rank in (0, 3, 7):
                units = rank_units(given, rank, layers_per_stage(model, given), kinds)
                mine, its = (memory.stage(one, rank, units, Shape.of(one, 8192)) for one in (given, read))
                assert its.activations == pytest.approx(mine.activations, rel=1e-9), (name, recompute, rank)
                assert in_flight(read, rank) == in_flight(given, rank)
                waits = [memory.waiting_bytes(one, rank, units, Shape.of(one, 8192)) for one in (given, read)]
                assert waits[0] == waits[1] and (waits[0] > 0) == (name == "zb_h1")
