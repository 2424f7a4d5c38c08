"""Runs that stop and go on: resumed bit for bit, at another size, after a killed or a failing rank, after a signal."""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.kit import FaultPlan, preload, run_ranks
from shardwright.checkpoint import save
from shardwright.checkpoint.io import CheckpointState, load_checkpoint
from shardwright.checkpoint.manifest import latest_checkpoint, named_steps
from shardwright.checkpoint.remote import RemoteStore
from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import CheckpointError, ConfigError, RankError
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.parallel.hooks import AllReduce
from shardwright.train.checkpoints import RunCheckpoints
from shardwright.train.data import TrainSampler
from shardwright.train.loop import run_rank
from shardwright.train.metrics import read_metrics
from shardwright.train.prepare import PreparedData
from shardwright.train.start import RunOptions, check_same_config, open_split, prepare_run
from shardwright.train.step import Trainer

STEPS = 10
LAYOUT = "dp=2,microbatches=2,micro_batch=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text so short that ten steps read it more than twice."""
    folder = tmp_path_factory.mktemp("resume")
    rng = random.Random(3)
    words = [rng.choice("bdfgklmnprst") + rng.choice("aeiou") + rng.choice("lmnrst") for _ in range(80)]
    documents = [" ".join(rng.choices(words, k=rng.choice((3, 8, 30)))) for _ in range(42)]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return folder


EXPERTS: dict[str, Any] = {
    "family": "mixtral",
    "moe": {"num_experts": 4, "top_k": 2, "expert_dim": 48, "aux_coefficient": 0.01},
}
"""What makes a model with experts of `make_config`'s."""


def make_config(
    folder: Path, run: str, layout: str = LAYOUT, model: Mapping[str, Any] | None = None, **changes: Any
) -> RunConfig:
    table: dict[str, Any] = {
        "model": {
            "vocab_size": 320, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48,
            "max_positions": 64, "dropout": 0.1, **(model or {}),
        },
        "data": {"sources": str(folder / "documents.jsonl"), "seq_len": 32, "cache": str(folder / "datasets")},
        "optim": {"lr": 0.01, "warmup_steps": 3},
        "router": {"balance": "sequence"},
        "train": {"steps": STEPS, "threads": 1, "run_dir": str(folder / run), "peak_tflops": 1.0} | changes,
    }  # fmt: skip
    return RunConfig.of(table, (), layout)


@dataclass
class Plan:
    """What a rank shall do in its run beside training: faults, and functions of this module to call first."""

    faults: FaultPlan = field(default_factory=FaultPlan)
    prepare: Callable[..., None] | None = None
    arguments: tuple[Any, ...] = ()


def planned_rank(
    env: RankEnv, config: RunConfig, data: PreparedData, options: RunOptions, plan: Plan
) -> dict[str, Any]:
    plan.faults.on(env).wrap(AllReduce, "start", "reduce")
    if plan.prepare is not None:
        plan.prepare(env, *plan.arguments)
    return run_rank(env, config, data, options)


def run(config: RunConfig, resume: str = "none", plan: Plan | None = None) -> list[dict[str, Any]]:
    """The summaries of all ranks of a run."""
    options = RunOptions(resume=resume)
    data = prepare_run(config, options)
    return run_local_ranks(
        planned_rank,
        config.layout.world_size,
        (config, data, options, plan or Plan()),
        threads_per_rank=1,
        timeout_s=30.0,
        time_limit_s=60.0,
        grace_s=1.0,
        preload=preload(),
    )


def losses(config: RunConfig) -> list[float]:
    """The losses of all steps that the run folder tells of."""
    records = read_metrics(config.train.run_dir)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def checkpoints(config: RunConfig) -> list[int]:
    return list(named_steps(Path(config.train.run_dir) / "checkpoints"))


def load(config: RunConfig, step: int = STEPS) -> CheckpointState:
    path = Path(config.train.run_dir) / "checkpoints" / f"step-{step}"
    return load_checkpoint(path, parameter_specs(config.model))


def assert_same_state(first: CheckpointState, second: CheckpointState) -> None:
    assert (first.step, first.samples, first.extra["optimizer_steps"]) == (
        second.step,
        second.samples,
        second.extra["optimizer_steps"],
    )
    for mine, other in (
        (first.weights, second.weights),
        *zip(first.optimizer.values(), second.optimizer.values(), strict=True),
    ):
        assert mine.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in mine.items())


