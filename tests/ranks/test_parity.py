"""Data-parallel layouts against one process, byte by byte and value by value; and every mutation turns it red."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from ranks.kit import run_ranks
from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv
from shardwright.model.transformer import Transformer
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.train.step import Trainer
from shardwright.verify.mutate import MUTATIONS
from shardwright.verify.parity import (
    Trace,
    Verification,
    compare,
    dry_step,
    max_rel_diff,
    reference_run,
    trace_steps,
    train_sampler,
    verify,
    whole_batches,
)

STEPS = 3
SMALL_BUCKETS = "bucket_mb=0.01"
BLOCK_BUCKETS = "bucket_mb=0.03"

LLAMA: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip
GPT2 = LLAMA | {
    "family": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "tied_head": True,
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "num_kv_heads": 4,
}  # fmt: skip
QWEN2 = LLAMA | {"family": "qwen2", "qkv_bias": True, "tied_head": True}
QWEN3 = LLAMA | {"family": "qwen3", "qk_norm": True, "head_dim": 12}
DROPOUT = {"dropout": 0.1}

CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "plain": (LLAMA, "dp=2", []),
    "gloo": (LLAMA, "dp=2,comm=gloo", []),
    "gloo, three ranks": (LLAMA, f"dp=3,comm=gloo,{SMALL_BUCKETS}", []),
    "three ranks": (LLAMA, f"dp=3,{SMALL_BUCKETS}", []),
    "accumulation": (LLAMA, "dp=2,microbatches=3,micro_batch=2", []),
    "small buckets": (LLAMA, f"dp=2,microbatches=2,{SMALL_BUCKETS}", []),
    "one bucket": (LLAMA, "dp=2,microbatches=2", ["optim.clip=0"]),
    "a bucket for each block": (LLAMA, f"dp=2,microbatches=2,{BLOCK_BUCKETS}", ["optim.clip=0"]),
    "selective recomputation": (LLAMA | DROPOUT, "dp=2,microbatches=2,recompute=selective", []),
    "full recomputation": (LLAMA | DROPOUT, "dp=2,microbatches=2,recompute=full", []),
    "no recomputation": (LLAMA | DROPOUT, "dp=2,microbatches=2", []),
    "tied": (LLAMA | {"tied_head": True}, f"dp=2,microbatches=2,{SMALL_BUCKETS}", []),
    "gpt2": (GPT2 | DROPOUT, f"dp=2,microbatches=2,{SMALL_BUCKETS}", []),
    "qwen2": (QWEN2, "dp=2,recompute=full", []),
    "qwen3": (QWEN3, "dp=2,microbatches=2", []),
    "frozen": (LLAMA, "dp=2,microbatches=2", ['train.freeze=["embedding.", "blocks.0."]']),
    "frozen, full recomputation": (QWEN2, "dp=2,recompute=full", ['train.freeze=["blocks.1.mlp", "head."]']),
    "crossing documents": (LLAMA, "dp=2", ["data.cross_documents=true"]),
    "adamw in fp64": (LLAMA | DROPOUT, f"dp=2,microbatches=2,precision=fp64,{SMALL_BUCKETS}", ["optim.name=adamw"]),
    "clipped, warm-up": (LLAMA, "dp=2", ["optim.clip=0.05", "optim.warmup_steps=2"]),
    "bf16": (LLAMA, "dp=2,microbatches=2,precision=bf16", []),
    "bf16 on the wire": (LLAMA, f"dp=2,microbatches=2,reduce_dtype=bf16,{SMALL_BUCKETS}", []),
    "fp16 on the wire": (LLAMA, "dp=2,reduce_dtype=fp16", []),
    "four ranks": (LLAMA, "dp=4", []),
    "four ranks, accumulation": (GPT2 | DROPOUT, f"dp=4,microbatches=3,recompute=full,{SMALL_BUCKETS}", []),
    "four ranks, adamw in fp64": (QWEN2, "dp=4,micro_batch=3,precision=fp64", ["optim.name=adamw"]),
}
ADAMW = (LLAMA, "dp=2,microbatches=2", ["optim.name=adamw"])
MUTATED = (LLAMA | DROPOUT, f"dp=2,microbatches=2,{SMALL_BUCKETS}", [])

EXPECTED = {
    "drop-gradient-all-reduce": {"gradients", "parameters", "norm", "replicas", "ledger"},
    "drop-first-bucket": {"gradients", "parameters", "norm", "replicas", "ledger"},
    "local-token-count": {"loss", "gradients", "norm", "replicas", "ledger"},
    "average-gradients": {"gradients", "norm"},
    "reduce-twice": {"gradients", "norm", "ledger"},
    "half-wire": {"gradients", "ledger"},
    "replica-drift": {"replicas"},
    "local-loss": {"loss", "replicas"},
    "own-seed": {"loss", "gradients", "parameters", "norm", "replicas"},
    "reduce-early": {"gradients", "norm", "replicas"},
    "last-micro-batch-only": {"gradients", "parameters", "norm"},
    "decay-all": {"parameters"},
    "one-document": {"loss", "gradients", "parameters", "norm"},
    "own-token-index": {"loss", "gradients", "parameters", "norm"},
}
"""What must be red under each mutation; more may be."""


def make_config(folder: str, model: dict[str, Any], layout: str, sets: list[str]) -> RunConfig:
    table = {
        "model": model,
        "data": {"sources": f"{folder}/documents.jsonl", "seq_len": 48, "cache": f"{folder}/datasets"},
        "optim": {"name": "sgd", "lr": 0.1},
        "train": {"steps": 10, "threads": 1, "run_dir": f"{folder}/run"},
    }
    return RunConfig.of(table, sets, layout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with documents of 1 to 60 words."""
    folder = tmp_path_factory.mktemp("parity")
    rng = random.Random(3)
    words = [rng.choice("bdfgklmnprst") + rng.choice("aeiou") + rng.choice("lmnrst") for _ in range(80)]
    documents = [" ".join(rng.choices(words, k=rng.choice((1, 5, 12, 60)))) for _ in range(300)]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(folder)


