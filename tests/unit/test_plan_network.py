"""What collectives cost on levels of links, and the worked examples of tensor and context traffic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.axes import RankGrid
from shardwright.core.cluster import Cluster, LinkLevel, find_chip
from shardwright.core.layout import Layout
from shardwright.core.ledger import ring_bytes
from shardwright.core.model_config import ModelConfig
from shardwright.plan.compute import Kernels, Shape, UnitCost, layer_kind
from shardwright.plan.network import Network, Span, group_span
from shardwright.plan.stack import Stack
from shardwright.plan.traffic import Traffic

IDEAL = Stack(intra=1.0, inter=1.0, attention=1.0, launch=0.0)
B1, B2 = 400e9, 50e9


@pytest.fixture(scope="module")
def examples(shared: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shared / "vectors" / "worked_examples.json").read_text())
    return found


def two_levels(nodes: int = 4, gpus: int = 8, latency: float = 0.0, first: float = B1) -> Network:
    levels = (LinkLevel("intra", gpus, first, latency), LinkLevel("inter", nodes * gpus, B2, latency))
    return Network(Cluster(find_chip("h100"), nodes, gpus, levels), IDEAL)


@pytest.mark.parametrize(
    ("grid", "axis", "ways"),
    [
        (RankGrid(tp=8, dp=4), "tp", (8, 1)),  # inside a node
        (RankGrid(tp=8, dp=4), "dp", (1, 4)),  # strided: one rank of each node
        (RankGrid(tp=2, dp=16), "dp", (4, 4)),  # mixed: four of each node
        (RankGrid(tp=16, dp=2), "tp", (8, 2)),
        (RankGrid(tp=2, cp=2, dp=8), "dp_cp", (4, 4)),
        (RankGrid(tp=2, dp=4, pp=4), "dp", (4, 1)),
        (RankGrid(tp=2, dp=4, pp=4, order="tp-cp-pp-dp"), "dp", (1, 4)),
        (RankGrid(tp=2, dp=4, pp=4, order="tp-cp-pp-dp"), "pp", (4, 1)),
        (RankGrid(tp=2, dp=16, ep=8), "ep", (8, 1)),
        (RankGrid(tp=2, dp=16, ep=8), "edp", (1, 4)),
        (RankGrid(dp=32), "world", (8, 4)),
        (RankGrid(tp=4, cp=2, dp=4), "cp", (2, 1)),
    ],
)
def test_groups_are_split_by_level(grid: RankGrid, axis: str, ways: tuple[int, ...]) -> None:
    assert group_span(grid, axis, (8, 32)).ways == ways


@pytest.mark.parametrize("verb", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_group_with_a_part_of_a_node_has_a_part_of_its_links(verb: str) -> None:
    levels = (LinkLevel("intra", 8, 1e18, 0.0), LinkLevel("inter", 32, B2, 0.0))
    whole, part = (
        Network(Cluster(find_chip("h100"), 4, 8, levels), replace(IDEAL, part_node=share)) for share in (1.0, 0.5)
    )
    for ways, times in (((1, 4), 1), ((2, 4), 2), ((4, 4), 2), ((8, 4), 1), ((2, 1), 1)):
        spans = Span(ways)
        assert part.seconds(verb, 1e9, spans) == pytest.approx(times * whole.seconds(verb, 1e9, spans), rel=1e-3)


@pytest.mark.parametrize("verb", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"])
def test_a_message_takes_what_the_software_takes_beside_the_links(verb: str) -> None:
    cluster = Cluster(find_chip("h100"), 4, 8, (LinkLevel("intra", 8, B1, 1e-6), LinkLevel("inter", 32, B2, 1e-5)))
    plain, loaded = (Network(cluster, replace(IDEAL, message=seconds)) for seconds in (0.0, 3e-4))

    def seconds(network: Network, ways: tuple[int, ...]) -> float:
        return network.send_seconds(1e6, 1) if verb == "send" else network.seconds(verb, 1e6, Span(ways))

    assert seconds(loaded, (8, 4)) - seconds(plain, (8, 4)) == pytest.approx(3e-4)
    if verb != "send":
        assert seconds(loaded, (1, 1)) == 0.0


def test_a_group_that_straddles_a_node_counts_as_crossing() -> None:
    assert group_span(RankGrid(tp=6, dp=4), "tp", (8, 24)).ways == (3, 2)


@pytest.mark.parametrize("grid", [RankGrid(tp=2, cp=2, dp=4, pp=2), RankGrid(tp=4, dp=2, pp=4, order="tp-cp-pp-dp")])
@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp", "dp_cp", "ep", "edp"])
def test_spans_agree_with_the_groups(grid: RankGrid, axis: str) -> None:
    span = group_span(grid, axis, (4, grid.world_size))
    nodes = {len({rank // 4 for rank in group}) for group in grid.axis_groups(axis)}
    assert span.size == len(grid.axis_groups(axis)[0])
    assert span.ways[1] == max(nodes)


def test_ring_inside_a_node() -> None:
    network, span, size = two_levels(), Span((8, 1)), 1e9
    assert network.seconds("all_gather", size, span) == pytest.approx(size * 7 / 8 / B1)
    assert network.seconds("all_reduce", size, span) == pytest.approx(2 * size * 7 / 8 / B1)
    assert network.link(span) == "intra"
    assert network.seconds("all_reduce", size, Span((1, 1))) == 0


def test_a_strided_group_sees_the_outer_links_only() -> None:
    assert two_levels().seconds("all_gather", 1e9, Span((1, 4))) == pytest.approx(1e9 * 3 / 4 / B2)


def test_a_mixed_group_uses_all_links_of_a_node() -> None:
    """Eight ranks of a node carry an eighth each: between nodes the group runs at eight links' rate."""
    network = two_levels(first=1e15)
    mixed = network.seconds("all_reduce", 1e9, Span((8, 4)))
    assert mixed == pytest.approx(2 * 1e9 / 8 * 3 / 4 / B2, rel=0.01)
    assert network.link(Span((8, 4))) == "inter"