def stop_in_step(env: RankEnv, step: int, rank: int) -> None:
    """Have ``rank`` ask for a stop in its 0-based step ``step``, as its signal handler does."""
    original = Trainer.step

    def step_and_ask(self: Trainer, batches: Any, number: int) -> Any:
        self.stop_requested = number == step and env.rank == rank
        return original(self, batches, number)

    Trainer.step = step_and_ask  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------ resume


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunConfig:
    """A run of ten steps without a break."""
    config = make_config(folder, "whole")
    summaries = run(config)
    assert [summary["steps"] for summary in summaries] == [STEPS, STEPS]
    assert not any(summary["stopped"] for summary in summaries)
    return config


@pytest.fixture(scope="module")
def halved(folder: Path) -> RunConfig:
    """The same run, stopped after five steps by its last rank."""
    config = make_config(folder, "halved")
    summaries = run(config, plan=Plan(prepare=stop_in_step, arguments=(4, 1)))
    assert [(summary["steps"], summary["stopped"]) for summary in summaries] == [(5, True), (5, True)]
    assert checkpoints(config) == [5]
    return config


def copied(
    config: RunConfig, folder: Path, run_name: str, layout: str = LAYOUT, model: Mapping[str, Any] | None = None
) -> RunConfig:
    """Another run folder with the checkpoints and metrics of ``config``'s."""
    source, target = Path(config.train.run_dir), folder / run_name
    for path in sorted(source.rglob("*")):
        if path.is_file() and "tensorboard" not in path.parts:
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())
    return make_config(folder, run_name, layout, model)


def test_a_resumed_run_continues_bit_for_bit_in_its_second_epoch(
    folder: Path, whole: RunConfig, halved: RunConfig
) -> None:
    config = copied(halved, folder, "resumed")
    data = prepare_run(config, RunOptions(resume="auto"))
    num_windows = open_split(config, data, "train").datasets[0].num_windows
    assert num_windows < 5 * config.layout.global_batch < 2 * num_windows
    run(config, resume="auto")
    assert losses(config) == losses(whole)
    assert_same_state(load(config), load(whole))


def test_a_run_resumed_on_one_rank_reads_the_same_samples(folder: Path, whole: RunConfig, halved: RunConfig) -> None:
    config = copied(halved, folder, "resumed-on-one", "dp=1,microbatches=2,micro_batch=4")
    assert config.layout.global_batch == whole.layout.global_batch
    run(config, resume=str(Path(config.train.run_dir) / "checkpoints" / "step-5"))
    assert losses(config)[:5] == losses(whole)[:5]
    assert losses(config) == pytest.approx(losses(whole), rel=1e-6)
    assert load(config).samples == STEPS * whole.layout.global_batch


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_bf16_continues_bit_for_bit_too(zero: int, folder: Path) -> None:
    """Weights are saved in bf16, so the fp32 masters must come back as they were."""
    layout = f"dp=2,zero={zero},micro_batch=2,precision=bf16,recompute=full"
    frozen = ["blocks.0.mlp"] if zero == 3 else []
    names = (f"bf16-whole-{zero}", f"bf16-halves-{zero}")
    whole, halves = (make_config(folder, name, layout, steps=4, freeze=frozen) for name in names)
    run(whole)
    run(halves, plan=Plan(prepare=stop_in_step, arguments=(1, 0)))
    assert checkpoints(halves) == [2]
    run(halves, resume="auto")
    assert losses(halves) == losses(whole)
    assert_same_state(load(halves, 4), load(whole, 4))


def test_lh_02_ranks_end_together_though_windows_do_not_divide_among_them(folder: Path) -> None:
    """An epoch goes on into the next one, a rank without held-out windows brings empty batches: equal steps everywhere."""
    config = make_config(folder, "uneven", "dp=4", eval_every=4)
    data = prepare_run(config, RunOptions())
    train, valid = (open_split(config, data, split).datasets[0] for split in ("train", "valid"))
    assert train.num_windows % 4 and train.num_windows < 4 * STEPS and valid.num_eval_windows < 4
    summaries = run(config)
    assert [summary["steps"] for summary in summaries] == [STEPS] * 4 and len(losses(config)) == STEPS
    assert {summary["valid_loss"] for summary in summaries} == {summaries[0]["valid_loss"]} != {None}


STOPPED_LAYOUTS = {
    "dp and pp": "dp=2,pp=2,microbatches=2,micro_batch=2",
    "dp and tp": "dp=2,tp=2,microbatches=2,micro_batch=2",
    "experts over dp": "dp=2,ep=2,microbatches=2,micro_batch=2",
}


