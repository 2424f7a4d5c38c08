"""Starting ranks: results, every way a rank can fail, stopping, and ranks that another program has started."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ranks.kit import TESTS, living_ranks, run_ranks
from shardwright import launch
from shardwright.errors import ConfigError, DataError, LayoutError, RankError, ShardwrightError
from shardwright.launch import RankEnv, init_process_group, run_local_ranks, torchrun_env

Say = Callable[[int, Any], None]


class OwnDataError(DataError):
    """A subclass that shardwright.errors does not know."""


# ------------------------------------------------------------------------------------------ what the ranks do


def describe(env: RankEnv, word: str) -> tuple[Any, ...]:
    return env.rank, env.world_size, env.local_rank, env.local_world_size, env.num_nodes, word, os.getpid()


def reduced(env: RankEnv, repeats: int) -> float:
    value = torch.full((1000,), float(env.rank + 1))
    for _ in range(repeats):
        dist.all_reduce(value)
        value /= env.world_size
    return float(value[0]) * env.world_size


def threads_and_spin(env: RankEnv) -> tuple[int, str | None]:
    return torch.get_num_threads(), os.environ.get("GOMP_SPINCOUNT")


def large(env: RankEnv, numel: int) -> torch.Tensor:
    return torch.full((numel,), float(env.rank))


def count_aloud(env: RankEnv) -> str:
    for step in range(3):
        env.send({"step": step})
    return "done"


def fail_on_rank_2(env: RankEnv, how: str) -> None:
    """Rank 2 fails in its own way; the others wait for it in a collective."""
    env.send(os.getpid())
    dist.barrier()
    if env.rank == 2:
        if how == "raise":
            raise ValueError("seven is not even")
        if how == "user":
            raise OwnDataError("corpus.txt is empty; name a file with text")
        if how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "_exit":
            os._exit(7)
        if how == "exit":
            sys.exit(9)
        if how == "leave":
            return
        if how == "sleep":
            time.sleep(60)
        if how == "lambda":
            return lambda: None  # type: ignore[return-value]
    dist.all_reduce(torch.ones(1))


def ignore_sigterm(env: RankEnv) -> None:
    """Rank 0 fails; 1 and 2 wait for each other in native code, where no Python handler runs."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    dist.barrier()
    if env.rank == 0:
        raise KeyError("rank 0 gives up")
    dist.recv(torch.empty(1), src=3 - env.rank)


def lose_peer_first(env: RankEnv) -> None:
    """Rank 1 dies after rank 0 has noticed that it is going, the wrong order to put the blame."""
    dist.barrier()
    if env.rank == 1:
        dist.destroy_process_group()
        time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise OSError("the step could not be finished") from error


def time_out_after_the_loss_it_causes(env: RankEnv) -> None:
    """Rank 1 gives up waiting for rank 2 and closes its connections, but rank 0 is the first to speak of it."""
    if env.rank == 0:
        raise ConnectionError("connection closed by peer")
    if env.rank == 1:
        time.sleep(0.2)
        raise RuntimeError("timed out waiting 1000ms for recv operation to complete")
    time.sleep(60)


def die_with_a_child_that_lives(env: RankEnv) -> None:
    """Like a data worker, the child has inherited the rank's end of the pipe and keeps it open."""
    if os.fork() == 0:
        time.sleep(5)
        os._exit(0)
    os._exit(7)


def save_when_asked(env: RankEnv, seconds: float) -> str:
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    env.send("ready")
    while not asked.is_set():
        time.sleep(0.01)
    time.sleep(seconds)
    return f"saved by {env.rank}"


def ask_by_exit(env: RankEnv) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    env.send("ready")
    time.sleep(60)


def wait_forever(env: RankEnv) -> None:
    env.send(os.getpid())
    time.sleep(600)


def on_all(world_size: int, action: Callable[[], None]) -> Say:
    """A listener that acts when every rank has spoken."""
    ranks: set[int] = set()

    def listen(rank: int, message: Any) -> None:
        if rank not in ranks:
            ranks.add(rank)
            if len(ranks) == world_size:
                action()

    return listen


def signal_self(*signums: int) -> None:
    for signum in signums:
        os.kill(os.getpid(), signum)


# ------------------------------------------------------------------------------------------------- results


def test_results_come_back_in_the_order_of_ranks() -> None:
    results = run_local_ranks(describe, 4, ("hello",))
    assert [result[:-1] for result in results] == [(rank, 4, rank, 4, 1, "hello") for rank in range(4)]
    assert len({result[-1] for result in results} | {os.getpid()}) == 5  # five different processes


