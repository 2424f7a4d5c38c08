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

This is the only module of the package that reads or writes environment variables. torch is imported by ranks only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import mmap
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from shardwright import errors
from shardwright.errors import ConfigError, LayoutError, RankError, ShardwrightError

if TYPE_CHECKING:
    import torch

PRELOAD = ("torch", "torch.distributed", "shardwright.train.loop", "shardwright.cli")
DEFAULT_TIMEOUT_S = 120.0
MEMORY_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 35),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""What ranks on CPU run with, unless the user set it: freed activations stay in the process, on huge pages. Without it
glibc gives each large tensor back to the kernel, which clears its pages anew: 3 to 6 % of a step (docs/log.md)."""
BLAME_WINDOW_S = 0.5  # how long a lost connection waits for the death that explains it
FORKSERVER_LOST = 255  # exit code that multiprocessing makes up when the fork server died; the rank may be alive
TICK_S = 0.2  # how often deadlines are looked at while nothing happens

_process_lock = threading.Lock()  # starting and reaping processes is not safe in two threads at once


@dataclass(frozen=True)
class RankEnv:
    """Who a rank is and how it meets the others. ``send(obj)`` passes a picklable object to the starting process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    init_method: str
    store_path: str | None = None  # the file of the rendezvous, for local ranks
    timeout_s: float = DEFAULT_TIMEOUT_S  # of the rendezvous and of each collective
    node_rank: int = 0
    num_nodes: int = 1
    agent_store: bool = False  # the rendezvous' store is that of torchrun's agents, which outlives the ranks
    sender: Callable[[Any], None] | None = field(default=None, repr=False, compare=False)
    noter: Callable[[str], None] | None = field(default=None, repr=False, compare=False)

    def send(self, message: Any) -> None:
        """Pass ``message`` to ``on_message(rank, message)`` of whoever started the ranks; dropped if there is none."""
        if self.sender is not None:
            self.sender(message)

    def note(self, doing: str) -> None:
        """Leave in memory what the rank is at; if it dies or stalls there, the error says so. Cheap; dropped under torchrun."""
        if self.noter is not None:
            self.noter(doing)


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


# ---------------------------------------------------------------------------------------------- inside a rank


def device_for(env: RankEnv, kind: Literal["auto", "cpu", "cuda"] = "auto") -> torch.device:
    """The device of this rank: ``cuda:local_rank`` where every rank of the node has a GPU of its own, else the CPU.

    Raises ConfigError if ``kind`` is "cuda" and the node has fewer GPUs than ranks.
    """
    import torch

    num_gpus = torch.cuda.device_count() if kind != "cpu" and torch.cuda.is_available() else 0
    if num_gpus >= env.local_world_size:
        return torch.device("cuda", env.local_rank)
    if kind == "cuda":
        raise ConfigError(
            f"device=cuda needs a GPU for each of the {env.local_world_size} ranks of a node, found {num_gpus}; "
            "use device=cpu or fewer ranks"
        )
    return torch.device("cpu")


def init_process_group(env: RankEnv, device: Literal["cpu", "cuda"] = "cpu") -> None:
    """Join the default process group: gloo for CPU tensors and, on CUDA, NCCL for tensors on this rank's GPU."""
    import torch
    import torch.distributed as dist

    backend, device_id, timeout = "gloo", None, timedelta(seconds=env.timeout_s)
    if device == "cuda":
        backend, device_id = "cpu:gloo,cuda:nccl", torch.device("cuda", env.local_rank)
        torch.cuda.set_device(device_id)
    where: dict[str, Any] = {"init_method": env.init_method}
    if env.agent_store:
        from torch.distributed.rendezvous import rendezvous

        from shardwright.comm.rendezvous import fresh_store

        store, _, _ = next(rendezvous(env.init_method, env.rank, env.world_size, timeout=timeout))
        where = {"store": fresh_store(store, env.rank, env.world_size, env.timeout_s)}
    dist.init_process_group(
        backend, rank=env.rank, world_size=env.world_size, timeout=timeout, device_id=device_id, **where
    )
    if device == "cpu":  # a rank that is done and leaves at once would break the connections that others still make
        dist.barrier()