@pytest.fixture(scope="module", params=STOPPED_LAYOUTS)
def stopped(request: pytest.FixtureRequest, folder: Path) -> tuple[RunConfig, RunConfig]:
    """A run of ten steps at a layout, and the same run stopped after five."""
    layout, label = STOPPED_LAYOUTS[request.param], request.param.replace(" ", "-")
    model = EXPERTS if "experts" in label else None
    whole, halved = (make_config(folder, f"{label}-{name}", layout, model) for name in ("whole", "halved"))
    run(whole)
    run(halved, plan=Plan(prepare=stop_in_step, arguments=(4, 1)))
    assert checkpoints(halved) == [5]
    return whole, halved


def test_ck_09_ck_14_ck_19_resumed_at_the_same_layout_bit_for_bit(
    stopped: tuple[RunConfig, RunConfig], folder: Path
) -> None:
    """With dropout 0.1 and warm-up 3: state, schedule, samples and each rank's own dropout masks go on, experts of all ranks."""
    whole, halved = stopped
    model = EXPERTS if halved.model.is_moe else None
    config = copied(halved, folder, f"{Path(halved.train.run_dir).name}-resumed", str(halved.layout), model)
    run(config, resume="auto")
    assert losses(config) == losses(whole)
    assert_same_state(load(config), load(whole))


def held_experts(env: RankEnv, config: RunConfig, path: Path | None) -> dict[str, list[float]]:
    """The first value of each expert that this rank holds, after loading ``path``; without it, filled with their numbers and
    saved."""
    if env.world_size > 1:
        init_process_group(env)
    mesh = Mesh.distributed(config.layout, env.rank) if env.world_size > 1 else Mesh.solo()
    mesh.layout = config.layout
    trainer = Trainer(config, mesh)
    with RunCheckpoints(config, trainer, None, env.note) as saved:
        if path is None:

            def fill(name: str, view: torch.Tensor) -> None:
                for place, expert in enumerate(view if ".experts." in name else ()):
                    expert.fill_(mesh.ep.rank * len(view) + place)

            trainer.fill_parameters(fill)
            saved.save(1, 4, last=True)
        else:
            saved.restore(str(path))
    return {name: tensor.flatten(1)[:, 0].tolist() for name, tensor in trainer.named_parameters().items() if ".experts." in name}


def test_ck_19_every_expert_is_in_the_file_and_comes_back_at_any_ep(folder: Path) -> None:
    """Four experts on two ranks, expert i filled with i: local numbers never stand for global ones."""
    config = make_config(folder, "filled", "dp=2,ep=2,micro_batch=2", EXPERTS)
    run_local_ranks(held_experts, 2, (config, None), threads_per_rank=1, preload=preload())
    path = Path(config.train.run_dir) / "checkpoints" / "step-1"
    weights = load(config, 1).weights
    stacks = [name for name in weights if ".experts." in name]
    assert len(stacks) == 4
    for name in stacks:
        assert [sorted(set(expert.flatten().tolist())) for expert in weights[name]] == [[0.0], [1.0], [2.0], [3.0]]
    for layout, held in (("dp=2,ep=2,micro_batch=2", [[0.0, 1.0], [2.0, 3.0]]), ("dp=1,micro_batch=4", [[0.0, 1.0, 2.0, 3.0]])):
        again = config.model_copy(update={"layout": Layout.parse(layout)})
        ranks = run_local_ranks(held_experts, len(held), (again, path), threads_per_rank=1, preload=preload())
        assert ranks == [dict.fromkeys(stacks, numbers) for numbers in held]


@pytest.mark.parametrize("stopped", ["experts over dp"], indirect=True)
def test_ck_19_a_run_with_experts_goes_on_without_ep(stopped: tuple[RunConfig, RunConfig], folder: Path) -> None:
    whole, halved = stopped
    name = f"{Path(halved.train.run_dir).name}-without-ep"
    config = copied(halved, folder, name, "dp=2,microbatches=2,micro_batch=2", EXPERTS)
    run(config, resume="auto")
    assert losses(config) == pytest.approx(losses(whole), rel=1e-5)


# ------------------------------------------------------------------------------------------ a rank is lost


