"""Pipelines as they run: delays and random schedules, what is in flight, tied copies, evaluation, checkpoints, faults."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks.kit import preload, run_ranks
from ranks.runs import make_config, write_documents
from shardwright.bench import random_batches
from shardwright.checkpoint.convert import convert
from shardwright.checkpoint.hf import load_hf
from shardwright.checkpoint.io import load_checkpoint
from shardwright.comm.mesh import Mesh
from shardwright.core.layout import SCHEDULES, Layout
from shardwright.core.run_config import RunConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import LayoutError, RankError
from shardwright.launch import RankEnv, run_local_ranks
from shardwright.ops.gradients import storage_of, tensors_in
from shardwright.schedule.action import COMPUTE, Action, Kind
from shardwright.schedule.make import INTERLEAVED, make_schedule
from shardwright.schedule.memory import in_flight_by_stage
from shardwright.train.dryrun import dry_stage
from shardwright.train.loop import run_rank
from shardwright.train.metrics import read_metrics
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.train.start import RunOptions, prepare_run
from shardwright.train.step import Trainer
from shardwright.train.supported import check_supported
from shardwright.verify.parity import reference_run, train_sampler, whole_batches
from shardwright.verify.stress import StressCase, random_case, stress_rank

LLAMA: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline-runs")
    write_documents(folder)
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> PreparedData:
    return prepare_data(make_config(str(folder), LLAMA, "dp=1"))


# ------------------------------------------------------------------------------------------ random schedules and delays


@pytest.mark.parametrize(("ranks", "count"), [(2, 8), (3, 3), (4, 5)])
def test_random_schedules_end_with_the_same_bits_with_and_without_delays(  # PP-05
    ranks: int, count: int, folder: Path, data: PreparedData
) -> None:
    model = LLAMA | {"num_layers": 2 * ranks}
    plain = make_config(str(folder), model, "precision=fp64")
    cases = [random_case(seed, plain, folder, ranks, delay_s=0.01) for seed in range(count)]
    assert len({case.blocking for case in cases}) == 2
    results = run_ranks(stress_rank, ranks, data, cases)
    for case, outcomes in zip(cases, zip(*results, strict=True), strict=True):
        assert [outcome.differs for outcome in outcomes] == [[]] * ranks, case
        loss, norm = alone(case, data)
        assert [outcome.loss for outcome in outcomes] == [pytest.approx(loss, rel=1e-12)] * ranks
        assert [outcome.norm for outcome in outcomes] == [pytest.approx(norm, rel=1e-9)] * ranks


def alone(case: StressCase, data: PreparedData) -> tuple[float, float]:
    """Loss and norm of the first step in one process."""
    layout = Layout(microbatches=case.config.layout.microbatches, precision="fp64")
    config = case.config.model_copy(update={"layout": layout})
    trace = reference_run(config, whole_batches(train_sampler(config, data, 0)), 1)
    return trace.losses[0], trace.norms[0]


def test_a_tied_head_needs_its_ends_where_their_sum_is(folder: Path) -> None:
    path = folder / "ends.txt"
    path.write_text("rank 0: F1.0 BW1.0\nrank 1: F0.0 BW0.0\nrank 2: F2.0 BW2.0\n")
    tied = make_config(str(folder), LLAMA | {"tied_head": True}, f"pp=3,schedule=file:{path}")
    with pytest.raises(LayoutError, match=r"first stage on rank 1 and the last on rank 2, and the head is tied"):
        check_supported(tied)
    check_supported(make_config(str(folder), LLAMA, f"pp=3,schedule=file:{path}"))


# ------------------------------------------------------------------------------------------ what is held, and where


class _Saved:
    """A tensor that autograd keeps for a backward, counted on its stage until autograd lets it go."""

    def __init__(self, tensor: Tensor, stage: int, held: Counter[int]) -> None:
        self.tensor, self.stage, self.held = tensor, stage, held
        held[stage] += tensor.nbytes

    def __del__(self) -> None:
        self.held[self.stage] -= self.tensor.nbytes


@dataclass
class Observed:
    """What one rank saw of a few steps."""

    evaluation: float = 0.0
    losses: list[float] = field(default_factory=list)
    tied_differences: list[float] = field(default_factory=list)
    in_flight: Mapping[int, int] = field(default_factory=dict)
    peak_bytes: Counter[int] = field(default_factory=Counter)
    one_microbatch: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    names: list[str] = field(default_factory=list)
    most_sends: int = 0


def observe(env: RankEnv, data: PreparedData, runs: dict[str, tuple[RunConfig, int]]) -> dict[str, Observed]:
    return {label: observe_run(env, data, config, steps) for label, (config, steps) in runs.items()}


def observe_run(env: RankEnv, data: PreparedData, config: RunConfig, steps: int) -> Observed:
    mesh = Mesh.distributed(config.layout, env.rank)
    trainer, found, at = Trainer(config, mesh), Observed(), [Action(Kind.F, 0, 0)]
    held: Counter[int] = Counter()
    before: Counter[int] = Counter()
    sampler = train_sampler(config, data, mesh.coordinates["dp"])
    found.names = sorted(trainer.parameters)
    found.evaluation, _ = trainer.evaluate(sampler.batches(0))

    def on_action(action: Action) -> None:
        if at[0].kind is Kind.F:
            found.one_microbatch[at[0].stage].add(held[at[0].stage] - before[at[0].stage])
        for stage, size in held.items():
            found.peak_bytes[stage] = max(found.peak_bytes[stage], size)
        found.most_sends = max(found.most_sends, len(trainer.executor._sends))
        before.clear()
        before.update(held)
        at[0] = action

    with torch.autograd.graph.saved_tensors_hooks(lambda t: _Saved(t, at[0].stage, held), lambda saved: saved.tensor):
        for step in range(steps):
            trainer.executor.on_action = None if step == 0 else on_action
            at[0] = Action(Kind.BW, 0, 0)
            found.losses.append(trainer.step(list(sampler.batches(step)), step).loss)
            if steps == 10 and mesh.tied.size > 1:
                mine = trainer.parameters["embedding.token.weight"].detach()
                both = mesh.tied.all_gather(mine.unsqueeze(0), name="tied")
                found.tied_differences.append((both[0] - both[1]).abs().max().item())
    found.in_flight = dict(trainer.executor.most_in_flight)
    return found


WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved")


@pytest.fixture(scope="module")
def observed(folder: Path, data: PreparedData) -> dict[str, tuple[RunConfig, list[Observed]]]:
    runs: dict[str, tuple[RunConfig, int]] = {}
    for schedule in SCHEDULES:
        chunks = ",virtual=2" if schedule in INTERLEAVED else ""
        layout = f"pp=2,schedule={schedule},microbatches=5{chunks},precision=fp64"
        tied = {"tied_head": True} if schedule != "1f1b" else {}
        runs[schedule] = (make_config(str(folder), LLAMA | tied, layout), 2)
    for pp, steps in ((2, 10), (4, 10)):  # TE-01
        layout = f"pp={pp},microbatches=4,bucket_mb=0.01"
        model = LLAMA | {"tied_head": True}
        runs[f"adamw {pp}"] = (make_config(str(folder), model, layout, ["optim.name=adamw", "optim.lr=0.01"]), steps)
    found: dict[str, tuple[RunConfig, list[Observed]]] = {}
    for world in (2, 4):
        chosen = {label: run for label, run in runs.items() if run[0].layout.world_size == world}
        results = run_ranks(observe, world, data, chosen)
        found |= {label: (chosen[label][0], [result[label] for result in results]) for label in chosen}
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_holds_as_many_micro_batches_as_its_schedule_says(
    schedule: str, observed: dict[str, tuple[RunConfig, list[Observed]]]
) -> None:
    config, ranks = observed[schedule]
    rows = make_schedule(config.layout)
    measured = {stage: count for rank in ranks for stage, count in rank.in_flight.items()}
    assert tuple(measured[stage] for stage in range(rows.num_stages)) == in_flight_by_stage(rows)
    if schedule == "gpipe":
        assert measured == {0: 5, 1: 5}
    if schedule in ("1f1b", "zb_h1"):
        assert measured == ({0: 2, 1: 1} if schedule == "1f1b" else {0: 2, 1: 2})
    for rank in ranks:
        for stage in rank.in_flight:
            peak, (one,) = rank.peak_bytes[stage], rank.one_microbatch[stage]
            assert one > 0
            if schedule in WHOLE_BACKWARD:  # else B lets go of a part, and W of the rest
                assert peak == one * measured[stage], (stage, peak / one)
            else:
                assert peak <= one * measured[stage]


class _Kept:
    """A tensor that autograd keeps, for as long as it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def held_bytes(env: RankEnv, data: PreparedData, runs: dict[str, RunConfig]) -> dict[str, tuple[int, int, int]]:
    """Of each run's second step the most bytes of distinct storages, and those for W alone: counted, and by the ledger."""
    return {label: held_in_step(env, data, config) for label, config in runs.items()}


