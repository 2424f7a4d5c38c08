"""Whole training steps of models with experts against one process: wherever the experts are, however uneven the routing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ranks.runs import Judge, Run, make_config, red, trace_runs
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.verify.mutate_experts import EXPERT_MUTATIONS
from shardwright.verify.parity import Trace, dry_steps, first_of_each_stage

MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "expert_dim": 24, "aux_coefficient": 0.05}
MODEL: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
    "family": "mixtral", "moe": MOE,
}  # fmt: skip
ONE = MODEL | {"moe": MOE | {"num_experts": 8, "top_k": 1, "normalise_top_k": False}}
THREE = MODEL | {"moe": MOE | {"num_experts": 8, "top_k": 3}}
FOUR = MODEL | {"moe": MOE | {"num_experts": 8, "top_k": 4}}
PLACED = MODEL | {"position": "learned"}
"""Equal words have different scores: where scores are equal, rounding would decide which of them an expert keeps."""
DEEP = MODEL | {"num_layers": 4}
DEEPSEEK = MODEL | {
    "family": "deepseek_v3", "num_layers": 3, "num_kv_heads": 4,
    "mla": {"kv_lora_rank": 16, "q_lora_rank": 12, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6},
    "moe": MOE | {
        "num_experts": 8, "groups": 4, "top_groups": 2, "score": "sigmoid", "bias_correction": True, "routed_scale": 2.5,
        "num_shared_experts": 1, "dense_layers": (1,),
    },
}  # fmt: skip
FP64 = "precision=fp64"
BY_SCORE = ["router.drop_by=probability"]

CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "data parallel, whole experts": (MODEL, "dp=2,microbatches=2", []),
    "recomputed": (MODEL, "dp=2,microbatches=2,recompute=full", []),
    "two ranks": (MODEL, "dp=2,ep=2,microbatches=2", []),
    "k=1": (ONE, "dp=2,ep=2", []),
    "k=3": (THREE, "dp=2,ep=2,microbatches=2,micro_batch=2", []),
    "tokens once": (FOUR, "dp=2,ep=2,ep_deduplicate=on", []),
    "halves": (FOUR, "dp=2,ep=2,ep_overlap=on,microbatches=2,recompute=full", []),
    "halves once": (FOUR, "dp=2,ep=2,ep_overlap=on,ep_deduplicate=on,recompute=full", []),
    "deepseek": (DEEPSEEK, "dp=2,ep=2,microbatches=2,recompute=full", []),
    "zero-1": (MODEL, "dp=2,ep=2,zero=1", []),
    "zero-2": (MODEL, "dp=2,ep=2,zero=2,accumulate=reduce,microbatches=2", []),
    "zero-3": (DEEPSEEK, "dp=2,ep=2,zero=3,microbatches=2", []),
    "zero-3, whole experts": (MODEL, "dp=2,zero=3,recompute=full", []),
    "tensor parallel": (MODEL, "tp=2,ep=2,microbatches=2", []),
    "tensor parallel, whole experts": (MODEL, "tp=2", []),
    "tensor parallel, padding": (THREE, "tp=2,ep=2,ep_deduplicate=on", ["data.seq_len=47"]),
    "tensor parallel deepseek": (DEEPSEEK, "tp=2,ep=2,microbatches=2", []),
    "capacity": (MODEL, "dp=2,ep=2,micro_batch=2,moe=capacity:1.0", []),
    "capacity over tp": (MODEL, "tp=2,ep=2,micro_batch=2,moe=capacity:0.8", []),
    "reroute over tp": (THREE, "tp=2,ep=2,micro_batch=2,moe=capacity:1.0:reroute,recompute=full", []),
    "by score over tp": (PLACED, "tp=2,ep=2,micro_batch=2,moe=capacity:1.0", BY_SCORE),
    "by sequence": (MODEL, "tp=2,ep=2,micro_batch=2", ["router.balance=sequence", "router.z_loss=0.01"]),
    "whole batch": (MODEL, "dp=2,ep=2", ["router.balance=global", "router.z_loss=0.01"]),
    "pipeline": (MODEL, "pp=2,microbatches=3", []),
    "V-shaped pipeline": (DEEP, "pp=2,schedule=zb_v,microbatches=4", []),
    "context parallel": (DEEPSEEK, "cp=2,ep=2,microbatches=2", []),
    "capacity over cp": (MODEL, "cp=2,ep=2,micro_batch=2,moe=capacity:0.8", ["router.balance=sequence"]),
    "frozen experts": (MODEL, "dp=2,ep=2,zero=3", ["train.freeze=['blocks.0.moe.experts']"]),
    "four ranks": (FOUR, "dp=4,ep=4", []),
    "copies": (MODEL, "dp=4,ep=2", []),
    "copies in shards": (MODEL, "dp=4,ep=2,zero=3,microbatches=2", []),
    "copies in shards of replicas": (MODEL, "dp=4,zero=1,dp_replicate=2", []),
    "over tp and dp": (FOUR, "tp=2,dp=2,ep=4,microbatches=2,ep_deduplicate=on,ep_overlap=on", []),
    "over tp, copies over dp": (DEEPSEEK, "tp=2,dp=2,ep=2,zero=1,moe=capacity:1.25:reroute", []),
    "over tp and dp, shards": (MODEL, "tp=2,dp=2,zero=3,moe=capacity:1.25", []),
    "over cp and dp": (MODEL, "cp=2,dp=2,ep=4,zero=1,moe=capacity:1.0:reroute", []),
    "over cp and tp": (FOUR, "cp=2,tp=2,ep=4,cp_kind=ulysses,ep_deduplicate=on", ["data.seq_len=47"]),
    "under a pipeline": (DEEP, "pp=2,dp=2,ep=2,schedule=interleaved,virtual=2,microbatches=4,recompute=full", []),
}
SINGLE = {"single precision": (MODEL, "dp=2,ep=2,microbatches=2", list[str]())}
HALF: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "bf16, two ranks": (MODEL, "dp=2,ep=2,microbatches=2,precision=bf16", []),
    "bf16, recomputed": (FOUR, "dp=2,ep=2,ep_deduplicate=on,ep_overlap=on,recompute=full,precision=bf16", []),
    "bf16, tensor parallel": (MODEL, "tp=2,ep=2,microbatches=2,precision=bf16", []),
    "bf16, padding": (THREE, "tp=2,ep=2,precision=bf16", ["data.seq_len=47"]),
    "bf16, pipeline": (MODEL, "pp=2,microbatches=3,precision=bf16", []),
    "bf16, deepseek": (DEEPSEEK, "cp=2,ep=2,microbatches=2,precision=bf16", []),
    "bf16, capacity": (MODEL, "dp=2,ep=2,micro_batch=2,moe=capacity:1.0,precision=bf16", []),
    "bf16 on the wire": (THREE, "dp=2,ep=2,zero=2,micro_batch=2,reduce_dtype=bf16", []),
}
"""Where rounding may send a token to another expert than in one process, which then follows."""


def write_skewed_text(folder: Path) -> None:
    """Long documents, 19 of 20 words the same: nearly all tokens go to the same experts, and some get none."""
    rng = random.Random(7)
    words = [first + second + last for first in "bdfgkmnprs" for second in "aeiou" for last in "ntx"]
    texts = [" ".join("la" if rng.random() < 0.95 else rng.choice(words) for _ in range(300)) for _ in range(80)]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreparedData]:
    folder = tmp_path_factory.mktemp("experts")
    write_skewed_text(folder)
    return str(folder), prepare_data(make_config(str(folder), MODEL, FP64))


@pytest.fixture(scope="module")
def runs(data: tuple[str, PreparedData]) -> dict[str, Run]:
    found: dict[str, Run] = {}
    for name, (model, layout, sets) in (CASES | SINGLE).items():
        precision = "precision=fp32" if name in SINGLE else FP64
        found[name] = make_config(data[0], model, f"{layout},{precision}", sets), None
    for name, (model, layout, sets) in HALF.items():
        found[name] = make_config(data[0], model, layout, sets), None
    for mutation, case in BROKEN.items():
        found[mutation] = found[case][0], mutation
    return found


@pytest.fixture(scope="module")
def traces(data: tuple[str, PreparedData], runs: dict[str, Run]) -> dict[str, list[Trace]]:
    return trace_runs(data[1], runs, 200)


@pytest.fixture(scope="module")
def judge(data: tuple[str, PreparedData]) -> Judge:
    return Judge(data[1])


@pytest.mark.parametrize("name", CASES | SINGLE | HALF)
def test_same_as_one_process(name: str, runs: dict[str, Run], traces: dict[str, list[Trace]], judge: Judge) -> None:
    result = judge(runs[name][0], traces[name])
    assert red(result) == set(), (result.to_json(), result.differences[:5])


@pytest.mark.parametrize("name", ["halves once", "over tp, copies over dp", "under a pipeline"])
def test_a_dry_run_of_the_routing_sends_what_the_run_sent(
    name: str, runs: dict[str, Run], traces: dict[str, list[Trace]]
) -> None:
    config, found = runs[name][0], traces[name]
    dry = dry_steps(config, found)
    for rank, ledger in zip(first_of_each_stage(config.layout), dry, strict=True):
        assert ledger.differences(found[rank].ledgers[-1]) == []
        assert ledger.dispatches == found[rank].ledgers[-1].dispatches


def test_the_routing_is_skewed(traces: dict[str, list[Trace]]) -> None:
    """Nearly all tokens go to one expert of a layer, and some experts get none."""
    counts = traces["k=1"][0].choices[0]
    assert max(max(layer) / sum(layer) for layer in counts) > 0.85
    assert min(min(layer) for layer in counts) == 0


def test_recomputation_reports_the_same_losses_of_routers(traces: dict[str, list[Trace]]) -> None:
    """MO-01: a forward that runs twice counts once."""
    plain, again = (traces[name][0] for name in ("data parallel, whole experts", "recomputed"))
    assert plain.router_losses == pytest.approx(again.router_losses, rel=1e-12)
    assert plain.choices == again.choices


BROKEN = {
    "lose-dispatch": "two ranks",
    "lose-combine": "two ranks",
    "lose-combine-gradient": "two ranks",
    "lose-dispatch-gradient": "two ranks",
    "lose-dispatch-weights": "tokens once",
    "lose-dispatch-weights-gradient": "tokens once",
    "drop-expert-gradients": "copies",
    "drop-expert-scatter": "copies in shards",
    "drop-expert-gather": "copies in shards",
    "drop-expert-norm": "two ranks",
    "drop-expert-shard-norm": "copies in shards",
    "own-choices": "two ranks",
    "own-part-of-sequence": "by sequence",
    "own-capacity": "capacity over tp",
    "own-scores": "by score over tp",
    "own-report": "deepseek",
    "experts-by-ep": "two ranks",
    "own-tokens-in-routers": "two ranks",
    "worst-experts": "bf16, two ranks",
    "count-again": "deepseek",
}
"""Mutation -> the case that it breaks."""


def test_every_mutation_is_tried() -> None:
    assert BROKEN.keys() == EXPERT_MUTATIONS.keys()


@pytest.mark.parametrize("mutation", BROKEN)
def test_a_mutation_turns_red(mutation: str, runs: dict[str, Run], traces: dict[str, list[Trace]], judge: Judge) -> None:
    assert red(judge(runs[mutation][0], traces[mutation]))
