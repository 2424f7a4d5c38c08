"""Context parallelism on the own model, against one process: value by value, byte by byte."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.kit import run_ranks
from ranks.runs import Judge, Run, make_config, red, trace_runs, write_documents
from shardwright.comm.mesh import Mesh
from shardwright.core.ledger import Ledger
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv
from shardwright.train.data import MicroBatch
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.train.step import Trainer
from shardwright.verify.mutate_context import CONTEXT_MUTATIONS
from shardwright.verify.parity import Trace

pytestmark = pytest.mark.timeout(300)  # the first test makes the runs of all; on busy cores that may take minutes

LLAMA: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip
TIED = LLAMA | {"tied_head": True}
SIX = LLAMA | {"dim": 36, "num_heads": 6, "num_kv_heads": 3, "head_dim": 6, "vocab_size": 321, "ffn_dim": 49}
GPT2 = LLAMA | {
    "family": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "tied_head": True,
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "num_kv_heads": 4, "dropout": 0.1,
}  # fmt: skip
QWEN3 = LLAMA | {"family": "qwen3", "qk_norm": True, "head_dim": 12, "num_kv_heads": 1, "dropout": 0.1}
WINDOW = LLAMA | {"sliding_window": 7}
FP64, GATHER, ULYSSES = "precision=fp64", "cp_kind=allgather", "cp_kind=ulysses"
ODD_TOKENS, CROSSING = "data.seq_len=47", "data.cross_documents=true"

Case = tuple[dict[str, Any], str, list[str]]
CASES: dict[str, Case] = {
    "ring": (LLAMA, f"cp=2,{FP64}", []),
    "gathered": (LLAMA, f"cp=2,{GATHER},{FP64}", []),
    "ulysses": (LLAMA, f"cp=2,{ULYSSES},{FP64}", []),
    "ring in fp32": (GPT2, "cp=2,micro_batch=3", [CROSSING]),
    "gathered in fp32, gloo": (TIED, f"cp=2,{GATHER},comm=gloo", [ODD_TOKENS]),
    "ulysses in fp32": (GPT2, f"cp=2,{ULYSSES}", [ODD_TOKENS]),
    "ring, gloo": (LLAMA, f"cp=2,comm=gloo,{FP64}", [CROSSING]),
    "ring, odd tokens": (QWEN3, f"cp=2,micro_batch=3,microbatches=2,{FP64}", [ODD_TOKENS]),
    "ulysses, one kv head": (QWEN3, f"cp=2,{ULYSSES},{FP64}", [ODD_TOKENS]),
    "ulysses, windows": (WINDOW, f"cp=2,{ULYSSES},{FP64}", [CROSSING]),
    "adamw, clipped": (LLAMA | {"dropout": 0.1}, f"cp=2,{FP64}", ["optim.name=adamw", "optim.clip=0.05"]),
    "frozen": (LLAMA, f"cp=2,{FP64}", ['train.freeze=["embedding.", "blocks.0.", "blocks.1.attention.k"]']),
    "loss in chunks": (TIED, f"cp=2,{FP64}", ["train.loss_chunk=13"]),
    **{f"{kind}, recompute={recompute}": (GPT2, f"cp=2,cp_kind={kind},microbatches=2,recompute={recompute}", [])
       for kind in ("ring", "allgather", "ulysses") for recompute in ("none", "selective", "full")},
    "zero 1": (TIED, "cp=2,zero=1,microbatches=2", []),
    "zero 2": (LLAMA, f"cp=2,zero=2,{GATHER},microbatches=2,accumulate=reduce,bucket_mb=0.01", []),
    "zero 3": (TIED, "cp=2,zero=3,recompute=full,microbatches=2", []),
    "ring of three": (SIX, f"cp=3,{FP64}", []),
    "ring of three, dropout": (SIX | {"dropout": 0.1}, f"cp=3,micro_batch=3,recompute=full,{FP64}", [ODD_TOKENS]),
    "gathered over three": (SIX, f"cp=3,{GATHER},{FP64}", [CROSSING]),
    "ulysses over three": (SIX | {"tied_head": True}, f"cp=3,{ULYSSES},{FP64}", [ODD_TOKENS]),
    "ring of four": (GPT2, f"cp=4,micro_batch=2,{FP64}", [CROSSING]),
    "gathered over four": (QWEN3, f"cp=4,{GATHER},recompute=full", [ODD_TOKENS]),
    "ulysses over four": (QWEN3 | {"num_kv_heads": 2}, f"cp=4,{ULYSSES},{FP64}", []),
    "cp x dp": (TIED, f"cp=2,dp=2,microbatches=2,{FP64}", [ODD_TOKENS]),
    "cp x dp, zero 3": (TIED, "cp=2,dp=2,zero=3,microbatches=2", []),
    "cp x dp, replicas": (LLAMA, f"cp=2,dp=2,zero=2,dp_replicate=2,{ULYSSES}", []),
    "tp x cp": (GPT2, f"tp=2,cp=2,recompute=full,{FP64}", [ODD_TOKENS]),
    "tp x cp, sp off": (QWEN3, f"tp=2,cp=2,sp=off,recompute=selective,{FP64}", [ODD_TOKENS]),
    "tp x cp, gathered, zero 1": (TIED, f"tp=2,cp=2,{GATHER},zero=1,tp_overlap=2", []),
    "tp x cp, ulysses": (GPT2, f"tp=2,cp=2,{ULYSSES},{FP64}", [ODD_TOKENS]),
    "pp x cp": (TIED, f"cp=2,pp=2,schedule=zb_h1,microbatches=3,recompute=full,{FP64}", [ODD_TOKENS]),
    "pp x cp, V": (TIED | {"num_layers": 4}, f"cp=2,pp=2,schedule=zb_v,microbatches=4,{FP64}", [CROSSING]),
    "pp x cp, gathered, zero 3": (
        LLAMA | {"num_layers": 4}, f"cp=2,pp=2,schedule=interleaved,virtual=2,{GATHER},zero=3,microbatches=2", [],
    ),
    "tp x cp x dp": (GPT2, f"tp=2,cp=2,dp=2,microbatches=2,{FP64}", [ODD_TOKENS]),
    "tp x cp x dp, sp off": (QWEN3, f"tp=2,cp=2,dp=2,sp=off,zero=3,recompute=full,order=tp-cp-pp-dp,{FP64}", [CROSSING]),
}  # fmt: skip

BF16: dict[str, Case] = {
    f"bf16, {kind}": (LLAMA, f"cp=4,cp_kind={kind},precision=bf16", [CROSSING]) for kind in ("ring", "allgather")
}

RING, WHOLE = (GPT2, "cp=2", [CROSSING]), {"loss", "gradients", "parameters", "norm"}
GATHERED, EXCHANGED = (GPT2, f"cp=2,{GATHER}", []), (GPT2, f"cp=2,{ULYSSES}", [])
BROKEN: dict[str, tuple[str, Case, set[str]]] = {
    "lost blocks": ("lose-kv", RING, WHOLE),
    "lost block gradients": ("lose-kv-gradients", RING, {"gradients", "parameters", "norm"}),
    "no gather": ("lose-kv", GATHERED, WHOLE | {"ledger"}),
    "no scatter": ("lose-kv-gradients", GATHERED, {"gradients", "parameters", "norm", "ledger"}),
    "heads not exchanged": ("drop-heads-in", EXCHANGED, WHOLE | {"ledger"}),
    "heads not brought back": ("drop-heads-out", EXCHANGED, WHOLE | {"ledger"}),
    "own gradients": ("drop-cp-gradients", RING, {"gradients", "parameters", "replicas", "ledger"}),
    "own gradients, dp": ("drop-dp-cp-gradients", CASES["cp x dp"], {"gradients", "parameters", "replicas", "ledger"}),
    "local positions": ("local-positions", RING, WHOLE),  # CP-03
    "reversed": ("reversed-cut", RING, WHOLE),  # CP-03
    "one document": ("one-document", CASES["ring"], WHOLE),  # CP-01
    "own dropout": ("own-token-index", RING, WHOLE),
    "own count": ("local-token-count", RING, {"gradients", "ledger"}),
}
"""What is broken -> the mutation, its layout, and what must be red; more may be."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("context")
    write_documents(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(folder: str) -> PreparedData:
    return prepare_data(make_config(folder, LLAMA, "dp=1"))


@pytest.fixture(scope="module")
def judge(data: PreparedData) -> Judge:
    return Judge(data)


@pytest.fixture(scope="module")
def traces(folder: str, data: PreparedData) -> dict[str, list[Trace]]:
    runs: dict[str, Run] = {label: (make_config(folder, *case), None) for label, case in (CASES | BF16).items()}
    runs |= {label: (make_config(folder, *case), name) for label, (name, case, _) in BROKEN.items()}
    return trace_runs(data, runs, time_limit=150)


@pytest.mark.parametrize("label", CASES)
def test_a_layout_computes_and_sends_what_it_should(
    label: str, folder: str, judge: Judge, traces: dict[str, list[Trace]]
) -> None:
    result = judge(make_config(folder, *CASES[label]), traces[label])
    assert result.passed, result.to_json()
    assert result.predicted.total_bytes == result.dryrun.total_bytes == result.measured.total_bytes > 0


@pytest.mark.parametrize("label", BROKEN)
def test_what_breaks_a_layout_turns_it_red(
    label: str, folder: str, judge: Judge, traces: dict[str, list[Trace]]
) -> None:
    _, case, expected = BROKEN[label]
    found = red(judge(make_config(folder, *case), traces[label]))
    assert expected <= found, found


def test_every_mutation_is_tried() -> None:
    assert {name for name, _, _ in BROKEN.values()} >= set(CONTEXT_MUTATIONS)


# ------------------------------------------------------------------------------------------ memory


def fits(env: RankEnv, config: RunConfig, tokens: int, room: int) -> bool:
    """Whether a step on one document of ``tokens`` fits ``room`` bytes beyond what a rank at work holds; the kernel refuses
    more. Messages go over gloo: shared memory would not count.
    """
    trainer = Trainer(config, Mesh.distributed(config.layout, env.rank))

    def document(length: int) -> MicroBatch:
        numbers = torch.arange(length)
        return MicroBatch(numbers % 64, (numbers + 1) % 64, numbers, numbers, (length,), length, (0,))

    trainer.step([document(64)], 0)
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    limit = int(status.split("VmData:")[1].split()[0]) * 1024 + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        trainer.step([document(tokens)], 1)
    except (RuntimeError, MemoryError) as error:
        assert "memory" in str(error) or "bad_alloc" in str(error), error
        return False
    return True


def test_two_ranks_train_what_one_has_no_room_for(folder: str) -> None:
    """About 30 kB a token: 60 MB on one rank; half of it on each of two, and the blocks on their way."""
    model = LLAMA | {"vocab_size": 64, "dim": 64, "num_layers": 6, "num_heads": 8, "ffn_dim": 128, "max_positions": 4096}
    for layout, expected in (("cp=1", False), ("cp=2", True)):
        config = make_config(folder, model, f"comm=gloo,{layout}", ["train.loss_chunk=256"])
        assert run_ranks(fits, config.layout.world_size, config, 2048, 50 << 20) == [expected] * config.layout.world_size


# ------------------------------------------------------------------------------------------ what the ledger shows


def sent(ledger: Ledger) -> dict[str, tuple[int, int]]:
    """Phase, verb and tensor -> calls and bytes over cp in one step."""
    entries = (e for e in ledger.entries.values() if e.axis == "cp" and e.tensor in ("kv", "kv gradient", "heads in"))
    return {f"{e.phase} {e.verb} {e.tensor}": (e.count, e.bytes) for e in entries if e.verb != "recv"}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputation_never_goes_round_the_ring_again(recompute: str, traces: dict[str, list[Trace]]) -> None:
    """Two micro-batches of 48 tokens on two ranks, two layers: blocks of 2 x 24 x 32 elements in fp32."""
    block, times = 2 * 24 * 32 * 4, 2 * 2
    for trace in traces[f"ring, recompute={recompute}"]:
        hops = {"F send kv": (times, times * block), "B send kv": (times, times * block)}
        assert sent(trace.ledgers[0]) == hops | {"B send kv gradient": (2 * times, 2 * times * block)}
    assert ("recompute all_to_all heads in" in sent(traces[f"ulysses, recompute={recompute}"][0].ledgers[0])) == (
        recompute == "full"
    )


@pytest.mark.parametrize("kind", ["ring", "allgather", "ulysses"])
def test_recomputation_drops_the_same_and_changes_no_bit(kind: str, traces: dict[str, list[Trace]]) -> None:  # RN-04
    kept = traces[f"{kind}, recompute=none"]
    for recompute in ("selective", "full"):
        for first, again in zip(kept, traces[f"{kind}, recompute={recompute}"], strict=True):
            assert first.losses == again.losses
            for mine, other in zip((*first.gradients, first.parameters), (*again.gradients, again.parameters), strict=True):
                assert all(torch.equal(value, other[name]) for name, value in mine.items())


def test_gathered_blocks_give_the_ring_s_bits(traces: dict[str, list[Trace]]) -> None:
    for ring, gathered in zip(traces["ring"], traces["gathered"], strict=True):
        assert ring.losses == gathered.losses


@pytest.mark.parametrize("label", BF16)
def test_in_bf16_a_layout_is_as_near_as_bf16_allows(
    label: str, folder: str, judge: Judge, traces: dict[str, list[Trace]]
) -> None:
    result = judge(make_config(folder, *BF16[label]), traces[label])
    assert result.passed, result.to_json()
