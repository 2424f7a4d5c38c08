"""Waiting for other processes of this host without threads: how to stand still, and how to see that a peer has ended.

A wait spins for some microseconds, then yields the core (more ranks than cores must work well), then sleeps, a little
longer each time. Flags are plain int64 in shared memory, written by one process each. That is sound on x86, where stores
of one core become visible in order; streaming stores, which do not, are drained by :func:`store_fence`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

SPINS = 30
YIELD_SECONDS = 100e-6
LEAST_SLEEP, MOST_SLEEP = 20e-6, 1e-3
LOOK_SECONDS = 0.02
"""How often a wait that sleeps looks after its peers."""


def unsound_machine() -> str | None:
    """Why flags in shared memory cannot be used here, or None where they can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"flags in shared memory are sound on x86-64 only, this is {platform.machine()}"
    if sys.platform != "linux":
        return f"shared memory without a name needs Linux, this is {sys.platform}"
    return None


def store_fence() -> Callable[[], None]:
    """A function that returns when all stores of this thread are visible: a lock's atomic instruction does that."""
    lock = threading.Lock()

    def fence() -> None:
        with lock:
            pass

    return fence


class Backoff:
    """One wait that did not end at once. ``pause`` stands still, a little longer each time."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Something moved: the next pauses are short again, and the time begins anew."""
        self._turns, self._sleep = 0, LEAST_SLEEP
        self._begin = self._looked = time.monotonic()

    def pause(self) -> bool:
        """Stand still; whether that was a sleep."""
        self._turns += 1
        if self._turns <= SPINS:
            return False
        if time.monotonic() - self._begin < YIELD_SECONDS:
            os.sched_yield()
            return False
        time.sleep(self._sleep)
        self._sleep = min(MOST_SLEEP, self._sleep * 1.2)
        return True

    def due(self) -> bool:
        """Whether it is time to look after the peers."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        return True

    @property
    def seconds(self) -> float:
        """How long nothing has moved."""
        return time.monotonic() - self._begin


class Watch:
    """Which of some processes have ended, by a file descriptor each that the kernel marks when that happens.

    ``pids``: world rank -> process id. Where the kernel has no such descriptors, /proc is read instead.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids = dict(pids)
        self._dead: set[int] = set()
        self._files: dict[int, int] = {}
        self._born: dict[int, str | None] = {}
        self._poll = select.poll()
        for rank, pid in self.pids.items():
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.add(rank)
            except OSError:  # an old kernel, or a sandbox without it
                self._born[rank] = _birth(pid)
            else:
                self._files[file] = rank
                self._poll.register(file, select.POLLIN)
        self.close = weakref.finalize(self, _close, tuple(self._files))
        self.close.atexit = False

    def dead(self, ranks: Iterable[int]) -> int | None:
        """The first of ``ranks`` whose process has ended."""
        if self.close.alive:
            self._dead.update(self._files[file] for file, _ in self._poll.poll(0))
        for rank, born in self._born.items():
            if _birth(self.pids[rank]) != born:
                self._dead.add(rank)
        return next((rank for rank in ranks if rank in self._dead), None)


def _birth(pid: int) -> str | None:
    """When the process ``pid`` started, in the kernel's ticks; None if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None


def _close(files: tuple[int, ...]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)