def _leave_process_group() -> None:
    """Free sockets and NCCL communicators, if the target joined a process group and did not leave it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Failure:
    """Why a rank ended without a result; made in the rank, or by the parent for a rank that could not speak."""

    rank: int
    cause: str  # reads on after "rank 2 "
    details: str = ""  # traceback, or native stack
    consequence: bool = False  # of another rank's end: a lost connection or a timeout
    timeout: bool = False
    user_error: tuple[str, str] | None = None  # class of shardwright.errors and message, if it is one of ours


_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket closed|connectFullMesh failed"
    r"|remote process exited|ncclRemoteError",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(
    r"timed out (waiting|after)|(wait|socket) timeout|timeout caused pair closure|Watchdog caught collective",
    re.IGNORECASE,
)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from or while handling."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _describe(rank: int, error: BaseException) -> _Failure:
    """What the parent is told about an exception that left the target."""
    links = list(_chain(error))
    texts = [str(link) for link in links if isinstance(link, RuntimeError | OSError | RankError)]
    timeout = any(_TIMED_OUT.search(text) for text in texts)
    lost = any(isinstance(link, ConnectionError | RankError) for link in links)
    user_error = None
    if isinstance(error, ShardwrightError) and not isinstance(error, RankError):
        known = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
        user_error = (known.__name__, str(error))
    return _Failure(
        rank,
        cause=f"failed: {''.join(traceback.format_exception_only(error)).strip()}",
        details="".join(traceback.format_exception(error)).rstrip(),
        consequence=timeout or lost or any(_PEER_LOST.search(text) for text in texts),
        timeout=timeout,
        user_error=user_error,
    )


class _Note:
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


def _rank_main(env: RankEnv, payload: bytes, link: connection.Connection, stacks_path: Path, threads: int) -> None:
    """The whole life of a local rank: call the target, send its result or its error."""
    send_lock = threading.Lock()

    def send(kind: str, body: Any) -> None:
        data = pickle.dumps((kind, body), protocol=pickle.HIGHEST_PROTOCOL)
        with send_lock:
            link.send_bytes(data)

    try:
        _prepare_rank(stacks_path, threads)
        target, args = pickle.loads(payload)
        note = _Note(_note_path(stacks_path))
        result = target(dataclasses.replace(env, sender=lambda message: send("message", message), noter=note), *args)
        _leave_process_group()
        send("result", result)
    except (SystemExit, KeyboardInterrupt):  # the target's own way to end; the parent sees the exit code
        raise
    except BaseException as error:  # the edge of the process: whatever it is, it must reach the parent
        send("failure", _describe(env.rank, error))
        sys.exit(1)


def _note_path(stacks_path: Path) -> Path:
    return stacks_path.with_suffix(".note")


# ---------------------------------------------------------------------------------------- in the starting process


class _LocalRank:
    """The starting process's view of one rank."""

    def __init__(self, rank: int, process: ForkServerProcess, link: connection.Connection, stacks_path: Path) -> None:
        self.rank = rank
        self.process = process
        self.pid = process.pid
        self.link = link
        self.stacks_path = stacks_path
        self.result: Any = None
        self.returned = False
        self.failure: _Failure | None = None
        self.exit_code: int | None = None

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self.exit_code in (None, FORKSERVER_LOST) and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def reap(self, timeout: float) -> bool:
        """Wait for the end of the process; whether it has ended."""
        if self.exit_code is None and connection.wait([self.process.sentinel], timeout):
            with _process_lock:
                self.process.join()
                self.exit_code = self.process.exitcode
        return self.exit_code is not None

    def stacks(self) -> str:
        """What faulthandler has written for this rank."""
        return self.stacks_path.read_text(errors="replace").rstrip() if self.stacks_path.exists() else ""

    def doing(self) -> str:
        """What the rank has noted to be at."""
        return _Note.read(_note_path(self.stacks_path))

    def describe_exit(self) -> _Failure:
        """The failure of a rank that ended without a word."""
        code = self.exit_code or 0
        if code == FORKSERVER_LOST:
            return _Failure(self.rank, f"was lost: it exited with code {code}, or the fork server was killed")
        if code >= 0:
            return _Failure(self.rank, f"exited with code {code} before it returned")
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        why = {"SIGKILL": "out of memory, or killed by hand", "SIGTERM": "ended by hand or by a scheduler"}
        why |= dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"), "a crash in native code")
        return _Failure(self.rank, f"was killed by {name} ({why.get(name, 'from outside')})", self.stacks())


