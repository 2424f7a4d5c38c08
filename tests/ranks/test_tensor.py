"""Tensor and sequence parallelism on the own model, against one process: value by value, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest

from ranks.runs import Run, make_config, red, trace_runs, verification, write_documents
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.verify.mutate import TENSOR_MUTATIONS
from shardwright.verify.parity import Trace

LLAMA: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip
ODD = LLAMA | {"vocab_size": 321, "ffn_dim": 49, "tied_head": False}
SIX = ODD | {"dim": 36, "num_heads": 6, "num_kv_heads": 3, "head_dim": 6}
FOUR = LLAMA | {"num_kv_heads": 4}
GPT2 = FOUR | {
    "family": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "tied_head": True,
    "qkv_bias": True, "out_bias": True, "mlp_bias": True,
}  # fmt: skip
QWEN2 = LLAMA | {"family": "qwen2", "qkv_bias": True, "tied_head": True}
QWEN3 = LLAMA | {"family": "qwen3", "qk_norm": True, "head_dim": 12}
ONE_KV = LLAMA | {"num_kv_heads": 1}
DROPOUT = {"dropout": 0.1}
FP64, OFF, CHUNKS = "precision=fp64", "sp=off", "tp_overlap=3"
ODD_TOKENS = "data.seq_len=47"

CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "llama": (LLAMA, f"tp=2,{FP64}", []),
    "llama, sp off": (LLAMA, f"tp=2,{OFF},{FP64}", []),
    "llama in fp32": (LLAMA, "tp=2", []),
    "llama in fp32, sp off": (LLAMA, f"tp=2,{OFF}", []),
    "adamw": (LLAMA | DROPOUT, f"tp=2,{FP64}", ["optim.name=adamw"]),
    "one kv head": (ONE_KV, f"tp=2,{FP64}", []),
    "one kv head, sp off": (ONE_KV, f"tp=2,{OFF},{FP64}", []),
    "one kv head with qk norm, sp off": (QWEN3 | {"num_kv_heads": 1}, f"tp=2,{OFF},{FP64}", []),
    "qwen2, recompute": (QWEN2, f"tp=2,recompute=full,{FP64}", []),
    "qwen2, sp off": (QWEN2, f"tp=2,{OFF},{FP64}", []),
    "qwen3, selective": (QWEN3, f"tp=2,recompute=selective,{FP64}", []),
    "qwen3, sp off": (QWEN3, f"tp=2,{OFF}", []),
    "gpt2": (GPT2 | DROPOUT, f"tp=2,microbatches=2,{FP64}", []),
    "gpt2, sp off": (GPT2 | DROPOUT, f"tp=2,{OFF},recompute=full,{FP64}", []),
    "gpt2 with a head of its own": (GPT2 | {"tied_head": False}, f"tp=2,recompute=selective,{FP64}", []),
    "odd vocabulary and channels": (ODD, f"tp=2,{FP64}", []),
    "odd and tied, sp off": (ODD | {"tied_head": True}, f"tp=2,{OFF},{FP64}", []),
    "odd tokens": (LLAMA | DROPOUT, f"tp=2,micro_batch=3,{FP64}", [ODD_TOKENS]),
    "odd tokens, sp off": (LLAMA | DROPOUT, f"tp=2,micro_batch=3,{OFF},{FP64}", [ODD_TOKENS]),
    "crossing documents": (LLAMA, f"tp=2,micro_batch=2,{FP64}", ["data.cross_documents=true"]),
    "clipped": (GPT2, f"tp=2,{FP64}", ["optim.clip=0.05"]),
    "frozen": (LLAMA, f"tp=2,{FP64}", ['train.freeze=["embedding.", "blocks.0.", "blocks.1.attention.k"]']),
    "frozen, sp off": (GPT2, f"tp=2,{OFF},recompute=full,{FP64}", ['train.freeze=["blocks.1.mlp", "blocks.0.attention"]']),
    "small buckets": (QWEN3, f"tp=2,bucket_mb=0.01,{FP64}", []),
    "overlap": (LLAMA, f"tp=2,{CHUNKS},{FP64}", [ODD_TOKENS]),
    "overlap, sp off": (LLAMA, f"tp=2,{OFF},{CHUNKS},{FP64}", [ODD_TOKENS]),
    "overlap, recompute": (GPT2 | DROPOUT, f"tp=2,{CHUNKS},recompute=full", []),
    "loss in chunks": (ODD, f"tp=2,{FP64}", ["train.loss_chunk=13"]),
    "loss in chunks, sp off": (GPT2, f"tp=2,{OFF},recompute=full,{FP64}", ["train.loss_chunk=13"]),
    "loss in chunks, frozen head": (LLAMA, "tp=2", ["train.loss_chunk=13", 'train.freeze=["head.weight"]']),
    "three ranks": (SIX, f"tp=3,{FP64}", []),
    "three ranks, odd tokens": (SIX | DROPOUT, f"tp=3,recompute=selective,{CHUNKS},{FP64}", [ODD_TOKENS]),
    "three ranks, sp off": (SIX | {"tied_head": True}, f"tp=3,{OFF},{CHUNKS}", []),
    "four ranks": (GPT2 | {"vocab_size": 321}, f"tp=4,{FP64}", []),
    "four ranks, sp off": (FOUR, f"tp=4,{OFF}", []),
    "four ranks, one kv head": (QWEN3 | {"num_kv_heads": 1}, f"tp=4,{FP64}", [ODD_TOKENS]),
    "tp x dp": (QWEN2 | DROPOUT, f"tp=2,dp=2,microbatches=2,{FP64}", [ODD_TOKENS]),
    "tp x dp, sp off": (GPT2 | DROPOUT, f"tp=2,dp=2,microbatches=2,micro_batch=2,{OFF},recompute=full", []),
    "tp x dp, small buckets": (LLAMA, "tp=2,dp=2,microbatches=3,bucket_mb=0.01", ["train.loss_chunk=20"]),
}

ON, PLAIN = (GPT2, "tp=2", []), (GPT2, f"tp=2,{OFF}", [])
VALUES = {"loss", "gradients", "parameters", "norm"}
BROKEN: dict[tuple[str, str], set[str]] = {
    ("drop-embedding", "on"): VALUES | {"ledger"},
    ("drop-embedding", "off"): VALUES | {"ledger"},
    ("drop-attention-out", "on"): VALUES | {"ledger"},
    ("drop-attention-out", "off"): VALUES | {"ledger"},
    ("drop-mlp-out", "on"): VALUES | {"ledger"},
    ("drop-mlp-out", "off"): VALUES | {"ledger"},
    ("drop-attention-in-gradient", "on"): {"gradients", "parameters", "norm", "ledger"},
    ("drop-attention-in-gradient", "off"): {"gradients", "parameters", "norm", "replicas", "ledger"},
    ("drop-mlp-in-gradient", "on"): {"gradients", "parameters", "norm", "ledger"},
    ("drop-mlp-in-gradient", "off"): {"gradients", "parameters", "norm", "replicas", "ledger"},
    ("drop-attention-in-again", "on"): {"gradients", "parameters", "norm", "ledger"},
    ("drop-mlp-in-again", "on"): {"gradients", "parameters", "norm", "ledger"},
    ("drop-loss-maximum", "on"): {"loss", "gradients", "ledger"},
    ("drop-loss-denominator", "on"): {"loss", "gradients", "ledger"},
    ("drop-loss-target", "off"): {"loss", "ledger"},
    ("drop-head-gradient", "on"): {"gradients", "parameters", "norm", "ledger"},
    ("drop-head-gradient", "off"): {"gradients", "parameters", "norm", "replicas", "ledger"},
    ("drop-norm", "on"): {"norm", "ledger"},
    ("drop-tp-gradients", "on"): {"gradients", "parameters", "norm", "replicas", "ledger"},
    ("bias-before-the-sum", "on"): {"gradients", "parameters", "norm"},
    ("bias-before-the-sum", "off"): {"gradients", "parameters", "norm"},
    ("norm-counts-copies", "on"): {"norm"},
    ("norm-counts-copies", "off"): {"norm"},
}
"""(mutation, sequence parallelism) -> what must be red; more may be."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tensor")
    write_documents(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(folder: str) -> PreparedData:
    return prepare_data(make_config(folder, LLAMA, "dp=1"))


@pytest.fixture(scope="module")
def traces(folder: str, data: PreparedData) -> dict[str, list[Trace]]:
    runs: dict[str, Run] = {label: (make_config(folder, *case), None) for label, case in CASES.items()}
    for name, sequence in BROKEN:
        runs[f"{name} {sequence}"] = (make_config(folder, *(ON if sequence == "on" else PLAIN)), name)
    return trace_runs(data, runs)


@pytest.mark.parametrize("label", CASES)
def test_a_layout_computes_and_sends_what_it_should(
    label: str, folder: str, data: PreparedData, traces: dict[str, list[Trace]]
) -> None:
    config = make_config(folder, *CASES[label])
    result = verification(config, data, traces[label])
    assert result.passed, result.to_json()
    assert result.predicted.total_bytes == result.dryrun.total_bytes == result.measured.total_bytes > 0


def test_every_mutation_of_tensor_parallelism_has_what_it_must_turn_red() -> None:
    assert {name for name, _ in BROKEN} == TENSOR_MUTATIONS.keys()


@pytest.mark.parametrize(("name", "sequence"), BROKEN)
def test_every_mutation_turns_it_red(
    name: str, sequence: str, folder: str, data: PreparedData, traces: dict[str, list[Trace]]
) -> None:
    result = verification(make_config(folder, *(ON if sequence == "on" else PLAIN)), data, traces[f"{name} {sequence}"])
    assert not result.passed
    assert red(result) >= BROKEN[name, sequence], result.to_json()