def held_in_step(env: RankEnv, data: PreparedData, config: RunConfig) -> tuple[int, int, int]:
    mesh = Mesh.distributed(config.layout, env.rank)
    trainer = Trainer(config, mesh)
    executor, queue, most = trainer.executor, trainer.buckets.queue, [0, 0]
    saved: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def keep(tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        saved.add(kept)
        return kept

    def look() -> None:
        flights = executor._in_flight.values()
        waiting = list(tensors_in([queue._waiting, *([*flight.deferred] for flight in flights)]))
        boundary = [tensor for flight in flights for tensor in (*flight.inputs, *flight.outputs)]
        batches = [parameter.data for parameter in trainer.parameters.values()]
        for batch in executor._microbatches:
            batches += tensors_in(vars(batch).values())
        outside = {storage_of(tensor) for tensor in batches}
        for index, tensors in enumerate(([*waiting, *boundary, *(kept.tensor for kept in saved)], waiting)):
            sizes = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
            most[index] = max(most[index], sum(size for key, size in sizes.items() if key not in outside))

    backward = executor._unit_backward

    def looked_at(*values: Any) -> Tensor:
        look()
        gradient: Tensor = backward(*values)
        look()
        return gradient

    executor._unit_backward = looked_at  # type: ignore[method-assign]
    executor.on_action = lambda action: look()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        batches = list(train_sampler(config, data, mesh.coordinates["dp"]).batches(0))
        trainer.step(batches, 0)
        most[:] = 0, 0
        ledger = trainer.step(batches, 1).ledger
    return most[0], most[1], ledger.peak["held for W"]


@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_that_wait_for_a_weight_gradient_are_those_of_the_dry_run(
    tp: int, folder: Path, data: PreparedData
) -> None:
    """And all activations, but for 8 % (what a kernel keeps for itself): x and dy and, with sp, gathered tokens until W."""
    runs = {
        f"{schedule} {recompute}": make_config(
            str(folder), LLAMA, f"pp=2,tp={tp},schedule={schedule},recompute={recompute},microbatches=4"
        )
        for schedule in ("zb_h1", "zb_v")
        for recompute in ("none", "full")
    }
    results = run_ranks(held_bytes, 2 * tp, data, runs)
    for label, config in runs.items():
        for rank, found in enumerate(results):
            dry = dry_stage(config, rank, config.layout.grid.coordinates(rank)["pp"]).memory
            whole, waiting, booked = found[label]
            assert (label, rank, waiting) == (label, rank, booked)
            assert booked == dry.parts["held for W"]
            assert whole == pytest.approx(dry.activations, rel=0.08), (label, rank)


def test_sends_that_are_done_are_let_go(observed: dict[str, tuple[RunConfig, list[Observed]]]) -> None:
    assert {rank.most_sends for _, ranks in observed.values() for rank in ranks} == {0}


@pytest.mark.parametrize("pp", [2, 4])
def test_the_copies_of_a_tied_weight_stay_equal_after_every_step(
    pp: int, observed: dict[str, tuple[RunConfig, list[Observed]]], data: PreparedData
) -> None:
    config, ranks = observed[f"adamw {pp}"]
    assert [len(rank.tied_differences) for rank in ranks] == [10, *[0] * (pp - 2), 10]
    assert all(difference == 0.0 for rank in ranks for difference in rank.tied_differences)
    alone = reference_run(config, whole_batches(train_sampler(config, data, 0)), 10)
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, rel=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_equals_one_process_on_every_rank(
    schedule: str, observed: dict[str, tuple[RunConfig, list[Observed]]], data: PreparedData
) -> None:
    config, ranks = observed[schedule]
    alone = reference_run(config, whole_batches(train_sampler(config, data, 0)), 1)
    assert [rank.evaluation for rank in ranks] == [pytest.approx(alone.losses[0], rel=1e-12)] * 2


def test_stages_hold_the_layers_of_their_place(observed: dict[str, tuple[RunConfig, list[Observed]]]) -> None:
    """US-13, PP-07: global layer numbers, each layer once."""

    def layers(label: str) -> list[set[int]]:
        return [
            {int(name.split(".")[1]) for name in rank.names if name.startswith("blocks.")} for rank in observed[label][1]
        ]

    assert layers("1f1b") == [{0, 1}, {2, 3}]
    assert layers("interleaved") == [{0, 2}, {1, 3}]
    assert layers("zb_v") == [{0, 3}, {1, 2}]
    names = [name for rank in observed["1f1b"][1] for name in rank.names]
    assert sorted(names) == sorted(parameter_specs(observed["1f1b"][0].model))


# ------------------------------------------------------------------------------------------ whole runs


def loop_config(folder: Path, run: str, layout: str, **changes: Any) -> RunConfig:
    config = make_config(str(folder), LLAMA | {"tied_head": True}, f"{layout},microbatches=4,precision=fp64")
    optim = config.optim.model_copy(update={"name": "adamw", "lr": 0.01})
    train = config.train.model_copy(update={"steps": 6, "save_every": 3, "run_dir": str(folder / run)} | changes)
    return config.model_copy(update={"optim": optim, "train": train})


def run_loop(config: RunConfig, options: RunOptions, fault: str = "") -> list[dict[str, Any]]:
    return run_local_ranks(
        faulty_rank,
        config.layout.world_size,
        (config, prepare_run(config, options), options, fault),
        threads_per_rank=1,
        timeout_s=config.train.timeout_s,
        time_limit_s=60.0,
        grace_s=1.0,
        preload=preload(),
    )


def faulty_rank(
    env: RankEnv, config: RunConfig, data: PreparedData, options: RunOptions, fault: str
) -> dict[str, Any]:
    """A rank of a run; its last rank meets ``fault`` at F1.2 of the second step."""
    original = Trainer.step

    def step_with_fault(self: Trainer, batches: Any, number: int) -> Any:
        def on_action(action: Action) -> None:
            if str(action) == "F1.2":
                os.kill(os.getpid(), signal.SIGKILL if fault == "die" else signal.SIGSTOP)

        if number == 1 and env.rank == 1:
            if fault == "shape":
                self.executor.stages[1].width += 1
            else:
                self.executor.on_action = on_action
        return original(self, batches, number)

    if fault:
        Trainer.step = step_with_fault  # type: ignore[method-assign]
    return run_rank(env, config, data, options)


@pytest.fixture(scope="module")
def piped(folder: Path) -> tuple[RunConfig, list[dict[str, Any]]]:
    config = loop_config(folder, "piped", "pp=2,schedule=zb_h1")
    return config, run_loop(config, RunOptions(profile=True))


@pytest.fixture(scope="module")
def single(folder: Path) -> RunConfig:
    config = loop_config(folder, "single", "pp=1")
    run_loop(config, RunOptions())
    return config


def losses(config: RunConfig) -> list[float]:
    return [record["loss"] for record in read_metrics(config.train.run_dir)]


def weights(config: RunConfig) -> dict[str, Tensor]:
    path = Path(config.train.run_dir) / "checkpoints" / "step-6"
    return load_checkpoint(path, parameter_specs(config.model)).weights


def test_a_checkpoint_of_two_stages_continues_on_one_rank_and_the_reverse(
    folder: Path, piped: tuple[RunConfig, list[dict[str, Any]]], single: RunConfig
) -> None:
    assert losses(piped[0]) == pytest.approx(losses(single), rel=1e-9)
    for source, layout in ((piped[0], "pp=1"), (single, "pp=2,schedule=zb_v")):
        config = loop_config(folder, f"from-{source.layout.pp}", layout)
        run_loop(config, RunOptions(resume=str(Path(source.train.run_dir) / "checkpoints" / "step-3")))
        assert losses(config)[-3:] == pytest.approx(losses(single)[3:], rel=1e-9)
        mine, other = weights(config), weights(single)
        assert mine.keys() == other.keys()
        assert all(torch.allclose(mine[name], other[name], rtol=1e-6, atol=1e-9) for name in other)


def test_the_run_measures_its_bubble_beside_the_simulated_one(piped: tuple[RunConfig, list[dict[str, Any]]]) -> None:
    config, summaries = piped
    found = summaries[0]["pipeline"]
    assert 0 < found["bubble_fraction"] < 1 and 0 < found["simulated_bubble_fraction"] < 1
    assert found["schedule"] == "zb_h1" and found["in_flight"] == [2, 2]
    assert found["slowest_stage"] in (0, 1) and all(seconds > 0 for stage in found["stage_seconds"] for seconds in stage.values())
    assert len(found["idle_seconds"]) == config.layout.pp


def late_gathers(env: RankEnv, data: PreparedData, config: RunConfig, delay_s: float) -> list[tuple[float, float]]:
    """Rank 1 comes ``delay_s`` late to each F, so rank 0 waits for its shards: seconds that each F took, and waited."""
    trainer = Trainer(config, Mesh.distributed(config.layout, env.rank))
    batches = list(train_sampler(config, data, env.rank).batches(0))
    for step in range(2):
        trainer.step(batches, step)
        if env.rank == 1:
            trainer.executor.on_action = lambda action: time.sleep(delay_s if action.kind is Kind.F else 0)
    waits = trainer.executor.waits
    assert {wait.verb for wait in waits} >= {"all_gather"} and all(wait.launch <= wait.start <= wait.end for wait in waits)
    assert trainer.mesh.recorder.waits is None  # nothing grows between steps
    return [(span.end - span.start, span.waited) for span in trainer.executor.spans if span.action.kind is Kind.F]


def test_what_a_forward_waits_for_a_gather_is_not_its_computing(folder: Path, data: PreparedData) -> None:
    config = make_config(str(folder), LLAMA, "dp=2,zero=3,microbatches=2,reshard=always")
    first, _ = run_ranks(late_gathers, 2, data, config, 0.1)
    assert len(first) == 2
    for took, waited in first:
        assert 0.08 < waited <= took


def test_the_trace_has_three_lanes_for_each_rank(piped: tuple[RunConfig, list[dict[str, Any]]]) -> None:
    config, _ = piped
    events = json.loads((Path(config.train.run_dir) / "trace.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    rows = make_schedule(config.layout).rows
    for rank in range(2):
        (pid,) = (pid for pid, name in names.items() if name.startswith(f"rank {rank} pp {rank}"))
        mine = [e for e in events if e["pid"] == pid and e["ph"] == "X"]
        by_lane = {lane: [e for e in mine if lanes[pid, e["tid"]] == lane] for lane in ("compute", "communication", "idle")}
        assert [e["name"] for e in by_lane["compute"]] == [str(action) for action in rows[rank]] * 3
        names_there = [e["name"] for e in by_lane["communication"] if not e["name"].startswith("wait for")]
        assert names_there and all(Kind(name.rstrip("0123456789.")) not in COMPUTE for name in names_there)
        for e in by_lane["idle"]:  # no computation reaches into it
            assert all(c["ts"] + c["dur"] <= e["ts"] + 1 or c["ts"] >= e["ts"] + e["dur"] - 1 for c in by_lane["compute"])
    assert any(e.get("cat") == "cpu_op" for e in events)  # PyTorch's own profile of rank 0


# ------------------------------------------------------------------------------------------ small cases of pipelines


def uneven_batch(env: RankEnv | None, config: RunConfig) -> tuple[float, float]:
    """Loss and norm of a step over 8 sequences in micro-batches of 3, 3 and 2."""
    trainer = Trainer(config, Mesh.solo() if env is None else Mesh.distributed(config.layout, env.rank))
    batches = random_batches(config.model, 2, 3, 48, seed=1) + random_batches(config.model, 1, 2, 48, seed=2)
    result = trainer.step(batches, 0)
    return result.loss, result.grad_norm


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_batch_that_does_not_divide_by_its_micro_batches(schedule: str, folder: Path) -> None:
    """PP-02: the loss is that of one rank, weighed by tokens; each boundary carries what its micro-batch has."""
    model = LLAMA | {"num_layers": 3}
    alone = uneven_batch(None, make_config(str(folder), model, "microbatches=3,precision=fp64"))
    config = make_config(str(folder), model, f"pp=3,microbatches=3,schedule={schedule},precision=fp64")
    for found in run_ranks(uneven_batch, 3, config):
        assert found == pytest.approx(alone, rel=1e-9)


def test_steps_go_on_where_the_data_ends_in_the_middle_of_a_batch(folder: Path, data: PreparedData) -> None:
    """PP-06: no partial batch; the next epoch fills it, every rank makes the same number of steps."""
    text = folder / "few.jsonl"
    text.write_text("".join((folder / "documents.jsonl").read_text().splitlines(keepends=True)[:40]))
    runs = {}
    for pp in (1, 2):
        config = make_config(
            str(folder), LLAMA, f"pp={pp},microbatches=4,precision=fp64",
            [f"data.sources={text}", "data.valid_fraction=0", f"train.run_dir={folder}/few-{pp}"],
        )  # fmt: skip
        options = RunOptions()
        windows = sum(part.num_windows for part in train_sampler(config, prepare_run(config, options), 0).blend.datasets)
        assert windows % 4
        config = config.model_copy(update={"train": config.train.model_copy(update={"steps": windows // 4 + 2})})
        summaries = run_loop(config, options)
        assert [summary["steps"] for summary in summaries] == [windows // 4 + 2] * pp
        runs[pp] = losses(config)
    assert len(runs[2]) == len(runs[1]) and runs[2] == pytest.approx(runs[1], rel=1e-9)


def test_what_only_one_stage_has_is_told_and_exported_once(folder: Path) -> None:
    """PP-07: three stages of one layer; parameters, lr, loss and norm are those of one rank, each exported tensor is there."""
    told, exported = {}, {}
    for pp in (1, 3):
        config = make_config(
            str(folder), LLAMA | {"num_layers": 3}, f"pp={pp},microbatches=4,precision=fp64",
            ["train.steps=2", "train.save_every=2", f"train.run_dir={folder}/told-{pp}", "optim.name=adamw", "optim.lr=0.01"],
        )  # fmt: skip
        run_loop(config, RunOptions())
        run_dir = Path(config.train.run_dir)
        told[pp] = [record[key] for record in read_metrics(run_dir) for key in ("loss", "lr", "grad_norm")]
        convert(run_dir / "checkpoints" / "step-2", folder / f"exported-{pp}")
        exported[pp] = load_hf(folder / f"exported-{pp}")[1]
    assert told[3] == pytest.approx(told[1], rel=1e-8) and len(told[3]) == 6
    specs = parameter_specs(config.model)
    assert list(exported[3]) == list(exported[1]) and set(exported[3]) == set(specs)
    assert sum(value.numel() for value in exported[3].values()) == config.model.num_parameters()
    for name, value in exported[3].items():
        assert torch.allclose(value, exported[1][name], rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("die", [r"^rank 1 was killed by SIGKILL .*; it was at stage 1, action F1\.2, micro-batch 2"]),
        (
            "stall",
            [
                r"^rank 0 failed: .*timed out after 3 s.*; the rank was at stage 0, action RECV_B0\.\d, micro-batch \d",
                r"\nrank 1 was at stage 1, action F1\.2, micro-batch 2\n",
            ],
        ),
        (
            "shape",
            [r"receive from rank 0 of 'activations\.0' .*expected .*; the rank was at stage 1, action RECV_F1\.0, micro-batch 0"],
        ),
    ],
)
def test_a_stage_that_fails_is_named_with_its_action_and_micro_batch(fault: str, told: list[str], folder: Path) -> None:
    config = loop_config(folder, f"fault-{fault}", "pp=2", timeout_s=3.0)
    with pytest.raises(RankError) as caught:
        run_loop(config, RunOptions(), fault)
    for pattern in told:
        assert re.search(pattern, str(caught.value)), str(caught.value)
