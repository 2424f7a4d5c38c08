"""A run that is killed or asked to stop, as a program of its own, and what ``--resume auto`` makes of it afterwards."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from e2e.conftest import TrainedRun
from e2e.kit import TINY, Outcome, finish, program, read_jsonl, sets, shardwright

STEPS, SAVE_EVERY = 14, 4
LAYOUT, GLOBAL_BATCH = "dp=2,micro_batch=4,microbatches=8", 64


@pytest.fixture(scope="module")
def changes(short: dict[str, Any]) -> dict[str, Any]:
    """Steps of some 100 ms, so that a run can be met in the middle of one; saves that are done when the next step begins."""
    saves = {"train__save_every": SAVE_EVERY, "train__keep_last": 9, "train__async_save": "false"}
    return {**short, **saves, "train__steps": STEPS, "data__seq_len": 64}


@pytest.fixture(scope="module")
def uninterrupted(changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    shardwright("train", TINY, "--layout", LAYOUT, "--json", *sets(**changes, train__run_dir=folder)).json()
    return folder


def start(changes: dict[str, Any]) -> list[str]:
    return ["-m", "shardwright", "train", TINY, "--layout", LAYOUT, *sets(**changes, train__run_dir="run")]


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int, limit: float = 60.0) -> None:
    """Until ``step`` has been written and a later one is being computed."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + limit
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)
    time.sleep(0.02)


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool], limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)


def processes_of(process: subprocess.Popen[str]) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """(ranks in their order, all other processes) that a run has started."""
    every = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in every if "forkserver" in " ".join(psutil.Process(child.ppid()).cmdline())]
    return sorted(ranks, key=lambda rank: rank.pid), [child for child in every if child not in ranks]


def continues_as_if_nothing_had_happened(run: Path, uninterrupted: Path, *, resumed_at: int) -> None:
    """Resume, and compare every step and the last checkpoint with the undisturbed run, bit for bit."""
    outcome = shardwright("train", str(run / "config.toml"), "--resume", "auto", *sets(train__run_dir=run))
    assert (outcome.code, outcome.err) == (0, "")
    assert f"resumed from step-{resumed_at}: step {resumed_at}, {resumed_at * GLOBAL_BATCH} samples read" in outcome.out
    ours, theirs = read_jsonl(run / "metrics.jsonl"), read_jsonl(uninterrupted / "metrics.jsonl")
    for name in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [record[name] for record in ours] == [record[name] for record in theirs], name
    assert (ours[-1]["valid_loss"], ours[-1]["step"]) == (theirs[-1]["valid_loss"], STEPS)
    assert_same_checkpoint(run, uninterrupted)


def assert_same_checkpoint(run: Path, uninterrupted: Path) -> None:
    for name in ("model.safetensors", "state/exp_avg.safetensors", "state/exp_avg_sq.safetensors"):
        last = Path("checkpoints", f"step-{STEPS}", name)
        assert (run / last).read_bytes() == (uninterrupted / last).read_bytes(), name


def test_killing_a_rank_ends_the_run_which_then_continues(
    changes: dict[str, Any], tmp_path: Path, uninterrupted: Path
) -> None:
    run = tmp_path / "run"
    with program(start(changes), tmp_path) as process:
        wait_for_step(process, run, SAVE_EVERY + 2)
        ranks, others = processes_of(process)
        assert len(ranks) == 2
        killed_at = time.monotonic()
        ranks[1].kill()
        outcome = finish(process)
        assert time.monotonic() - killed_at < 15
        assert outcome.code == 3
        assert outcome.err.startswith("error: rank 1 was killed by SIGKILL (out of memory, or killed by hand)")
        assert "Traceback" not in outcome.err
        _, alive = psutil.wait_procs([*ranks, *others], timeout=5)
        assert alive == []
    assert len(read_jsonl(run / "metrics.jsonl")) < STEPS
    continues_as_if_nothing_had_happened(run, uninterrupted, resumed_at=SAVE_EVERY)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_stop_saves_and_says_how_to_continue(
    changes: dict[str, Any], tmp_path: Path, uninterrupted: Path, signum: signal.Signals
) -> None:
    run, as_json = tmp_path / "run", signum == signal.SIGINT
    with program([*start(changes), *(["--json"] if as_json else [])], tmp_path) as process:
        wait_for_step(process, run, 2)
        process.send_signal(signum)
        outcome = finish(process)
    assert (outcome.code, outcome.err) == (0, "")
    if as_json:
        step, stopped = outcome.json()["steps"], outcome.json()["stopped"]
    else:
        found = re.search(r"stopped after step (\d+) and saved; continue with", outcome.out)
        step, stopped = int(found[1]) if found else 0, found is not None
        assert "shardwright train run/config.toml --resume auto" in outcome.out.splitlines()
    assert stopped and 3 <= step < STEPS
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == list(range(1, step + 1))
    continues_as_if_nothing_had_happened(run, uninterrupted, resumed_at=step)