@pytest.fixture(scope="module")
def data(folder: str) -> PreparedData:
    return prepare_data(make_config(folder, LLAMA, "dp=1", []))


# ------------------------------------------------------------------------------------------ what the ranks do


def trace_all(env: RankEnv, data: PreparedData, runs: dict[str, tuple[RunConfig, str | None]]) -> dict[str, Trace]:
    """Several runs one after another on the same ranks."""
    return {
        label: trace_steps(Mesh.distributed(config.layout, env.rank), config, data, STEPS, mutation)
        for label, (config, mutation) in runs.items()
    }


def by_run(results: list[dict[str, Trace]]) -> dict[str, list[Trace]]:
    return {label: [found[label] for found in results] for label in results[0]}


@pytest.fixture(scope="module")
def traces(folder: str, data: PreparedData) -> dict[str, list[Trace]]:
    """Run -> the trace of each rank; all runs of one world size share their ranks."""
    runs: dict[str, tuple[RunConfig, str | None]] = {
        label: (make_config(folder, *case), None) for label, case in CASES.items()
    }
    runs["adamw in fp32"] = (make_config(folder, *ADAMW), None)
    runs |= {name: (make_config(folder, *MUTATED), name) for name in MUTATIONS}
    found: dict[str, list[Trace]] = {}
    for world in (2, 3, 4):
        chosen = {label: run for label, run in runs.items() if run[0].layout.world_size == world}
        found |= by_run(run_ranks(trace_all, world, data, chosen))
    return found


def reference(config: RunConfig, data: PreparedData) -> Trace:
    return reference_run(config, whole_batches(train_sampler(config, data, 0)), STEPS)


def verification(config: RunConfig, data: PreparedData, found: list[Trace]) -> Verification:
    return compare(config, found, reference(config, data), [dry_step(config)])


# ------------------------------------------------------------------------------------------ equal to one process


@pytest.mark.parametrize("label", CASES)
def test_a_layout_computes_and_sends_what_it_should(
    label: str, folder: str, data: PreparedData, traces: dict[str, list[Trace]]
) -> None:
    config = make_config(folder, *CASES[label])
    result = verification(config, data, traces[label])
    assert result.passed, result.to_json()
    assert result.predicted.total_bytes == result.dryrun.total_bytes == result.measured.total_bytes > 0


def test_adamw_in_fp32_differs_by_less_than_a_hundredth_of_its_steps(
    folder: str, data: PreparedData, traces: dict[str, list[Trace]]
) -> None:
    """Adam magnifies rounding: a difference counts beside the largest value, or beside what the steps could move."""
    config = make_config(folder, *ADAMW)
    want = reference(config, data)
    movable = config.optim.lr * STEPS
    for name, value in want.parameters.items():
        difference = (traces["adamw in fp32"][0].parameters[name] - value).abs().max().item()
        assert difference <= 1e-2 * max(value.abs().max().item(), movable), name
    assert max_rel_diff(traces["adamw in fp32"][0].gradients[0], want.gradients[0])[0] < 1e-5


def test_ranks_and_micro_batches_have_different_numbers_of_targets_and_documents(
    folder: str, data: PreparedData
) -> None:
    """What the cases above are for would not show with equal shares."""
    config = make_config(folder, *CASES["accumulation"])
    batches = [
        batch for rank in range(2) for step in range(STEPS) for batch in train_sampler(config, data, rank).batches(step)
    ]
    assert len({batch.num_valid for batch in batches}) > 1
    assert len({len(batch.lengths) for batch in batches}) > 1


