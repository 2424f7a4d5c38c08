"""Plans of dispatches as values: sizes, assumed routings, and what the closed form makes of them."""

from __future__ import annotations

from itertools import product

import pytest

from shardwright.core.axes import RankGrid
from shardwright.core.dispatch import DispatchPlan, apportioned, assumed_plan, touched_share
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger
from shardwright.core.model_config import ModelConfig
from shardwright.core.run_config import RunConfig
from shardwright.core.specs import bucket_members, parameter_specs
from shardwright.errors import LayoutError
from shardwright.plan.collectives import predict_step
from shardwright.plan.compute import layer_kind
from shardwright.plan.dispatch import dispatch_traffic
from shardwright.plan.stages import ParameterTable, rank_units
from shardwright.verify.memory import memory_differences
from shardwright.verify.parity import dry_step

MODEL = ModelConfig.load(
    {
        "vocab_size": 96, "dim": 16, "num_layers": 3, "num_heads": 4, "ffn_dim": 32, "family": "deepseek_v3",
        "moe": {
            "num_experts": 8, "top_k": 2, "expert_dim": 12, "num_shared_experts": 1, "dense_layers": [1],
            "aux_coefficient": 0.01, "bias_correction": True, "score": "sigmoid",
        },
    }
)  # fmt: skip
SKEWED = DispatchPlan(1, (0, 7, 0, 1), ((3, 0), (0, 1)))
"""Rank 1 of 2, which has experts 2 and 3: nearly all tokens go to rank 0."""


def test_sizes_of_a_plan() -> None:
    assert (SKEWED.ep, SKEWED.num_local) == (2, 2)
    assert (SKEWED.send_sizes, SKEWED.receive_sizes, SKEWED.local_counts) == ([7, 1], [3, 1], [3, 1])
    assert SKEWED.row_sizes == ([7, 1], [3, 1])
    assert (SKEWED.remote(SKEWED.send_sizes), SKEWED.remote(SKEWED.receive_sizes)) == (7, 3)


@pytest.mark.parametrize(("total", "shares"), [(10, [1.0, 1, 1]), (7, [0.9, 0.1, 0.0]), (0, [1.0, 2.0]), (5, [3.0])])
def test_an_apportioned_total_is_all_given_out(total: int, shares: list[float]) -> None:
    counts = apportioned(total, shares)
    assert sum(counts) == total
    assert all(abs(count - total * share / sum(shares)) < 1 for count, share in zip(counts, shares, strict=True))


@pytest.mark.parametrize(("ep", "tokens", "top_k", "deduplicate"), list(product((1, 2, 4), (0, 5, 64), (1, 2, 4), (False, True))))
def test_assumed_plans_of_all_ranks_fit_together(ep: int, tokens: int, top_k: int, deduplicate: bool) -> None:
    plans = [
        assumed_plan(ep=ep, rank=rank, num_experts=8, tokens=tokens, top_k=top_k, deduplicate=deduplicate)
        for rank in range(ep)
    ]
    for source, target in product(plans, plans):
        assert source.send_sizes[target.rank] == target.receive_sizes[source.rank]
        assert source.row_sizes[0][target.rank] == target.row_sizes[1][source.rank]
        if source.tokens_sent is not None:
            assert source.tokens_sent[target.rank] <= min(source.send_sizes[target.rank], tokens)
    assert sum(plans[0].sent) == tokens * top_k


def test_a_given_skew() -> None:
    plan = assumed_plan(ep=2, rank=0, num_experts=4, tokens=100, top_k=1, shares=[0.9, 0.1, 0, 0])
    assert (plan.sent, plan.send_sizes) == ((90, 10, 0, 0), [100, 0])


def test_share_of_tokens_that_touch_a_rank() -> None:
    assert touched_share(16, 2, 1) == 0.5
    assert touched_share(16, 2, 4) == pytest.approx(1 - 8 * 7 * 6 * 5 / (16 * 15 * 14 * 13))
    assert touched_share(4, 1, 2) == 1


