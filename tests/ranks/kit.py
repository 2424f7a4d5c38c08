"""The kit for tests on real ranks: start them, stop what hangs, and break them at a named point.

    from ranks.kit import FaultPlan, run_ranks

    def total(env, faults):                     # a function of the module, so that ranks can import it
        value = torch.ones(1)
        faults.on(env).at("before_reduce", step=0)
        dist.all_reduce(value)
        return value.item()

    assert run_ranks(total, 2, FaultPlan()) == [2.0, 2.0]

All ranks of a pytest session are forked from one process that has imported torch, so that two of them start, join
gloo and end in about 0.1 s. What hangs is ended after ``time_limit`` and every rank's stack is in the error.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shardwright.launch import RankEnv, init_process_group, run_local_ranks

TESTS = Path(__file__).resolve().parents[1]
# Test modules are named from the project's root (tests.ranks.test_launch); ranks must find them by that name.
if str(TESTS.parent) not in sys.path:
    sys.path.append(str(TESTS.parent))


def preload() -> tuple[str, ...]:
    """What the fork server imports once for all ranks: torch, and the package's modules that ranks use."""
    root = TESTS.parent / "src"
    packages = ("comm", "ops", "parallel", "model", "train")
    files = sorted(file for package in packages for file in (root / "shardwright" / package).glob("[!_]*.py"))
    own = (".".join(file.relative_to(root).with_suffix("").parts) for file in files)
    others = ("torch", "torch.distributed", "torch._dynamo", "numpy", "psutil", "pytest", "shardwright.launch")
    return (*others, *own)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    time_limit: float = 60.0,
    timeout_s: float = 30.0,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """``fn(env, *args)`` on ``world_size`` real ranks that have joined gloo; the results in the order of ranks.

    ``timeout_s`` is the limit of one collective, ``time_limit`` that of the whole run; both in seconds.
    """
    return run_local_ranks(
        _with_gloo,
        world_size,
        (fn, *args),
        threads_per_rank=1,
        timeout_s=timeout_s,
        time_limit_s=time_limit,
        grace_s=1.0,
        preload=preload(),
        on_message=on_message,
    )


def _with_gloo(env: RankEnv, fn: Callable[..., Any], *args: Any) -> Any:
    init_process_group(env)
    return fn(env, *args)


def living_ranks() -> set[int]:
    """Process ids of all ranks that this test process has started and that have not ended."""
    ranks: set[int] = set()
    for child in psutil.Process().children():
        if any("multiprocessing.forkserver" in word for word in child.cmdline()):
            ranks |= {rank.pid for rank in child.children(recursive=True)}
    return ranks


@dataclass
class FaultPlan:
    """What shall go wrong, and where. Code under test calls ``at(name, step)`` at its named points.

    ``kill`` maps a point to the step at which SIGKILL ends the process (None: the first time it is reached).
    ``delay`` maps a point to the seconds to sleep whenever it is reached. Where a caller gives no step, it is the
    number of times that the point was reached before. ``ranks`` are the ranks concerned (None: all).
    """

    kill: Mapping[str, int | None] = field(default_factory=dict)
    delay: Mapping[str, float] = field(default_factory=dict)
    ranks: Sequence[int] | None = None
    reached: Counter[str] = field(default_factory=Counter)

    def on(self, env: RankEnv) -> FaultPlan:
        """The plan as it concerns this rank: itself, or an empty one."""
        return self if self.ranks is None or env.rank in self.ranks else FaultPlan()

    def at(self, name: str, step: int | None = None) -> None:
        """The point ``name`` is reached: sleep, end the process, or do nothing, as planned."""
        step = self.reached[name] if step is None else step
        self.reached[name] += 1
        if name in self.delay:
            time.sleep(self.delay[name])
        if name in self.kill and self.kill[name] in (None, step):
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, owner: Any, attribute: str, name: str | None = None) -> None:
        """Make every call of ``owner.attribute`` a point, reached before the call: a verb, a write, a rename.

        It stays replaced for the life of the process, so call it in ranks only, which live for one run.
        """
        original, point = getattr(owner, attribute), name or attribute

        @functools.wraps(original)
        def reach_and_call(*args: Any, **kwargs: Any) -> Any:
            self.at(point)
            return original(*args, **kwargs)

        setattr(owner, attribute, reach_and_call)
