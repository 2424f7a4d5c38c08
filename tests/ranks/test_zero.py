"""Sharded data parallelism against one process: every stage, with tp, pp, accumulation, replicas, tied and frozen weights."""

from __future__ import annotations

import gc
import json
import mmap
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks.kit import run_ranks
from ranks.runs import STEPS, Run, make_config, red, trace_runs, write_documents
from shardwright.comm.mesh import Mesh
from shardwright.core.buckets import Member, plan_buckets
from shardwright.core.layout import Layout
from shardwright.core.run_config import OptimConfig, RunConfig
from shardwright.launch import RankEnv
from shardwright.model.transformer import Transformer
from shardwright.ops.gradients import slot_of
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.hooks import AllReduce
from shardwright.plan.collectives import predict_step
from shardwright.plan.memory import bytes_per_parameter
from shardwright.schedule.action import Kind
from shardwright.train.optim import FlatOptimizer, global_norm
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.train.step import Trainer
from shardwright.verify.mutate import ZERO_MUTATIONS
from shardwright.verify.parity import (
    Trace,
    Verification,
    compare,
    dry_step,
    first_of_each_stage,
    reference_run,
    trace_steps,
    train_sampler,
    whole_batches,
)

pytestmark = pytest.mark.timeout(300)  # the first test makes the runs of all; on busy cores that may take minutes

LLAMA: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip
DEEP = LLAMA | {"num_layers": 4}
TIED = LLAMA | {"tied_head": True}
DEEP_TIED = DEEP | {"tied_head": True}
GPT2 = LLAMA | {
    "family": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "tied_head": True,
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "num_kv_heads": 4, "dropout": 0.1,
}  # fmt: skip
FROZEN = 'train.freeze=["embedding.", "blocks.0."]'
SMALL, BLOCK = "bucket_mb=0.01", "bucket_mb=0.03"
UNCLIPPED = ["optim.clip=0"]  # the norm is summed bucket by bucket, so clipping has other roundings
ZB_V, INTERLEAVED = "pp=2,schedule=zb_v", "pp=2,schedule=interleaved,virtual=2"