def test_all_reduce_reaches_every_rank() -> None:
    assert run_ranks(reduced, 3, 1) == [6.0, 6.0, 6.0]


def test_large_results_from_all_ranks_at_once() -> None:
    numel = 5_000_000  # 20 MB from each rank, far above what a pipe holds
    for rank, tensor in enumerate(run_ranks(large, 3, numel)):
        assert tensor.shape == (numel,) and bool((tensor == rank).all())


def test_messages_arrive_in_order_while_ranks_run() -> None:
    heard: dict[int, list[Any]] = {0: [], 1: []}
    assert run_ranks(count_aloud, 2, on_message=lambda rank, message: heard[rank].append(message)) == ["done"] * 2
    assert heard == {rank: [{"step": 0}, {"step": 1}, {"step": 2}] for rank in (0, 1)}
    assert run_ranks(count_aloud, 1) == ["done"]  # nobody listens


def test_a_listener_that_fails_ends_the_ranks() -> None:
    def listen(rank: int, message: Any) -> None:
        raise BrokenPipeError("the terminal is gone")

    with pytest.raises(BrokenPipeError, match="the terminal is gone"):
        run_local_ranks(wait_forever, 2, on_message=listen)
    assert not living_ranks()


def test_ranks_share_the_cores_and_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_local_ranks(threads_and_spin, 1, threads_per_rank=3) == [(3, "0")]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert launch.default_threads(1) == cores
    assert launch.default_threads(10 * cores) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch.default_threads(2) == 5
    assert run_local_ranks(threads_and_spin, 1) == [(5, "0")]


def test_lh_04_two_jobs_at_once_do_not_meet() -> None:
    """No port is used, so none can be taken."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run_ranks, reduced, 2, 20)
        second = pool.submit(run_ranks, reduced, 3, 20)
        assert first.result() == [3.0] * 2 and second.result() == [6.0] * 3


def test_a_failed_job_does_not_disturb_its_neighbour() -> None:
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(run_ranks, reduced, 2, 200)
        bad = pool.submit(run_ranks, fail_on_rank_2, 3, "sigkill")
        assert good.result() == [3.0] * 2
        assert isinstance(bad.exception(), RankError)


def test_the_rendezvous_directory_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_ranks(reduced, 2, 1)
    with pytest.raises(RankError):
        run_ranks(fail_on_rank_2, 3, "raise")
    assert list(tmp_path.iterdir()) == []


def test_no_ranks_at_all_is_refused() -> None:
    with pytest.raises(LayoutError, match="number of ranks is 0"):
        run_local_ranks(describe, 0, ("",))


# ------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("how", "first_line"),
    [
        ("raise", "rank 2 failed: ValueError: seven is not even"),
        ("sigkill", "rank 2 was killed by SIGKILL (out of memory, or killed by hand)"),
        ("segfault", "rank 2 was killed by SIGSEGV (a crash in native code)"),
        ("_exit", "rank 2 exited with code 7 before it returned"),
        ("exit", "rank 2 exited with code 9 before it returned"),
    ],
)
def test_the_rank_that_fails_is_named_and_all_are_ended(how: str, first_line: str) -> None:
    pids: dict[int, int] = {}
    start = time.perf_counter()
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on_rank_2, 4, how, on_message=pids.__setitem__)
    assert time.perf_counter() - start < 10
    assert str(caught.value).splitlines()[0] == first_line
    assert (caught.value.rank, caught.value.exit_code) == (2, 3)
    if how == "raise":
        assert 'raise ValueError("seven is not even")' in str(caught.value)  # the rank's traceback
    if how == "segfault":
        assert "in fail_on_rank_2" in str(caught.value)  # where it crashed
    assert len(pids) == 4
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]  # nothing left, not even unreaped


def test_a_mistake_of_the_user_keeps_its_class_and_message() -> None:
    with pytest.raises(ShardwrightError) as caught:
        run_ranks(fail_on_rank_2, 3, "user")
    assert type(caught.value) is DataError
    assert str(caught.value) == "corpus.txt is empty; name a file with text"
    assert "raised on rank 2" in caught.value.__notes__[0]


def test_ranks_that_do_not_hear_sigterm_are_killed_after_the_grace() -> None:
    start = time.perf_counter()
    with pytest.raises(RankError, match=r"^rank 0 failed: KeyError: 'rank 0 gives up'"):
        run_ranks(ignore_sigterm, 3)
    assert 1 < time.perf_counter() - start < 10  # the kit's grace is 1 s


def test_a_lost_connection_is_not_blamed_before_the_death_behind_it() -> None:
    with pytest.raises(RankError, match=r"^rank 1 was killed by SIGKILL"):
        run_ranks(lose_peer_first, 2)


def test_a_lost_connection_without_a_death_says_who_had_left() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on_rank_2, 3, "leave")
    assert re.match(r"rank [01] failed: RuntimeError: .*closed", str(caught.value))
    assert "rank 2 had returned already" in str(caught.value)


def test_a_collective_that_times_out_shows_where_the_others_were() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on_rank_2, 3, "sleep", timeout_s=1.0)
    message = str(caught.value)
    assert re.match(r"rank [01] failed: RuntimeError: .*[Tt]imed out", message)
    where = message.split("where the other ranks were:")[1]
    assert "rank 2:" in where and "in fail_on_rank_2" in where


def test_a_timeout_is_blamed_before_the_lost_connections_it_causes() -> None:
    with pytest.raises(RankError, match=r"^rank 1 failed: RuntimeError: timed out") as caught:
        run_ranks(time_out_after_the_loss_it_causes, 3)
    where = str(caught.value).split("where the other ranks were:")[1]
    assert "rank 2:" in where and "in time_out_after_the_loss_it_causes" in where


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankError, match=r"^rank 2 failed: .*pickle"):
        run_ranks(fail_on_rank_2, 3, "lambda")


def test_a_dead_rank_is_noticed_although_its_own_child_lives() -> None:
    start = time.perf_counter()
    with pytest.raises(RankError, match=r"^rank 0 exited with code 7"):
        run_local_ranks(die_with_a_child_that_lives, 1)
    assert time.perf_counter() - start < 4


def ended(pid: int, patience: float = 5.0) -> bool:
    """Whether a process ends soon; one that nobody has reaped counts as ended."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)
                continue
        return True
    return False


