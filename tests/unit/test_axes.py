"""Rank arithmetic: coordinates, groups of every axis, the folded expert view, both world orders."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.comm.mesh import MESH_AXES
from shardwright.core.axes import AXES, COMPOSITE_AXES, ORDERS, RankGrid

ALL_AXES = sorted({*AXES, *COMPOSITE_AXES, *MESH_AXES})
DATA_PARALLEL_INSIDE = "tp-cp-dp-pp"
PIPELINE_INSIDE = "tp-cp-pp-dp"


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    tp, cp, dp, pp = (draw(st.integers(1, 4)) for _ in range(4))
    ep = draw(st.sampled_from([size for size in range(1, tp * cp * dp + 1) if tp * cp * dp % size == 0]))
    return RankGrid(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, order=draw(st.sampled_from(sorted(ORDERS))))


@given(grids())
@settings(max_examples=60, deadline=None)
def test_rank_and_coordinates_are_inverses(grid: RankGrid) -> None:
    seen = set()
    for rank in range(grid.world_size):
        coordinates = grid.coordinates(rank)
        assert grid.rank(coordinates) == rank
        assert all(0 <= coordinates[axis] < grid.degree(axis) for axis in AXES)
        seen.add(tuple(coordinates.items()))
    assert len(seen) == grid.world_size


@given(grids(), st.sampled_from(ALL_AXES))
@settings(max_examples=120, deadline=None)
def test_groups_of_every_axis_partition_the_world(grid: RankGrid, axis: str) -> None:
    groups = grid.axis_groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    if axis == "tied":  # the two ends of each pipeline; the ranks between are alone
        ends = [group for group in groups if len(group) == 2]
        assert len(ends) == (grid.stage_size if grid.pp > 1 else 0)
        for group in ends:
            first, last = (grid.coordinates(rank) for rank in group)
            assert {first["pp"], last["pp"]} == {0, grid.pp - 1}
            assert all(first[other] == last[other] for other in ("tp", "cp", "dp"))
    else:
        assert {len(group) for group in groups} == {grid.degree(axis)}
    # A process group numbers its members in ascending order of their world ranks, and so must we.
    assert all(list(group) == sorted(group) for group in groups)


@given(grids(), st.sampled_from([*AXES, *COMPOSITE_AXES]))
@settings(max_examples=60, deadline=None)
def test_ranks_of_a_group_differ_along_its_axes_only(grid: RankGrid, axis: str) -> None:
    along = COMPOSITE_AXES.get(axis, (axis,))
    for group in grid.axis_groups(axis):
        fixed = {tuple(grid.coordinates(rank)[other] for other in AXES if other not in along) for rank in group}
        assert len(fixed) == 1


@given(grids())
@settings(max_examples=60, deadline=None)
def test_the_expert_view_folds_each_stage(grid: RankGrid) -> None:
    assert grid.ep * grid.edp == grid.stage_size
    stages = [set(grid.stage_ranks(stage)) for stage in range(grid.pp)]
    for expert_group in grid.axis_groups("ep"):
        assert any(set(expert_group) <= stage for stage in stages)
    column = {rank: index for index, replicas in enumerate(grid.axis_groups("edp")) for rank in replicas}
    assert all(len({column[rank] for rank in group}) == grid.ep for group in grid.axis_groups("ep"))
    first = [grid.coordinates(rank) for rank in grid.axis_groups("ep")[0]]
    places = [(c["dp"] * grid.cp + c["cp"]) * grid.tp + c["tp"] for c in first]
    assert places == list(range(grid.ep))  # ep is innermost: over tp first, then cp, then dp


@given(grids())
@settings(max_examples=60, deadline=None)
def test_degrees_multiply(grid: RankGrid) -> None:
    assert grid.degree("world") == grid.world_size == math.prod(grid.degree(axis) for axis in AXES)
    assert grid.degree("dp_cp") == grid.dp * grid.cp
    assert grid.degree("stage") * grid.pp == grid.world_size


@pytest.mark.parametrize(
    ("order", "axis", "groups"),
    [
        (DATA_PARALLEL_INSIDE, "tp", ((0, 1), (2, 3), (4, 5), (6, 7))),
        (DATA_PARALLEL_INSIDE, "dp", ((0, 2), (1, 3), (4, 6), (5, 7))),
        (DATA_PARALLEL_INSIDE, "pp", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (DATA_PARALLEL_INSIDE, "stage", ((0, 1, 2, 3), (4, 5, 6, 7))),
        (PIPELINE_INSIDE, "dp", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (PIPELINE_INSIDE, "pp", ((0, 2), (1, 3), (4, 6), (5, 7))),
        (PIPELINE_INSIDE, "stage", ((0, 1, 4, 5), (2, 3, 6, 7))),
        (PIPELINE_INSIDE, "world", (tuple(range(8)),)),
        (DATA_PARALLEL_INSIDE, "ep", ((0, 1, 2, 3), (4, 5, 6, 7))),
        (DATA_PARALLEL_INSIDE, "edp", ((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,))),
    ],
)
def test_groups_of_two_by_two_by_two(order: str, axis: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert RankGrid(tp=2, dp=2, pp=2, ep=4, order=order).axis_groups(axis) == groups


def test_a_missing_coordinate_is_zero() -> None:
    assert RankGrid(tp=2, dp=3, pp=2).rank({"dp": 2}) == 4
