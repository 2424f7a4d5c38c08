"""Tensor and sequence parallelism on the own model, against one process: value by value, byte by byte."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from ranks.kit import run_ranks
from ranks.runs import Judge, Run, make_config, red, trace_runs, write_documents
from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger
from shardwright.launch import RankEnv
from shardwright.model.loss import head_loss
from shardwright.model.transformer import Transformer
from shardwright.ops.attention import CausalAttend
from shardwright.parallel.tensor import Region
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.verify.mutate import TENSOR_MUTATIONS
from shardwright.verify.parity import Trace, assemble, dry_step, train_sampler, whole_batches

LLAMA: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip
ODD = LLAMA | {"vocab_size": 321, "ffn_dim": 49, "tied_head": False}
SIX = ODD | {"dim": 36, "num_heads": 6, "num_kv_heads": 3, "head_dim": 6}
FOUR = LLAMA | {"num_kv_heads": 4}
WIDE = LLAMA | {"dim": 256, "head_dim": 8, "num_layers": 1}
"""Its activations are large enough for ranks of a host to read them where they are."""
GPT2 = FOUR | {
    "family": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "tied_head": True,
    "qkv_bias": True, "out_bias": True, "mlp_bias": True,
}  # fmt: skip
QWEN2 = LLAMA | {"family": "qwen2", "qkv_bias": True, "tied_head": True}
QWEN3 = LLAMA | {"family": "qwen3", "qk_norm": True, "head_dim": 12}
LATENT = FOUR | {
    "family": "deepseek_v3",
    "mla": {"kv_lora_rank": 12, "q_lora_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 8},
}
STRAIGHT = FOUR | {
    "family": "deepseek_v2", "rope_scaling": {"kind": "yarn", "factor": 4, "original_max_positions": 16, "mscale_all_dim": 1.0},
    "mla": {"kv_lora_rank": 12, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 14},
}  # fmt: skip
ONE_KV = LLAMA | {"num_kv_heads": 1}
DROPOUT = {"dropout": 0.1}
FP64, OFF, CHUNKS = "precision=fp64", "sp=off", "tp_overlap=3"
ODD_TOKENS = "data.seq_len=47"
SCORES = ["train.attention=scores"]

CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "llama": (LLAMA, f"tp=2,{FP64}", []),
    "llama, sp off": (LLAMA, f"tp=2,{OFF},{FP64}", []),
    "llama in fp32": (LLAMA, "tp=2", []),
    "llama in fp32, sp off": (LLAMA, f"tp=2,{OFF}", []),
    "read in place": (WIDE, f"tp=2,micro_batch=2,{FP64}", []),
    "read in place, sp off": (WIDE, f"tp=2,micro_batch=2,{OFF},{FP64}", []),
    "gloo": (LLAMA, "tp=2,comm=gloo", []),
    "gloo, sp off": (LLAMA, f"tp=2,{OFF},comm=gloo", []),
    "adamw": (LLAMA | DROPOUT, f"tp=2,{FP64}", ["optim.name=adamw"]),
    "one kv head": (ONE_KV, f"tp=2,{FP64}", []),
    "one kv head, sp off": (ONE_KV, f"tp=2,{OFF},{FP64}", []),
    "one kv head with qk norm, sp off": (QWEN3 | {"num_kv_heads": 1}, f"tp=2,{OFF},{FP64}", []),
    "qwen2, recompute": (QWEN2, f"tp=2,recompute=full,{FP64}", []),
    "qwen2, sp off": (QWEN2, f"tp=2,{OFF},{FP64}", []),
    "qwen3, selective": (QWEN3, f"tp=2,recompute=selective,{FP64}", []),
    "qwen3, sp off": (QWEN3, f"tp=2,{OFF}", []),
    "gpt2": (GPT2 | DROPOUT, f"tp=2,microbatches=2,{FP64}", []),
    "gpt2, sp off": (GPT2 | DROPOUT, f"tp=2,{OFF},recompute=full,{FP64}", SCORES),
    "gpt2 with a head of its own": (GPT2 | DROPOUT | {"tied_head": False}, f"tp=2,recompute=selective,{FP64}", SCORES),
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
    **{f"recompute={kind}": (GPT2 | DROPOUT, f"tp=2,recompute={kind}", []) for kind in ("none", "selective", "full")},
    "latent": (LATENT | DROPOUT, f"tp=2,{CHUNKS},{FP64}", [ODD_TOKENS]),
    "latent, recompute": (LATENT, f"tp=2,recompute=full,{FP64}", []),
    "latent, queries without, sp off": (STRAIGHT, f"tp=2,{OFF},recompute=selective,{FP64}", []),
    "latent, four ranks": (LATENT, f"tp=4,{FP64}", []),
    "three ranks": (SIX, f"tp=3,{FP64}", []),
    "three ranks, odd tokens": (SIX | DROPOUT, f"tp=3,recompute=selective,{CHUNKS},{FP64}", [ODD_TOKENS]),
    "three ranks, sp off": (SIX | {"tied_head": True}, f"tp=3,{OFF},{CHUNKS}", []),
    "four ranks": (GPT2 | {"vocab_size": 321}, f"tp=4,{FP64}", []),
    "four ranks, sp off": (FOUR, f"tp=4,{OFF}", []),
    "four ranks, two kv heads": (LLAMA, f"tp=4,{FP64}", []),
    "four ranks, two kv heads with qk norm, sp off": (QWEN3 | {"num_kv_heads": 2}, f"tp=4,recompute=full,{OFF},{FP64}", []),
    "four ranks, one kv head": (QWEN3 | {"num_kv_heads": 1}, f"tp=4,{FP64}", [ODD_TOKENS]),
    "tp x dp": (QWEN2 | DROPOUT, f"tp=2,dp=2,microbatches=2,{FP64}", [ODD_TOKENS]),
    "tp x dp, sp off": (GPT2 | DROPOUT, f"tp=2,dp=2,microbatches=2,micro_batch=2,{OFF},recompute=full", []),
    "tp x dp, small buckets": (LLAMA, "tp=2,dp=2,microbatches=3,bucket_mb=0.01", ["train.loss_chunk=20"]),
}

BF16 = {label: (FOUR, f"tp=4,precision=bf16{change}", []) for label, change in (("bf16", ""), ("bf16, sp off", ",sp=off"))}

BASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "on": (GPT2, "tp=2", []),
    "off": (GPT2, f"tp=2,{OFF}", []),
    "one kv head": (QWEN3 | {"num_kv_heads": 1}, f"tp=2,{OFF}", []),
}
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
    ("drop-tp-gradients", "one kv head"): {"gradients", "parameters", "norm", "replicas", "ledger"},
    ("bias-before-the-sum", "on"): {"gradients", "parameters", "norm"},
    ("bias-before-the-sum", "off"): {"gradients", "parameters", "norm"},
    ("norm-counts-copies", "on"): {"norm"},
    ("norm-counts-copies", "off"): {"norm"},
}
"""(mutation, what it breaks) -> what must be red; more may be."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tensor")
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
    cases = CASES | BF16
    runs: dict[str, Run] = {label: (make_config(folder, *case), None) for label, case in cases.items()}
    for name, base in BROKEN:
        runs[f"{name} {base}"] = (make_config(folder, *BASES[base]), name)
    return trace_runs(data, runs)