PROGRAM = """
import os, psutil, time
from shardwright.errors import RankError
from shardwright.launch import run_local_ranks

def wait_forever(env):
    env.send(os.getpid())
    time.sleep(600)

seen = []

def kill_fork_server(rank, pid):
    print(pid, flush=True)
    seen.append(rank)
    if len(seen) == 2:
        [child.kill() for child in psutil.Process().children() if "forkserver" in str(child.cmdline())]

if __name__ == "__main__":
    try:
        run_local_ranks(wait_forever, 2, preload=["torch"], on_message=kill_fork_server)
    except RankError as error:
        print(error, flush=True)
    run_local_ranks(wait_forever, 2, preload=["torch"], on_message=lambda rank, pid: print(pid, flush=True))
"""


def test_ranks_end_when_the_fork_server_or_the_program_is_killed(tmp_path: Path) -> None:
    """In a program of its own: its fork server is killed, as the kernel may do; it starts another; it is killed."""
    program, temporary = tmp_path / "program.py", tmp_path / "temporary"
    program.write_text(PROGRAM)
    temporary.mkdir()
    env = os.environ | {"PYTHONPATH": str(TESTS.parent / "src"), "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, str(program)], env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline() for _ in range(5)]
        parent.kill()
    *pids, message = sorted(lines, key=len)
    assert re.match("rank [01] was lost: .* the fork server was killed", message)
    assert all(ended(int(pid)) for pid in pids)
    assert not list(temporary.glob("shardwright-*"))


# ------------------------------------------------------------------------------------------------- stopping


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C is heard, also where the tests themselves were started in the background and ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_are_asked_to_stop_may_save_and_return(signum: int) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    listen = on_all(2, functools.partial(signal_self, signum))
    assert run_ranks(save_when_asked, 2, 0.3, on_message=listen) == ["saved by 0", "saved by 1"]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_repeated_sigterm_does_not_cut_off_the_save() -> None:
    listen = on_all(2, functools.partial(signal_self, signal.SIGTERM, signal.SIGTERM))
    assert run_ranks(save_when_asked, 2, 0.3, on_message=listen) == ["saved by 0", "saved by 1"]


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_kills() -> None:
    listen = on_all(2, functools.partial(signal_self, signal.SIGINT, signal.SIGINT))
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(save_when_asked, 2, 30.0, on_message=listen)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("target", [wait_forever, ask_by_exit])
def test_ranks_that_stop_without_a_result_end_the_run_as_the_signal_asked(target: Callable[..., Any]) -> None:
    listen = on_all(2, functools.partial(signal_self, signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        run_ranks(target, 2, on_message=listen)
    assert caught.value.code == 128 + signal.SIGTERM


def test_saving_has_a_limit() -> None:
    listen = on_all(2, functools.partial(signal_self, signal.SIGTERM))
    start = time.perf_counter()
    with pytest.raises(SystemExit) as caught:
        run_local_ranks(save_when_asked, 2, (30.0,), stop_limit_s=0.5, grace_s=0.2, on_message=listen)
    assert caught.value.__notes__ == ["the ranks did not save and end within 0.5 s and were killed"]
    assert 0.5 < time.perf_counter() - start < 5


def test_a_signal_to_the_whole_group_does_not_end_the_fork_server() -> None:
    """Schedulers and `timeout` signal every process; the one that starts and reaps ranks must outlive its ranks."""
    run_ranks(reduced, 1, 1)
    servers = [child for child in psutil.Process().children() if "multiprocessing.forkserver" in str(child.cmdline())]
    listen = on_all(2, lambda: [server.terminate() for server in servers] and signal_self(signal.SIGTERM))
    assert run_ranks(save_when_asked, 2, 0.1, on_message=listen) == ["saved by 0", "saved by 1"]
    assert len(servers) == 1 and servers[0].is_running()


# --------------------------------------------------------------------------- ranks that another program started

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29501",
}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "MASTER_ADDR": "node0",
}


def test_torchrun_is_recognised() -> None:
    env = torchrun_env(TORCHRUN, timeout_s=7.0)
    assert env == RankEnv(5, 8, 1, 4, "env://", None, 7.0, node_rank=1, num_nodes=2)
    again = torchrun_env({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, timeout_s=7.0)
    assert again is not None and again == dataclasses.replace(env, agent_store=True)


def test_srun_is_recognised() -> None:
    env = torchrun_env(SRUN)
    assert env is not None
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (4, 5, 0, 1)
    assert (env.node_rank, env.num_nodes, env.init_method) == (2, 3, "tcp://node0:10000")
    even = torchrun_env({**SRUN, "SLURM_NTASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "MASTER_PORT": "1234"})
    assert even is not None and (even.local_world_size, even.init_method) == (2, "tcp://node0:1234")


def test_lh_04_jobs_and_steps_of_slurm_have_ports_of_their_own() -> None:
    jobs = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in ("4711", "4712", "99999999") for step in ("0", "1")]
    envs = [torchrun_env({**SRUN, **job}) for job in jobs]
    ports = {int(env.init_method.rpartition(":")[2]) for env in envs if env is not None}
    assert len(ports) == len(jobs) and all(10000 <= port < 30000 for port in ports)


def test_lh_04_a_port_that_another_program_holds_is_told_at_once() -> None:
    start = time.perf_counter()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"rank 0 cannot listen at .*{port}.*; set MASTER_PORT to one that is free"):
            init_process_group(RankEnv(0, 2, 0, 2, f"tcp://127.0.0.1:{port}"))
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"},  # the batch script, outside srun
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},  # one task, which starts its own ranks
    ],
)
def test_without_a_starter_there_is_no_rank(environ: dict[str, str]) -> None:
    assert torchrun_env(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({key: value for key, value in SRUN.items() if key != "MASTER_ADDR"}, "5 tasks but MASTER_ADDR is not set"),
    ],
)
def test_half_an_environment_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        torchrun_env(environ)