def differing(first: Trace, second: Trace) -> list[str]:
    """Gradients and parameters that differ in any bit, and losses."""
    pairs = zip((*first.gradients, first.parameters), (*second.gradients, second.parameters), strict=True)
    found = [name for mine, other in pairs for name in mine if not torch.equal(mine[name], other[name])]
    return found + (["loss"] if first.losses != second.losses else [])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("one bucket", "a bucket for each block"),
        ("no recomputation", "full recomputation"),
        ("no recomputation", "selective recomputation"),
    ],
)
def test_bucket_sizes_and_recomputation_change_no_bit(one: str, other: str, traces: dict[str, list[Trace]]) -> None:
    """As long as weights that are multiplied as one stay in one bucket, and on two ranks, whose sum has one order."""
    for first, second in zip(traces[one], traces[other], strict=True):
        assert first.gradients[0].keys() == second.gradients[0].keys()
        assert differing(first, second) == []
    assert differing(traces[one][0], traces["plain"][0])


def test_shared_memory_and_gloo_give_the_same_bits(traces: dict[str, list[Trace]]) -> None:
    for first, second in zip(traces["plain"], traces["gloo"], strict=True):
        assert differing(first, second) == []


@pytest.mark.parametrize("label", ["frozen", "frozen, full recomputation"])
def test_frozen_parameters_keep_every_bit_and_have_no_state(
    label: str, folder: str, traces: dict[str, list[Trace]]
) -> None:
    config = make_config(folder, *CASES[label])
    start = dict(Transformer(config.model, Mesh.solo()).initialise(config.train.seed).named_parameters())
    frozen = {name for name in start if name.startswith(config.train.freeze)}
    assert frozen and frozen != start.keys()
    for trace in traces[label]:
        assert all(torch.equal(trace.parameters[name], start[name]) for name in frozen)
        assert all(
            not torch.equal(trace.parameters[name], value) for name, value in start.items() if name not in frozen
        )
        assert all(step.keys() == start.keys() - frozen for step in trace.gradients)
    trainer = Trainer(config, Mesh.dry(config.layout), "meta")
    assert all(views.keys() == start.keys() - frozen for views in trainer.optimizer.named_state().values())


def test_a_tied_weight_has_one_gradient_from_both_of_its_uses(
    folder: str, data: PreparedData, traces: dict[str, list[Trace]]
) -> None:
    """TE: its one bucket waits for the embedding, the last unit of the backward pass."""
    config = make_config(folder, *CASES["tied"])
    tied = traces["tied"][0]
    assert not any(name.startswith("head.weight") for name in tied.parameters)
    assert tied.gradients[0]["embedding.token.weight"].count_nonzero(dim=1).min() > 0  # every row: the head uses all
    assert traces["plain"][0].gradients[0]["embedding.token.weight"].count_nonzero(dim=1).min() == 0
    buckets = Trainer(config, Mesh.solo()).buckets.buckets
    assert "embedding.token.weight" in [member.name for member in buckets[-1].plan.members]


def test_a_steps_ledger_says_when_each_bucket_was_ready_launched_and_done(traces: dict[str, list[Trace]]) -> None:
    for trace in traces["small buckets"]:
        for ledger in trace.ledgers:
            names = [timing.bucket for timing in ledger.buckets]
            assert names == [f"gradients.{index}" for index in range(len(names))] and len(names) > 2
            assert all(0 < t.ready <= t.launch <= t.end and t.waited >= 0 for t in ledger.buckets)
            launches = [timing.launch for timing in ledger.buckets]
            assert launches == sorted(launches)
            assert ledger.buckets[0].launch < ledger.buckets[-1].ready  # sent while backward goes on
            assert ledger.exposed_tail == sum(timing.waited for timing in ledger.buckets)


# ------------------------------------------------------------------------------------------ red when broken


def red(result: Verification) -> set[str]:
    found = {name for name, comparison in result.comparisons.items() if not comparison.passed}
    return found | ({"ledger"} if result.differences else set())


def test_every_mutation_has_what_it_must_turn_red() -> None:
    assert EXPECTED.keys() == MUTATIONS.keys()


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_turns_it_red(
    name: str, folder: str, data: PreparedData, traces: dict[str, list[Trace]]
) -> None:
    result = verification(make_config(folder, *MUTATED), data, traces[name])
    assert not result.passed
    assert red(result) >= EXPECTED[name], result.to_json()


# ------------------------------------------------------------------------------------------ the command


def test_verify_starts_its_own_ranks_and_takes_sgd_for_adamw_in_fp32(folder: str, data: PreparedData) -> None:
    result = verify(make_config(folder, *ADAMW), steps=1)
    shown = result.to_json()
    assert shown["passed"] and shown["ledger"]["equal"] and shown["parameters"]["tolerance"] == 1e-5
    assert not verify(make_config(folder, *ADAMW), steps=1, mutation="average-gradients").passed
