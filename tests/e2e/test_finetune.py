"""A real pretrained model: fine-tuned in two layouts, resumed in the middle, loaded by transformers; answers only."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from e2e.kit import PROJECT
from shardwright.core.run_config import RunConfig
from shardwright.train.loop import train
from shardwright.train.metrics import read_metrics
from shardwright.train.start import RunOptions, prepare_run

STEPS, QUIET = 6, Console(quiet=True)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finetune", PROJECT / "examples" / "finetune.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["finetune"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(shared: Path) -> Path:
    return shared / "data" / "models" / "babyllama-tok105"


@pytest.fixture(scope="module")
def text(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginning of real speeches."""
    path = tmp_path_factory.mktemp("text") / "speeches.txt"
    path.write_text((shared / "data" / "corpora" / "sotu.txt").read_text(encoding="utf-8")[:40_000], encoding="utf-8")
    return path


def test_a_pretrained_model_goes_on_in_another_layout_and_into_transformers(
    example: ModuleType, model: Path, text: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    tuned = example.finetune(model, text, tmp_path, STEPS, 64, QUIET)
    alone = example.run_table(model, text, tmp_path / "alone", 64)
    config = RunConfig.of(alone, [f"train.steps={STEPS}", "train.threads=1"], "microbatches=2,micro_batch=4")
    train(config, prepare_run(config, RunOptions()), RunOptions())
    want = [record["loss"] for record in read_metrics(alone["train"]["run_dir"])]
    assert tuned.losses == pytest.approx(want, rel=1e-5), "one process, without a stop"
    assert max(tuned.losses) < 3.0  # it can spell: one that knows nothing has ln 105 = 4.65
    assert tuned.logit_difference is not None and tuned.logit_difference < 1e-5


def test_conversations_train_on_answers_only(example: ModuleType, model: Path, shared: Path, tmp_path: Path) -> None:
    lines = (shared / "data" / "corpora" / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if len(line) < 240][:40]  # this model reads letters, 256 of them
    talks = tmp_path / "talks.jsonl"
    with talks.open("w", encoding="utf-8") as file:
        for record in map(json.loads, lines):
            roles = (("user", record["question"]), ("assistant", record["answer"]))
            file.write(json.dumps({"messages": [{"role": role, "content": said} for role, said in roles]}) + "\n")
    table: dict[str, Any] = example.run_table(model, talks, tmp_path, 256)
    config = RunConfig.of(table, ["train.steps=2", "train.threads=1"], "micro_batch=4")
    train(config, prepare_run(config, RunOptions()), RunOptions())
    for record in read_metrics(table["train"]["run_dir"]):
        assert 0 < record["tokens"] < 0.7 * 4 * 256, "questions and padding do not count"