CASES: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "0": (LLAMA, "dp=2", UNCLIPPED),
    "1": (LLAMA, f"dp=2,zero=1,{SMALL}", []),
    "1, a bucket for each block": (LLAMA, f"dp=2,zero=1,{BLOCK}", UNCLIPPED),
    "1, all-reduce": (LLAMA, f"dp=2,zero=1,zero1_reduce=allreduce,microbatches=2,{SMALL}", []),
    "1, gpt2, accumulation": (GPT2, "dp=2,zero=1,microbatches=4,recompute=full", []),
    "1, gloo": (LLAMA, "dp=2,zero=1,comm=gloo", []),
    "2": (LLAMA, "dp=2,zero=2", UNCLIPPED),
    "2, a bucket for each block": (LLAMA, f"dp=2,zero=2,{BLOCK}", UNCLIPPED),
    "2, small buckets": (LLAMA, f"dp=2,zero=2,{SMALL}", []),
    "2, deferred": (TIED, f"dp=2,zero=2,microbatches=4,{SMALL}", []),
    "2, reduced": (TIED, f"dp=2,zero=2,microbatches=4,accumulate=reduce,{SMALL}", []),
    "2, gloo": (LLAMA, f"dp=2,zero=2,microbatches=2,accumulate=reduce,comm=gloo,{SMALL}", []),
    "3": (LLAMA, "dp=2,zero=3", UNCLIPPED),
    "3, no prefetch": (LLAMA, "dp=2,zero=3,prefetch=0", UNCLIPPED),
    "3, far prefetch": (LLAMA, "dp=2,zero=3,prefetch=3", UNCLIPPED),
    "3, deferred": (LLAMA, "dp=2,zero=3,microbatches=4", []),
    "3, reduced, selective": (TIED, "dp=2,zero=3,microbatches=4,accumulate=reduce,recompute=selective,prefetch=2", []),
    "3, kept": (LLAMA, "dp=2,zero=3,microbatches=4,reshard=after_backward", []),
    "3, kept, reduced": (TIED, "dp=2,zero=3,microbatches=4,reshard=after_backward,accumulate=reduce", []),
    "3, gpt2, recomputed": (GPT2, "dp=2,zero=3,microbatches=2,recompute=full,comm=gloo", []),
    "3, frozen": (LLAMA, "dp=2,zero=3", [FROZEN]),
    "3, adamw in fp64": (TIED, "dp=2,zero=3,microbatches=2,precision=fp64", ["optim.name=adamw"]),
    "3, bf16": (LLAMA, "dp=2,zero=3,microbatches=2,precision=bf16", []),
    "1 of 3": (GPT2, "dp=3,zero=1,microbatches=4", []),
    "2 of 3": (LLAMA, f"dp=3,zero=2,{SMALL}", []),
    "3 of 3": (TIED, "dp=3,zero=3,microbatches=4", []),
    "1 of 4": (LLAMA, "dp=4,zero=1", [FROZEN]),
    "3 of 4": (TIED, "dp=4,zero=3", []),
    "1 with tp": (TIED, f"dp=2,tp=2,zero=1,{SMALL}", []),
    "2 with tp, no sp": (LLAMA, "dp=2,tp=2,zero=2,sp=off,microbatches=2,accumulate=reduce", []),
    "3 with tp": (TIED, "dp=2,tp=2,zero=3,microbatches=2", []),
    "3 with tp, frozen": (GPT2, "dp=2,tp=2,zero=3,reshard=after_backward,recompute=full", ['train.freeze=["embedding."]']),
    "1 with pp": (DEEP_TIED, "dp=2,pp=2,zero=1,microbatches=4", []),
    "2 with zb_v": (DEEP_TIED, f"dp=2,{ZB_V},zero=2,microbatches=4,accumulate=reduce,bucket_mb=0.05", []),
    "3 with pp": (DEEP_TIED, "dp=2,pp=2,zero=3,microbatches=4", []),
    "3 with interleaving": (DEEP, f"dp=2,{INTERLEAVED},zero=3,microbatches=4,reshard=after_backward", []),
    "3 with zb_v": (DEEP_TIED, f"dp=2,{ZB_V},zero=3,microbatches=4,accumulate=reduce,reshard=always", []),
    "1, replicas, bf16": (LLAMA, "dp=4,zero=1,dp_replicate=2,precision=bf16", []),
    "2, replicas": (LLAMA, "dp=4,zero=2,dp_replicate=2,microbatches=2,accumulate=reduce", []),
    "3, replicas": (TIED, "dp=4,zero=3,dp_replicate=2,microbatches=2", []),
    "3, replicas only": (LLAMA, "dp=4,zero=3,dp_replicate=4,reduce_dtype=bf16", []),
}  # fmt: skip
LONG = {"0": "", "1": ",zero=1", "2": ",zero=2,accumulate=reduce", "3": ",zero=3", "kept": ",zero=3,reshard=after_backward"}
LONG_STEPS = 20
RUNS_AT_ONCE = 20

