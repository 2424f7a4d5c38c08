"""Start ranks: real processes on this machine, or those that torchrun or srun has started already.

``launch(target, world, args)`` is what commands call. Without a starter around it, ``run_local_ranks`` forks one
process per rank from a *fork server*: a process that has imported torch once, so that a rank starts in
milliseconds. The ranks meet in a file of a private directory; no port is used, so two jobs never meet by accident.

What goes wrong is handled here, once, for everything that runs on ranks:

- a rank raises: it sends the error and its traceback; all ranks are ended and the error names the rank;
- a rank dies (signal, out of memory, ``os._exit``): the end of its process is noticed at once;
- a rank loses its peer because *another* rank died: it is not blamed, the other one is;
- Ctrl-C or SIGTERM: the ranks get SIGTERM, and may save and return; a second Ctrl-C kills them;
- a time limit passes: the Python stacks of every rank are in the error;
- this process dies: its ranks notice and end.

This package is the only one that reads or writes environment variables. torch is imported by ranks only.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, TypedDict, Unpack

from shardwright.errors import LayoutError
from shardwright.launch.job import Job, process_lock, raising_sigterm, stop_signals
from shardwright.launch.starter import (
    DEFAULT_TIMEOUT_S,
    RankEnv,
    device_for,
    init_process_group,
    leave_process_group,
    torchrun_env,
)

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "MEMORY_SETTINGS",
    "PRELOAD",
    "RankEnv",
    "available_cores",
    "default_threads",
    "device_for",
    "init_process_group",
    "launch",
    "raising_sigterm",
    "run_local_ranks",
    "start_forkserver",
    "torchrun_env",
]

PRELOAD = ("torch", "torch.distributed", "shardwright.train.loop", "shardwright.cli")
MEMORY_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 35),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.cpu.x86_non_temporal_threshold=0x100000",
}
"""What ranks on CPU run with, unless the user set it: freed activations stay in the process, on huge pages. Without it
glibc gives each large tensor back to the kernel, which clears its pages anew: 3 to 6 % of a step. And copies of 1 MiB and
more go past the caches, in half the time; by itself glibc does that from 3/4 of the last cache on (docs/log.md)."""


class RunOptions(TypedDict, total=False):
    """Keyword arguments of ``run_local_ranks`` that ``launch`` passes on."""

    threads_per_rank: int | None
    timeout_s: float
    time_limit_s: float | None
    grace_s: float
    stop_limit_s: float
    preload: Sequence[str]
    tune_memory: bool
    on_message: Callable[[int, Any], None] | None


def start_forkserver(preload: Sequence[str] = PRELOAD, *, tune_memory: bool = True) -> None:
    """Start the process that ranks are forked from and return at once; without effect if it runs.

    It imports ``preload`` (names that do not exist are skipped) while the caller goes on, so a command calls this
    first and reads its configuration meanwhile. All runs of one process share it. ``tune_memory``: see `MEMORY_SETTINGS`.
    """
    # Idle OpenMP threads must not spin: they would take the cores of the other ranks.
    settings = {"GOMP_SPINCOUNT": "0", **(MEMORY_SETTINGS if tune_memory else {})}
    wanted = {"OMP_NUM_THREADS": "1", **{name: os.environ.get(name, value) for name, value in settings.items()}}
    stop_signals = {signal.SIGINT, signal.SIGTERM}
    with process_lock:
        saved = {name: os.environ.get(name) for name in wanted}
        forkserver.set_forkserver_preload(list(preload))
        resource_tracker.ensure_running()  # first, because it resets the signal mask
        # A signal to the whole process group must reach the ranks, and must not end the process that reaps them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
        os.environ.update(wanted)
        try:
            forkserver.ensure_running()
        finally:
            for name, value in saved.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def default_threads(world_size: int) -> int:
    """Threads per rank: OMP_NUM_THREADS if the user has set it, else this process's cores shared among the ranks."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    return max(1, available_cores() // world_size)


