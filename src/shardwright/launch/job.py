"""One run of local ranks, seen from the process that starts them: it listens, blames the right rank, ends them all."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from shardwright import errors
from shardwright.errors import RankError, ShardwrightError
from shardwright.launch.failure import Failure
from shardwright.launch.rank import Note, note_path, rank_main
from shardwright.launch.starter import RankEnv, torchrun_env

BLAME_WINDOW_S = 0.5  # how long a lost connection waits for the death that explains it
FORKSERVER_LOST = 255  # exit code that multiprocessing makes up when the fork server died; the rank may be alive
FORK_SERVER_S = 1.0  # how long a fork server that does not answer is given to be seen as dead
TICK_S = 0.2  # how often deadlines are looked at while nothing happens

process_lock = threading.Lock()  # starting and reaping processes is not safe in two threads at once


class LocalRank:
    """The starting process's view of one rank."""

    def __init__(self, rank: int, process: ForkServerProcess, link: connection.Connection, stacks_path: Path) -> None:
        self.rank = rank
        self.process = process
        self.pid = process.pid
        self.link = link
        self.stacks_path = stacks_path
        self.result: Any = None
        self.returned = False
        self.failure: Failure | None = None
        self.exit_code: int | None = None

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self.exit_code in (None, FORKSERVER_LOST) and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def reap(self, timeout: float) -> bool:
        """Wait for the end of the process; whether it has ended."""
        if self.exit_code is None and connection.wait([self.process.sentinel], timeout):
            with process_lock:
                self.process.join()
                self.exit_code = self.process.exitcode
        return self.exit_code is not None

    def stacks(self) -> str:
        """What faulthandler has written for this rank."""
        return self.stacks_path.read_text(errors="replace").rstrip() if self.stacks_path.exists() else ""

    def doing(self) -> str:
        """What the rank has noted to be at."""
        return Note.read(note_path(self.stacks_path))

    def describe_exit(self) -> Failure:
        """The failure of a rank that ended without a word."""
        code = self.exit_code or 0
        if code == FORKSERVER_LOST:
            return Failure(self.rank, f"was lost: it exited with code {code}, or the fork server was killed")
        if code >= 0:
            return Failure(self.rank, f"exited with code {code} before it returned")
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        why = {"SIGKILL": "out of memory, or killed by hand", "SIGTERM": "ended by hand or by a scheduler"}
        why |= dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"), "a crash in native code")
        return Failure(self.rank, f"was killed by {name} ({why.get(name, 'from outside')})", self.stacks())


class Job:
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
        self.ranks: list[LocalRank] = []
        self.failures: list[Failure] = []  # in the order they were noticed
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
                target=rank_main, args=(env, payload, sender, stacks_path, threads), name=f"rank-{env.rank}"
            )
            try:
                self._fork(process)
            except (OSError, EOFError) as error:
                receiver.close()
                raise RankError(
                    f"rank {env.rank} could not be started: the fork server ended ({error or 'no answer'}); "
                    "its own message, if any, stands above",
                    rank=env.rank,
                ) from error
            finally:
                sender.close()
            self.ranks.append(LocalRank(env.rank, process, receiver, stacks_path))

    def _fork(self, process: ForkServerProcess) -> None:
        """Start a rank. A fork server that was killed may still be there for a moment: then a new one is asked for."""
        give_up_at = time.monotonic() + FORK_SERVER_S
        while True:
            try:
                with process_lock:
                    process.start()
                return
            except (OSError, EOFError):
                if self.ranks or time.monotonic() > give_up_at:
                    raise
            time.sleep(0.05)

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

    def listen(self, rank: LocalRank, *, drain: bool) -> bool:
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

    def note_end(self, rank: LocalRank) -> None:
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

    def note_failure(self, rank: LocalRank, failure: Failure) -> None:
        """Remember a failure; the first one starts the clock of those that look like consequences."""
        rank.failure = failure
        self.failures.append(failure)
        self.blame_at = min(self.blame_at, time.monotonic() + BLAME_WINDOW_S)

    def check_deadlines(self, running: list[LocalRank]) -> None:
        """Raise if the run, or the ranks' time to stop, is over."""
        now = time.monotonic()
        if now > self.stop_deadline:
            late = not (self.stopped or self.kill_requested)
            self.raise_stopped(f"the ranks did not save and end within {self.stop_limit_s:g} s and were killed" if late else "")
        if self.time_limit_s is not None and now > self.started_at + self.time_limit_s:
            names = _names([rank.rank for rank in running])
            stacks = self.ask_stacks(running)
            raise RankError(
                f"{names} did not end within the time limit of {self.time_limit_s:g} s, so all ranks were ended; "
                f"where each of them was:\n{stacks}",
                rank=running[0].rank if len(running) == 1 else -1,
            )

    def raise_stopped(self, note: str = "") -> NoReturn:
        """The ranks were asked to stop and have not returned: end as the signal asked."""
        end = SystemExit(128 + signal.SIGTERM) if self.stop_signal == signal.SIGTERM else KeyboardInterrupt()
        if note:
            end.add_note(note)
        raise end

    def raise_failure(self) -> None:
        """Raise the failure that explains all others, as soon as it is known."""
        root = next((failure for failure in self.failures if not failure.consequence), None)
        if root is None and self.failures and time.monotonic() > self.blame_at:
            # a rank that gives up waiting closes its connections, so its timeout explains the losses of the others
            root = next((failure for failure in self.failures if failure.timeout), self.failures[0])
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

    def story(self, root: Failure) -> Iterator[str]:
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

    def ask_stacks(self, ranks: list[LocalRank]) -> str:
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
def raising_sigterm() -> Iterator[None]:
    """While no rank runs yet, SIGTERM ends the program by an exception, as Ctrl-C does, so that it can say what there is.

    Not in a rank of torchrun or srun, where it may come in the middle of a collective, which no exception ends."""
    main = threading.current_thread() is threading.main_thread()
    if not main or torchrun_env() is not None or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def stop_signals(job: Job) -> Iterator[None]:
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