@pytest.mark.parametrize("ranks", [0, 2], ids=["before the ranks", "before the first step"])
def test_a_run_that_is_asked_to_stop_too_soon_says_that_nothing_is_saved(
    ranks: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """LH: a termination signal at any moment leads to a usable checkpoint or a clear statement that there is none."""
    with program([*start(changes), "--set", "train.stop_grace_s=3", "--json"], tmp_path) as process:
        wait_for(process, lambda: bool(psutil.Process(process.pid).children()))
        wait_for(process, lambda: len(processes_of(process)[0]) >= ranks)
        for rank in processes_of(process)[0][1:]:
            rank.suspend()  # so that no step is ever done
        process.send_signal(signal.SIGTERM)
        outcome = finish(process)
    assert (outcome.code, outcome.out) == (128 + signal.SIGTERM, "")
    assert re.fullmatch(r"stopped by SIGTERM(; the ranks did not .*)?; no checkpoint was saved\n", outcome.err), outcome


def test_ranks_that_cannot_save_in_time_are_killed_and_the_last_checkpoint_is_told(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """LH: the time to save is the run's to set."""
    run = tmp_path / "run"
    with program([*start(changes), "--set", "train.stop_grace_s=0.7"], tmp_path) as process:
        wait_for_step(process, run, SAVE_EVERY + 1)
        ranks, _ = processes_of(process)
        ranks[1].suspend()
        stopped_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        outcome = finish(process)
        assert 0.7 < time.monotonic() - stopped_at < 20
    last = max(int(path.parent.name.partition("-")[2]) for path in run.glob("checkpoints/*/manifest.json"))
    assert outcome.code == 128 + signal.SIGTERM and last >= SAVE_EVERY
    assert outcome.err == (
        "stopped by SIGTERM; the ranks did not save and end within 0.7 s and were killed; raise train.stop_grace_s to let them; "
        f"the last checkpoint is run/checkpoints/step-{last}, continue with shardwright train run/config.toml --resume auto\n"
    )


def test_a_run_killed_in_its_first_save_starts_again(tmp_path: Path, trained: TrainedRun) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-10.partial").mkdir(parents=True)
    (run / "checkpoints" / "step-10.partial" / "model.safetensors").write_bytes(b"half of it")
    lines = (trained.folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:10]) + lines[10][:30])  # the last line is torn as well
    outcome = resumed(run, trained)
    assert "step-10.partial is skipped: its save was interrupted" in outcome.out
    assert losses(run) == losses(trained.folder)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-10", "step-20"]


def test_a_truncated_checkpoint_is_passed_over_for_an_older_one(tmp_path: Path, trained: TrainedRun) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained.folder, run)
    last = Path("checkpoints", "step-20", "model.safetensors")
    os.truncate(run / last, 1000)
    outcome = resumed(run, trained)
    assert re.search(r"step-20 is skipped: .*model\.safetensors has 1000 bytes instead of \d+", outcome.out)
    assert "resumed from step-10: step 10, 40 samples read" in outcome.out
    assert losses(run) == losses(trained.folder)
    assert (run / last).read_bytes() == (trained.folder / last).read_bytes()


@pytest.mark.timeout(300)  # torch is imported by five processes
def test_torchrun_starts_all_ranks_again_after_one_was_killed(
    changes: dict[str, Any], tmp_path: Path, uninterrupted: Path
) -> None:
    """The agent's store still holds the addresses of the ranks before; `benchmarks/elastic.py` loses an agent as well."""
    run = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    with program([*torchrun, *start(changes), "--resume", "auto"], tmp_path, GOMP_SPINCOUNT="0") as process:
        wait_for_step(process, run, SAVE_EVERY + 2, 120.0)
        psutil.Process(process.pid).children()[1].kill()
        outcome = finish(process, 110.0)
    assert outcome.code == 0 and f"resumed from step-{SAVE_EVERY}: " in outcome.out, outcome
    assert losses(run) == losses(uninterrupted)
    assert_same_checkpoint(run, uninterrupted)


def test_fewer_ranks_go_on_with_the_same_samples(tmp_path: Path, trained: TrainedRun) -> None:
    """torchrun starts one rank again of two that there were: dp shrinks, accumulation keeps the batch."""
    run = tmp_path / "run"
    shutil.copytree(trained.folder, run)
    shutil.rmtree(run / "checkpoints" / "step-20")
    changes = sets(**{**trained.changes, "train__run_dir": run})
    command = ["-m", "shardwright", "train", TINY, "--layout", "dp=2", "--resume", "auto", *changes]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}
    with program(command, tmp_path, **place) as refused:
        outcome = finish(refused)
    assert outcome.code == 2 and "start 2 or use dp=1" in outcome.err
    with program([*command, "--set", "train.elastic=true"], tmp_path, **place) as process:
        outcome = finish(process)
    assert (outcome.code, outcome.err) == (0, "")
    assert "resumed from step-10: step 10, 40 samples read" in outcome.out
    ours, theirs = losses(run), losses(trained.folder)
    assert ours[:10] == theirs[:10] and [step for step, _ in ours] == [step for step, _ in theirs]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-6)


def resumed(run: Path, trained: TrainedRun) -> Outcome:
    """The trained run's command once more, in the folder ``run``, with ``--resume auto``."""
    outcome = shardwright("train", str(trained.folder / "config.toml"), "--resume", "auto", *sets(train__run_dir=run))
    assert (outcome.code, outcome.err) == (0, "")
    return outcome


def losses(run: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_jsonl(run / "metrics.jsonl")]