def available_cores() -> int:
    """CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def run_local_ranks(
    target: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...] = (),
    *,
    threads_per_rank: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    time_limit_s: float | None = None,
    grace_s: float = 2.0,
    stop_limit_s: float = 60.0,
    preload: Sequence[str] = PRELOAD,
    tune_memory: bool = True,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[Any]:
    """Run ``target(env, *args)`` in ``world_size`` processes of this machine; the results, in the order of ranks.

    ``target`` must be importable (a function of a module), its arguments and results picklable. It calls
    ``init_process_group(env)`` itself if it needs one, and ``env.send(obj)`` to have ``on_message(rank, obj)`` called
    here while it runs. A target that installs a handler for SIGTERM can save and return when asked to stop.

    ``timeout_s`` limits the rendezvous and each collective, ``time_limit_s`` the whole run; ``grace_s`` lies between
    SIGTERM and SIGKILL when a rank has failed; ``stop_limit_s`` is the time to save after Ctrl-C or SIGTERM.

    Raises:
        RankError: a rank failed, died, or the time limit passed; names the rank, shows its traceback or stacks.
        ShardwrightError: a rank met a mistake of the user (exit code 2); the same class and message.
        KeyboardInterrupt, SystemExit: asked to stop by Ctrl-C or SIGTERM, and not every rank returned; with a note if
            ``stop_limit_s`` was over.
    """
    if world_size < 1:
        raise LayoutError(f"the number of ranks is {world_size}; it must be at least 1")
    payload = pickle.dumps((target, args), protocol=pickle.HIGHEST_PROTOCOL)
    threads = threads_per_rank or default_threads(world_size)
    job = Job(time_limit_s=time_limit_s, grace_s=grace_s, stop_limit_s=stop_limit_s, on_message=on_message)
    folder = Path(tempfile.mkdtemp(prefix="shardwright-"))  # private: mode 0700
    store = folder / "rendezvous"
    envs = [
        RankEnv(rank, world_size, rank, world_size, f"file://{store}", str(store), timeout_s)
        for rank in range(world_size)
    ]
    try:
        with stop_signals(job):
            try:
                start_forkserver(preload, tune_memory=tune_memory)
                job.start(envs, payload, threads, folder)
                if job.stop_signal is not None:  # it came before all ranks were there to hear it
                    job.raise_stopped()
                return job.results()
            finally:
                job.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def launch(
    target: Callable[..., Any],
    layout_world: int,
    args: tuple[Any, ...] = (),
    *,
    layout: str = "",
    **options: Unpack[RunOptions],
) -> list[Any]:
    """Run ``target(env, *args)`` on the ranks of a layout, and return the results of the ranks started here.

    Under torchrun or srun this process *is* one rank: the result is a list of one. Otherwise ``run_local_ranks``
    starts all of them. ``layout`` is the layout's text form, for the message.

    Raises LayoutError if torchrun or srun started another number of ranks than ``layout_world``; otherwise as
    ``run_local_ranks``.
    """
    env = torchrun_env(timeout_s=options.get("timeout_s", DEFAULT_TIMEOUT_S))
    if env is None:
        return run_local_ranks(target, layout_world, args, **options)
    if env.world_size != layout_world:
        raise LayoutError(_wrong_world(env, layout_world, layout))
    os.environ.setdefault("GOMP_SPINCOUNT", "0")  # read when torch is imported
    threads, on_message = options.get("threads_per_rank"), options.get("on_message")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if on_message is not None:
        rank, listener = env.rank, on_message
        env = dataclasses.replace(env, sender=lambda message: listener(rank, message))
    result = target(env, *args)
    leave_process_group()
    return [result]


def _wrong_world(env: RankEnv, layout_world: int, layout: str) -> str:
    starter, option = "torchrun", f"--nproc-per-node {layout_world}"
    if env.init_method != "env://":
        starter, option = "srun", f"--ntasks {layout_world}"
    elif env.num_nodes > 1:
        option = f"--nnodes and --nproc-per-node with a product of {layout_world}"
    needed = f"{layout_world} rank{'s' if layout_world > 1 else ''}" + (f" ({layout})" if layout else "")
    return f"the layout needs {needed} but {starter} started {env.world_size}; use {option} or dp={env.world_size}"
