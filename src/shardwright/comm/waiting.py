"""Waiting for other processes of this host without threads: how to stand still, and how to see that a peer has ended.

A wait spins for some microseconds, then yields the core, then sleeps until the peer rings: more ranks than cores must work
well. Flags are plain int64 in shared memory, written by one process each. That is sound on x86, where stores
of one core become visible in order. Streaming stores do not, and a store and a load after it do not either: where that
matters, :class:`Fence` stands between them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import select
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

SPINS = 4
YIELD_SECONDS = 100e-6
LEAST_SLEEP, MOST_SLEEP = 1e-3, 20e-3
LOOK_SECONDS = 0.02
"""How often a wait that sleeps looks after its peers."""


_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # Linux on x86-64


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """Lets a process sleep until another rings: the kernel compares a shared word and puts it to sleep in one go.

    ``word`` is the address of the low half of an int64 that its owner counts up before it rings.
    """

    def __init__(self) -> None:
        self._call = ctypes.CDLL(None).syscall
        self._call.restype = ctypes.c_long
        self._call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
        self._limit = _Timespec()

    def sleep(self, word: int, value: int, seconds: float) -> None:
        """Sleep while the word is ``value``, at most so long; a signal may end it, too."""
        self._limit.nanoseconds = int(seconds * 1e9)
        self._call(_SYS_FUTEX, word, _FUTEX_WAIT, value & 0xFFFFFFFF, ctypes.addressof(self._limit))

    def ring(self, word: int) -> None:
        """Wake all that sleep on the word."""
        self._call(_SYS_FUTEX, word, _FUTEX_WAKE, 0x7FFFFFFF, None)


def unsound_machine() -> str | None:
    """Why flags in shared memory cannot be used here, or None where they can."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"flags in shared memory are sound on x86-64 only, this is {platform.machine()}"
    if sys.platform != "linux":
        return f"shared memory without a name needs Linux, this is {sys.platform}"
    return None


class Fence:
    """``acquire`` and ``release`` one after the other are a fence: the atomic instructions of a lock wait for all stores."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self.acquire, self.release = lock.acquire, lock.release

    def __call__(self) -> None:
        self.acquire()
        self.release()


class Backoff:
    """One wait that did not end at once: how to stand still, which gets longer as nothing moves."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Something moved: the next pauses are short again, and the time begins anew."""
        self._turns, self.sleep_seconds = 0, LEAST_SLEEP
        self._begin = self._looked = time.monotonic()

    def pause(self) -> bool:
        """Spin or yield once, or do nothing: then it is time to sleep."""
        self._turns += 1
        if self._turns <= SPINS:
            return False
        if time.monotonic() - self._begin < YIELD_SECONDS:
            os.sched_yield()
            return False
        return True

    def slept(self) -> bool:
        """After a sleep of ``sleep_seconds``: whether it is time to look after the peers."""
        self.sleep_seconds = min(MOST_SLEEP, self.sleep_seconds * 1.5)
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
