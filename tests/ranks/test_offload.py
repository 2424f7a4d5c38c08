"""State in host memory and delayed updates against one process; and what every stage holds against the planner's formula."""

from __future__ import annotations

import runpy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks.kit import TESTS, run_ranks
from ranks.runs import Judge, Run, make_config, red, trace_runs, write_documents
from shardwright.comm.base import Comm, ReduceOp, Work
from shardwright.comm.mesh import Mesh
from shardwright.comm.solo import SoloComm
from shardwright.core.ledger import Ledger
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv
from shardwright.ops.gradients import slot_of
from shardwright.parallel.data import MOST_IN_FLIGHT
from shardwright.parallel.hooks import AllReduce
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.train.step import Trainer
from shardwright.verify.memory import memory_differences
from shardwright.verify.mutate import OFFLOAD_MUTATIONS
from shardwright.verify.mutate_comms import ForwardingComm
from shardwright.verify.parity import Trace, train_sampler

pytestmark = pytest.mark.timeout(600)  # the first test makes the runs of all; on busy cores that takes minutes

LLAMA: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip
TIED = LLAMA | {"tied_head": True}
ADAMW = ["optim.name=adamw"]
DELAYED = [*ADAMW, "optim.delay_after=1", "optim.clip=0.5"]
FROZEN = [*ADAMW, 'train.freeze=["embedding.", "blocks.0."]']
SMALL, OUT, IN = "bucket_mb=0.02", "offload=optimizer", "offload=params"

OFFLOADED: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "alone": (TIED, f"{OUT},precision=fp64,microbatches=2", ADAMW),
    "alone, parameters too": (LLAMA, f"zero=3,{IN},precision=fp64,microbatches=2,accumulate=reduce", ADAMW),
    "0": (LLAMA, f"dp=2,{OUT},precision=fp64", ADAMW),
    "1": (TIED, f"dp=2,zero=1,{OUT},precision=fp64,{SMALL}", ADAMW),
    "1, all-reduce": (LLAMA, f"dp=2,zero=1,zero1_reduce=allreduce,{OUT},offload_fraction=0.3,precision=fp64", DELAYED[:1]),
    "1, fp32": (LLAMA, f"dp=2,zero=1,{OUT},{SMALL}", []),
    "2, deferred": (TIED, f"dp=2,zero=2,{OUT},microbatches=4,precision=fp64,{SMALL}", ADAMW),
    "2, reduced": (LLAMA, f"dp=2,zero=2,{OUT},microbatches=4,accumulate=reduce,precision=fp64,{SMALL}", ADAMW),
    "2, bf16": (LLAMA, f"dp=2,zero=2,{OUT},precision=bf16,{SMALL}", []),
    "3": (LLAMA, f"dp=2,zero=3,{OUT},precision=fp64", ADAMW),
    "3, a part": (TIED, f"dp=2,zero=3,{OUT},offload_fraction=0.4,microbatches=2,accumulate=reduce,precision=fp64", ADAMW),
    "3, parameters": (LLAMA, f"dp=2,zero=3,{IN},precision=fp64", ADAMW),
    "3, parameters, gloo": (TIED, f"dp=2,zero=3,{IN},recompute=full,prefetch=2,comm=gloo,precision=fp64", ADAMW),
    "3, a part of them": (LLAMA, f"dp=2,zero=3,{IN},offload_fraction=0.7,prefetch=0,microbatches=2,precision=fp64", FROZEN),
    "3, parameters, bf16": (LLAMA, f"dp=2,zero=3,{IN},reshard=after_backward,precision=bf16", []),
    "1, delayed": (LLAMA, f"dp=2,zero=1,{OUT},delayed_update=on,precision=fp64", DELAYED),
    "2, delayed": (LLAMA, f"dp=2,zero=2,{OUT},delayed_update=on,microbatches=2,accumulate=reduce,precision=fp64", DELAYED),
    "3, delayed": (TIED, f"dp=2,zero=3,{OUT},delayed_update=on,precision=fp64", DELAYED),
    "2 with tp": (LLAMA, f"dp=2,tp=2,zero=2,{OUT},precision=fp64", ADAMW),
    "3 with cp": (TIED, f"dp=2,cp=2,zero=3,{IN},microbatches=2,precision=fp64", ADAMW),
    "3, replicas": (LLAMA, f"dp=4,zero=3,dp_replicate=2,{IN},precision=fp64", ADAMW),
    "3 with pp": (TIED, f"dp=2,pp=2,zero=3,{IN},microbatches=2,precision=fp64", ADAMW),
}  # fmt: skip
PLAIN: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "plain 0": (LLAMA, "dp=2,precision=fp64", ADAMW),
    "plain 1": (TIED, f"dp=2,zero=1,precision=fp64,{SMALL}", ADAMW),
    "plain 2": (LLAMA, f"dp=2,zero=2,precision=fp64,{SMALL}", ADAMW),
    "plain 2, one bucket": (LLAMA, "dp=2,zero=2,precision=fp64", ADAMW),
    "plain 2, deferred": (LLAMA, f"dp=2,zero=2,microbatches=4,precision=fp64,{SMALL}", ADAMW),
    "plain 2, reduced": (TIED, f"dp=2,zero=2,microbatches=4,accumulate=reduce,precision=fp64,{SMALL}", ADAMW),
    "plain 3": (LLAMA, "dp=2,zero=3,precision=fp64", ADAMW),
    "plain 3, no prefetch": (TIED, "dp=2,zero=3,prefetch=0,precision=fp64", ADAMW),
    "plain 3, far": (LLAMA, "dp=2,zero=3,prefetch=3,microbatches=2,accumulate=reduce,precision=fp64", ADAMW),
    "plain 3, kept": (TIED, "dp=2,zero=3,reshard=after_backward,microbatches=2,precision=fp64", ADAMW),
    "plain 2, replicas": (LLAMA, f"dp=4,zero=2,dp_replicate=2,microbatches=2,accumulate=reduce,precision=fp64,{SMALL}", ADAMW),
    "plain 3 of 4": (LLAMA, "dp=4,zero=3,microbatches=2,accumulate=reduce,precision=fp64", ADAMW),
    "plain 3 with pp": (LLAMA, "dp=2,pp=2,zero=3,microbatches=4,precision=fp64", ADAMW),
    "plain 3 with pp, freed": (LLAMA, "dp=2,pp=2,zero=3,microbatches=4,reshard=always,precision=fp64", ADAMW),
    "plain 2 with cp": (LLAMA, f"dp=2,cp=2,zero=2,dp_replicate=2,precision=fp64,{SMALL}", ADAMW),
    "plain 3 with tp": (LLAMA, "dp=2,tp=2,zero=3,precision=fp64", ADAMW),
}  # fmt: skip
CASES = OFFLOADED | PLAIN

