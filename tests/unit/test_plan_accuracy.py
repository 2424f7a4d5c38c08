"""Measured rows, errors beside the straw man, and the fit of a stack's constants."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.core.cluster import CHIPS, find_chip
from shardwright.errors import ConfigError
from shardwright.plan import accuracy
from shardwright.plan.accuracy import assess, errors, spearman, straw_man
from shardwright.plan.calibrate import BOUNDS, calibrate, fit, mean_error, predict, simplex
from shardwright.plan.rows import Case, Refused, hardware_flops, read_cases, read_rows, training_cases
from shardwright.plan.serving_rows import read_runs
from shardwright.plan.stack import Stack, default_stack, fit_of, read_tables, serving_stack, stack_of, write_tables
from shardwright.plan.step_time import Pricer


def cases_of(shared: Path, name: str, group: str) -> list[Case]:
    found = read_cases(shared / "planner" / f"{name}.csv")
    return [case for case in found if isinstance(case, Case) and case.group == group]


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_is_its_run(shared: Path) -> None:
    case = cases_of(shared, "a100_multi_node_steps", "A100 multi-node")[0]
    assert case.seconds == pytest.approx(3.5665)
    assert case.model.num_parameters() == pytest.approx(3.6e9, rel=0.02)
    assert case.layout.world_size == case.cluster.world_size == 64
    assert case.layout.global_batch == 512
    assert case.cluster.levels[1].bandwidth == 12.5e9


def test_every_row_is_priced_or_refused_with_a_reason(shared: Path) -> None:
    for name in ("published_runs", "a100_multi_node_steps", "a100_single_node_steps", "serving_latency"):
        path = shared / "planner" / f"{name}.csv"
        found = read_runs(path)
        with path.open() as file:
            assert len(found) == sum(1 for _ in csv.DictReader(file))
        assert all(case.reason for case in found if isinstance(case, Refused))
        if name.startswith("a100"):
            assert not any(isinstance(case, Refused) for case in found)


def test_sc21_flops() -> None:
    """Their own check: 3,072 GPUs at 163 TFLOP/s are 502 PFLOP/s; a step of 3,072 sequences of the 1T model."""
    from shardwright.plan.rows import gpt

    model = gpt(128, 25600, 160, 51200, 2048)
    seconds = hardware_flops(model, 3072, 2048) / (3072 * 163e12)
    assert seconds == pytest.approx(102.6, rel=0.01)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no table of runs"):
        read_cases(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_cases(tmp_path / "none.csv")


# -- figures ---------------------------------------------------------------------------------------


def test_errors_and_ranks() -> None:
    found = errors([1.1, 0.8, 1.0], [1.0, 1.0, 1.0])
    assert found["mape"] == pytest.approx(10)
    assert found["median"] == pytest.approx(10)
    assert found["max"] == pytest.approx(20)
    assert found["bias"] == pytest.approx(-10 / 3)
    assert spearman([1, 2, 3], [10, 20, 30]) == 1
    assert spearman([1, 2, 3], [30, 20, 10]) == -1
    assert spearman([1, 1, 2], [5, 5, 9]) == 1


@pytest.mark.parametrize(
    ("name", "group", "bar"),
    [
        ("published_runs", "SC21 table 1", 5.0),
        ("published_runs", "Korthikanti table 5", 3.5),
        ("published_runs", "DGXC hopper", 5.0),
        ("a100_multi_node_steps", "A100 multi-node", 10.0),
        ("a100_single_node_steps", "A100 single-node", 15.0),
    ],
)
def test_bars(shared: Path, name: str, group: str, bar: float) -> None:
    cases = [case for case in cases_of(shared, name, group) if case.seconds]
    some = cases[:: max(1, len(cases) // 40)]
    assert mean_error(some, stack_of(some[0].stack)) <= bar
    simple = errors(straw_man(some), [case.seconds or 0.0 for case in some])
    assert simple["mape"] > mean_error(some, stack_of(some[0].stack))


def test_figures_of_a_group(shared: Path) -> None:
    cases = cases_of(shared, "published_runs", "FSDP hopper")
    figures = assess(cases)["groups"]["FSDP hopper"]
    assert figures["priced"] == figures["rows"] == 14
    assert figures["mape"] <= 8 < figures["straw_man"]["mape"]
    assert figures["median"] <= figures["p90"] <= figures["max"]
    assert "spearman" not in figures  # no model with several layouts


def test_choices_among_layouts(shared: Path) -> None:
    cases = cases_of(shared, "a100_multi_node_steps", "A100 multi-node")
    cases = [case for case in cases if case.family.startswith("3.6 ")]
    figures = assess(cases)["groups"]["A100 multi-node"]
    assert figures["regret"] <= 2
    assert figures["spearman"] >= 0.85


def test_measured_runs_are_accepted(shared: Path) -> None:
    for case in cases_of(shared, "a100_multi_node_steps", "A100 multi-node"):
        pricer = Pricer(case.model, case.cluster, case.seq, stack_of(case.stack))
        memory = pricer.stage_memory(case.layout)[0]
        assert pricer.margin.device_bytes(memory.total) <= case.cluster.chip.memory_bytes, case.label


def test_runs_out_of_memory_do_not_fit(shared: Path) -> None:
    cases = cases_of(shared, "published_runs", "BLOOM")
    oom = [case for case in cases if case.out_of_memory]
    figures = assess(oom)["groups"]["BLOOM"]["out_of_memory"]
    assert figures["rows"] == 5
    assert figures["refused"] >= 4


def test_the_command_prints_one_object(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (shared / "planner" / "a100_multi_node_steps.csv").open() as file:
        lines = file.readlines()[:5]
    path = tmp_path / "few.csv"
    path.write_text("".join(lines))
    assert accuracy.main([str(path), "--json"]) == 0
    group = json.loads(capsys.readouterr().out)["groups"]["A100 multi-node"]
    assert group["rows"] == group["priced"] == 4
    assert {"mape", "median", "p90", "max", "bias", "straw_man", "regret", "spearman"} <= set(group)
    assert accuracy.main([str(path)]) == 0
    assert "Error of predicted step times" in capsys.readouterr().out
    assert accuracy.main([str(tmp_path / "none.csv")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_family_differs_in_its_layout_only(shared: Path) -> None:
    cases = [case for case in cases_of(shared, "published_runs", "BLOOM") if "fp16" in case.family]
    assert len({case.model.num_heads for case in cases}) == 1
    before = {case.family for case in cases if case.family.endswith("before")}
    assert len(before) == 1
    mixed = {case.model.num_heads for case in cases_of(shared, "published_runs", "BLOOM") if " 176B " in case.family}
    assert mixed == {64, 112, 128}
    for case in cases_of(shared, "published_runs", "BLOOM"):
        if " 176B " in case.family:
            assert f" 176B {case.model.num_heads} " in case.family


NOT_IN_THE_TABLE = """
    fp16 72 14336  64  8  6  8 6 2016 123.57   fp16 72 14336  64  8 12  4 4 1568  92.75   fp16 72 14336  64 8 12 4 2 1568  99.93
    fp16 72 14336  64  8 12  4 2 2048 128.82   fp16 72 14336  64  8  8  6 4 2016 113.16   fp16 72 14336  64 4 12 8 4 2048 111.89
    fp16 72 14336  64  4  6 16 2 2048 111.71   fp16 72 14336  64  2 12 16 2 2048 112.50   fp16 72 14336  64 4 24 4 1 2048 130.60
    fp16 96 12288  64  1 48  8 1 2048 142.17   fp16 78 13824  64  4 12  8 1 2048 148.24   fp16 78 13824  64 4 12 8 2 2048 103.51
    fp16 78 13824  96  4 12  8 2 2048 107.12   fp16 78 13824 128  4 12  8 2 2048 147.41   fp16 78 13824  64 4 12 8 4 2048 106.72
    fp16 78 13824  96  4 12  8 4 2048 110.31   fp16 78 13824 128  4 12  8 4 2048 153.90   fp16 78 13824  96 8  6 8 4 2048 118.12
    fp16 78 13824 128  8  6  8 4 2048 156.84   fp16 72 14336 128  4 12  8 2 2048 114.02   fp16 72 14336 128 4 12 8 4 2048 137.53
    fp16 72 14336 128  8  6  8 4 2048 116.06   fp16 84 13312  64  4 12  8 2 2048 103.82   fp16 84 13312  64 4 12 8 4 2048 113.21
    fp16 84 13312  64  8  6  8 2 2048 129.61   fp16 78 13824  96  4 12  8 2  512  35.77   fp16 78 13824  96 4 12 8 2 1024  59.65
    fp16 78 13824  96  4 12  8 2 1536  83.11   fp16 78 13824  96  8  6  8 2 2048 133.57   fp16 78 13824  96 4  6 16 4 2048 115.55
    bf16 106 12288 64  4 12  8 2 2048 116.54   bf16 106 12288 96  4 12  8 2 2048 118.79   bf16 106 12288 128 4 12 8 2 2048 121.42
    bf16 106 12288 96  4 12  8 4 2048 120.34   bf16 82 13312  64  8 12  4 4 2048 111.79   bf16 82 13312 104 4 12 8 2 2048 123.71
    bf16 82 13312 128  4 12  8 2 2048 108.78   bf16 82 13312  64  4 12  8 4 2048 104.82   bf16 70 14336 128 4 12 8 2 2048 105.89
    fp16 72 14336  64  4 12  8 2 2048 113.54   fp16 72 14336  64  4 12  8 2 2048 110.42   fp16 72 14336  64 8  6 8 4 2048 113.95
    fp16 78 13824  96  8  6  8 4 2048 118.24   fp16 106 12288 96  4 12  8 2 2048 112.69   fp16 106 12288 64 4 12 8 2 2048 110.96
