"""Numbers that the theory fixes (worked examples beside the project), computed by the product's own code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.comm.mesh import Mesh
from shardwright.core.buckets import Member, plan_buckets
from shardwright.core.layout import Layout
from shardwright.core.ledger import ring_bytes
from shardwright.core.model_config import ModelConfig, MoEConfig
from shardwright.core.presets import preset
from shardwright.core.run_config import OptimConfig
from shardwright.ops.capacity import capacities
from shardwright.ops.kernels import swiglu
from shardwright.ops.linear import fused_linear, linear
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.hooks import AllReduce
from shardwright.plan.collectives import predict_step
from shardwright.schedule.action import Kind, Schedule
from shardwright.schedule.make import gpipe, one_forward_one_backward
from shardwright.train.optim import FlatOptimizer

GIB = 2**30


@pytest.fixture(scope="module")
def examples(shared: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shared / "vectors" / "worked_examples.json").read_text())
    return found


def attention_shape(layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=8, dim=heads * head_dim, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, ffn_dim=8,
    )  # fmt: skip


def test_kv_bytes(examples: dict[str, Any]) -> None:
    example = examples["kv_bytes"]
    given = example["inputs"]
    model = attention_shape(given["layers"], given["kv_heads"], given["kv_heads"], given["head_dim"])
    per_token = model.kv_bytes_per_token(given["bytes"])
    assert per_token == example["bytes_per_token"]
    assert per_token * given["tokens"] / GIB == example["gib"]


def test_kv_bytes_of_a_long_context(examples: dict[str, Any]) -> None:
    example = examples["context_parallel_128k"]
    given = example["inputs"]
    model = attention_shape(given["layers"], given["q_heads"], given["kv_heads"], given["head_dim"])
    total = model.kv_bytes_per_token(given["bytes"]) * given["seq"]
    assert total / GIB == example["kv_total_gib"]
    assert total / given["cp"] / GIB == example["kv_per_gpu_gib"]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_traffic_of_stage_0(examples: dict[str, Any], num_ranks: int) -> None:
    assert examples["zero_traffic"]["stage0"] == "2*(N-1)/N*P (all-reduce)"
    model = preset("tiny")
    ledger = predict_step(model, Layout(dp=num_ranks), 64)
    sent = sum(entry.bytes for entry in ledger.entries.values() if entry.phase == "reduce")
    parameter_bytes = 4 * model.num_parameters()
    assert parameter_bytes % num_ranks == 0
    assert sent == 2 * (num_ranks - 1) * parameter_bytes // num_ranks
    whole = ring_bytes("all_reduce", model.num_parameters(), 4, num_ranks)
    halves = [ring_bytes(verb, model.num_parameters(), 4, num_ranks) for verb in ("reduce_scatter", "all_gather")]
    assert sent == whole == sum(halves)


def test_tensor_parallel_traffic(examples: dict[str, Any]) -> None:
    example = examples["tensor_parallel_traffic"]
    given = example["inputs"]
    sent = ring_bytes("all_reduce", given["seq"] * given["hidden"], given["bytes"], given["tp"])
    assert sent == example["bytes_per_all_reduce"]
    per_layer = sent * given["all_reduces_per_layer_forward"]
    assert per_layer == example["bytes_per_layer_forward"]
    assert per_layer * given["layers"] / 1e9 == pytest.approx(example["gb_all_layers_forward"], rel=example["tol"])


def test_momentum_sgd(examples: dict[str, Any]) -> None:
    example = examples["momentum_sgd_sharded"]
    given = example["inputs"]
    start = [value for shard in given["params"] for value in shard]
    parameter = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    plans = plan_buckets([Member("w", (4,), ("unit",), False, ("cp", "dp"))], ["unit"], 1)
    buckets = GradientBuckets(plans, {"w": parameter}, Mesh.solo(), AllReduce())
    optimizer = FlatOptimizer(OptimConfig(name="sgd", momentum=given["mu"]), buckets.buckets)
    (bucket,) = buckets.buckets
    optimizer.state["momentum"][0].copy_(torch.tensor(given["momentum"], dtype=torch.float64).flatten())
    bucket.gradients.copy_(torch.tensor(given["grads_per_rank"], dtype=torch.float64).mean(0))
    optimizer.step(given["lr"])

    def shards(flat: torch.Tensor) -> list[Any]:
        return [pytest.approx(row, abs=example["tol_abs"]) for row in flat.view(2, 2).tolist()]

    assert example["grad_shard"] == shards(bucket.gradients)
    assert example["momentum_after"] == shards(optimizer.named_state()["momentum"]["w"])
    assert example["params_after"] == shards(parameter.detach())
    assert example["next_gather"] == pytest.approx(parameter.tolist(), abs=example["tol_abs"])


def test_swiglu_on_two_ranks(examples: dict[str, Any]) -> None:
    """Each rank's part of a split MLP, and their sum: the all-reduce that tensor parallelism needs."""
    example = examples["swiglu_two_ranks"]
    given = {name: torch.tensor(value, dtype=torch.float64) for name, value in example["inputs"].items()}
    partial = []
    for rank in range(2):
        gate, up, down = (given[name][rank].t().contiguous() for name in ("gate", "up", "down"))
        partial.append(linear(swiglu(fused_linear(given["x"], [gate, up])), down).squeeze(0))
    for ours, expected in zip(partial, example["partial"], strict=True):
        assert ours.tolist() == pytest.approx(expected, abs=example["tol_abs"])
    assert sum(partial).tolist() == pytest.approx(example["all_reduced"], abs=example["tol_abs"])


