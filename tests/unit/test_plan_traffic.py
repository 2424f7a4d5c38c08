"""Messages of a step by formula: counts, bytes and what hides them; equal to the run's closed form where both exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.ledger import LedgerEntry
from shardwright.core.model_config import ModelConfig
from shardwright.core.presets import preset
from shardwright.plan.collectives import predict_step
from shardwright.plan.compute import Shape, UnitCost, layer_kind
from shardwright.plan.network import Network
from shardwright.plan.stack import Stack
from shardwright.plan.stages import Parameters
from shardwright.plan.step_time import Pricer
from shardwright.plan.traffic import Message, Traffic

SEQ = 4096
STACK = Stack()
GB = 1e9


def traffic_of(layout: Layout, model: ModelConfig, cluster: str = "h100:8x8", stack: Stack = STACK) -> Traffic:
    machine = Cluster.parse(cluster)
    return Traffic(model, layout, Shape.of(layout, SEQ), Network(machine, stack), stack)


def sent(messages: list[Message], **wanted: str) -> int:
    return sum(m.bytes * m.count for m in messages if all(getattr(m, key) == value for key, value in wanted.items()))


def mixed(text: str) -> Layout:
    return Layout.parse(text + ",precision=bf16,reduce_dtype=bf16")


# -- data axis -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("zero=0", 2),
        ("zero=1", 2),
        ("zero=1,zero1_reduce=allreduce", 3),
        ("zero=2", 2),
        ("zero=3", 3),
        ("zero=3,reshard=after_backward", 2),
        ("zero=3,microbatches=4", 9),  # 2m gathers, one reduction
        ("zero=3,microbatches=4,accumulate=reduce", 12),
        ("zero=2,microbatches=4,accumulate=reduce", 5),
    ],
)
def test_zero_traffic(text: str, times: int) -> None:
    """Multiples of (N-1)/N P with gradients and parameters of the same dtype."""
    size, ranks = 1_024_000, 8
    layout = mixed(f"dp={ranks},{text}")
    messages = traffic_of(layout, preset("tiny")).data(Parameters(size), 4, 0)
    assert sent(messages) == pytest.approx(times * (ranks - 1) / ranks * 2 * size, rel=1e-4)


def test_70b_on_64_gpus(shared: Path) -> None:
    example = json.loads((shared / "vectors" / "worked_examples.json").read_text())["layout_70b_64_gpus"]
    held = Parameters(int(example["parameters_per_gpu"]))
    ddp, plain = (
        traffic_of(mixed(f"tp=8,pp=2,dp=4,{zero}"), preset("llama-3.1-70b")).data(held, 40, 0)
        for zero in ("zero=0", "zero=1,zero1_reduce=allreduce")
    )
    assert sent(ddp, verb="all_reduce") / GB == pytest.approx(example["gradient_all_reduce_gb_sent"], rel=1e-6)
    assert sent(plain) / GB == pytest.approx(example["zero1_plain_gb_sent"], rel=1e-6)


@pytest.mark.parametrize("name", ["bench-25m", "demo"])
@pytest.mark.parametrize("text", ["dp=4", "tp=2,dp=2", "tp=2,sp=off,dp=2", "pp=2,dp=2,microbatches=4"])
def test_bytes_are_those_of_the_runs_ledger(name: str, text: str) -> None:
    """Against the closed form that real runs are checked with; norm weights over tp and small messages apart."""
    model, layout = preset(name), Layout.parse(text)
    plan = Pricer(model, Cluster.parse("h100:1x8"), 256, STACK).price(layout)
    slow = 1 if layout.pp > 1 else 0  # the plan lists the slowest pipeline rank, here the one with the head
    rank = layout.grid.rank({"pp": slow})
    run = predict_step(model, layout, 256, rank=rank).entries.values()
    for axis in ("dp", "tp", "pp"):
        names = ("dp", "dp_cp") if axis == "dp" else (axis,)
        planned = sum(e.bytes for e in plan.communication if e.axis in names and "tied" not in e.tensor)
        ran = sum(e.bytes for e in run if e.axis in names and not _small(e))
        assert planned == pytest.approx(ran, rel=3e-4), axis


def _small(entry: LedgerEntry) -> bool:
    return entry.tensor == "norm" or (entry.axis == "tp" and entry.phase == "reduce")


def test_experts_reduce_over_their_replicas_only() -> None:
    model = preset("mixtral-8x7b")
    messages = traffic_of(mixed("dp=8,ep=4,zero=0"), model).data(Parameters(800_000, 80_000), 4, 0)
    assert sent(messages, axis="dp_cp") == pytest.approx(2 * 7 / 8 * 1.6e6, rel=1e-4)
    assert sent(messages, axis="edp") == pytest.approx(2 * 1 / 2 * 1.6e5, rel=1e-4)
    assert not traffic_of(mixed("dp=8,ep=8"), model).data(Parameters(0, 80_000), 4, 0)


def test_hybrid_sharding_keeps_gathers_inside() -> None:
    layout = mixed("dp=64,zero=3,dp_replicate=8")
    messages = traffic_of(layout, preset("llama-3.1-8b")).data(Parameters(8_000_000), 34, 0)
    gathers = [m for m in messages if m.verb == "all_gather"]
    replicas = [m for m in messages if m.tensor == "dense gradient shards"]
    assert {m.link for m in gathers} == {"intra"}
    assert {m.link for m in replicas} == {"inter"}
    assert sent(gathers) == pytest.approx(2 * 7 / 8 * 1.6e7, rel=1e-3)
    assert sent(replicas) == pytest.approx(2 * 7 / 8 * 1.6e7 / 8, rel=1e-3)


def test_a_tied_table_is_summed_over_both_ends() -> None:
    messages = traffic_of(mixed("pp=4,microbatches=4"), preset("gpt3-175b")).data(Parameters(1000), 4, 500)
    assert sent(messages, axis="pp", tensor="tied embedding") == 2 * 500 // 2 * 2


# -- inside a layer --------------------------------------------------------------------------------


def layer_of(text: str, name: str = "llama-3.1-8b", cost: UnitCost | None = None, layer: int = 5) -> list[Message]:
    model = preset(name)
    layout = mixed(text)
    return traffic_of(layout, model).layer(layer_kind(model, layer), cost or UnitCost(), layout.recompute)


def test_sequence_parallelism_sends_the_same_forward_and_two_gathers_more_backward() -> None:
    plain, split = layer_of("tp=8,sp=off"), layer_of("tp=8")
    assert sent(plain, phase="F") == sent(split, phase="F") == 2 * 2 * 7 * SEQ * 4096 * 2 // 8
    assert sent(split, phase="B") == sent(plain, phase="B")
    assert sent(split, phase="W") == sent(plain, phase="B") // 2


def test_full_recomputation_sends_the_forward_again() -> None:
    messages = layer_of("tp=8,recompute=full")
    assert sent(messages, phase="recompute") == sent(messages, phase="F") > 0


def test_ring_and_gathered_keys() -> None:
    block = 2 * 1024 * 1024 * 2  # K and V of 1,024 tokens, 8 heads of 128, bf16
    ring, gathered = layer_of("cp=4"), layer_of("cp=4,cp_kind=allgather")
    assert sent(ring, phase="F") == 3 * block == sent(gathered, phase="F")
    assert sent(ring, phase="B", tensor="kv") == 3 * block
    assert sent(ring, phase="B", tensor="kv.gradient") == 4 * 2 * block
    assert all(m.exposed == m.seconds for m in ring)  # nothing to hide behind
    hidden = layer_of("cp=4", cost=UnitCost(attention_forward=10.0))
    assert all(m.exposed == 0 for m in hidden)
    ulysses = layer_of("cp=4,cp_kind=ulysses")
    assert sent(ulysses, phase="F") == (2 * 1024 * 4096 * 2 + block) * 3 // 4


def test_experts_send_top_k_copies_there_and_back() -> None:
    messages = layer_of("dp=8,ep=8", "mixtral-8x7b")
    assert sent(messages, phase="F") == sent(messages, phase="B") == 2 * SEQ * 2 * 4096 * 2 * 7 // 8
    assert {m.verb for m in messages} == {"all_to_all"}
    assert not layer_of("dp=8,ep=8", "deepseek-v3", layer=0)  # a dense layer of a model with experts


def test_a_shared_expert_is_split_over_tp_and_routed_ones_are_not() -> None:
    with_shared, without = layer_of("tp=4,dp=2,ep=8", "deepseek-v3"), layer_of("tp=4,dp=2,ep=8", "mixtral-8x7b")
    assert {m.tensor for m in with_shared if m.axis == "tp"} == {"attention.in", "attention.out", "mlp.in", "mlp.out"}
    assert {m.tensor for m in without if m.axis == "tp"} == {"attention.in", "attention.out"}


def test_boundaries_and_their_links() -> None:
    model = preset("llama-3.1-8b")
    near, far = traffic_of(mixed("tp=4,pp=2"), model), traffic_of(mixed("tp=8,pp=2"), model)
    assert {m.link for m in near.boundary()} == {"intra"}
    assert {m.link for m in far.boundary()} == {"inter"}
    assert {m.bytes for m in far.boundary()} == {SEQ * 4096 * 2 // 8}
    whole, pieces = (
        traffic_of(mixed("tp=8,pp=2,sp=off"), model, stack=Stack(scatter_gather=on)) for on in (False, True)
    )
    assert {m.bytes for m in whole.boundary()} == {SEQ * 4096 * 2}
    assert {m.bytes for m in pieces.boundary()} == {SEQ * 4096 * 2 // 8}


@pytest.mark.parametrize("part", ["embedding", "head"])
def test_ends_send_nothing_without_tp(part: str) -> None:
    ends: Any = traffic_of(mixed("dp=2"), preset("llama-3.1-8b"))
    assert getattr(ends, part)() == []
    assert getattr(traffic_of(mixed("tp=2"), preset("llama-3.1-8b")), part)()
