"""Pipeline parallelism: every schedule against one process; what belongs to all stages; and what breaks turns it red."""

from __future__ import annotations

from typing import Any

import pytest

from ranks.runs import Judge, Run, make_config, red, trace_runs, write_documents
from shardwright.core.layout import SCHEDULES, V_SHAPED
from shardwright.schedule.make import INTERLEAVED
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.verify.mutate import PIPELINE_MUTATIONS
from shardwright.verify.parity import Trace

LLAMA: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip
EIGHT = LLAMA | {"num_layers": 8}
FIVE = LLAMA | {"num_layers": 5}
TIED = {"tied_head": True}
GPT2 = LLAMA | {
    "family": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "tied_head": True,
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "num_kv_heads": 4, "dropout": 0.1,
}  # fmt: skip
COUNTS = {2: (2, 4, 5, 1), 4: (4, 8, 5, 3)}
"""Pipeline ranks -> micro-batches: p, 2p, an odd number, fewer than p (PP-01)."""

Case = tuple[dict[str, Any], str, list[str]]


def text(schedule: str, pp: int, microbatches: int, virtual: int = 2) -> str:
    chunks = f",virtual={virtual}" if schedule in INTERLEAVED else ""
    return f"pp={pp},schedule={schedule},microbatches={microbatches}{chunks}"


def schedule_cases() -> dict[str, Case]:
    """Each schedule with each number of ranks and (on four ranks half of the) numbers of micro-batches; head,
    recomputation and precision take turns. All of them together are in `make proof`.
    """
    found: dict[str, Case] = {}
    for place, schedule in enumerate(SCHEDULES):
        for pp, counts in COUNTS.items():
            for turn, count in enumerate(counts):
                turn += place
                if pp == 4 and (turn + place // 2) % 2:
                    continue
                deep = pp == 4 and schedule in (*INTERLEAVED, *V_SHAPED)
                model = (EIGHT if deep else LLAMA) | (TIED if turn % 4 in (1, 2) else {})
                recompute = ",recompute=full" if turn % 4 > 1 else ""
                precision = ",precision=fp64" if turn % 3 else ""
                found[f"{schedule} {pp} {count}"] = (model, text(schedule, pp, count) + recompute + precision, [])
    return found


def combined_cases() -> dict[str, Case]:
    """Each schedule with dp=2 and with tp=2."""
    found: dict[str, Case] = {}
    for place, schedule in enumerate(SCHEDULES):
        tied = TIED if place % 2 else {}
        head, other = LLAMA | tied, LLAMA | ({} if tied else TIED)
        found[f"{schedule} dp"] = (head, f"dp=2,{text(schedule, 2, 3)},precision=fp64,bucket_mb=0.01", [])
        found[f"{schedule} tp"] = (other, f"tp=2,{text(schedule, 2, 3)},precision=fp64", [])
    return found


FROZEN = ['train.freeze=["embedding.", "blocks.0.", "blocks.1."]']
CASES: dict[str, Case] = {
    **schedule_cases(),
    **combined_cases(),
    "three axes": (GPT2, f"tp=2,dp=2,{text('1f1b', 2, 3)},recompute=full,precision=fp64", []),
    "three axes, V": (LLAMA | TIED, f"tp=2,dp=2,{text('zb_v', 2, 4)},micro_batch=2,precision=fp64", []),
    "four stages, dp": (EIGHT | TIED, f"dp=2,{text('zb_v', 4, 8)},precision=fp64", []),
    "three chunks": (LLAMA | {"num_layers": 6}, f"{text('interleaved_zb', 2, 3, virtual=3)},precision=fp64", []),
    "uneven": (FIVE, f"{text('1f1b', 2, 4)},precision=fp64", []),  # US-02
    "explicit stages": (FIVE | TIED, f"{text('zb_h1', 2, 4)},stages=1-4,precision=fp64", []),
    "explicit stages, V": (FIVE, f"{text('dualpipe_v', 2, 4)},stages=1-2-1-1,precision=fp64", []),
    "stages by cost": (FIVE | {"vocab_size": 960}, f"{text('zb_h1', 2, 4)},stages=cost,precision=fp64", []),
    "selective, dropout": (GPT2, f"{text('zb_h1', 2, 3)},recompute=selective,precision=fp64", []),
    "full, dropout": (GPT2, f"{text('zb_v', 2, 3)},recompute=full,precision=fp64", []),
    "policy of each rank": (LLAMA | TIED, f"tp=2,{text('zb_v', 2, 3)},recompute=full-none,precision=fp64", []),
    "policy of each rank, dropout": (GPT2, f"{text('interleaved', 2, 4)},recompute=selective-full,precision=fp64", []),
    "clipped": (LLAMA | TIED, f"{text('1f1b', 2, 3)},precision=fp64", ["optim.clip=0.05"]),  # GN-01
    "frozen first stage": (LLAMA, f"{text('1f1b', 2, 3)},precision=fp64", FROZEN),
    "frozen first stage, split": (LLAMA | TIED, f"{text('zb_h1', 2, 3)},recompute=full,precision=fp64", FROZEN),
    "bf16": (LLAMA, f"{text('zb_h1', 2, 3)},precision=bf16", []),
    "gloo": (LLAMA | TIED, f"{text('interleaved', 2, 4)},comm=gloo,precision=fp64", []),
    "gloo, V": (EIGHT, f"{text('zb_v', 4, 8)},comm=gloo,precision=fp64", []),
}  # fmt: skip
MUTATED: Case = (LLAMA | TIED, f"{text('zb_h1', 2, 3)},precision=fp64", ["optim.clip=0.05"])
VALUES = {"loss", "gradients", "parameters", "norm"}
EXPECTED = {
    "lose-activations": VALUES,
    "lose-activation-gradients": {"gradients", "parameters", "norm"},
    "swap-micro-batches": VALUES,
    "drop-tied-gradients": {"gradients", "parameters", "norm", "replicas", "ledger"},
    "stage-norm": {"parameters", "norm", "replicas", "ledger"},
    "forget-deferred": {"gradients", "parameters", "norm"},
}
"""What must be red under each mutation; more may be."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pipeline")
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
    runs: dict[str, Run] = {label: (make_config(folder, *case), None) for label, case in CASES.items()}
    runs |= {name: (make_config(folder, *MUTATED), name) for name in PIPELINE_MUTATIONS}
    return trace_runs(data, runs, time_limit=110.0)


# ------------------------------------------------------------------------------------------ equal to one process


@pytest.mark.parametrize("label", CASES)
def test_a_schedule_computes_and_sends_what_it_should(
    label: str, folder: str, judge: Judge, traces: dict[str, list[Trace]]
) -> None:
    """Loss and norm on every rank (LN-15), gradients, parameters, copies of tied weights, every byte."""
    result = judge(make_config(folder, *CASES[label]), traces[label])
    assert result.passed, result.to_json()
    assert result.measured.total_bytes > 0


def test_every_mutation_has_what_it_must_turn_red() -> None:
    assert EXPECTED.keys() == PIPELINE_MUTATIONS.keys()


@pytest.mark.parametrize("name", PIPELINE_MUTATIONS)
def test_every_mutation_turns_it_red(name: str, folder: str, judge: Judge, traces: dict[str, list[Trace]]) -> None:
    result = judge(make_config(folder, *MUTATED), traces[name])
    assert red(result) >= EXPECTED[name], result.to_json()