def set_environment(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name in TORCHRUN | SRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_launch_starts_the_ranks_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, {})
    results = launch.launch(describe, 2, ("hello",), layout="dp=2", threads_per_rank=1)
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]


def test_launch_under_torchrun_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, TORCHRUN)
    heard: list[Any] = []
    results = launch.launch(count_aloud, 8, on_message=lambda rank, message: heard.append((rank, message["step"])))
    assert (results, heard) == (["done"], [(5, 0), (5, 1), (5, 2)])
    assert launch.launch(describe, 8, ("here",))[0][-1] == os.getpid()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            TORCHRUN | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1"},
            "the layout needs 3 ranks (dp=3) but torchrun started 2; use --nproc-per-node 3 or dp=2",
        ),
        (TORCHRUN, "torchrun started 8; use --nnodes and --nproc-per-node with a product of 3 or dp=8"),
        (SRUN, "the layout needs 3 ranks (dp=3) but srun started 5; use --ntasks 3 or dp=5"),
    ],
)
def test_launch_refuses_another_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], message: str
) -> None:
    set_environment(monkeypatch, environ)
    with pytest.raises(LayoutError, match=re.escape(message)):
        launch.launch(describe, 3, ("",), layout="dp=3")


def test_a_rank_without_a_gpu_of_its_own_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    env = torchrun_env(TORCHRUN)
    assert env is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert launch.device_for(env) == torch.device("cuda", 1)
    assert launch.device_for(env, "cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert launch.device_for(env) == torch.device("cpu")
    with pytest.raises(ConfigError, match="each of the 4 ranks of a node, found 3"):
        launch.device_for(env, "cuda")
