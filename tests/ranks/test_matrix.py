"""A matrix of layouts on real ranks: answers are kept, resumed and shown; mutations are told by the check that is red."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.verify import broken
from shardwright.verify import matrix as module
from shardwright.verify.broken import BASES, FAMILIES, Breakages, Caught, break_everything
from shardwright.verify.layouts import Plan
from shardwright.verify.matrix import Matrix, Row, Runner, code_hash, verify_matrix
from shardwright.verify.mutate import known_mutations
from shardwright.verify.page import breakage_table, matrix_table, write_page

LAYOUTS = [Layout.parse(text) for text in ("dp=1", "tp=2,recompute=full", "pp=2,schedule=zb_v,microbatches=3,precision=fp64")]
CHOSEN = (Plan(LAYOUTS, 3, {(("tp", 4), ("dp", 4)): "needs 16 ranks"}),)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("matrix")
    table = {
        "model": {"preset": "tiny", "tied_head": True, "qkv_bias": True},
        "data": {"sources": "synthetic:sentences"},
        "train": {"run_dir": str(folder / "run"), "timeout_s": 30},
    }
    return RunConfig.of(table)


@pytest.fixture(scope="module")
def matrix(config: RunConfig) -> Matrix:
    folder = Path(config.train.run_dir).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "plan_layouts", lambda *args: CHOSEN[0])
        patch.setattr(module, "small_model", lambda model, layers: small(model, 4))
        first = verify_matrix(config, folder, 1)
        with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"key": "torn')
        seen: list[Row | str] = []
        again = verify_matrix(config, folder, 1, on_row=lambda done, total, row: seen.append(row))
    assert [row.kept for row in again.rows] == [True] * len(LAYOUTS) and seen[1:] == again.rows
    assert again.seconds < first.seconds
    return first


small = module.small_model


def test_every_layout_passes_and_is_kept_line_by_line(matrix: Matrix, config: RunConfig) -> None:
    assert matrix.passed and [row.ranks for row in matrix.rows] == [1, 2, 2]
    lines = (Path(config.train.run_dir).parent / "results.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines[: len(LAYOUTS)]]
    assert {row["layout"] for row in kept} == {str(layout) for layout in LAYOUTS}
    predicted, dry, measured = matrix.rows[1].bytes["tp"]
    assert predicted == dry == measured > 0 and "pp" in matrix.rows[2].bytes


def test_the_answer_has_the_keys_of_one_verification(matrix: Matrix) -> None:
    answer = json.loads(json.dumps(matrix.to_json()))
    assert answer["passed"] and answer["ledger"]["equal"] and answer["worst"]
    for name in ("loss", "gradients", "parameters"):
        assert 0 < answer[name]["max_rel_diff"] <= answer[name]["tolerance"]
    assert answer["refused_pairs"] == [{"pair": ["tp=4", "dp=4"], "reason": "needs 16 ranks"}]
    assert len(answer["layouts"]) == len(LAYOUTS) == matrix_table(matrix).title.count("3") * 3  # type: ignore[union-attr]


def test_the_page_shows_each_layout_what_was_sent_and_the_pairs(matrix: Matrix, tmp_path: Path) -> None:
    failed = Row("k", "dp=2", 2, False, 0.0, error="rank 1 <failed>")
    write_page(Matrix("a & b", [*matrix.rows, failed], matrix.plan, 1.0), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "3 of 4 layouts" in text and "a &amp; b" in text and "rank 1 &lt;failed&gt;" in text
    assert all(str(layout) in text for layout in LAYOUTS) and text.count("<svg") == 2
    assert "schedule=zb_v" in text and "<script" not in text


def test_a_change_of_code_or_configuration_is_run_again(config: RunConfig) -> None:
    keys = {module._key(code, config.model_copy(update={"layout": layout}), steps)
            for code in (code_hash(), "other") for layout in LAYOUTS for steps in (1, 3)}  # fmt: skip
    assert len(keys) == 2 * 3 * 2
    other = config.model_copy(update={"train": config.train.model_copy(update={"run_dir": "elsewhere"})})
    assert module._key("c", config, 1) == module._key("c", other, 1)


def test_after_an_error_the_rest_is_run_on_new_ranks(config: RunConfig, matrix: Matrix) -> None:
    """A layout that the ranks cannot run is an answer too."""
    one = module.small_config(config, Path(config.train.run_dir).parent, 2)
    data = module.prepare_data(one)
    configs = [one.model_copy(update={"layout": Layout.parse(text)}) for text in ("dp=2", "dp=2,tp=1,comm=gloo")]
    beyond = one.model_copy(update={"model": one.model.model_copy(update={"vocab_size": 40}), "layout": configs[0].layout})
    answers: dict[int, object] = {}
    runner = Runner(data, 1, 30.0)
    runner.run([configs[0], beyond, configs[1]], [None] * 3, lambda index, answer, seconds: answers.update({index: answer}))
    assert [isinstance(answers[index], str) for index in range(3)] == [False, True, False]
    assert "vocabulary" in str(answers[1])


def test_every_mutation_has_a_layout_and_every_exception_is_one() -> None:
    names = [name for family, _ in FAMILIES for name in family]
    assert sorted(names) == sorted(known_mutations()) and len(names) >= 25 and BASES.keys() <= set(names)


def test_mutations_are_caught_and_it_is_said_by_what(config: RunConfig) -> None:
    names = ("reuse-seed", "skip-loss-scale", "shift-positions", "drop-loss-weight", "swap-tp-ranks", "skip-clip")
    found = break_everything(config, Path(config.train.run_dir).parent, 2, names=names)
    caught = {one.name: set(one.caught_by) for one in found.caught}
    assert found.passed and caught.keys() == set(names) and not found.unsound
    assert "ledger" not in caught["swap-tp-ranks"] and "loss" not in caught["skip-loss-scale"] >= {"gradients", "norm"}
    assert {"loss", "gradients"} <= caught["drop-loss-weight"] and "gradients" in caught["shift-positions"]
    assert json.dumps(found.to_json()) and breakage_table(found).row_count == len(names)


def test_a_mutation_whose_ranks_end_with_an_error_is_not_caught(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be its own code that fails, or a rank that was late."""
    error = "rank 1 failed: AttributeError: 'Trainer' object has no attribute 'executor'\nTraceback"

    class Ends:
        def __init__(self, *given: object) -> None:
            pass

        def run(self, configs: Any, names: list[str | None], done: Any) -> None:
            for index, name in enumerate(names):
                passed = {"loss": SimpleNamespace(passed=name is None)}
                done(index, error if name == "reduce-early" else SimpleNamespace(comparisons=passed, differences=[]), 0.0)

    monkeypatch.setattr(broken, "Runner", Ends)
    found = break_everything(config, Path(config.train.run_dir).parent, 2, names=("reduce-early", "own-seed"))
    assert not found.passed and not found.unsound and found.stopped == ["reduce-early"]
    assert (found.to_json()["missed"], found.to_json()["stopped"]) == (["reduce-early"], ["reduce-early"])
    table = breakage_table(found)
    assert table.title == "2 kinds of defects, one at a time, 1 ended by an error"
    assert f"nothing: {error.splitlines()[0]}" in [str(cell) for cell in table.columns[3].cells]


def test_a_mutation_that_nothing_catches_or_an_unsound_layout_fails() -> None:
    one = Caught("a", "b", "dp=2", ["loss"], 0.0)
    assert Breakages([one], {}, {}, 0.0).passed
    missed = Breakages([one, Caught("c", "d", "dp=2", [], 0.0)], {}, {}, 0.0)
    assert not missed.passed and missed.to_json()["missed"] == ["c"]
    assert not Breakages([one], {"dp=2": ["loss"]}, {}, 0.0).passed and not Breakages([], {}, {"a": "no"}, 0.0).passed
