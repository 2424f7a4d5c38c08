"""A run whose ranks are killed again and again (SIGKILL, at random moments) and that must end as one that nobody disturbed.

Every life continues with ``auto``. Right after a kill the folder must hold a checkpoint no older than an interval (and, of saves
in the background, the steps that they may take), or, before the first save is done, none. When the run has come to its end, the
losses of all its steps are compared with those of an undisturbed run, bit for bit: a sample that was skipped or read twice
would show.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.checkpoint.manifest import PARTIAL, latest_checkpoint, step_of
from shardwright.core.run_config import RunConfig
from shardwright.errors import RankError
from shardwright.launch import PRELOAD, RankEnv, run_local_ranks
from shardwright.train.loop import run_rank
from shardwright.train.metrics import read_metrics
from shardwright.train.prepare import PreparedData
from shardwright.train.start import RunOptions, prepare_run


@dataclass(frozen=True)
class Kill:
    """One kill: steps that were done, the checkpoint that was there (0: none), and whether a save was under way."""

    step: int
    checkpoint: int
    saving: bool

    @property
    def lost(self) -> int:
        """Steps to be done again."""
        return self.step - self.checkpoint


@dataclass
class KilledRun:
    """What a run met on its way; ``problems`` is empty if all is as it should be."""

    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def mortal_rank(env: RankEnv, config: RunConfig, data: PreparedData, options: RunOptions) -> dict[str, Any]:
    """A rank that says who it is before it trains."""
    env.send({"pid": os.getpid()})
    return run_rank(env, config, data, options)


class _Killer:
    """Kills all ranks ``delay_s`` after the last of them has said who it is, or (``training``) after their first step."""

    def __init__(self, num_ranks: int, delay_s: float, training: bool) -> None:
        self.pids: list[int] = []
        self._num_ranks, self._training, self._timer = num_ranks, training, threading.Timer(delay_s, self._kill)
        self._started = False

    def hear(self, rank: int, message: Any) -> None:
        if "pid" in message:
            self.pids.append(message["pid"])
        begun = "record" in message if self._training else len(self.pids) == self._num_ranks
        if begun and not self._started:
            self._started = True
            self._timer.start()

    def _kill(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        self._timer.cancel()


def live_once(
    config: RunConfig, delay_s: float | None, limit_s: float, preload: Sequence[str] = PRELOAD, *, training: bool = False
) -> bool:
    """Start or continue the run; whether it came to its end. ``delay_s``: when it is killed (None: never), counted from its
    first step if ``training``."""
    options = RunOptions(resume="auto")
    data = prepare_run(config, options)
    world = config.layout.world_size
    killer = _Killer(world, delay_s, training) if delay_s is not None else None
    try:
        run_local_ranks(
            mortal_rank,
            world,
            (config, data, options),
            threads_per_rank=1,
            time_limit_s=limit_s,
            grace_s=0.5,
            preload=preload,
            on_message=killer.hear if killer is not None else None,
        )
    except RankError as error:
        if killer is None or "SIGKILL" not in str(error):
            raise
        return False
    finally:
        if killer is not None:
            killer.stop()
    return True


def killed_run(
    config: RunConfig,
    rng: random.Random,
    most_kills: int,
    reference: Sequence[float],
    *,
    longest_s: float = 1.0,
    most_lost: int,
    limit_s: float = 120.0,
    preload: Sequence[str] = PRELOAD,
    on_kill: Callable[[Kill], None] | None = None,
) -> KilledRun:
    """Kill the run of ``config`` up to ``most_kills`` times, then let it end. Half of the kills come within ``longest_s`` of its
    start, half of its first step: on a slow machine a run may do none before.

    ``reference`` are the losses of the undisturbed run; ``most_lost`` the steps that a kill may cost.
    """
    found = KilledRun()
    root = Path(config.train.run_dir) / "checkpoints"
    while len(found.kills) < most_kills:
        if live_once(config, rng.uniform(0, longest_s), limit_s, preload, training=rng.random() < 0.5):
            break
        kill = _look(config, root)
        before = found.kills[-1].checkpoint if found.kills else 0
        found.kills.append(kill)
        if on_kill is not None:
            on_kill(kill)
        if kill.checkpoint < before:
            found.problems.append(f"checkpoint {before} was lost: the newest is {kill.checkpoint}")
        if kill.lost > most_lost:
            found.problems.append(f"killed after step {kill.step} with checkpoint {kill.checkpoint}: {kill.lost} steps lost")
    live_once(config, None, limit_s, preload)
    losses = [record["loss"] for record in read_metrics(config.train.run_dir)]
    if losses != list(reference):
        same = [mine == theirs for mine, theirs in zip(losses, reference, strict=False)]
        first = same.index(False) if False in same else len(same)
        found.problems.append(f"the losses differ from those of a run that nobody killed, from step {first + 1} on")
    return found


def _look(config: RunConfig, root: Path) -> Kill:
    latest = latest_checkpoint(root, lambda text: None)
    metrics = Path(config.train.run_dir) / "metrics.jsonl"
    done = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    checkpoint = 0 if latest is None else step_of(latest)
    saving = root.is_dir() and any(path.name.endswith(PARTIAL) for path in root.iterdir())
    return Kill(max(done, checkpoint), checkpoint, saving)
