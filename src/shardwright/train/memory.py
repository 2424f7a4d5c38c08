"""The memory of this process while something runs: its proportional set size, where shared pages count once over all
processes that map them.

Of a rank whose peers read its buffers in place the resident set counts those pages in every rank; their sum over ranks
would count them several times.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwright.train.metrics import peak_memory_bytes

SMAPS = Path("/proc/self/smaps_rollup")
INTERVAL_S = 0.004


def proportional_bytes() -> int | None:
    """The proportional set size of this process now; None where the system does not tell."""
    try:
        lines = SMAPS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith("Pss:")]
    return int(found[0].split()[1]) * 1024 if found else None


class MemoryWatch:
    """A context in which a thread looks at the process's memory every few milliseconds; ``peak`` is the most it saw.

    Where there is no proportional set size ``peak`` is the most that was ever resident.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.peak = 0
        self._interval_s, self._stop = interval_s, threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            now = proportional_bytes()
            if now is None:
                self.peak = peak_memory_bytes()
                return
            self.peak = max(self.peak, now)
            if self._stop.wait(self._interval_s):
                return