"""
"""All runs of BigScience's chronicles-prequel (384 A100) after its NUMA settings were mended that the table does not have:
precision, layers, width, heads, tp, pp, dp, micro-batch, batch, seconds of the second step. No constant was fitted on them."""


def test_steps_that_nothing_was_fitted_on(shared: Path) -> None:
    path = shared / "planner" / "published_runs.csv"
    rows = [row for row in read_rows(path) if "chronicles-prequel" in row["source"] and row["tokens_per_s_per_gpu"]]
    like = {precision: next(row for row in rows if row["precision"] == precision) for precision in ("fp16", "bf16")}
    names = ("precision", "layers", "hidden", "heads", "tp", "pp", "dp", "micro_batch", "global_batch")
    words = NOT_IN_THE_TABLE.split()
    found = []
    for run in (words[place : place + 10] for place in range(0, len(words), 10)):
        (case,) = training_cases(path, [like[run[0]] | dict(zip(names, run, strict=False))])
        assert isinstance(case, Case), case
        work = case.model.num_parameters() * case.layout.global_batch
        found.append((predict(case, stack_of(case.stack), exact=True) / work, float(run[-1]) / work))
    said, real = zip(*found, strict=True)
    assert len(found) == 45
    assert errors(said, real)["median"] <= 4
    assert errors(said, real)["mape"] <= 5.5
    assert spearman(said, real) >= 0.7


# -- constants -------------------------------------------------------------------------------------


def test_the_simplex_finds_a_minimum() -> None:
    point = simplex(lambda x: (x[0] - 1) ** 2 + abs(x[1] + 2), [0.0, 0.0], 200)
    assert point == pytest.approx([1, -2], abs=1e-2)


def test_a_fit_finds_the_constants_behind_synthetic_runs(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.plan.calibrate.ROUNDS", 20)
    cases = cases_of(shared, "published_runs", "SC21 table 1")
    right = Stack(flash=False, gemm_bf16=0.62, fused=1.3, dp_overlap=0.0)
    made = [replace(case, seconds=predict(case, right)) for case in cases]
    found = fit(made[:4], replace(right, gemm_bf16=0.8), ["gemm_bf16"], rounds=25)
    assert found.gemm_bf16 == pytest.approx(0.62, rel=0.05)
    assert mean_error(made, found) < 2
    result = calibrate(made[:4], replace(right, gemm_bf16=0.65), ["gemm_bf16"])
    assert result.rows == 4
    assert result.held_out_mape < 2


def test_a_fit_leads_away_from_nothing(shared: Path) -> None:
    cases = cases_of(shared, "published_runs", "SC21 table 1")[:4]
    right = Stack(flash=False, message=2e-3)
    made = [replace(case, seconds=predict(case, right)) for case in cases]
    found = fit(made, replace(right, message=0.0), ["message"], rounds=25)
    assert found.message == pytest.approx(2e-3, rel=0.1)


def test_every_stack_has_a_source_and_constants_within_bounds() -> None:
    tables = read_tables()
    for name in tables:
        stack, found = stack_of(name, tables), fit_of(name)
        assert found.source
        assert found.rows > 0
        assert found.held_out_mape > 0
        assert bool(found.memory_fields) == (found.memory_rows > 0) == (found.held_out_memory_mape > 0)
        for field in (*found.fields, *found.memory_fields):
            low, high = BOUNDS[field]
            assert low * 0.999 <= getattr(stack, field) <= high * 1.001, (name, field)
    for chip in CHIPS.values():
        assert default_stack(chip).flash
        assert serving_stack(chip).burst > 0


def test_tables_are_written_as_they_are_read(tmp_path: Path) -> None:
    import tomllib

    tables = read_tables()
    assert tomllib.loads(write_tables(tables)) == tables
    with pytest.raises(ConfigError, match="no software stack 'nemo'"):
        stack_of("nemo")
    with pytest.raises(ConfigError, match=r"unknown constant 'gem_bf16'; did you mean 'gemm_bf16'"):
        stack_of("x", {"x": {"gem_bf16": 1.0}})
    assert default_stack(find_chip("tpu-v5e")) == Stack()