def test_bytes_of_a_dispatch() -> None:
    """7 rows out and 3 back (and the reverse in backward) of 16 values; 2 counts of 8 bytes to one other rank."""
    ledger = Ledger()
    dispatch_traffic(ledger, MODEL, Layout(dp=2, ep=2), {"layer": [SKEWED]}, 4)
    row = 16 * 4
    assert {(e.phase, e.tensor): e.bytes for e in ledger.entries.values()} == {
        ("F", "expert counts"): 16, ("F", "dispatch"): 7 * row, ("F", "combine"): 3 * row,
        ("B", "combine"): 7 * row, ("B", "dispatch"): 3 * row,
    }  # fmt: skip


def test_even_routing_sends_what_the_formula_says() -> None:
    layout = Layout(dp=4, ep=4, microbatches=3)
    ledger = predict_step(MODEL, layout, 64)
    rows = sum(entry.bytes for entry in ledger.entries.values() if entry.tensor in ("dispatch", "combine"))
    num_layers, tokens, top_k = 2, 64, 2
    assert rows == num_layers * 3 * 4 * tokens * top_k * 3 // 4 * 16 * 4  # (ep-1)/ep of N k rows, out and back, twice


def test_experts_see_the_ranks_of_a_stage_in_another_order() -> None:
    grid = RankGrid(tp=2, dp=2, pp=2, ep=2)
    assert grid.axis_groups("stage") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert grid.axis_groups("ep") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.axis_groups("edp") == grid.axis_groups("edp_shard") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert [grid.index_in_stage(rank) for rank in range(8)] == [0, 1, 2, 3] * 2
    replicated = RankGrid(dp=8, ep=2, dp_replicate=2)
    assert replicated.axis_groups("edp_shard") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert replicated.axis_groups("edp_replicate") == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (1, 4), (2, 2), (2, 4)])
def test_the_planner_counts_what_a_rank_holds(tp: int, ep: int) -> None:
    layout = Layout(tp=tp, dp=4, ep=ep)
    members = bucket_members(MODEL, layout, layout.grid.coordinates(0))
    experts = sum(member.numel for member in members if member.shard_over == "edp_shard")
    buffers = sum(spec.numel for spec in parameter_specs(MODEL).values() if spec.buffer)
    kinds = tuple(layer_kind(MODEL, layer) for layer in range(MODEL.num_layers))
    held = ParameterTable(MODEL).of_rank(rank_units(layout, 0, (3,), kinds), tp, ep)
    assert held.experts == experts == 2 * 8 // ep * 3 * 12 * 16
    assert held.dense == sum(member.numel for member in members) - experts + buffers


@pytest.mark.parametrize("layout", ["dp=4,ep=2,zero=1", "dp=4,ep=4,zero=3", "tp=2,dp=2,ep=4"])
def test_the_planner_says_how_much_memory_experts_take(layout: str) -> None:
    moe = MODEL.moe.model_dump() | {"dense_layers": []} if MODEL.moe is not None else {}
    table = {"model": MODEL.model_dump() | {"moe": moe}, "data": {"sources": "synthetic:sentences", "seq_len": 32}}
    config = RunConfig.of(table, (), layout)
    assert memory_differences(config, dry_step(config)) == []


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("dp=3,ep=3", "ep=3 must divide the model's 8 experts"),
        ("tp=2,sp=off,ep=2", "sequence parallelism"),
    ],
)
def test_what_a_model_with_experts_refuses(layout: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.parse(layout).check_model(MODEL)


@pytest.mark.parametrize("name", ["ep_overlap", "ep_deduplicate"])
def test_options_of_the_exchange_need_one(name: str) -> None:
    with pytest.raises(LayoutError, match="ep > 1"):
        Layout.parse(f"dp=2,{name}=on")