def test_after_a_kill_in_mid_step_a_resumed_run_has_the_losses_of_one_without(folder: Path, whole: RunConfig) -> None:
    config = make_config(folder, "killed", save_every=2, async_save=False)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL") as caught:
        run(config, plan=Plan(FaultPlan(kill={"reduce": 6}, ranks=[1])))
    assert caught.value.rank == 1 and time.monotonic() - start < 15
    assert checkpoints(config) == [4, 6]
    run(config, resume="auto")
    assert losses(config) == losses(whole)
    assert_same_state(load(config), load(whole))


def slow_disk(env: RankEnv, notes: Path) -> None:
    """Have a checkpoint take a second, and note how many steps have begun when it is complete."""
    begun, step, put_in_place = [0], Trainer.step, save.put_in_place

    def count(self: Trainer, batches: Any, number: int) -> Any:
        begun[0] += 1
        return step(self, batches, number)

    def wait_and_put(partial: Path, final: Path) -> None:
        time.sleep(1.0)
        put_in_place(partial, final)
        with notes.open("a") as file:
            file.write(f"{begun[0]}\n")

    Trainer.step = count  # type: ignore[method-assign]
    save.put_in_place = wait_and_put


@pytest.mark.parametrize("lag", [1, None])
def test_training_waits_for_a_save_that_lags_so_a_kill_costs_no_more(lag: int | None, folder: Path) -> None:
    """Saved after steps 5 and 10 in the background: complete before step 7 begins, or with half an interval before step 8."""
    config = make_config(folder, f"lag-{lag}", save_every=5, async_lag_steps=lag)
    notes = folder / f"lag-{lag}.txt"
    run(config, plan=Plan(prepare=slow_disk, arguments=(notes,)))
    assert checkpoints(config) == [5, 10]
    first, last = map(int, notes.read_text().split())
    assert 5 <= first <= 5 + config.train.save_lag and last == 10
    assert config.train.save_lag == (lag or 2)


def break_call(env: RankEnv, place: str, call: int) -> None:
    """Make the ``call``-th call (0-based) of ``module:name`` raise on the last rank, or the one that saves."""
    module, _, path = place.partition(":")
    *owners, attribute = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original, calls = getattr(owner, attribute), iter(range(1 << 30))

    @functools.wraps(original)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call and (env.rank == env.world_size - 1 or attribute == "put_in_place"):
            raise ZeroDivisionError(f"broken {attribute}")
        return original(*args, **kwargs)

    setattr(owner, attribute, maybe)


@pytest.mark.parametrize(
    ("place", "call", "rank"),
    [
        ("shardwright.model.transformer:Head.forward", 5, 1),
        ("shardwright.ops.gradients:GradSlot.add", 25, 1),
        ("shardwright.train.optim:FlatOptimizer.step", 2, 1),
        ("shardwright.train.data:TrainSampler.batches", 2, 1),
        ("shardwright.checkpoint.save:put_in_place", 2, 0),
    ],
    ids=["forward", "backward", "optimizer", "data", "save"],
)
def test_a_rank_that_raises_in_its_third_step_ends_all_and_is_named(
    place: str, call: int, rank: int, folder: Path
) -> None:
    attribute = place.rpartition(".")[2].rpartition(":")[2]
    config = make_config(folder, f"broken-{place.rpartition(':')[2]}", save_every=1, async_save=False)
    start = time.monotonic()
    with pytest.raises(RankError, match=rf"^rank {rank} failed: ZeroDivisionError: broken {attribute}") as caught:
        run(config, plan=Plan(prepare=break_call, arguments=(place, call)))
    assert caught.value.rank == rank and time.monotonic() - start < 15
    assert checkpoints(config) == [1, 2]  # two steps were done, and no torn checkpoint is left
    assert len(losses(config)) == (3 if attribute == "put_in_place" else 2)


# ------------------------------------------------------------------------------------------ signals


def signal_in_step(env: RankEnv, step: int, delays: dict[int, float]) -> None:
    """SIGTERM to this rank so many seconds after it begins its 0-based step ``step``."""
    original = Trainer.step

    def step_and_signal(self: Trainer, batches: Any, number: int) -> Any:
        if number == step and env.rank in delays:
            threading.Timer(delays[env.rank], os.kill, (os.getpid(), signal.SIGTERM)).start()
        return original(self, batches, number)

    Trainer.step = step_and_signal  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "delays", [{1: 0.0}, {0: 0.2, 1: 0.0, 2: 0.13, 3: 0.07}], ids=["one rank only", "all, one after another"]
)
def test_lh_06_a_signal_stops_all_ranks_after_the_same_step_with_one_checkpoint(
    delays: dict[int, float], folder: Path
) -> None:
    config = make_config(folder, f"signal-{len(delays)}", "dp=4", steps=5000)
    summaries = run(config, plan=Plan(prepare=signal_in_step, arguments=(3, delays)))
    (steps,) = {summary["steps"] for summary in summaries}
    assert all(summary["stopped"] for summary in summaries) and 4 <= steps < 5000
    assert checkpoints(config) == [steps] and len(losses(config)) == steps


