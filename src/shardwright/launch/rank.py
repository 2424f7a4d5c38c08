"""The life of a local rank, from the fork server to its result or its error."""

from __future__ import annotations

import dataclasses
import faulthandler
import mmap
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
from multiprocessing import connection
from pathlib import Path
from typing import Any

from shardwright.launch.failure import describe
from shardwright.launch.starter import RankEnv, leave_process_group


class Note:
    """One line in a file that both processes map: it can be read when its writer is dead or stopped."""

    SIZE = 256

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(self.SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self.SIZE)

    def __call__(self, text: str) -> None:
        data = text.encode()[: self.SIZE - 1]
        self._memory[: len(data) + 1] = bytes([len(data)]) + data

    @staticmethod
    def read(path: Path) -> str:
        data = path.read_bytes() if path.exists() else b""
        return data[1 : 1 + data[0]].decode(errors="replace") if data else ""


def _exit_with_parent(folder: Path) -> None:
    """End this rank when the process that started it has died, however it died; remove the job's directory for it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _prepare_rank(stacks_path: Path, threads: int) -> None:
    """Signals, stack dumps, the watchdog, the network interface and the number of threads of a fresh rank."""
    stacks = stacks_path.open("w")  # stays open: faulthandler writes to it whenever it is asked
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    # A terminal sends Ctrl-C to every process; ranks leave it to their parent, which sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    watchdog = threading.Thread(target=_exit_with_parent, args=(stacks_path.parent,), daemon=True)
    watchdog.start()
    # Local ranks need no name service: a host name that does not resolve would make gloo slow or fail.
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    import torch

    torch.set_num_threads(threads)


def rank_main(env: RankEnv, payload: bytes, link: connection.Connection, stacks_path: Path, threads: int) -> None:
    """The whole life of a local rank: call the target, send its result or its error."""
    send_lock = threading.Lock()

    def send(kind: str, body: Any) -> None:
        data = pickle.dumps((kind, body), protocol=pickle.HIGHEST_PROTOCOL)
        with send_lock:
            link.send_bytes(data)

    try:
        _prepare_rank(stacks_path, threads)
        target, args = pickle.loads(payload)
        note = Note(note_path(stacks_path))
        result = target(dataclasses.replace(env, sender=lambda message: send("message", message), noter=note), *args)
        leave_process_group()
        send("result", result)
    except (SystemExit, KeyboardInterrupt):  # the target's own way to end; the parent sees the exit code
        raise
    except BaseException as error:  # the edge of the process: whatever it is, it must reach the parent
        send("failure", describe(env.rank, error))
        sys.exit(1)


def note_path(stacks_path: Path) -> Path:
    return stacks_path.with_suffix(".note")
