"""The plan of gathers and frees over a schedule, and the groups and sizes of shards."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from shardwright.comm.record import Recorder
from shardwright.core.axes import RankGrid
from shardwright.core.buckets import BucketPlan, Member, plan_buckets
from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError, LayoutError
from shardwright.parallel.gather import UnitGatherer
from shardwright.parallel.hooks import FunctionHook, check_shards
from shardwright.schedule.gathers import Use, plan_gathers, unit_uses
from shardwright.schedule.make import make_schedule
from shardwright.train.supported import check_supported

UNITS = ("embedding", "blocks.0", "blocks.1", "head")
GROUPS = [{"embedding"}, {"blocks.0"}, {"blocks.1"}, {"head"}]


def planned(text: str, groups: list[set[str]] = GROUPS, rank: int = 0) -> list[Use]:
    layout = Layout.parse(f"zero=3,{text}")
    schedule = make_schedule(layout)
    cut = len(UNITS) // schedule.num_stages
    stages = [UNITS[i * cut : (i + 1) * cut] for i in range(schedule.num_stages)]
    return plan_gathers(unit_uses(schedule, rank, stages), groups, layout)


def gathers(uses: list[Use]) -> list[int]:
    """How often each group is gathered."""
    return [sum(use.gather.count(group) for use in uses) for group in range(len(GROUPS))]


def test_a_unit_is_gathered_for_each_use_and_freed_after_it() -> None:
    uses = planned("microbatches=2")
    assert [f"{use.phase} {use.unit}" for use in uses[:5]] == [*(f"F {unit}" for unit in UNITS), "B head"]
    assert all(use.gather == use.free == (UNITS.index(use.unit),) for use in uses)
    assert gathers(uses) == [4] * 4


def test_a_unit_that_is_kept_is_gathered_once_a_step_or_once_a_micro_batch() -> None:
    deferred = planned("microbatches=3,reshard=after_backward")
    assert gathers(deferred) == [1] * 4
    assert [use.unit for use in deferred if use.free] == list(reversed(UNITS))
    each = planned("microbatches=3,reshard=after_backward,accumulate=reduce")
    assert gathers(each) == [3] * 4
    assert all(use.free == () for use in each if use.phase == "F")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved,virtual=2", "zb_h1", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("reshard", ["always", "after_backward", "after_backward,accumulate=reduce"])
@pytest.mark.parametrize("rank", [0, 1])
def test_with_micro_batches_in_flight_every_use_finds_its_unit(schedule: str, reshard: str, rank: int) -> None:
    groups = [{"embedding", "head"}, {"embedding"}, {"blocks.0"}, {"blocks.1"}, {"head"}]
    held: set[int] = set()
    for use in planned(f"pp=2,microbatches=4,schedule={schedule},reshard={reshard}", groups, rank):
        assert not held & set(use.gather)
        held |= set(use.gather)
        assert {index for index, units in enumerate(groups) if use.unit in units} <= held
        assert set(use.free) <= held
        held -= set(use.free)
    assert held == set()


def test_with_a_pipeline_a_unit_is_gathered_once_a_step_unless_asked_otherwise() -> None:
    counts = {
        reshard: sum(len(use.gather) for use in planned(f"pp=2,microbatches=4{reshard}"))
        for reshard in ("", ",reshard=after_backward", ",reshard=always", ",accumulate=reduce")
    }
    assert counts[""] == counts[",reshard=after_backward"] == len(UNITS) // 2
    assert counts[""] <= counts[",accumulate=reduce"] < counts[",reshard=always"] == 8 * counts[""]
    assert sum(len(use.gather) for use in planned("microbatches=4")) == 8 * len(UNITS)


def test_a_tied_weight_stays_from_one_end_to_the_other() -> None:
    groups = [{"embedding", "head"}, {"blocks.0"}]
    uses = planned("reshard=after_backward,accumulate=reduce,microbatches=2", groups)
    places = [index for index, use in enumerate(uses) if 0 in use.gather or 0 in use.free]
    assert [uses[place].unit for place in places] == ["embedding"] * 4
    assert all(a < b for a, b in pairwise(places))


class Gathered:
    """Flat parameters that only say when they are gathered, waited for and freed."""

    def __init__(self, index: int, said: list[str], held: set[int], most: list[int]) -> None:
        self.index, self.said, self.held, self.most = index, said, held, most
        self.full: object | None = None
        self.gathered_in_place = False

    def start_gather(self) -> None:
        assert self.full is None
        self.full = self
        self.held.add(self.index)
        self.most.append(len(self.held))
        self.said.append(f"start {self.index}")

    def finish_gather(self, *, before_reduction: bool = False) -> None:
        self.gathered_in_place = True

    def free(self) -> None:
        assert self.gathered_in_place
        self.full, self.gathered_in_place = None, False
        self.held.discard(self.index)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize("reshard", ["always", "after_backward"])
def test_gathers_start_before_the_first_input_and_between_uses_and_no_further_than_asked(reshard: str, prefetch: int) -> None:
    uses = planned(f"microbatches=2,reshard={reshard}")
    said: list[str] = []
    most: list[int] = [0]
    held: set[int] = set()
    groups: Any = [Gathered(index, said, held, most) for index in range(len(GROUPS))]
    gatherer = UnitGatherer(groups, uses, prefetch, Recorder())
    gatherer.begin()
    ahead = [index for use in uses[: 1 + prefetch] for index in use.gather] if prefetch else []
    assert said == [f"start {index}" for index in dict.fromkeys(ahead)]
    for use in uses:
        before = len(said)
        gatherer.acquire(use.unit)
        assert len(said) - before == (len(use.gather) if prefetch == 0 else 0)  # what is needed was started by then
        gatherer.release(use.unit)
    assert said == [f"start {index}" for use in uses for index in use.gather]  # always in the order of use
    assert not held and (reshard != "always" or max(most) <= 1 + prefetch)


def test_what_the_same_units_use_is_one_bucket() -> None:
    members = [
        Member("token", (20, 4), ("embedding", "head"), True, ("dp",)),
        Member("position", (8, 4), ("embedding",), True, ("dp",)),
        Member("q", (300, 300), ("blocks.0",), True, ("dp",)),
        Member("norm", (4,), ("blocks.0",), False, ("dp",)),
        Member("last", (4,), ("head",), False, ("dp",)),
    ]
    plans = plan_buckets(members, ["embedding", "blocks.0", "head"], 0.01, by_unit=True)
    assert [[m.name for m in plan.members] for plan in plans] == [["last"], ["q", "norm"], ["token"], ["position"]]
    assert [plan.gather_name for plan in plans] == [f"parameters.{index}" for index in range(4)]


@pytest.mark.parametrize(("numel", "shards", "padded"), [(0, 4, 0), (3, 4, 4), (5, 2, 6), (8, 4, 8), (9, 1, 9)])
def test_a_bucket_is_padded_to_equal_shards(numel: int, shards: int, padded: int) -> None:
    assert BucketPlan("gradients.0", (), (), (), 0, numel).padded(shards) == padded


def test_replicas_are_the_outer_ranks_of_the_data_parallel_group() -> None:
    grid = RankGrid(tp=2, cp=2, dp=2, dp_replicate=2)
    assert grid.axis_groups("dp_shard") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.axis_groups("dp_replicate") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.degree("dp_shard") == grid.degree("dp_replicate") == 2
    assert RankGrid(dp=4, pp=2).axis_groups("dp_shard") == RankGrid(dp=4, pp=2).axis_groups("dp_cp")


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("dp=4,dp_replicate=2", {}, "set zero=1 or more"),
        ("dp=2,zero=1,accumulate=reduce", {}, "set zero=2"),
        ("dp=2,zero=2", {"compile": True}, "use zero=1 or train.compile=false"),
        ("dp=2,zero=2,reshard=always", {}, "reshard=always does nothing with zero=2"),
        ("pp=2,schedule=zb_h1,microbatches=4", {"compile": True}, "use schedule=1f1b or interleaved, or leave compile out"),
        ("pp=2,schedule=dualpipe_v,microbatches=4", {"compile": True}, "compiled blocks write weight gradients in B"),
        ("dp=2,zero=2,offload=params", {}, "set zero=3, or use offload=optimizer"),
        ("dp=2,zero=1,delayed_update=on", {}, "set offload=optimizer, or leave delayed_update out"),
        ("dp=2,zero=1,offload=optimizer,offload_fraction=0.5,delayed_update=on", {}, "leave offload_fraction out"),
    ],
)
def test_what_cannot_be_trained_is_refused(layout: str, change: dict[str, bool], message: str) -> None:
    table = {"model": "demo", "data": {"sources": "x"}, "train": change}
    with pytest.raises(LayoutError, match=message):
        check_supported(RunConfig.of(table, (), layout))


def test_a_hook_that_knows_whole_gradients_only_is_refused() -> None:
    with pytest.raises(ConfigError, match="zero1_reduce=allreduce"):

        def mine(*args: object) -> None: ...

        check_shards(FunctionHook(mine, "sum"))
