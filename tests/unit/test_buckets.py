"""`plan_buckets`: every member once, within the limit, in the order in which backward makes them ready."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.buckets import Member, plan_buckets
from shardwright.core.layout import Layout
from shardwright.core.presets import preset
from shardwright.core.specs import bucket_members, unit_names

MIB = 2**20
DP, TP = ("cp", "dp"), ("tp", "cp", "dp")


def member(name: str, numel: int, *units: str, decay: bool = True, axes: tuple[str, ...] = DP) -> Member:
    return Member(name, (numel,), units, decay, axes)


UNITS = ["embedding", "blocks.0", "blocks.1", "head"]
Problem = tuple[list[Member], int]


def problems() -> st.SearchStrategy[Problem]:
    """Up to 15 members of 0 to 30 elements, and the elements that a bucket may hold."""
    used_by = st.sampled_from([(unit,) for unit in UNITS] + [("embedding", "head")])
    fields = st.tuples(st.integers(0, 30), used_by, st.booleans(), st.sampled_from([DP, TP]))
    members = st.lists(fields, max_size=15).map(
        lambda found: [Member(f"p{i}", (numel,), *rest) for i, (numel, *rest) in enumerate(found)]
    )
    return st.tuples(members, st.integers(1, 60))


@given(problems())
@settings(max_examples=100, deadline=None)
def test_buckets_hold_every_member_once_within_the_limit_in_order_of_readiness(problem: Problem) -> None:
    members, limit = problem
    plans = plan_buckets(members, UNITS, limit * 4 / MIB)
    held = [m for plan in plans for m in plan.members]
    assert sorted(held, key=lambda m: m.name) == sorted(members, key=lambda m: m.name)
    assert [plan.name for plan in plans] == [f"gradients.{index}" for index in range(len(plans))]
    for plan in plans:
        assert {m.reduce_axes for m in plan.members} == {plan.reduce_axes}
        assert sum(bool(m.numel) for m in plan.members) <= 1 or plan.numel <= limit
        ends = [offset + m.numel for offset, m in zip(plan.offsets, plan.members, strict=True)]
        assert list(plan.offsets) == [0, *ends[:-1]] and ends[-1] == plan.numel
        decays = [m.decay for m in plan.members]
        assert decays == sorted(decays, reverse=True)  # one decayed range, then one undecayed
        assert plan.num_decayed == sum(m.numel for m in plan.members if m.decay)
    for axes in (DP, TP):  # a bucket does not wait for a parameter that belongs to a later one of its kind
        ready = [[-min(UNITS.index(u) for u in m.units) for m in p.members] for p in plans if p.reduce_axes == axes]
        assert all(max(earlier) <= min(later) for earlier, later in pairwise(ready))
    completed_by = [min(UNITS.index(unit) for unit in plan.units) for plan in plans]
    assert completed_by == sorted(completed_by, reverse=True)  # backward reaches the earliest unit last


def test_the_limit_is_in_mib_of_the_given_elements() -> None:
    members = [member(f"w{i}", MIB // 4, "block") for i in range(8)]  # 1 MiB each in fp32
    assert [len(plan.members) for plan in plan_buckets(members, ["block"], 3)] == [3, 3, 2]
    assert [len(plan.members) for plan in plan_buckets(members, ["block"], 3, element_bytes=8)] == [1] * 8


def test_a_large_parameter_has_a_bucket_of_its_own() -> None:
    members = [member("a", 4, "u"), member("large", 50, "u"), member("b", 4, "u")]
    plans = plan_buckets(members, ["u"], 40 / MIB)
    assert [[m.name for m in plan.members] for plan in plans] == [["a"], ["large"], ["b"]]


def test_a_tied_weight_is_ready_with_the_embedding() -> None:
    units = ["embedding", "block", "head"]
    members = [
        member("embedding", 10, "embedding", "head"), member("block", 10, "block"), member("norm", 10, "head", decay=False),
    ]  # fmt: skip
    plans = plan_buckets(members, units, 40 / MIB)
    assert [plan.members[0].name for plan in plans] == ["norm", "block", "embedding"]
    assert plans[-1].units == {"embedding", "head"}
    model = preset("tiny", tied_head=True)
    plans = plan_buckets(bucket_members(model, Layout(), Layout().grid.coordinates(0)), unit_names(model), 0.1)
    assert len(plans) > 2
    assert [plan for plan in plans if "embedding.token.weight" in {m.name for m in plan.members}] == plans[-1:]


def test_projections_of_one_layer_stay_neighbours() -> None:
    model = preset("tiny", qkv_bias=True)
    (plan,) = plan_buckets(bucket_members(model, Layout(), Layout().grid.coordinates(0)), unit_names(model), 25)
    names = [m.name for m in plan.members]
    for layer in range(model.num_layers):
        for kind in ("weight", "bias"):
            start = names.index(f"blocks.{layer}.attention.q.{kind}")
            following = names[start : start + 3]
            assert following == [f"blocks.{layer}.attention.{part}.{kind}" for part in "qkv"]
    in_order = [names.index(f"{name}.weight") for name in ("head", "blocks.1.mlp.down", "blocks.0.mlp.down")]
    assert in_order == sorted(in_order)