# ------------------------------------------------------------------------------------------ other configurations


def compare_configs(env: RankEnv, pairs: list[tuple[RunConfig, RunConfig]]) -> list[str]:
    messages = []
    for pair in pairs:
        mesh = Mesh.distributed(pair[0].layout, env.rank)
        try:
            check_same_config(pair[env.rank], mesh.world)
            messages.append("same")
        except ConfigError as error:
            messages.append(str(error))
    return messages


def with_another_seed(env: RankEnv, config: RunConfig, data: PreparedData, options: RunOptions) -> dict[str, Any]:
    train = config.train.model_copy(update={"seed": env.rank})
    return run_rank(env, config.model_copy(update={"train": train}), data, options)


def test_lh_03_a_rank_with_another_configuration_is_refused_with_both_values(folder: Path) -> None:
    config = make_config(folder, "configs")
    others = [
        config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 0.5})}),
        config.model_copy(update={"layout": config.layout.with_(micro_batch=3, microbatches=1)}),
        config.model_copy(update={"model": config.model.model_copy(update={"dropout": 0.0})}),
        config,
    ]
    first, second = run_ranks(compare_configs, 2, [(config, other) for other in others])
    assert first == second
    assert first[0].startswith("rank 1 was started with optim.lr=0.5 but rank 0 with optim.lr=0.01")
    assert "rank 1 was started with layout='dp=2,micro_batch=3' but rank 0 with layout=" in first[1]
    assert "model.dropout=0.0 but rank 0 with model.dropout=0.1" in first[2]
    assert first[3] == "same"

    with pytest.raises(ConfigError, match=r"rank 1 was started with train\.seed=1 but rank 0 with train\.seed=0"):
        options = RunOptions()
        run_local_ranks(
            with_another_seed, 2, (config, prepare_run(config, options), options), threads_per_rank=1, preload=preload()
        )
    assert not Path(config.train.run_dir).exists()  # refused before anything was written


def test_samples_go_on_where_the_checkpoint_says_though_the_batch_changed(folder: Path) -> None:
    """CK-21: five steps of batch 4, then batch 8: the next sample is 20."""
    config = make_config(folder, "samples", "dp=1")
    blend = open_split(config, prepare_run(config, RunOptions()), "train")
    assert TrainSampler(blend, 4, 1, 1, 0).first_sample(5) == 20
    assert list(TrainSampler(blend, 4, 1, 2, 1, 5, 20).sample_ids(5, 0)) == [24, 25, 26, 27]


# ------------------------------------------------------------------------------------------ sharded state


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,zero=3,micro_batch=2",
        "dp=1,micro_batch=4",
        "dp=4,zero=2,dp_replicate=2",
        "dp=1,tp=2,zero=1,micro_batch=4",
        "dp=2,pp=2,zero=3,reshard=after_backward,microbatches=2",
        "cp=2,zero=3,micro_batch=4",
        "dp=2,zero=3,offload=params,offload_fraction=0.5,micro_batch=2",
    ],
)
def test_a_checkpoint_of_shards_is_whole_and_fits_any_layout(layout: str, folder: Path, sharded: RunConfig) -> None:
    """CK-08, and TE-02: the tied weight is one tensor before and after, and goes on with the same losses."""
    config = sharded_config(folder, f"sharded-{layout}", layout)
    assert config.layout.global_batch == sharded.layout.global_batch
    run(config, resume=str(Path(sharded.train.run_dir) / "checkpoints" / "step-3"))
    found = [record["loss"] for record in read_metrics(config.train.run_dir)]
    if config.layout == sharded.layout:
        assert found == losses(sharded)[3:]
        assert_same_state(load(config, 6), load(sharded, 6))
    else:
        assert found == pytest.approx(losses(sharded)[3:], rel=1e-5)
        held_out = [[r["valid_loss"] for r in read_metrics(c.train.run_dir) if "valid_loss" in r][-1] for c in (config, sharded)]
        assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)
        weights, expected = load(config, 6).weights, load(sharded, 6).weights
        assert all(torch.allclose(weights[name], value, atol=2e-3) for name, value in expected.items())
    assert "head.weight" not in load(config, 6).weights


