"""A run under ``torchrun --nnodes=1:2`` that loses a worker, then a whole agent, and must end as one that nobody disturbed.

Two agents on this machine start one rank each. First the worker of one is killed (SIGKILL): the group starts again with two
ranks. Then that agent is killed together with its worker: the other one goes on alone, so dp shrinks from 2 to 1 and
accumulation keeps the batch. Each start continues from the last checkpoint (``--resume auto``, ``train.elastic``). Every rank
notes the samples of each step it does, so what was skipped or read twice shows even where losses would not tell.

    python benchmarks/elastic.py [--steps 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
LAYOUT, GLOBAL_BATCH, SAVE_EVERY = "dp=2,micro_batch=2,microbatches=2", 8, 5


# -- on the ranks ------------------------------------------------------------------------------------------


def worker(folder: Path, arguments: Sequence[str]) -> int:
    """``shardwright ARGUMENTS``, with the samples of every step that was done in a file of this process."""
    from shardwright import cli
    from shardwright.train.step import Trainer

    done: list[IO[str]] = []
    original = Trainer.step

    def step(self: Trainer, batches: Sequence[Any], number: int) -> Any:
        world = self.mesh.world
        if not done:
            with self.mesh.recorder.aside():
                life = world.gather_objects(f"{time.time():.3f}")[0]
            done.append((folder / f"{life} {world.rank} {world.size}.jsonl").open("w", encoding="utf-8", buffering=1))
        result = original(self, batches, number)
        done[0].write(json.dumps([number, [sample for batch in batches for sample in batch.samples]]) + "\n")
        return result

    Trainer.step = step  # type: ignore[method-assign]
    sys.argv = ["shardwright", *arguments]
    return cli.main()


# -- what the ranks have noted -----------------------------------------------------------------------------


@dataclass
class Life:
    """One start of the group: samples by step, of the steps that all its ranks have done."""

    num_ranks: int
    steps: dict[int, list[int]]

    @property
    def first(self) -> int | None:
        return min(self.steps, default=None)

    @property
    def last(self) -> int:
        return max(self.steps, default=-1)


def lives(folder: Path) -> list[Life]:
    """The starts of the group in their order, but those that ended before their first step was done."""
    ranks: dict[tuple[str, int], list[dict[int, list[int]]]] = {}
    for path in sorted(folder.glob("* * *.jsonl")):
        life, _, world = path.name.removesuffix(".jsonl").split(" ")
        lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
        ranks.setdefault((life, int(world)), []).append(dict(json.loads(line) for line in lines))
    found = []
    for (_, world), mine in ranks.items():
        common = set(mine[0]).intersection(*mine[1:]) if len(mine) == world else set()
        found.append(Life(world, {step: sorted(sample for rank in mine for sample in rank[step]) for step in sorted(common)}))
    return [life for life in found if life.steps]


def problems(every: Sequence[Life], steps: int) -> list[str]:
    """What is not as it should be in the samples: of each step the last life that did it counts."""
    wrong = []
    for before, after in pairwise(every):
        if after.first is None or after.first % SAVE_EVERY or not before.last - 2 * SAVE_EVERY < after.first <= before.last + 1:
            wrong.append(f"after step {before.last} the group goes on with step {after.first}")
    if [life.num_ranks for life in every] != [2, 2, 1]:
        wrong.append(f"the group was started with {[life.num_ranks for life in every]} ranks")
    for step in range(steps):
        samples = next((life.steps[step] for life in reversed(every) if step in life.steps), [])
        if samples != list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)):
            wrong.append(f"step {step} read samples {samples}")
    return wrong


# -- the run -----------------------------------------------------------------------------------------------


def train_words(folder: Path, run: str, steps: int) -> list[str]:
    values = {
        "train.steps": steps, "train.save_every": SAVE_EVERY, "train.threads": 1, "train.peak_tflops": 1.0,
        "train.run_dir": folder / run, "train.elastic": "true", "data.cache": folder / "datasets", "data.seq_len": 64,
    }  # fmt: skip
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    return ["train", "examples/tiny.toml", "--layout", LAYOUT, "--resume", "auto", "--json", *sets]


def start(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "PYTHONPATH": path}
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def agent(port: int, first: bool, folder: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """One of two agents, with one worker; the first one keeps the rendezvous."""
    conf = f"is_host={first},last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=3"
    torchrun = [
        "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3",
        "--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic",
        "--rdzv-conf", conf, "--local-addr", "127.0.0.1",
    ]  # fmt: skip
    return start([*torchrun, str(Path(__file__).resolve()), "--worker", str(folder), *words], folder / f"agent-{first}.log")


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)


def wait_for(what: Callable[[], bool], running: subprocess.Popen[bytes], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        if running.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run stopped or stood still: exit code {running.poll()}, see its log")
        time.sleep(0.05)


def disturbed(folder: Path, steps: int, limit_s: float) -> list[Life]:
    """The run with both kills; its lives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = train_words(folder, "disturbed", steps)
    agents = [agent(port, first, folder, words) for first in (True, False)]
    try:

        def after(step: int, lifes: int) -> Callable[[], bool]:
            def reached() -> bool:
                done = lives(folder)
                return len(done) >= lifes and done[-1].num_ranks == 2 and done[-1].last >= step

            return reached

        wait_for(after(steps // 4, 1), agents[0], limit_s)
        lost = psutil.Process(agents[1].pid)
        kill(lost.children(recursive=True))
        wait_for(after(steps // 2, 2), agents[0], limit_s)
        kill([lost, *lost.children(recursive=True)])
        code = agents[0].wait(limit_s)
        if code:
            raise RuntimeError(f"the agent that was left ended with {code}")
    finally:
        for each in agents:
            every = psutil.Process(each.pid).children(recursive=True) if each.poll() is None else []
            kill(every)
            each.kill()
            each.wait()
    return lives(folder)


def measure(steps: int = 60, limit_s: float = 600.0) -> dict[str, Any]:
    """Both runs; raises RuntimeError with the end of the agent's log if the disturbed one does not come to its end."""
    from shardwright.train.metrics import read_metrics

    with tempfile.TemporaryDirectory(prefix="shardwright-elastic-") as name:
        folder = Path(name)
        log = folder / "undisturbed.log"
        if start(["-m", "shardwright", *train_words(folder, "undisturbed", steps)], log).wait(limit_s):
            raise RuntimeError(log.read_text()[-1500:])
        before = time.monotonic()
        try:
            every = disturbed(folder, steps, limit_s)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{error}\n{(folder / 'agent-True.log').read_text()[-3000:]}") from None
        seconds = time.monotonic() - before
        ours, theirs = (read_metrics(folder / run) for run in ("disturbed", "undisturbed"))
    wrong = problems(every, steps)
    if [record["step"] for record in ours] != list(range(1, steps + 1)):
        wrong.append(f"the metrics hold steps {[record['step'] for record in ours]}")
    pairs = [(mine["loss"], other["loss"]) for mine, other in zip(ours, theirs, strict=False)]
    return {
        "ranks": [life.num_ranks for life in every],
        "steps": [[life.first, life.last] for life in every],
        "largest_loss_difference": max(abs(mine - other) / abs(other) for mine, other in pairs),
        "problems": wrong,
        "seconds": seconds,
    }


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        return worker(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.steps)
    print(json.dumps(found, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
