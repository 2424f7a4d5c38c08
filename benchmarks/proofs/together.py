"""All axes together: checkpoints that fit any layout, and runs that survive."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proofs.base import Check, Outcome, keep, tests

from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.train.metrics import read_metrics
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.verify.kills import KilledRun, killed_run, live_once
from shardwright.verify.reshard import FirstRun, ReshardCase, first_runs, problems, random_layout, second_runs

SMALL = {
    "vocab_size": 320, "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
    "tied_head": True, "dropout": 0.1,
}  # fmt: skip
EXPERTS = {
    **SMALL, "family": "deepseek_v3", "tied_head": False, "num_kv_heads": 4, "head_dim": 16, "dropout": 0.0,
    "mla": {"q_lora_rank": 12, "kv_lora_rank": 8, "nope_head_dim": 8, "rope_head_dim": 8, "v_head_dim": 8},
    "moe": {
        "num_experts": 4, "top_k": 2, "expert_dim": 24, "first_dense_layers": 1, "score": "sigmoid", "bias_correction": True,
        "num_shared_experts": 1, "aux_coefficient": 0.01,
    },
}  # fmt: skip
"""Latent attention; a shared expert; routers balanced by a bias and by a loss over each sequence, as micro-batches differ."""


def small_config(folder: Path, run: str, layout: str, model: Mapping[str, Any] = SMALL, **train: Any) -> RunConfig:
    table = {
        "model": model,
        "router": {"balance": "sequence"},
        "data": {"sources": "synthetic:sentences", "seq_len": 32, "cache": str(folder / "datasets")},
        "optim": {"lr": 0.003},
        "train": {"steps": 100, "threads": 1, "run_dir": str(folder / run), "peak_tflops": 1.0} | train,
    }
    return RunConfig.of(table, (), layout)


# -- 3 -------------------------------------------------------------------------------------------------


def first_world(env: RankEnv, data: PreparedData, cases: list[ReshardCase]) -> list[FirstRun]:
    init_process_group(env)
    return first_runs(env, data, cases)


def second_world(env: RankEnv, data: PreparedData, cases: list[ReshardCase]) -> list[list[float]]:
    init_process_group(env)
    return second_runs(env, data, cases)


def resharded(count: int = 24) -> Outcome:
    """Random pairs of layouts of 1 to 8 ranks; every second pair is of a model with experts."""
    rng = random.Random(8)
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as name:
        folder = Path(name)
        plain = small_config(folder, "plain", "dp=1")
        data = prepare_data(plain)
        cases = []
        for index in range(count):
            model = EXPERTS if index % 2 else SMALL
            alone = small_config(folder, "plain", "dp=1", model)
            layouts = [random_layout(rng, alone, rng.choice((1, 2, 4, 4, 8)), 8) for _ in range(2)]
            pair = [small_config(folder, f"{index}-{turn}", str(layout), model) for turn, layout in enumerate(layouts)]
            cases.append(ReshardCase(*pair))
        firsts: dict[int, list[FirstRun]] = {}
        seconds: dict[int, list[float]] = {}
        for world in (1, 2, 4, 8):
            chosen = [i for i, case in enumerate(cases) if case.first.layout.world_size == world]
            ranks = run_local_ranks(first_world, world, (data, [cases[i] for i in chosen]), threads_per_rank=1)
            firsts |= {i: list(each) for i, each in zip(chosen, zip(*ranks, strict=True), strict=True)}
        for world in (1, 2, 4, 8):
            chosen = [i for i, case in enumerate(cases) if case.second.layout.world_size == world]
            ranks = run_local_ranks(second_world, world, (data, [cases[i] for i in chosen]), threads_per_rank=1)
            seconds |= dict(zip(chosen, ranks[0], strict=True))
        wrong = {str(case): found for i, case in enumerate(cases) if (found := problems(case, firsts[i], seconds[i]))}
        keep("checkpoint-layouts.json", {"pairs": [str(case) for case in cases], "wrong": wrong})
        split = sum(max(case.first.layout.ep, case.second.layout.ep) > 1 for case in cases)
    value = f"{count - len(wrong)} of {count} pairs, {count // 2} with experts, {split} of them with ep > 1"
    return Outcome(value + (f"; wrong: {list(wrong.items())[:2]}" if wrong else ""), not wrong)


# -- 4 -------------------------------------------------------------------------------------------------


def killed(count: int = 200) -> Outcome:
    """Half of the kills while checkpoints are written in the background, half without.

    A save at once costs at most the interval behind it. One in the background is complete some steps later at most
    (``train.async_lag_steps``, here half an interval), and until then what is lost counts from the save before it.
    """
    every, problems_, rng = 5, [], random.Random(4)
    kills = {True: 0, False: 0}
    saving, lag, lost = 0, 0, {True: 0, False: 0}
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as name:
        folder = Path(name)
        layout = "dp=2,zero=1,micro_batch=2"
        undisturbed = small_config(folder, "undisturbed", layout, steps=400, save_every=every)
        live_once(undisturbed, None, 600)
        reference = [record["loss"] for record in read_metrics(undisturbed.train.run_dir)]
        series = 0
        while sum(kills.values()) < count:
            background = kills[True] < count // 2
            config = small_config(folder, f"killed-{series}", layout, steps=400, save_every=every, async_save=background)
            most = count // 2 - kills[background]
            found = _killed_run(config, rng, most, reference, every + config.train.save_lag)
            lag = max(lag, config.train.save_lag)
            kills[background] += len(found.kills)
            saving += sum(kill.saving for kill in found.kills)
            lost[background] = max([lost[background], *(kill.lost for kill in found.kills)])
            problems_ += found.problems
            series += 1
    value = (
        f"{sum(kills.values())} kills in {series} runs, {saving} of them in a save; most steps lost {lost[False]} of {every}, "
        f"with saves in the background {lost[True]} of {every + lag}; losses bit-equal"
    )
    value += f"; wrong: {problems_[:3]}" if problems_ else ""
    return Outcome(value, not problems_)


def _killed_run(config: RunConfig, rng: random.Random, most: int, reference: list[float], most_lost: int) -> KilledRun:
    return killed_run(config, rng, most, reference, longest_s=1.5, most_lost=most_lost, limit_s=600)


# -- 5 -------------------------------------------------------------------------------------------------


def beside_peers() -> Outcome:
    import checkpoints

    found = checkpoints.run("dp=2,micro_batch=4", "bench-25m", 5, None)
    keep("checkpoint-speed.json", found)
    ratios = ", ".join(f"{name} {value:.2f}" for name, value in found["ratios"].items())
    blocked = found["blocked_share_of_a_step"]
    value = f"{blocked:.2%} of a step, background {found['background_processor_share_of_a_step']:.0%} on a core; {ratios}"
    return Outcome(value, blocked <= 0.05)


def elastic() -> Outcome:
    import elastic

    found = elastic.measure()
    keep("checkpoint-elastic.json", found)
    wrong, loss = found["problems"], found["largest_loss_difference"]
    value = f"steps {found['steps']} on {found['ranks']} ranks, losses differ by at most {loss:.0e}"
    return Outcome(value + (f"; wrong: {wrong[:3]}" if wrong else ""), not wrong and loss <= 1e-5)


CHECKS = [
    Check("3", "save at one layout, load at another", "bit-equal, 5 losses to 1e-5, >= 20 pairs, half with experts", resharded),
    Check("4", "kills at random moments", "200; one interval lost at most, and the lag of a background save", killed),
    Check("5", "a save in the background blocks", "<= 5 % of a step; ratios beside torch.save and DCP", beside_peers),
    Check("8", "torchrun --nnodes=1:2: a worker is killed, then an agent", "goes on with fewer ranks, losses to 1e-5", elastic),
    Check("6", "a rank that sleeps, calls another collective, dies", "diagnosed in the report, in time", lambda: tests(
        "tests/ranks/test_flight.py", "tests/unit/test_flight.py", "tests/ranks/test_launch.py",
    )),
    Check("7", "groups CK and LH", "all tests pass", lambda: tests(
        "tests/unit/test_checkpoint.py", "tests/unit/test_save.py", "tests/unit/test_runs.py", "tests/unit/test_convert.py",
        "tests/ranks/test_checkpoints.py", "tests/ranks/test_resume.py", "tests/ranks/test_launch.py", "tests/e2e/test_faults.py",
    )),
]  # fmt: skip