MUTATED: dict[str, tuple[tuple[dict[str, Any], str, list[str]], set[str]]] = {
    "drop-reduce-scatter": (CASES["2, small buckets"], {"gradients", "parameters", "ledger"}),
    "drop-parameter-gather": (CASES["1"], {"loss", "parameters", "replicas", "ledger"}),
    "drop-shard-norm": (CASES["2"], {"norm", "replicas", "ledger"}),
    "drop-replica-sum": (CASES["3, replicas"], {"gradients", "parameters", "replicas", "ledger"}),
    "others-shard": (CASES["3"], {"loss", "gradients"}),
    "borders-left-out": (CASES["3"], {"loss", "gradients", "ledger"}),
    "dirty-padding": (CASES["2 of 3"], {"norm"}),
    "last-reduction-only": (CASES["2, reduced"], {"gradients", "parameters", "norm"}),
    "never-freed": (CASES["3"], {"loss", "parameters", "ledger"}),
}
"""Mutation -> the layout that it breaks, and what must be red; more may be."""
ALSO_MUTATED = {
    "average-gradients": (CASES["3"], {"gradients", "norm"}),
    "drop-tp-gradients": (CASES["3 with tp"], {"gradients", "ledger"}),
    "drop-parameter-gather": (CASES["3 of 3"], {"loss", "gradients", "ledger"}),
    "drop-reduce-scatter": (CASES["1"], {"gradients", "parameters", "ledger"}),
    "decay-all": (CASES["1"], {"parameters"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("zero")
    write_documents(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(folder: str) -> PreparedData:
    return prepare_data(make_config(folder, LLAMA, "dp=1"))


@pytest.fixture(scope="module")
def traces(folder: str, data: PreparedData) -> dict[str, list[Trace]]:
    """Run -> the trace of each rank; some runs of one world size share one launch."""
    runs: dict[str, Run] = {label: (make_config(folder, *case), None) for label, case in CASES.items()}
    runs |= {f"mutated {name}": (make_config(folder, *case), name) for name, (case, _) in MUTATED.items()}
    runs |= {f"also mutated {name}": (make_config(folder, *case), name) for name, (case, _) in ALSO_MUTATED.items()}
    found: dict[str, list[Trace]] = {}
    for chosen in (list(runs.items())[first : first + RUNS_AT_ONCE] for first in range(0, len(runs), RUNS_AT_ONCE)):
        found |= trace_runs(data, dict(chosen), time_limit=280.0)
    return found


@pytest.fixture(scope="module")
def references() -> dict[str, Trace]:
    return {}


def verification(
    config: RunConfig, data: PreparedData, found: list[Trace], references: dict[str, Trace]
) -> Verification:
    """The comparison; one process's run is made once for all layouts of the same batch."""
    layout = config.layout
    key = f"{config.model} {config.optim} {config.train.freeze} {layout.global_batch} {layout.precision}"
    if key not in references:
        references[key] = reference_run(config, whole_batches(train_sampler(config, data, 0)), STEPS)
    return compare(config, found, references[key], [dry_step(config, rank) for rank in first_of_each_stage(config.layout)])


# ------------------------------------------------------------------------------------------ equal to one process


@pytest.mark.parametrize("label", CASES)
def test_a_sharded_layout_computes_and_sends_what_it_should(
    label: str, folder: str, data: PreparedData, traces: dict[str, list[Trace]], references: dict[str, Trace]
) -> None:
    result = verification(make_config(folder, *CASES[label]), data, traces[label], references)
    assert result.passed, result.to_json()
    assert result.predicted.total_bytes == result.dryrun.total_bytes == result.measured.total_bytes > 0


@pytest.mark.parametrize(
    "label", ["1, a bucket for each block", "2", "2, a bucket for each block", "3", "3, no prefetch", "3, far prefetch"]
)
def test_stages_bucket_sizes_and_prefetch_change_no_bit(label: str, traces: dict[str, list[Trace]]) -> None:
    """On two ranks, whose sum has one order, with weights that are multiplied as one in one bucket."""
    for plain, sharded in zip(traces["0"], traces[label], strict=True):
        assert sharded.losses == plain.losses
        for mine, other in zip((*sharded.gradients, sharded.parameters), (*plain.gradients, plain.parameters), strict=True):
            assert [name for name, value in other.items() if not torch.equal(mine[name], value)] == []


def test_frozen_parameters_keep_every_bit_and_have_no_state(folder: str, traces: dict[str, list[Trace]]) -> None:
    """ZF-08."""
    config = make_config(folder, *CASES["3, frozen"])
    start = dict(Transformer(config.model, Mesh.solo()).initialise(config.train.seed).named_parameters())
    frozen = {name for name in start if name.startswith(config.train.freeze)}
    for trace in traces["3, frozen"]:
        assert all(torch.equal(trace.parameters[name], start[name]) for name in frozen)
        assert not any(torch.equal(trace.parameters[name], start[name]) for name in start.keys() - frozen)
        memory = trace.ledgers[-1].memory
        trained = sum(value.numel() for name, value in start.items() if name not in frozen)
        assert memory["parameters"] == config.model.num_parameters() * 4 // 2  # frozen ones are sharded too
        assert memory["gradients"] == memory["optimizer"] == trained * 4 // 2
    trainer = Trainer(config, Mesh.dry(config.layout), "meta")
    assert trainer.optimizer.named_state()["momentum"].keys() == start.keys() - frozen


def test_what_is_gathered_is_a_unit_and_what_is_prefetched(folder: str, traces: dict[str, list[Trace]]) -> None:
    """Peak bytes by class, of a step: the largest neighbours in the order of use, and two gradient buffers."""
    sizes = {"embedding": 320 * 32 * 4, "block": (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 64) * 4}
    sizes["head"] = sizes["embedding"] + 32 * 4
    for label, units in (("3, no prefetch", ["head"]), ("3", ["block", "head"]), ("3, kept", [*sizes, "block"])):
        for trace in traces[label]:
            memory, peak = trace.ledgers[-1].memory, trace.ledgers[-1].peak
            assert peak["gathered"] == sum(sizes[unit] for unit in units), label
            assert memory["gradients"] == memory["parameters"] == sum((*sizes.values(), sizes["block"])) / 2
    assert traces["3"][0].ledgers[-1].peak["buffers"] == sizes["head"] + 2 * sizes["block"]
    whole = sum((*sizes.values(), sizes["block"]))
    assert traces["3, deferred"][0].ledgers[-1].peak["buffers"] == whole
    assert traces["1"][0].ledgers[-1].peak["buffers"] == 0


def gathers_beside_the_first_receive(env: RankEnv, data: PreparedData, config: RunConfig) -> tuple[list[str], bool]:
    """Groups whose gather begins before the first action of the rank's row is over; whether that is a receive."""
    trainer = Trainer(config, Mesh.distributed(config.layout, env.rank))
    ledger = trainer.step(train_sampler(config, data, trainer.mesh.coordinates["dp"]).batches(0), 0).ledger
    first, origin = trainer.executor.spans[0], trainer.buckets.storage._origin
    early = [w.units[0] for w in ledger.windows if w.kind == "gathered" and w.start + origin < first.end]
    return early, first.action.kind is Kind.RECV_F


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_later_stage_gathers_while_it_waits_for_its_first_input(prefetch: int, folder: str, data: PreparedData) -> None:
    config = make_config(folder, DEEP, f"dp=2,pp=2,zero=3,microbatches=2,prefetch={prefetch}")
    units = ["blocks.2", "blocks.3", "head"][: 1 + prefetch] if prefetch else []
    ranks = run_ranks(gathers_beside_the_first_receive, 4, data, config)
    assert [found for found, receives in ranks if receives] == [units] * 2


def moved_in_memory(env: RankEnv, data: PreparedData, config: RunConfig) -> tuple[int, int]:
    """What a step reads and writes in memory for messages over the shard axis; how many gathers it has."""
    trainer = Trainer(config, Mesh.distributed(config.layout, env.rank))
    ledger = trainer.step(list(train_sampler(config, data, env.rank).batches(0)), 0).ledger
    return sum(ledger.moved_bytes.values()), sum(entry.count for entry in ledger.entries.values() if entry.verb == "all_gather")


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.system() != "Linux", reason="shared memory needs Linux on x86-64")
def test_gathers_between_ranks_of_a_host_copy_next_to_nothing(folder: str, data: PreparedData) -> None:
    """Beside the reductions (each rank reads its part of both buffers and writes one) only borders between parts move."""
    model = LLAMA | {"dim": 128, "num_heads": 4, "ffn_dim": 256}
    config = make_config(folder, model, "dp=2,zero=3,comm=shm")
    shard = config.model.num_parameters() * 4 // 2
    for moved, gathers in run_ranks(moved_in_memory, 2, data, config):
        assert 3 * shard <= moved <= 3 * shard + gathers * 4 * 2 * mmap.PAGESIZE + 4096, (moved, shard, gathers)


# ------------------------------------------------------------------------------------------ stages beside one another


def trace_long(env: RankEnv, data: PreparedData, runs: dict[str, RunConfig]) -> dict[str, Trace]:
    meshes = {label: Mesh.distributed(config.layout, env.rank) for label, config in runs.items()}
    return {label: trace_steps(meshes[label], config, data, LONG_STEPS) for label, config in runs.items()}


def test_all_stages_have_the_losses_and_norms_of_stage_0(folder: str, data: PreparedData) -> None:
    """And GN-07: every rank reports the same norm, that of the whole gradient."""
    runs = {
        label: make_config(folder, LLAMA, f"dp=2,microbatches=2{layout}", ["optim.name=adamw", "optim.lr=0.003"])
        for label, layout in LONG.items()
    }
    ranks = run_ranks(trace_long, 2, data, runs, time_limit=280.0)
    assert ranks[0]["0"].losses[-1] < ranks[0]["0"].losses[0] - 0.1
    for rank in ranks:
        for trace in rank.values():
            assert trace.losses == pytest.approx(ranks[0]["0"].losses, rel=1e-6)
            assert trace.norms == pytest.approx(ranks[0]["0"].norms, rel=1e-5)
            assert trace.norms == ranks[0][next(k for k, v in rank.items() if v is trace)].norms


# ------------------------------------------------------------------------------------------ bytes and memory


def live_bytes() -> int:
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def beside_the_state(env: RankEnv, data: PreparedData, configs: list[RunConfig]) -> list[int]:
    """Bytes of tensors that are alive after a step of each run, less those of its state by the ledger."""
    found = []
    for config in configs:
        gc.collect()
        before = live_bytes()
        trainer = Trainer(config, Mesh.distributed(config.layout, env.rank))
        sampler = train_sampler(config, data, trainer.mesh.coordinates["dp"])
        ledger = trainer.step(list(sampler.batches(0)), 0).ledger
        gc.collect()
        found.append(live_bytes() - before - sum(ledger.memory.values()))
        del trainer
    return found


def test_nothing_of_a_reduction_outlives_it(folder: str, data: PreparedData) -> None:
    """What a transport took for a bucket's reduction is free when the step ends, not when the next one begins."""
    configs = [make_config(folder, LLAMA, f"dp=2,zero={zero},comm=gloo", ["optim.name=adamw"]) for zero in range(4)]
    buckets = LLAMA["vocab_size"] * LLAMA["dim"] * 4
    for rank in run_ranks(beside_the_state, 2, data, configs):
        assert max(rank) < buckets // 4, rank


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_bytes_of_the_stages(num_ranks: int, shared: Path) -> None:
    """ZeRO's table; what a run sends is equal to this by the cases above."""
    table = json.loads((shared / "vectors" / "worked_examples.json").read_text())["zero_traffic"]
    model = RunConfig.of({"model": LLAMA, "data": {"sources": "x"}}, (), "dp=1").model
    step = (num_ranks - 1) * model.num_parameters() * 4 // num_ranks
    assert model.num_parameters() % num_ranks == 0

    def sent(layout: str) -> int:
        entries = predict_step(model, Layout.parse(f"dp={num_ranks},{layout}"), 48).entries.values()
        return sum(e.bytes for e in entries if e.tensor.startswith(("gradients", "parameters")))

    assert table["stage0"].startswith("2*(N-1)/N*P") and sent("zero=0") == 2 * step
    assert table["stage1_optimised"] == "(N-1)/N*P reduce-scatter + (N-1)/N*P all-gather" and sent("zero=1") == 2 * step
    assert table["stage2"] == "same total as stage 0" and sent("zero=2") == 2 * step
    assert table["stage3"].startswith("3*(N-1)/N*P") and sent("zero=3") == 3 * step
    assert sent("zero=1,zero1_reduce=allreduce") == 3 * step
    assert sent("zero=2,microbatches=4,accumulate=reduce") == 5 * step
    assert sent("zero=3,microbatches=4") == 9 * step
    assert sent("zero=3,microbatches=4,reshard=after_backward") == 2 * step
    assert sent("zero=3,microbatches=4,reshard=after_backward,accumulate=reduce") == 8 * step


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "each"), [("fp32", (4, 4, 8)), ("bf16", (2, 4, 12))])
@pytest.mark.parametrize("layout", ["dp=4", "dp=8,dp_replicate=2"])
def test_state_on_a_rank_is_that_of_the_formula(
    zero: int, precision: str, each: tuple[int, int, int], layout: str, folder: str
) -> None:
    text = f"{layout},zero={zero},precision={precision}" if zero else f"dp=4,precision={precision}"
    config = make_config(folder, LLAMA, text, ["optim.name=adamw"])
    memory = Trainer(config, Mesh.dry(config.layout, 1), "meta").memory()
    shares = bytes_per_parameter(zero, 4, *each)
    expected = [share * config.model.num_parameters() for share in shares]
    assert list(memory.values()) == expected


# ------------------------------------------------------------------------------------------ red when broken


def test_every_mutation_has_what_it_must_turn_red() -> None:
    assert MUTATED.keys() == ZERO_MUTATIONS.keys()


@pytest.mark.parametrize(
    ("name", "label"),
    [*((name, "mutated") for name in MUTATED), *((name, "also mutated") for name in ALSO_MUTATED)],
)
def test_every_mutation_turns_it_red(
    name: str,
    label: str,
    folder: str,
    data: PreparedData,
    traces: dict[str, list[Trace]],
    references: dict[str, Trace],
) -> None:
    case, expected = (MUTATED if label == "mutated" else ALSO_MUTATED)[name]
    result = verification(make_config(folder, *case), data, traces[f"{label} {name}"], references)
    assert red(result) >= expected, result.to_json()


# ------------------------------------------------------------------------------------------ by hand


class Toy:
    """Parameters by name (each a unit of its own), sharded as ``layout`` says, with one rank's gradients."""

    def __init__(self, env: RankEnv, layout: str, values: dict[str, Tensor], optim: OptimConfig) -> None:
        parsed = Layout.parse(layout)
        self.mesh = Mesh.distributed(parsed, env.rank)
        self.parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        members = [Member(name, tuple(p.shape), (name,), True, ("dp",)) for name, p in self.parameters.items()]
        plans = plan_buckets(members, list(values), 1, by_unit=parsed.zero == 3)
        self.buckets = GradientBuckets(plans, self.parameters, self.mesh, AllReduce(), layout=parsed)
        self.optimizer = FlatOptimizer(optim, self.buckets.buckets)

    def step(self, gradients: dict[str, Tensor], lr: float) -> float:
        """One update; returns the norm."""
        self.buckets.begin()
        for name, gradient in reversed(gradients.items()):
            slot = slot_of(self.parameters[name])
            assert slot is not None
            slot.add(gradient)
            self.buckets.unit_done(name)
        self.buckets.finish()
        norm = float(global_norm(self.buckets, self.mesh))
        self.optimizer.step(lr)
        return norm


def momentum_example(env: RankEnv, given: dict[str, Any], stages: list[str]) -> dict[str, Any]:
    found = {}
    for stage in stages:
        start = torch.tensor(given["params"], dtype=torch.float64).flatten()
        toy = Toy(env, f"dp=2,{stage}", {"w": start}, OptimConfig(name="sgd", momentum=given["mu"], weight_decay=0.0))
        momentum = torch.tensor(given["momentum"], dtype=torch.float64).flatten()
        toy.optimizer.load({"momentum": {"w": momentum}}, 0)
        own = torch.tensor(given["grads_per_rank"], dtype=torch.float64)[env.rank] / 2  # the mean as a sum
        toy.step({"w": own}, given["lr"])
        (bucket,) = toy.buckets.buckets
        found[stage] = {
            "grad_shard": bucket.gradients.tolist(),
            "momentum_after": toy.optimizer.state["momentum"][0].tolist(),
            "params_after": bucket.own_parts[0].tolist(),
            "next_gather": toy.buckets.named("parameters")["w"].tolist(),
        }
    return found


def test_momentum_example(shared: Path) -> None:
    example = json.loads((shared / "vectors" / "worked_examples.json").read_text())["momentum_sgd_sharded"]
    stages = ["zero=1", "zero=1,zero1_reduce=allreduce", "zero=2", "zero=3"]
    for rank, found in enumerate(run_ranks(momentum_example, 2, example["inputs"], stages)):
        for stage in stages:
            for key in ("grad_shard", "momentum_after", "params_after"):
                assert found[stage][key] == pytest.approx(example[key][rank], abs=example["tol_abs"]), (stage, key)
            assert found[stage]["next_gather"] == pytest.approx(example["next_gather"], abs=example["tol_abs"])


def uneven(world: int) -> dict[str, dict[str, Tensor]]:
    """Parameters that do not divide, by the pitfall that they stand for."""
    cases = {
        "US-08": {"embedding": (11, 3)},
        "US-09": {"slice": (5,)},
        "US-10": {"w": (3, 8)},
        "US-11": {"w": (8, 4), "nothing": (0, 8), "b": (4,)},
        "GN-10": {"w": (3,)},
        "CK-08": {"big": (4096,)} | {f"small.{index}": (2,) for index in range(20)},
    }
    generator = torch.Generator().manual_seed(world)
    return {
        case: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for case, shapes in cases.items()
    }


State = dict[str, dict[str, Tensor]]
ADAMW = OptimConfig(lr=0.1)


def uneven_steps(env: RankEnv, layouts: list[str], saved: dict[str, State] | None) -> dict[str, dict[str, State]]:
    """Layout -> case -> parameters and state after two steps; with ``saved`` only loaded from it, and given back."""
    found: dict[str, dict[str, State]] = {}
    for layout in layouts:
        found[layout] = {}
        for case, values in uneven(0).items():
            toy = Toy(env, layout, values, ADAMW)
            if saved is None:
                for step in range(2):
                    toy.step({name: value * (step + 1) / env.world_size for name, value in values.items()}, 0.1)
            else:
                toy.optimizer.load({kind: saved[case][kind] for kind in toy.optimizer.kinds}, 2)
                for bucket in toy.buckets.buckets:
                    given = saved[case]["parameters"]
                    bucket.fill_parameters(lambda name, view, given=given: view.copy_(given[name]))  # type: ignore[misc]
            state = toy.optimizer.named_state() | {"parameters": toy.buckets.named("parameters")}
            found[layout][case] = {
                kind: {name: view.detach().clone() for name, view in views.items()} for kind, views in state.items()
            }
    return found


def same(one: State, other: State, exact: bool) -> bool:
    def equal(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and (torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-5, atol=1e-6))

    return all(equal(value, other[kind][name]) for kind, views in one.items() for name, value in views.items())


def test_sizes_that_do_not_divide_are_updated_saved_and_loaded() -> None:
    """US-08 to US-11 and CK-08: padded and empty shards, more ranks than elements, at every stage, on 1, 2, 4 and 8 ranks."""
    (alone,) = run_ranks(uneven_steps, 1, ["dp=1"], None)
    reference = alone["dp=1"]
    saved: dict[str, State] = {}
    for world, stages in (
        (2, ["zero=1", "zero=2", "zero=3", "zero=3,comm=gloo", "zero=1,comm=gloo"]),
        (4, ["zero=1", "zero=3,dp_replicate=2"]),
        (8, ["zero=3"]),
    ):
        layouts = [f"dp={world},{stage}" for stage in stages]
        ranks = run_ranks(uneven_steps, world, layouts, None)
        for layout in layouts:
            for case, expected in reference.items():
                assert same(expected, ranks[0][layout][case], exact=False), (layout, case)
                for rank in ranks:
                    assert same(ranks[0][layout][case], rank[layout][case], exact=True), (layout, case)
        saved = ranks[0][layouts[-1]]
    for world, layouts in ((8, ["dp=8,zero=3"]), (2, ["dp=2,zero=1", "dp=2,zero=3"]), (1, ["dp=1"])):
        for rank in run_ranks(uneven_steps, world, layouts, saved):
            assert all(same(saved[case], rank[layout][case], exact=True) for layout in layouts for case in saved)


def not_finite(env: RankEnv) -> list[float]:
    """A rank whose shard is padding only, and an infinite gradient elsewhere."""
    found = []
    for layout in ("dp=4,zero=1", "dp=4,zero=3"):
        toy = Toy(env, layout, {"w": torch.ones(3)}, ADAMW)
        found.append(toy.step({"w": torch.tensor([3.0, 4.0, 0.0]) / 4}, 0.1))
        found.append(toy.step({"w": torch.full((3,), torch.inf if env.rank == 0 else 1.0)}, 0.1))
    return found


def test_a_rank_without_any_element_takes_part_in_every_decision() -> None:
    """GN-10, and GN-07: the parts 3 and 4 of two ranks make 5."""
    ranks = run_ranks(not_finite, 4)
    assert all(norms == [5.0, torch.inf, 5.0, torch.inf] for norms in ranks)