class _Job:
    """One run of local ranks: starts them, listens to them, and ends them when one fails, always all of them."""

    def __init__(
        self,
        *,
        time_limit_s: float | None,
        grace_s: float,
        stop_limit_s: float,
        on_message: Callable[[int, Any], None] | None,
    ) -> None:
        self.time_limit_s = time_limit_s
        self.grace_s = grace_s
        self.stop_limit_s = stop_limit_s
        self.on_message = on_message
        self.ranks: list[_LocalRank] = []
        self.failures: list[_Failure] = []  # in the order they were noticed
        self.blame_at = float("inf")  # when a failure that looks like a consequence is taken as the cause
        self.started_at = time.monotonic()
        self.stop_signal: int | None = None
        self.stop_deadline = float("inf")
        self.kill_requested = False
        self.stopped = False  # a rank has ended as asked, without a result

    def start(self, envs: Sequence[RankEnv], payload: bytes, threads: int, folder: Path) -> None:
        """Fork one process per rank. Raises RankError if the fork server is gone."""
        context = multiprocessing.get_context("forkserver")
        for env in envs:
            receiver, sender = context.Pipe(duplex=False)
            stacks_path = folder / f"stacks-{env.rank}.txt"
            process = context.Process(
                target=_rank_main, args=(env, payload, sender, stacks_path, threads), name=f"rank-{env.rank}"
            )
            try:
                with _process_lock:
                    process.start()
            except (OSError, EOFError) as error:
                receiver.close()
                raise RankError(
                    f"rank {env.rank} could not be started: the fork server ended ({error or 'no answer'}); "
                    "its own message, if any, stands above",
                    rank=env.rank,
                ) from error
            finally:
                sender.close()
            self.ranks.append(_LocalRank(env.rank, process, receiver, stacks_path))

    def stop(self, signum: int) -> None:
        """Pass a request to stop on to the ranks; a second Ctrl-C kills them. Called from a signal handler."""
        if self.stop_signal is None:
            self.stop_signal = signum
            self.stop_deadline = time.monotonic() + self.stop_limit_s
            self.signal_all(signal.SIGTERM)
        elif signum == signal.SIGINT:
            self.kill_requested = True
            self.stop_deadline = 0.0
            self.signal_all(signal.SIGKILL)

    def signal_all(self, signum: int) -> None:
        """Send a signal to every rank that runs."""
        for rank in self.ranks:
            rank.send_signal(signum)

    def results(self) -> list[Any]:
        """Listen until every rank has returned and ended; raises what ``run_local_ranks`` raises."""
        open_links = {rank.link: rank for rank in self.ranks}
        while running := [rank for rank in self.ranks if rank.exit_code is None]:
            self.check_deadlines(running)
            ready = connection.wait([*open_links, *(rank.process.sentinel for rank in running)], TICK_S)
            for rank in running:
                ended = rank.process.sentinel in ready
                heard = rank.link in open_links and (rank.link in ready or (ended and rank.link.poll()))
                if heard and not self.listen(rank, drain=ended):
                    del open_links[rank.link]
                if ended:
                    self.note_end(rank)
            self.raise_failure()
        self.blame_at = 0.0
        self.raise_failure()
        if not all(rank.returned for rank in self.ranks):
            self.raise_stopped()
        return [rank.result for rank in self.ranks]

    def listen(self, rank: _LocalRank, *, drain: bool) -> bool:
        """Take one message from a rank, or all that are left; whether more may come."""
        while True:
            try:
                data = rank.link.recv_bytes()
            except (EOFError, OSError):  # closed, or cut off within a message: the end of the process explains it
                return False
            kind, body = pickle.loads(data)
            if kind == "message" and self.on_message is not None:
                self.on_message(rank.rank, body)
            elif kind == "result":
                rank.result, rank.returned = body, True
            elif kind == "failure":
                self.note_failure(rank, body)
            if not (drain and rank.link.poll()):
                return True

    def note_end(self, rank: _LocalRank) -> None:
        """Take the exit code of a rank that has ended."""
        rank.reap(0.0)
        if rank.failure is None and not (rank.returned and rank.exit_code == 0):
            rank.returned = False
            code = rank.exit_code or 0
            if self.kill_requested or (self.stop_signal is not None and (code >= 0 or code == -signal.SIGTERM)):
                self.stopped = True  # the others can only wait for it now
                self.stop_deadline = min(self.stop_deadline, time.monotonic() + self.grace_s)
            else:
                self.note_failure(rank, rank.describe_exit())

    def note_failure(self, rank: _LocalRank, failure: _Failure) -> None:
        """Remember a failure; the first one starts the clock of those that look like consequences."""
        rank.failure = failure
        self.failures.append(failure)
        self.blame_at = min(self.blame_at, time.monotonic() + BLAME_WINDOW_S)

    def check_deadlines(self, running: list[_LocalRank]) -> None:
        """Raise if the run, or the ranks' time to stop, is over."""
        now = time.monotonic()
        if now > self.stop_deadline:
            self.raise_stopped()
        if self.time_limit_s is not None and now > self.started_at + self.time_limit_s:
            names = _names([rank.rank for rank in running])
            stacks = self.ask_stacks(running)
            raise RankError(
                f"{names} did not end within the time limit of {self.time_limit_s:g} s, so all ranks were ended; "
                f"where each of them was:\n{stacks}",
                rank=running[0].rank if len(running) == 1 else -1,
            )

    def raise_stopped(self) -> None:
        """The ranks were asked to stop and have not returned: end as the signal asked."""
        if self.stop_signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    def raise_failure(self) -> None:
        """Raise the failure that explains all others, as soon as it is known."""
        root = next((failure for failure in self.failures if not failure.consequence), None)
        if root is None and self.failures and time.monotonic() > self.blame_at:
            root = self.failures[0]
        if root is None:
            return
        if root.consequence and self.stopped:
            self.raise_stopped()
        if root.user_error is not None:
            name, message = root.user_error
            known: type[ShardwrightError] = getattr(errors, name)
            error = known(message)
            error.add_note(f"raised on rank {root.rank}:\n{root.details}")
            raise error
        raise RankError("\n".join(self.story(root)), rank=root.rank)

    def story(self, root: _Failure) -> Iterator[str]:
        """The lines of the error: the rank and the cause first, then what helps to find the reason."""
        doing = next(rank.doing() for rank in self.ranks if rank.rank == root.rank)
        yield f"rank {root.rank} {root.cause}" + (f"; it was at {doing}" if doing and doing not in root.cause else "")
        if root.details:
            yield root.details
        if not root.consequence:
            return
        returned = [rank.rank for rank in self.ranks if rank.returned]
        if returned:
            yield f"{_names(returned)} had returned already"
        for other in self.failures:
            if other is not root:
                yield f"rank {other.rank} {other.cause}\n{other.details}".rstrip()
        waiting = [rank for rank in self.ranks if not rank.returned and rank.failure is None]
        yield from (f"rank {rank.rank} was at {rank.doing()}" for rank in waiting if rank.doing())
        if root.timeout and waiting:
            yield f"where the other ranks were:\n{self.ask_stacks(waiting)}"

    def ask_stacks(self, ranks: list[_LocalRank]) -> str:
        """Have ranks write their Python stacks, which also works while they are blocked in native code."""
        for rank in ranks:
            rank.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        before: list[str] = []
        stacks = [rank.stacks() for rank in ranks]
        while time.monotonic() < deadline and not (all(stacks) and stacks == before):
            time.sleep(0.05)
            before, stacks = stacks, [rank.stacks() for rank in ranks]
        return "\n".join(f"rank {rank.rank}:\n{text or 'no answer'}" for rank, text in zip(ranks, stacks, strict=True))

    def end(self) -> None:
        """End every rank that still runs: SIGTERM, after the grace SIGKILL; then free what they held."""
        for signum, patience in ((signal.SIGTERM, self.grace_s), (signal.SIGKILL, 10.0)):
            deadline = time.monotonic() + patience
            self.signal_all(signum)
            for rank in self.ranks:
                rank.reap(max(0.0, deadline - time.monotonic()))
        for rank in self.ranks:
            rank.link.close()
            if rank.exit_code is not None:
                rank.process.close()