def test_latency_counts_hops_and_trees_win_for_small_messages() -> None:
    network = two_levels(nodes=64, latency=10e-6)
    assert network.seconds("all_gather", 64, Span((1, 64))) == pytest.approx(63 * 10e-6, rel=1e-3)
    assert network.seconds("all_reduce", 64, Span((1, 64))) == pytest.approx(12 * 10e-6, rel=1e-3)
    assert network.send_seconds(B1 * 1e-3, 1) == pytest.approx(10e-6 + 1e-3)
    assert network.send_link(1) == "intra"
    assert network.send_link(8) == "inter"


def test_all_to_all_sends_each_part_on_its_own_level() -> None:
    seconds = two_levels().seconds("all_to_all", 1e9, Span((8, 4)))
    assert seconds == pytest.approx(1e9 * 24 / 32 / B2)


def test_a_measured_curve_lowers_the_rate() -> None:
    level = LinkLevel("intra", 8, B1, 0.0, ((1e3, 0.1), (1e9, 0.9)))
    assert level.efficiency_at(1) == 0.1
    assert level.efficiency_at(1e6) == pytest.approx(0.5)
    assert level.efficiency_at(1e12) == 0.9
    network = Network(Cluster(find_chip("h100"), 1, 8, (level,)), IDEAL)
    assert network.seconds("all_gather", 8e9, Span((8,))) == pytest.approx(7e9 / B1 / 0.9)


# -- worked examples ---------------------------------------------------------------------------------


def test_tensor_parallel_traffic(examples: dict[str, Any]) -> None:
    example = examples["tensor_parallel_traffic"]
    given = example["inputs"]
    model = ModelConfig(
        vocab_size=8, dim=given["hidden"], num_layers=given["layers"], num_heads=64, num_kv_heads=8, ffn_dim=28672
    )
    layout = Layout(tp=given["tp"], sp="off", precision="bf16")
    for rate, seconds in example["seconds_at"].items():
        level = LinkLevel("intra", 8, float(rate.split("_")[0]) * 1e9, 0.0)
        network = Network(Cluster(find_chip("h100"), 1, 8, (level,)), IDEAL)
        traffic = Traffic(model, layout, Shape.of(layout, given["seq"]), network, IDEAL)
        layer = [m for m in traffic.layer(layer_kind(model, 0), UnitCost(), "none") if m.phase == "F"]
        assert len(layer) == given["all_reduces_per_layer_forward"]
        assert {m.bytes for m in layer} == {example["bytes_per_all_reduce"]}
        assert sum(m.bytes for m in layer) == example["bytes_per_layer_forward"]
        total = sum(m.bytes for m in layer) * given["layers"]
        assert total / 1e9 == pytest.approx(example["gb_all_layers_forward"], rel=example["tol"])
        assert sum(m.seconds for m in layer) * given["layers"] == pytest.approx(seconds, rel=example["tol"])


def test_context_parallel_block(examples: dict[str, Any]) -> None:
    example = examples["context_parallel_128k"]
    given = example["inputs"]
    model = ModelConfig(
        vocab_size=8, dim=4096, num_layers=given["layers"], num_heads=given["q_heads"], ffn_dim=8,
        num_kv_heads=given["kv_heads"], head_dim=given["head_dim"],
    )  # fmt: skip
    layout = Layout(cp=given["cp"], precision="bf16")
    shape = Shape.of(layout, given["seq"])
    level = LinkLevel("intra", 8, given["link_gb_s"] * 1e9, 0.0)
    cluster = Cluster(replace(find_chip("h100"), num_sms=0), 1, 8, (level,))
    network = Network(cluster, IDEAL)
    block = Traffic(model, layout, shape, network, IDEAL).kv_block_elements() * given["bytes"]
    assert block == example["block_bytes"]
    assert network.send_seconds(block, 1) == pytest.approx(example["block_seconds"], rel=example["tol"])
    kernels = Kernels(cluster.chip, IDEAL, "bf16")
    kernels.fused_attention(shape.tokens, shape.tokens, model.num_heads, 2 * model.head_dim, causal=False)
    assert kernels.cost.flops_forward == example["block_flops"]
    assert kernels.cost.forward == pytest.approx(example["block_compute_seconds"], rel=example["tol"])


def test_ring_bytes_are_the_ledgers() -> None:
    assert ring_bytes("all_reduce", 8192 * 8192, 2, 8) == 234881024