MUTATED = {
    "overwritten-on-host": (CASES["2, reduced"], {"gradients", "parameters", "norm"}),  # GN-06
    "drop-copy-out": (CASES["1, fp32"], {"parameters"}),
    "drop-copy-in": (CASES["3"], {"parameters"}),
    "not-delayed": (CASES["2, delayed"], {"loss", "parameters"}),
    "delayed-into-the-next": (CASES["1, delayed"], {"parameters"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("offload")
    write_documents(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(folder: str) -> PreparedData:
    return prepare_data(make_config(folder, LLAMA, "dp=1"))


@pytest.fixture(scope="module")
def traces(folder: str, data: PreparedData) -> dict[str, list[Trace]]:
    runs: dict[str, Run] = {label: (make_config(folder, *case), None) for label, case in CASES.items()}
    runs |= {f"mutated {name}": (make_config(folder, *case), name) for name, (case, _) in MUTATED.items()}
    return trace_runs(data, runs, time_limit=280.0)


@pytest.fixture(scope="module")
def judge(data: PreparedData) -> Judge:
    return Judge(data)


@pytest.mark.parametrize("label", OFFLOADED)
def test_offload_computes_and_sends_what_it_should(
    label: str, folder: str, judge: Judge, traces: dict[str, list[Trace]]
) -> None:
    """Against one process with, where asked for, exactly the same delay. GN-06, GN-07, TE-02 and ZF-08 with offload too."""
    result = judge(make_config(folder, *CASES[label]), traces[label])
    assert result.passed, result.to_json()
    assert result.predicted.total_bytes == result.dryrun.total_bytes == result.measured.total_bytes > 0


@pytest.mark.parametrize("name", MUTATED)
def test_every_mutation_turns_it_red(name: str, folder: str, judge: Judge, traces: dict[str, list[Trace]]) -> None:
    case, expected = MUTATED[name]
    assert red(judge(make_config(folder, *case), traces[f"mutated {name}"])) >= expected


def test_every_mutation_has_what_it_must_turn_red() -> None:
    assert MUTATED.keys() == OFFLOAD_MUTATIONS.keys()


# ------------------------------------------------------------------------------------------ memory


def with_adam(config: RunConfig, ledger: Ledger) -> Ledger:
    """The ledger of a run; with SGD, whose state is half of Adam's, the other half is added."""
    peak, sgd = dict(ledger.peak), config.optim.name == "sgd"
    wide = 8 if config.layout.precision == "fp64" else 4
    for name in ("optimizer", "host optimizer"):
        if sgd and name in peak:
            masters = config.layout.precision == "bf16" or name.startswith("host")
            peak[name] += peak[name] // (2 * wide if masters else wide) * wide
    return replace(ledger, peak=peak)


@pytest.mark.parametrize("label", [label for label, case in CASES.items() if case[2] != FROZEN])
def test_peak_memory_by_class_is_that_of_the_planner(label: str, folder: str, traces: dict[str, list[Trace]]) -> None:
    """Within 2 % (or what padding adds): on every rank and in every step."""
    config = make_config(folder, *CASES[label])
    for rank, trace in enumerate(traces[label]):
        for ledger in trace.ledgers:
            assert memory_differences(config, with_adam(config, ledger), rank) == []
            assert ledger.memory == {kind: size for kind, size in ledger.peak.items() if kind in ledger.memory}
            worse = replace(ledger, peak={kind: size + size // 20 for kind, size in with_adam(config, ledger).peak.items()})
            assert len(memory_differences(config, worse, rank)) == sum(size > 2560 for size in ledger.peak.values())


def test_windows_are_what_the_classes_add_up_to(traces: dict[str, list[Trace]]) -> None:
    """Each gather and each buffer from where it is made to where it is freed; nothing is left when a step ends."""
    for label in ("plain 3", "plain 3, far", "3, parameters, gloo"):
        ledger = traces[label][0].ledgers[-1]
        for kind in ("gathered", "buffers"):
            mine = [window for window in ledger.windows if window.kind == kind]
            changes = sorted((t, b) for w in mine for t, b in ((w.start, w.bytes), (w.end, -w.bytes)))
            held = [sum(b for _, b in changes[: index + 1]) for index in range(len(changes))]
            assert max(held) == ledger.peak[kind] and held[-1] == 0
            assert all(0 <= window.start < window.end for window in mine)
    gathers = [w for w in traces["plain 3"][0].ledgers[-1].windows if w.kind == "gathered"]
    order = ["embedding", *(f"blocks.{layer}" for layer in range(4)), "head"]
    assert [w.units for w in gathers] == [(unit,) for unit in (*order, *reversed(order))]
    assert [w.phase for w in gathers] == ["F"] * 6 + ["B"] * 6


# ------------------------------------------------------------------------------------------ bits


class Late(ForwardingComm):
    """Reductions that are a moment late."""

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        time.sleep(0.002 * (self.rank + 1))
        return super().reduce_scatter_start(output, tensor, op, name=name)


def run_steps(env: RankEnv, config: RunConfig, data: PreparedData, wrap: type[Late] | None = None) -> Trainer:
    mesh = Mesh.distributed(config.layout, env.rank)
    if wrap is not None:
        mesh.wrap(_wrapped(wrap))
    trainer = Trainer(config, mesh)
    sampler = train_sampler(config, data, mesh.coordinates["dp"])
    for step in range(8):
        trainer.step(sampler.batches(step), step)
    return trainer


def _wrapped(wrap: type[Late]) -> Any:
    def make(comm: Comm) -> Comm:
        return wrap(comm) if comm.axis == "dp_shard" else comm

    return make


def same_bits(env: RankEnv, folder: str, data: PreparedData) -> list[str]:
    """ZF-02: the stages with and without offload, with tiny buckets and late reductions."""
    differ = []
    for stage in ("zero=1,bucket_mb=0.01", "zero=2,microbatches=2,accumulate=reduce,bucket_mb=0.01", "zero=3"):
        found = []
        for offload, late in (("", None), (",offload=optimizer", Late), (",offload=params", Late)):
            if "params" not in offload or "zero=3" in stage:
                config = make_config(folder, LLAMA, f"dp=2,{stage}{offload}", ADAMW)
                found.append(run_steps(env, config, data, late).named_parameters())
        for other in found[1:]:
            differ += [f"{stage} {name}" for name, value in found[0].items() if not torch.equal(value, other[name])]
    return differ


def infinite(env: RankEnv, folder: str, data: PreparedData) -> list[tuple[bool, bool]]:
    """GN-09: an infinite gradient on rank 0; whether the step is skipped, and parameters stay as they were."""
    found = []
    for layout in ("zero=1,offload=optimizer", "zero=2,offload=optimizer", "zero=3,offload=params"):
        config = make_config(folder, LLAMA, f"dp=4,{layout}", ["train.on_nonfinite=skip"])
        trainer = Trainer(config, Mesh.distributed(config.layout, env.rank))
        before = {name: value.clone() for name, value in trainer.named_parameters().items()}
        unit_done = trainer.buckets.unit_done

        def poisoned(unit: str, trainer: Trainer = trainer, done: Any = unit_done) -> None:
            slot = slot_of(trainer.parameters["head.norm.weight"])
            if unit == "head" and env.rank == 0 and slot is not None:
                slot.view[0] = torch.inf
            done(unit)

        trainer.executor.reducer.unit_done = poisoned  # type: ignore[method-assign]
        result = trainer.step(train_sampler(config, data, env.rank).batches(0), 0)
        after = trainer.named_parameters()
        found.append((result.skipped, all(torch.equal(value, after[name]) for name, value in before.items())))
    return found


def test_offload_changes_no_bit_whenever_reductions_end(folder: str, data: PreparedData) -> None:
    assert run_ranks(same_bits, 2, folder, data, time_limit=120.0) == [[], []]


def test_every_rank_skips_a_step_whose_gradients_are_not_finite(folder: str, data: PreparedData) -> None:
    for rank in run_ranks(infinite, 4, folder, data, time_limit=120.0):
        assert rank == [(True, True)] * 3


# ------------------------------------------------------------------------------------------ when gradients are copied out


class Told(Work):
    """Over when it is said to be."""

    over = False

    @property
    def done(self) -> bool:
        return self.over


class Lagging(AllReduce):
    """On one rank: a reduction is over when ``lag`` more have been started (None: when it is waited for)."""

    def __init__(self, lag: int | None) -> None:
        super().__init__()
        self.lag = lag
        self.works: list[Told] = []

    def start(self, gradients: Tensor, comms: Sequence[Comm], name: str) -> Work:
        self.works.append(Told())
        if self.lag is not None and len(self.works) > self.lag:
            self.works[-1 - self.lag].over = True
        return self.works[-1]

    def scatter(self, gradients: Tensor, shard: Tensor, comm: Comm, name: str) -> Work:
        shard.copy_(gradients)
        return self.start(shard, [comm], name)


def copies(config: RunConfig, data: PreparedData, lag: int | None) -> tuple[list[str], list[str], Trainer]:
    """Buckets that are copied out while backward runs; all that are; the trainer after a step."""
    trainer = Trainer(config, Mesh(config.layout, 0, lambda axis, groups: SoloComm(axis)), hook=Lagging(lag))
    copied: list[str] = []
    during: list[str] = []
    copy_out, finish = trainer.buckets.storage.copy_out, trainer.buckets.finish

    def noted(host: Tensor, tensor: Tensor, name: str, *, add: bool = False) -> None:
        copied.append(name)
        copy_out(host, tensor, name, add=add)

    def finished() -> Any:
        during.extend(copied)
        return finish()

    trainer.buckets.storage.copy_out = noted  # type: ignore[method-assign]
    trainer.buckets.finish = finished  # type: ignore[method-assign]
    trainer.step(train_sampler(config, data, 0).batches(0), 0)
    return during, copied, trainer


@pytest.mark.parametrize("layout", [
    f"{OUT},{SMALL}", f"zero=1,{OUT},{SMALL}", f"zero=2,{OUT},{SMALL}", f"zero=3,{OUT},microbatches=2,accumulate=reduce",
])  # fmt: skip
def test_gradients_are_copied_out_in_order_when_their_reduction_is_over(layout: str, folder: str, data: PreparedData) -> None:
    config = make_config(folder, LLAMA, layout, ADAMW)
    _, late, reference = copies(config, data, None)
    peak = reference.buckets.storage.peak
    assert len(late) > 4
    for lag in (0, 1, 3):
        during, copied, trainer = copies(config, data, lag)
        behind = min(lag, MOST_IN_FLIGHT) if config.layout.zero >= 2 else lag
        assert copied == late and during == late[: len(late) - behind]
        assert trainer.buckets.storage.peak == peak  # no byte is held longer, or shorter
        for name, value in reference.named_parameters().items():
            assert torch.equal(trainer.named_parameters()[name], value), name


# ------------------------------------------------------------------------------------------ the GPU's script


def test_the_script_for_a_gpu_trains_with_the_state_in_each_place_and_asks_the_planner() -> None:
    """Here on the CPU: the layouts are legal on one rank, their losses alike, and the plan has activations."""
    script = runpy.run_path(str(TESTS.parent / "benchmarks" / "gpu" / "train.py"))
    plans, losses = {}, []
    for name, state in script["STATES"]["dense"].items():
        config = script["run_config"]("tiny", f"microbatches=2{state}", 64)
        losses.append(script["losses"](config, "cpu", 3))
        plans[name] = script["memory_beside_the_plan"](config, 10**6)
    assert losses[0][-1] < losses[0][0] and all(other == pytest.approx(losses[0], rel=1e-5) for other in losses)
    total = {name: plan["planned_memory_bytes"] for name, plan in plans.items()}
    assert total["zero=0"] > total["offload=optimizer"] > total["offload=params"]
    assert all(plan["planned"]["activations"] > 0 for plan in plans.values())
    assert plans["zero=0"]["peak_over_planned"] == 10**6 / total["zero=0"]
    assert plans["offload=params"]["planned_on_host"] and not plans["zero=3"]["planned_on_host"]