def test_a_run_with_delayed_updates_goes_on_where_it_was_stopped(folder: Path) -> None:
    """What is outstanding is made up for before a checkpoint: the run that was not stopped has the same bits."""
    layout = "dp=2,zero=1,offload=optimizer,delayed_update=on,micro_batch=2"
    whole, rest = (sharded_config(folder, name, layout) for name in ("delayed", "delayed-rest"))
    whole, rest = (c.model_copy(update={"optim": c.optim.model_copy(update={"delay_after": 1})}) for c in (whole, rest))
    run(whole)
    run(rest, resume=str(Path(whole.train.run_dir) / "checkpoints" / "step-3"))
    assert [record["loss"] for record in read_metrics(rest.train.run_dir)] == losses(whole)[3:]
    assert_same_state(load(rest, 6), load(whole, 6))
    assert load(whole, 6).extra["optimizer_steps"] == 6


def sharded_config(folder: Path, run_name: str, layout: str) -> RunConfig:
    config = make_config(folder, run_name, layout, steps=6, save_every=3, eval_every=3, eval_batches=2)
    return config.model_copy(update={"model": config.model.model_copy(update={"tied_head": True})})


@pytest.fixture(scope="module")
def sharded(folder: Path) -> RunConfig:
    """A run at ZeRO-3 that saves after three of its six steps; stage 0 has the same losses."""
    config = sharded_config(folder, "sharded", "dp=2,zero=3,micro_batch=2")
    run(config)
    plain = sharded_config(folder, "unsharded", "dp=2,micro_batch=2")
    run(plain)
    assert losses(config) == pytest.approx(losses(plain), rel=1e-6)
    records = [record["valid_loss"] for record in read_metrics(config.train.run_dir) if "valid_loss" in record]
    assert len(records) == 2
    return config


# ------------------------------------------------------------------------------------------ an object store


def refuse_uploads(env: RankEnv, files: int) -> None:
    """Have the store take so many files and then no more."""
    original, taken = RemoteStore._put, iter(range(files))

    def put(self: RemoteStore, *arguments: Any) -> None:
        if next(taken, None) is None:
            raise ConnectionError("the store is away")
        original(self, *arguments)

    RemoteStore._put = put  # type: ignore[method-assign]


def stored(url: str) -> list[int]:
    return [found.step for found in RemoteStore(url).steps() if found.finished]


def test_a_run_whose_machine_is_lost_goes_on_from_the_store(folder: Path, whole: RunConfig) -> None:
    url = f"file://{folder}/store"
    first = make_config(folder, "stored", save_every=4, keep_every=2, checkpoint_url=url)
    run(first, plan=Plan(prepare=stop_in_step, arguments=(4, 1)))
    assert stored(url) == [4, 5] == checkpoints(first)
    with pytest.raises(CheckpointError, match=r"store already holds checkpoints \(up to step 5\); continue with --resume"):
        prepare_run(make_config(folder, "another", checkpoint_url=url), RunOptions())
    second = make_config(folder, "elsewhere", save_every=5, keep_every=5, checkpoint_url=url)
    flipped = folder / "store" / "step-5" / "state" / "exp_avg.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    run(second, resume="auto")
    assert checkpoints(second) == [5, 10]  # step 5 came with a wrong byte, so step 4 came too; here 5 was saved again
    records = read_metrics(second.train.run_dir)
    assert [record["step"] for record in records] == [*range(5, STEPS + 1)]
    assert [record["loss"] for record in records] == losses(whole)[4:]
    assert_same_state(load(second), load(whole))
    assert stored(url) == [5, 10]
    assert latest_checkpoint(folder / "store", pytest.fail) == folder / "store" / "step-10"  # a folder like ours


def test_an_upload_that_fails_ends_the_run_which_then_goes_on(folder: Path, whole: RunConfig) -> None:
    url = f"file://{folder}/flaky"
    config = make_config(folder, "flaky-run", save_every=2, keep_last=9, checkpoint_url=url)
    with pytest.raises(CheckpointError, match=r"^could not copy step-[4-9] to .*ConnectionError: the store is away"):
        run(config, plan=Plan(prepare=refuse_uploads, arguments=(7,)))
    assert stored(url) == [2]
    assert checkpoints(config)[0] == 2
    run(config, resume="auto")
    assert losses(config) == losses(whole)
    assert stored(url)[-1] == STEPS and len(list((folder / "flaky").iterdir())) == len(stored(url))
