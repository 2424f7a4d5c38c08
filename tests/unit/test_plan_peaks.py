"""Peaks of memory: what is held for a while against the real step with shapes only, and public runs of other software."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.layout import Layout
from shardwright.core.presets import preset
from shardwright.core.run_config import RunConfig
from shardwright.plan.accuracy import MEMORY_HIGH, MEMORY_LOW, assess
from shardwright.plan.calibrate import Peaks, calibrate_memory
from shardwright.plan.compute import Shape, layer_kind
from shardwright.plan.memory import MemoryModel, layer_activation_bytes, logits_bytes
from shardwright.plan.rows import Case, read_rows, training_cases
from shardwright.plan.stack import Stack, eager, stack_of
from shardwright.plan.stages import ParameterTable, layers_per_stage, rank_units
from shardwright.verify.memory import memory_differences, planned_memory
from shardwright.verify.parity import dry_step

BASE: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "top_k": 2, "expert_dim": 20, "dense_layers": [1]}
MODELS = {
    "dense": BASE,
    "tied": BASE | {"tied_head": True},
    "experts": BASE | {"moe": EXPERTS},
    "shared": BASE | {"family": "deepseek_v3", "num_kv_heads": 4, "moe": EXPERTS | {"num_shared_experts": 1}},
}

# -- against a dry run -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout", "rank"),
    [
        ("experts", "dp=4,ep=2,zero=3", 0),  # dense and expert groups have shards of their own
        ("experts", "tp=2,dp=2,ep=4,zero=3,microbatches=2,accumulate=reduce", 3),  # an expert has one rank
        ("shared", "cp=2,dp=2,ep=2,zero=2,microbatches=4,accumulate=reduce,bucket_mb=0.02", 1),
        ("experts", "cp=2,ep=2,zero=2,recompute=full,offload=optimizer,microbatches=4", 0),
        ("dense", "dp=2,zero=2,microbatches=8,accumulate=reduce", 0),  # one bucket, again and again
        ("tied", "dp=2,pp=2,zero=2,schedule=zb_v,microbatches=5,accumulate=reduce,bucket_mb=0.02", 0),
        ("dense", "dp=2,pp=2,zero=3,schedule=zb_h1,microbatches=4,reshard=always,accumulate=reduce", 2),
        ("experts", "dp=2,pp=2,zero=3,schedule=interleaved,virtual=2,microbatches=8,reshard=always", 3),
        ("dense", "dp=2,pp=2,zero=2,schedule=interleaved,virtual=2,microbatches=8,accumulate=reduce,bucket_mb=0.02", 0),
        ("tied", "dp=2,pp=2,zero=3,schedule=dualpipe_v,microbatches=6,offload=params,offload_fraction=0.5", 0),
        ("dense", "dp=2,pp=2,zero=3,microbatches=12,accumulate=reduce", 1),
    ],
)
def test_what_is_held_for_a_while_is_that_of_the_real_step(model: str, layout: str, rank: int) -> None:
    table = {"model": MODELS[model], "data": {"sources": "synthetic:sentences", "seq_len": 32}}
    config = RunConfig.of(table, (), layout)
    ledger = dry_step(config, rank)
    assert memory_differences(config, ledger, rank) == []
    planned = planned_memory(config, rank)
    assert ledger.peak["gathered"] == planned["gathered"]
    assert ledger.peak["buffers"] == planned["buffers"] > 0


# -- what other software keeps -----------------------------------------------------------------------


def test_every_second_product_is_kept() -> None:
    """Of Llama 3 8B: input, q, v, attention and gate; eager also down. With tp what is scattered."""
    model, stack = preset("llama-3.1-8b"), Stack(selective_repeats=0.5)
    kind, shape = layer_kind(model, 0), Shape.of(Layout(), 8192)

    def layer(stack: Stack, shape: Shape = shape) -> float:
        return layer_activation_bytes(model, kind, shape, "bf16", stack, "selective") / shape.tokens

    assert layer(stack) == 2 * (4096 + 4096 + 1024 + 4096 + 14336) + 4 * 32
    assert layer(eager(stack)) - layer(stack) == 2 * 4096
    halves = Shape.of(Layout(tp=2), 8192)
    assert layer(stack, halves) == 2 * (2048 + 2048 + 512 + 2048 + 7168 + 2 * 2048) + 4 * 16


def test_logits_at_the_peak_of_the_loss() -> None:
    model, shape = preset("llama-3.1-8b"), Shape.of(Layout(tp=2), 4096)
    each = 4096 * 128256
    assert logits_bytes(model, shape, "bf16") == each // 2 * 8
    assert logits_bytes(model, shape, "bf16", Stack(logit_bytes=12.0, whole_logits=True)) == each * 12
    assert logits_bytes(model, shape, "fp32", Stack(logit_bytes=12.0)) == each // 2 * 8


def stage(layout: Layout, stack: Stack, rank: int = 0) -> Any:
    model = preset("llama-3.1-8b")
    kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
    units = rank_units(layout, rank, layers_per_stage(model, layout), kinds)
    return MemoryModel(model, ParameterTable(model), stack).stage(layout, rank, units, Shape.of(layout, 4096))


def test_state_and_gradients_of_other_software() -> None:
    sharded = Layout(dp=8, zero=3, precision="bf16", recompute="full")
    count = preset("llama-3.1-8b").num_parameters()
    plain, fully, small = (stage(sharded, Stack(state_bytes=size)) for size in (14.0, 12.0, 6.0))
    assert [s.parameters + s.optimizer for s in (plain, fully, small)] == [size * count // 8 for size in (14, 12, 6)]
    late = stage(sharded, Stack(late_gradients=True))  # shards fit where the logits were, as far as those go
    most = plain.gradients + plain.parts["gradient buffers"]
    assert plain.total - late.total == min(most, plain.parts["logits"])
    several = stage(sharded.with_(microbatches=2), Stack(late_gradients=True))
    assert several.gradients == 0
    assert several.parts["gradient buffers"] == 4 * count
    table = 128256 * 4096
    halves = Layout(tp=2, precision="bf16", reduce_dtype="bf16")
    whole, split = (stage(halves, Stack(whole_embedding=flag)) for flag in (True, False))
    assert whole.parameters - split.parameters == 2 * (table - table // 2)


def test_what_a_pipeline_and_a_root_unit_keep() -> None:
    last = Layout(pp=2, microbatches=4, precision="bf16")
    more = stage(last, Stack(keeps_outputs=True), 1).activations - stage(last, Stack(), 1).activations
    assert more == 4 * 2 * 4096 * 128256
    gathered = stage(Layout(dp=8, zero=3, precision="bf16"), Stack(keeps_root=True)).parts["gathered units"]
    model = preset("llama-3.1-8b")
    layer = ParameterTable(model).layer(layer_kind(model, 0), 1, 1).total
    assert gathered == 2 * (2 * 128256 * 4096 + 4096 + 2 * layer)
    ring = Layout(cp=2, recompute="full", precision="bf16")
    assert "attention outputs" in stage(ring, Stack()).parts
    assert "attention outputs" not in stage(ring, Stack(keeps_attention=False)).parts


# -- public runs -------------------------------------------------------------------------------------

TITAN, FORGE, WEAK = "llama3_h100_202412", "KempnerForge benchmarks/mfu", "KempnerForge benchmarks/wea"
NOT_IN_THE_TABLE = [
    # source, model, GPUs and a note of a row that is in the table; what differs in the run; GiB
    (TITAN, "8B", 8, "eager", {"n_gpus": 128}, 67.0),
    (TITAN, "8B", 8, "torch.compile;", {"n_gpus": 128}, 62.0),
    (TITAN, "8B", 8, "torch.compile + float8", {"n_gpus": 128}, 61.8),
    (TITAN, "8B", 8, "dp x cp", {"cp": 2, "seq_len": 65536}, 84.2),
    (TITAN, "405B", 512, "4D", {"cp": 2, "seq_len": 65536}, 75.9),
    (FORGE, "7B", 4, "", {"tp": 1}, 61.1),
    (FORGE, "7B", 16, "", {"n_gpus": 8}, 32.7),
    (FORGE, "13B", 32, "", {"n_gpus": 16}, 39.2),
    (WEAK, "13B", 128, "", {"n_gpus": 64}, 34.8),
    (WEAK, "70B", 64, "", {"n_gpus": 32}, 93.2),
    (WEAK, "70B", 64, "", {"n_gpus": 96}, 84.6),
    (WEAK, "70B", 64, "", {"n_gpus": 160}, 82.9),
]
"""Runs on the same public pages as rows of the table, which no constant was fitted on."""


@pytest.mark.parametrize(("source", "model", "gpus", "note", "changes", "gib"), NOT_IN_THE_TABLE)
def test_peaks_that_nothing_was_fitted_on(
    shared: Path, source: str, model: str, gpus: int, note: str, changes: dict[str, int], gib: float
) -> None:
    path = shared / "planner" / "published_runs.csv"
    row = next(
        row for row in read_rows(path)
        if source in row["source"] and model in row["model"] and row["n_gpus"] == str(gpus) and note in row["notes"]
        and row["mem_gb_per_gpu"]
    )  # fmt: skip
    ranks = gpus // int(row["tp"])
    sequences = int(row["global_batch"]) // ranks if row["global_batch"] else 0
    row |= {name: str(value) for name, value in changes.items()} | {"mem_gb_per_gpu": str(gib)}
    if sequences:
        row["global_batch"] = str(sequences * (int(row["n_gpus"]) // int(row["tp"])))
    (case,) = training_cases(path, [row])
    assert isinstance(case, Case), case
    (ratio,) = Peaks([case], stack_of(case.stack)).ratios(stack_of(case.stack))
    assert MEMORY_LOW <= 100 * (ratio - 1) <= MEMORY_HIGH


def test_how_many_peaks_are_within_the_bar(shared: Path) -> None:
    path = shared / "planner" / "published_runs.csv"
    groups = assess(training_cases(path, [row for row in read_rows(path) if row["mem_gb_per_gpu"]]))["groups"]
    found = {name: (group["memory"]["within"], group["memory"]["rows"]) for name, group in groups.items() if "memory" in group}
    least = {"torchtitan hopper": 11, "BLOOM": 18, "nanotron hopper": 11, "KempnerForge hopper": 13}
    assert {name: rows for name, (_, rows) in found.items()} == dict(zip(least, (15, 24, 18, 14), strict=True))
    assert all(within >= least[name] for name, (within, _) in found.items()), found


def test_a_fit_of_memory_finds_what_a_device_holds_more(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.plan.calibrate.ROUNDS", 120)
    path = shared / "planner" / "published_runs.csv"
    rows = [row for row in read_rows(path) if "nanotron" in row["source"] and row["mem_gb_per_gpu"] and row["mfu"]]
    cases = [case for case in training_cases(path, rows[:6]) if isinstance(case, Case)]
    right = Stack(reserve_gib=6.0, reserve_share=0.1)
    ratios = Peaks(cases, right).ratios(right)
    made = [replace(case, memory_gib=(case.memory_gib or 0.0) * ratio) for case, ratio in zip(cases, ratios, strict=True)]
    result = calibrate_memory(made, Stack(), ["reserve_gib", "reserve_share"])
    assert result.mape < 2 < 100 * abs(Peaks(made, right).ratios(Stack())[0] - 1)
    assert result.held_out_mape < 3
