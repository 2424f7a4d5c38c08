"""A model with experts from its run file to text: what it shows of them, and that a resumed run goes on bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tomli_w
import torch

from e2e.kit import PROJECT, read_jsonl, sets, shardwright
from shardwright.checkpoint.hf import load_hf
from shardwright.train.experts import read_experts

MODEL = {
    "family": "deepseek_v3", "vocab_size": 320, "dim": 32, "num_layers": 2, "num_heads": 2, "ffn_dim": 48, "max_positions": 64,
    "mla": {"kv_lora_rank": 12, "q_lora_rank": 10, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 8},
    "moe": {
        "num_experts": 8, "top_k": 2, "expert_dim": 16, "num_shared_experts": 1, "first_dense_layers": 1, "groups": 4,
        "top_groups": 2, "score": "sigmoid", "bias_correction": True, "routed_scale": 2.5,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    table = {
        "layout": "micro_batch=2,moe=capacity:1.25:reroute",
        "model": MODEL,
        "data": {"sources": "synthetic:sentences", "seq_len": 32, "cache": str(folder / "datasets")},
        "optim": {"lr": 3e-3},
        "router": {"bias_rate": 0.01, "jitter": 0.02, "z_loss": 1e-3},
        "train": {"steps": 4, "save_every": 2, "threads": 1, "peak_tflops": 1.0, "run_dir": str(folder / "run")},
    }
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    return path


def test_a_resumed_run_goes_on_bit_for_bit_with_its_biases(run_file: Path) -> None:
    first = shardwright("train", str(run_file))
    assert first.code == 0, first
    assert "experts" in first.out and "Tokens of each expert" in first.out
    run = run_file.parent / "run"
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(record["aux_loss"] > 0 and record["rerouted_share"] > 0 for record in records)
    experts = read_experts(run)
    assert experts is not None and experts["layers"] == [1] and sum(experts["last"][0]) == 4 * 64 * 2
    whole = load_hf(run / "checkpoints" / "step-4")[1]
    bias = whole["blocks.1.moe.router.correction"]
    assert bias.dtype == torch.float32 and bias.any()

    again = run_file.parent / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "step-4")
    more = shardwright("train", str(run_file), "--resume", "auto", *sets(train__run_dir=again))
    assert more.code == 0, more
    repeated = read_jsonl(again / "metrics.jsonl")
    assert [record["loss"] for record in repeated] == [record["loss"] for record in records]
    for name, value in load_hf(again / "checkpoints" / "step-4")[1].items():
        assert torch.equal(value, whole[name]), name


def test_text_from_it(run_file: Path) -> None:
    checkpoint = run_file.parent / "run" / "checkpoints" / "step-4"
    if not checkpoint.is_dir():
        pytest.skip("the run of the test before did not end")
    text = shardwright("generate", str(checkpoint), "--prompt", "The", "--max-tokens", "8", "--json").json()
    assert text["tokens"]


def test_the_example_is_a_run_file() -> None:
    example = str(PROJECT / "examples" / "tiny-moe.toml")
    refused = shardwright("train", example, "--layout", "moe=capacity:0")
    assert refused.code == 2 and "use dropless or a capacity above 0" in refused.err