def test_work_of_one_served_token(examples: dict[str, Any]) -> None:
    """Two FLOPs for each active parameter; the example's model has 236e9 parameters, 21e9 of them active."""
    example = examples["moe_serving"]
    model = preset("deepseek-v2")
    given = example["inputs"]
    assert model.num_parameters() == pytest.approx(given["total_parameters"], rel=0.01)
    assert model.num_active_parameters() == pytest.approx(given["active_parameters"], rel=0.03)
    gflop = model.flops_per_token(1, backward=False) / 1e9
    assert gflop == pytest.approx(example["gflop_per_token_active"], rel=0.03)
    weights = model.num_parameters() * given["bytes"] / 1e9
    assert weights == pytest.approx(example["weights_gb"], rel=0.01)
    assert math.ceil(weights / given["gpu_gb"]) == example["least_gpus"]
    assert 2 * model.num_parameters() / 1e9 == pytest.approx(example["gflop_per_token_all"], rel=0.01)


def test_rows_and_capacity_of_an_expert(examples: dict[str, Any]) -> None:
    given = examples["moe_serving"]["tokens_per_expert"]
    moe = MoEConfig(num_experts=given["experts"], top_k=given["top_k"], expert_dim=8)
    assert moe.mean_tokens(given["tokens"]) == given["value"]
    rule = examples["moe_serving"]["switch_capacity"].split(",")[0]
    assert rule == "ceil(top_k * tokens / experts * capacity_factor)"
    for tokens, top_k, experts, factor, expected in ((256, 2, 64, 1.25, 10), (100, 1, 8, 1.0, 13), (64, 4, 16, 1.1, 18)):
        names = {"top_k": top_k, "tokens": tokens, "experts": experts, "capacity_factor": factor, "ceil": math.ceil}
        assert eval(rule, names) == expected
        moe = MoEConfig(num_experts=experts, top_k=top_k, expert_dim=8)
        assert moe.capacity(tokens, factor) == expected
        sequence = torch.zeros(tokens, dtype=torch.int64)
        assert capacities(sequence, 1, top_k, experts, factor).tolist() == [expected]


@pytest.mark.parametrize("num_stages", [1, 4, 8])
@pytest.mark.parametrize("num_microbatches", [2, 8, 20])
def test_micro_batches_in_flight(examples: dict[str, Any], num_stages: int, num_microbatches: int) -> None:
    rules = {rule["schedule"]: rule["rule"] for rule in examples["in_flight_activations"]}
    p, m = num_stages, num_microbatches
    assert rules["gpipe"] == "every stage holds m micro-batches at its peak"
    assert _peaks(gpipe(p, m)) == [m] * p
    assert rules["1f1b"].startswith("stage s of p holds at most min(p - s, m) micro-batches")
    assert _peaks(one_forward_one_backward(p, m)) == [min(p - s, m) for s in range(p)]


def _peaks(schedule: Schedule) -> list[int]:
    peaks = []
    for row in schedule.rows:
        held = [sum(1 if a.kind is Kind.F else -1 for a in row[: index + 1]) for index in range(len(row))]
        peaks.append(max(held))
    return peaks
