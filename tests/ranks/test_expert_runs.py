"""Whole training steps of models with experts against one process: every way to place ranks, any routing, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from ranks.runs import Judge, Run, make_config, red, trace_runs, write_documents
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.verify.parity import Trace

MOE = {"num_experts": 4, "top_k": 2, "expert_dim": 24, "aux_coefficient": 0.01}
MODEL: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
    "family": "mixtral", "moe": MOE,
}  # fmt: skip
FP64 = "precision=fp64"

CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "dp=2,ep=2": (MODEL, "dp=2,ep=2,microbatches=2", []),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreparedData]:
    folder = tmp_path_factory.mktemp("experts")
    write_documents(folder)
    return str(folder), prepare_data(make_config(str(folder), MODEL, FP64))


@pytest.fixture(scope="module")
def runs(data: tuple[str, PreparedData]) -> dict[str, Run]:
    return {name: (make_config(data[0], model, f"{layout},{FP64}", sets), None) for name, (model, layout, sets) in CASES.items()}


@pytest.fixture(scope="module")
def traces(data: tuple[str, PreparedData], runs: dict[str, Run]) -> dict[str, list[Trace]]:
    return trace_runs(data[1], runs)


@pytest.fixture(scope="module")
def judge(data: tuple[str, PreparedData]) -> Judge:
    return Judge(data[1])


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_process(name: str, runs: dict[str, Run], traces: dict[str, list[Trace]], judge: Judge) -> None:
    result = judge(runs[name][0], traces[name])
    assert red(result) == set(), (result.to_json(), result.differences[:5])