@pytest.mark.parametrize("label", CASES)
def test_a_layout_computes_and_sends_what_it_should(
    label: str, folder: str, judge: Judge, traces: dict[str, list[Trace]]
) -> None:
    config = make_config(folder, *CASES[label])
    result = judge(config, traces[label])
    assert result.passed, result.to_json()
    assert result.predicted.total_bytes == result.dryrun.total_bytes == result.measured.total_bytes > 0


@pytest.mark.parametrize("change", ["", ", sp off"])
def test_shared_memory_and_gloo_give_the_same_bits(change: str, traces: dict[str, list[Trace]]) -> None:
    for one, other in zip(traces[f"llama in fp32{change}"], traces[f"gloo{change}"], strict=True):
        assert one.losses == other.losses
        for mine, theirs in zip([*one.gradients, one.parameters], [*other.gradients, other.parameters], strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


# ------------------------------------------------------------------------------------------ what the ledger shows


def counts(ledger: Ledger, phase: str) -> dict[str, int]:
    """Messages over tp in one phase of one step."""
    return {f"{e.verb} {e.tensor}": e.count for e in ledger.entries.values() if e.axis == "tp" and e.phase == phase}


LAYERS = LLAMA["num_layers"]
LOSS = {f"all_reduce loss {name}": 1 for name in ("maximum", "denominator", "target")}


def test_one_reduction_after_attention_and_one_after_the_mlp(traces: dict[str, list[Trace]]) -> None:
    for trace in traces["llama, sp off"]:
        for ledger in trace.ledgers:
            layer = {"all_reduce attention out": LAYERS, "all_reduce mlp out": LAYERS}
            assert counts(ledger, "F") == {"all_reduce embedding": 1, **layer, **LOSS}
            layer = {"all_reduce attention in gradient": LAYERS, "all_reduce mlp in gradient": LAYERS}
            assert counts(ledger, "B") == {"all_reduce head gradient": 1, **layer}


def test_sequence_parallelism_sends_pairs_and_two_gathers_more(traces: dict[str, list[Trace]]) -> None:
    for trace in traces["llama"]:
        for ledger in trace.ledgers:
            pairs = [f"{verb} {part}" for part in ("attention", "mlp") for verb in ("all_gather", "reduce_scatter")]
            layer = {f"{pair} {'in' if 'gather' in pair else 'out'}": LAYERS for pair in pairs}
            assert counts(ledger, "F") == {"reduce_scatter embedding": 1, **layer, "all_gather head": 1, **LOSS}
            layer = {f"{pair} {'out' if 'gather' in pair else 'in gradient'}": LAYERS for pair in pairs}
            again = {f"all_gather {part} in again": LAYERS for part in ("attention", "mlp")}
            ends = {"reduce_scatter head gradient": 1, "all_gather embedding": 1}
            assert counts(ledger, "B") == {**ends, **layer, **again}


@pytest.mark.parametrize(("whole", "chunked"), [("llama", "overlap"), ("llama, sp off", "overlap, sp off")])
def test_overlap_sends_the_same_bytes_in_three_parts(
    whole: str, chunked: str, folder: str, traces: dict[str, list[Trace]]
) -> None:
    """The chunked run has its own token count, so the whole one is a dry run at that count."""
    model, layout, sets = CASES[chunked]
    config = make_config(folder, model, layout.replace(f",{CHUNKS}", ""), sets)
    plain, parts = dry_step(config), traces[chunked][0].ledgers[0]
    assert parts.total_bytes == plain.total_bytes
    for key, entry in plain.entries.items():
        times = 3 if key[3].removesuffix(" gradient") in ("attention in", "attention out", "mlp in", "mlp out") else 1
        assert (parts.entries[key].bytes, parts.entries[key].count) == (entry.bytes, times * entry.count), key


# ------------------------------------------------------------------------------------------ dropout, again


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputation_drops_the_same_and_changes_no_bit(kind: str, traces: dict[str, list[Trace]]) -> None:  # RN-04
    for kept, again in zip(traces["recompute=none"], traces[f"recompute={kind}"], strict=True):
        assert kept.losses == again.losses
        for first, second in zip((*kept.gradients, kept.parameters), (*again.gradients, again.parameters), strict=True):
            assert all(torch.equal(value, second[name]) for name, value in first.items())


# ------------------------------------------------------------------------------------------ half precision


def test_in_bf16_sequence_parallelism_is_no_less_exact(  # TP-09
    folder: str, data: PreparedData, traces: dict[str, list[Trace]]
) -> None:
    config = make_config(folder, *BF16["bf16"])
    model = Transformer(config.model, Mesh.solo(), torch.float64).initialise(config.train.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    batch = whole_batches(train_sampler(config, data, 0))(0)
    (model(batch.tokens, batch.positions, CausalAttend(batch.lengths), batch.targets) / batch.num_valid).backward()
    exact = {name: parameter.grad for name, parameter in model.named_parameters()}
    errors = {}
    for label in BF16:
        found, _ = assemble(config, [trace.gradients[0] for trace in traces[label]])
        square = sum((found[name] - value).double().square().sum().item() for name, value in exact.items())
        errors[label] = math.sqrt(square / sum(value.square().sum().item() for value in exact.values()))
    assert 0 < errors["bf16"] < 1.5 * errors["bf16, sp off"] < 0.05, errors
    norms = [traces[label][0].norms[0] for label in ("llama in fp32", "llama in fp32, sp off")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


# ------------------------------------------------------------------------------------------ the loss alone


def head_losses(env: RankEnv) -> dict[str, float]:
    """Loss and gradients of the head for vocabularies that do not divide, one of them with a rank without rows."""
    found = {}
    for vocab, sequence, chunk in itertools.product((11, 2), (True, False), (0, 4)):
        comm = Mesh.distributed(Layout(tp=env.world_size), env.rank).tp
        torch.manual_seed(2)
        x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(vocab, 4, dtype=torch.float64, requires_grad=True)
        targets = torch.tensor([0, vocab - 1, -100, 1, 0, 1, vocab // 2, -100, vocab - 1])
        want = head_loss(x, weight, targets)
        want.backward()
        each = -(-vocab // env.world_size)
        rows = slice(min(env.rank * each, vocab), min((env.rank + 1) * each, vocab))
        own = slice(env.rank * 3, env.rank * 3 + 3) if sequence else slice(0, 9)
        x_local = x.detach()[own].clone().requires_grad_()
        weight_local = weight.detach()[rows].clone().requires_grad_()
        got = head_loss(x_local, weight_local, targets, Region(comm, sequence), rows.start, chunk)
        got.backward()
        assert x.grad is not None and weight.grad is not None
        assert x_local.grad is not None and weight_local.grad is not None
        differences = [(got - want).abs(), (x_local.grad - x.grad[own]).abs().max()]
        differences += [(weight_local.grad - weight.grad[rows]).abs().max()] if each and rows.stop > rows.start else []
        zero = head_loss(x_local, weight_local * 0, targets, Region(comm, sequence), rows.start, chunk)
        differences.append((zero - 7 * math.log(vocab)).abs())  # US-01
        found[f"{vocab} {sequence} {chunk}"] = max(value.item() for value in differences)
    return found


def test_the_head_loss_of_uneven_and_empty_vocabulary_parts() -> None:
    for rank in run_ranks(head_losses, 3):
        assert max(rank.values()) < 1e-12, rank


# ------------------------------------------------------------------------------------------ red when broken


def test_every_mutation_of_tensor_parallelism_has_what_it_must_turn_red() -> None:
    assert {name for name, _ in BROKEN} == TENSOR_MUTATIONS.keys()


@pytest.mark.parametrize(("name", "base"), BROKEN)
def test_every_mutation_turns_it_red(
    name: str, base: str, folder: str, judge: Judge, traces: dict[str, list[Trace]]
) -> None:
    result = judge(make_config(folder, *BASES[base]), traces[f"{name} {base}"])
    assert not result.passed
    assert red(result) >= BROKEN[name, base], result.to_json()
