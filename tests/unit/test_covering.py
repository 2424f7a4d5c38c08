"""Covering sets: every pair that can be is there, what cannot be is named, and few assignments do it."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

from shardwright.core.layout import SCHEDULES, Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.presets import PRESETS
from shardwright.core.run_config import RunConfig
from shardwright.verify.covering import Assignment, Cover, Factor, pairs_of
from shardwright.verify.layouts import plan_layouts, shown_values, small_model
from shardwright.verify.matrix import small_config

FREE = [Factor(name, tuple(range(3)), root=name in "ab") for name in "abcdef"]


def never(assignment: Assignment) -> None:
    return None


def test_every_pair_of_free_factors_is_covered_by_few() -> None:
    found = Cover(FREE, never).compute()
    covered = set().union(*map(pairs_of, found.assignments))
    wanted = {((x, i), (y, j)) for x, y in combinations("abcdef", 2) for i, j in product(range(3), repeat=2)}
    assert covered == wanted and found.num_pairs == len(wanted) and not found.refused
    assert len(found.assignments) <= 18  # of 729; 9 is the least for two factors of three values


def test_what_cannot_be_is_refused_with_the_reason_and_in_no_assignment() -> None:
    def refusal(assignment: Assignment) -> str | None:
        return "a and c are never both 2" if assignment.get("a") == assignment.get("c") == 2 else None

    found = Cover(FREE, refusal).compute()
    assert found.refused == {(("a", 2), ("c", 2)): "a and c are never both 2"}
    assert all(refusal(assignment) is None for assignment in found.assignments)
    assert found.num_pairs == 15 * 9 - 1


def test_a_factor_without_its_condition_is_absent_and_covers_nothing() -> None:
    schedule = Factor("s", ("x", "y"), lambda chosen: chosen["a"] > 0)
    found = Cover([*FREE, schedule], never).compute(required=[{"a": 1, "b": 1, "f": 2}], least=30)
    assert len(found.assignments) == 30 and {"a": 1, "b": 1, "f": 2}.items() <= found.assignments[0].items()
    assert all(("s" in assignment) == (assignment["a"] > 0) for assignment in found.assignments)
    covered = set().union(*map(pairs_of, found.assignments))
    assert {(("b", b), ("s", s)) for b, s in product(range(3), "xy")} <= covered
    assert not found.refused  # (a=0, s=x) has no meaning, which is no refusal


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2-124m", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b"])
def test_a_model_made_small_keeps_its_switches(name: str) -> None:
    if name not in PRESETS:
        pytest.skip(f"no preset {name}")
    model = ModelConfig.load(name)
    small = small_model(model)
    for switch in ("family", "norm", "activation", "position", "tied_head", "qk_norm", "qkv_bias", "attention_sinks"):
        assert getattr(small, switch) == getattr(model, switch), switch
    assert (small.moe is None) == (model.moe is None) and small.num_parameters() < 500_000
    assert (small.num_kv_heads < small.num_heads) == (model.num_kv_heads < model.num_heads)


def test_the_layouts_of_two_ranks_cover_what_two_ranks_can_show(tmp_path: Path) -> None:
    table = {"model": "tiny", "data": {"sources": "synthetic:sentences"}, "train": {"run_dir": str(tmp_path / "run")}}
    small = small_config(RunConfig.of(table), tmp_path)
    plan = plan_layouts(small, most_ranks=2, least=0)
    values = set().union(*map(shown_values, plan.layouts[:-1]))
    assert {f"schedule={name}" for name in SCHEDULES} | {f"zero={stage}" for stage in range(4)} <= values
    assert {"tp=2", "dp=2", "pp=2"} <= values and all(layout.world_size <= 2 for layout in plan.layouts[:-1])
    whole = plan.layouts[-1]
    assert whole.tp == whole.dp == whole.pp == 2, "all axes at once come last, whatever the limit"
    assert "needs 4 ranks, at most 2 are to be started" in plan.refused[(("tp", 2), ("dp", 2))]
    assert len(set(plan.layouts)) == len(plan.layouts) and isinstance(whole, Layout)