def _names(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextlib.contextmanager
def _stop_signals(job: _Job) -> Iterator[None]:
    """While the ranks run, Ctrl-C and SIGTERM stop them. Only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        job.stop(signum)

    wanted = [known for known in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(known) is not signal.SIG_IGN]
    previous = {known: signal.signal(known, handler) for known in wanted}
    try:
        yield
    finally:
        for known, old in previous.items():
            signal.signal(known, signal.SIG_DFL if old is None else old)


def start_forkserver(preload: Sequence[str] = PRELOAD, *, tune_memory: bool = True) -> None:
    """Start the process that ranks are forked from and return at once; without effect if it runs.

    It imports ``preload`` (names that do not exist are skipped) while the caller goes on, so a command calls this
    first and reads its configuration meanwhile. All runs of one process share it. ``tune_memory``: see `MEMORY_SETTINGS`.
    """
    # Idle OpenMP threads must not spin: they would take the cores of the other ranks.
    settings = {"GOMP_SPINCOUNT": "0", **(MEMORY_SETTINGS if tune_memory else {})}
    wanted = {"OMP_NUM_THREADS": "1", **{name: os.environ.get(name, value) for name, value in settings.items()}}
    stop_signals = {signal.SIGINT, signal.SIGTERM}
    with _process_lock:
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
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, cores // world_size)


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
        KeyboardInterrupt, SystemExit: asked to stop by Ctrl-C or SIGTERM, and not every rank returned.
    """
    if world_size < 1:
        raise LayoutError(f"the number of ranks is {world_size}; it must be at least 1")
    payload = pickle.dumps((target, args), protocol=pickle.HIGHEST_PROTOCOL)
    threads = threads_per_rank or default_threads(world_size)
    job = _Job(time_limit_s=time_limit_s, grace_s=grace_s, stop_limit_s=stop_limit_s, on_message=on_message)
    folder = Path(tempfile.mkdtemp(prefix="shardwright-"))  # private: mode 0700
    store = folder / "rendezvous"
    envs = [
        RankEnv(rank, world_size, rank, world_size, f"file://{store}", str(store), timeout_s)
        for rank in range(world_size)
    ]
    try:
        with _stop_signals(job):
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


# ------------------------------------------------------------------------------------- under torchrun or srun


def torchrun_env(environ: Mapping[str, str] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> RankEnv | None:
    """This process's rank if torchrun (``RANK`` ...) or Slurm's srun (``SLURM_PROCID`` ...) started it, else None.

    ``environ`` is the process's environment unless given. Raises ConfigError for half an environment: then one side
    thinks that ranks were started, and starting them here again would run everything several times.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        env = _from_torchrun(environ, timeout_s)
    elif "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ):
        slurm = _from_srun(environ, timeout_s)
        if slurm is None:
            return None
        env = slurm
    else:
        return None
    if not (0 <= env.rank < env.world_size and 0 <= env.local_rank < env.local_world_size <= env.world_size):
        raise ConfigError(
            f"the environment says rank {env.rank} of {env.world_size} and local rank {env.local_rank} of "
            f"{env.local_world_size}, which cannot be; start with torchrun, or unset RANK and WORLD_SIZE"
        )
    return env


def _from_torchrun(environ: Mapping[str, str], timeout_s: float) -> RankEnv:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not; start with torchrun, or unset RANK and "
            "WORLD_SIZE to start ranks here"
        )
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", 1)
    return RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK", 0),
        local_world_size=local_world_size,
        init_method="env://",
        timeout_s=timeout_s,
        node_rank=_integer(environ, "GROUP_RANK", rank // max(1, local_world_size)),
        num_nodes=max(1, world_size // max(1, local_world_size)),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_srun(environ: Mapping[str, str], timeout_s: float) -> RankEnv | None:
    world_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _integer(environ, world_name, 1)
    if "MASTER_ADDR" not in environ:
        if world_size == 1:  # one task that may start its own ranks
            return None
        raise ConfigError(
            f"srun started {world_size} tasks but MASTER_ADDR is not set; before srun, export MASTER_ADDR=$(scontrol "
            'show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    num_nodes = _integer(environ, nodes_name, 1)
    node_rank = _integer(environ, "SLURM_NODEID", 0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    per_node: list[int] = []  # "4(x2),1" is 4, 4, 1
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        per_node += [int(count)] * int(times or 1)
    host, port = environ["MASTER_ADDR"], _integer(environ, "MASTER_PORT", 29500)
    return RankEnv(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_integer(environ, "SLURM_LOCALID", 0),
        local_world_size=per_node[node_rank] if node_rank < len(per_node) else max(1, world_size // max(1, num_nodes)),
        init_method=f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}",
        timeout_s=timeout_s,
        node_rank=node_rank,
        num_nodes=num_nodes,
    )


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} is not a whole number; start with torchrun, or unset it")
    return int(text)


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
    _leave_process_group()
    return [result]


def _wrong_world(env: RankEnv, layout_world: int, layout: str) -> str:
    starter, option = "torchrun", f"--nproc-per-node {layout_world}"
    if env.init_method != "env://":
        starter, option = "srun", f"--ntasks {layout_world}"
    elif env.num_nodes > 1:
        option = f"--nnodes and --nproc-per-node with a product of {layout_world}"
    needed = f"{layout_world} rank{'s' if layout_world > 1 else ''}" + (f" ({layout})" if layout else "")
    return f"the layout needs {needed} but {starter} started {env.world_size}; use {option} or dp={env.world_size}"
