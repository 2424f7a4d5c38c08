"""Random schedules under random delays: no deadlock, and the same bits as without delays.

A schedule is made by a list scheduler that takes any action that can run, on any rank. It goes through a file, as a
user's own does, and through the whole trainer. Delays are put on sends, on receives and before each computation; sends
may be made to block until they are over.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardwright.comm.base import Comm, Work
from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv
from shardwright.schedule.action import COMPUTE, Action, Kind, Schedule
from shardwright.schedule.passes import add_communication, check, receives_to_post
from shardwright.train.prepare import PreparedData
from shardwright.train.step import Trainer
from shardwright.verify.mutate_comms import ForwardingComm
from shardwright.verify.parity import train_sampler


def random_schedule(rng: random.Random, ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Rows that can run: ``chunks`` stages on each rank in any placement, actions in any possible order, B W or BW."""
    placement = list(range(ranks)) * chunks
    rng.shuffle(placement)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    last = len(placement) - 1
    ready = [Action(Kind.F, 0, m) for m in range(num_microbatches)]
    eager = rng.random()  # how much of the time backwards come first, so that few and many are in flight
    while ready:
        backwards = [action for action in ready if action.kind is not Kind.F]
        action = rng.choice(backwards if backwards and rng.random() < eager else ready)
        ready.remove(action)
        rows[placement[action.stage]].append(action)
        kind, stage, m = action.kind, action.stage, action.microbatch
        if kind is Kind.F:
            ready.append(Action(Kind.F, stage + 1, m) if stage < last else Action(rng.choice(_BACKWARDS), stage, m))
        if kind is Kind.B:
            ready.append(Action(Kind.W, stage, m))
        if kind in _BACKWARDS and stage > 0:
            ready.append(Action(rng.choice(_BACKWARDS), stage - 1, m))
    return Schedule("random", len(placement), num_microbatches, tuple(placement), tuple(map(tuple, rows)))


_BACKWARDS = (Kind.B, Kind.BW)


@dataclass(frozen=True)
class StressCase:
    """``delay_s``: the longest delay. ``blocking``: each send is waited for at once (over gloo: until it is received)."""

    seed: int
    config: RunConfig
    delay_s: float
    blocking: bool


def random_case(seed: int, config: RunConfig, folder: Path, ranks: int, delay_s: float) -> StressCase:
    """A random schedule for ``ranks`` pipeline ranks, written to ``folder``, with a random number of micro-batches and
    chunks that the model has layers for; half of the cases go over gloo with blocking sends.
    """
    rng = random.Random(seed)
    microbatches, chunks = rng.randint(1, 2 * ranks + 1), rng.randint(1, config.model.num_layers // ranks)
    schedule = random_schedule(rng, ranks, microbatches, chunks)
    sending = add_communication(schedule)
    assert check(schedule) == [] and check(sending, receives_to_post(sending)) == []
    path = folder / f"schedule-{ranks}-{seed}.txt"
    path.write_text(f"{schedule}\n", encoding="utf-8")
    blocking = rng.random() < 0.5
    layout = config.layout.with_(
        pp=ranks,
        schedule=f"file:{path}",
        microbatches=microbatches,
        virtual=chunks,
        comm="gloo" if blocking else "auto",
        recompute=rng.choice(("none", "full")),
    )
    return StressCase(seed, config.model_copy(update={"layout": layout}), delay_s, blocking)


class _Delays:
    """Sleeps at random, its own way on each rank."""

    def __init__(self, seed: int, rank: int, longest: float) -> None:
        self._rng, self._longest = random.Random(1000 * seed + rank), longest

    def __call__(self, share: float = 0.3) -> None:
        if self._rng.random() < share:
            time.sleep(self._rng.random() * self._longest)


class _DelayedWork(Work):
    def __init__(self, work: Work, delay: _Delays) -> None:
        self._work, self._delay = work, delay

    @property
    def done(self) -> bool:
        return self._work.done

    def wait(self) -> None:
        self._delay()
        self._work.wait()


class _DelayedComm(ForwardingComm):
    def __init__(self, inner: Comm, delay: _Delays, blocking: bool) -> None:
        super().__init__(inner)
        self._delay, self._blocking = delay, blocking

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        self._delay()
        work = super().send(tensor, to, name=name)
        if self._blocking:
            work.wait()
        return work

    def receive(self, output: Tensor, source: int, *, name: str) -> Work:
        return _DelayedWork(super().receive(output, source, name=name), self._delay)


@dataclass
class StressOutcome:
    """What one rank found. ``differs``: names of tensors whose bits differ between the runs without and with delays."""

    loss: float
    norm: float
    differs: list[str]


def stress_rank(env: RankEnv, data: PreparedData, cases: Sequence[StressCase]) -> list[StressOutcome]:
    """Two steps of each case, without and with delays. The process group is initialised."""
    outcomes = []
    for case in cases:
        plain = _steps(env, data, case, None)
        delayed = _steps(env, data, case, _Delays(case.seed, env.rank, case.delay_s))
        differs = [name for name, value in plain.items() if not torch.equal(value, delayed[name])]
        outcomes.append(StressOutcome(plain["loss"].item(), plain["norm"].item(), differs))
    return outcomes


def _steps(env: RankEnv, data: PreparedData, case: StressCase, delay: _Delays | None) -> dict[str, Tensor]:
    """Loss and norm of the first step, gradients of the last and parameters after it."""
    config = case.config
    mesh = Mesh.distributed(config.layout, env.rank, env.timeout_s)
    if delay is not None:
        delays = delay
        mesh.wrap(lambda comm: _DelayedComm(comm, delays, case.blocking))
    trainer = Trainer(config, mesh)
    if delay is not None:
        trainer.executor.on_action = lambda action: delays() if action.kind in COMPUTE else None
    sampler = train_sampler(config, data, mesh.coordinates["dp"])
    results = [trainer.step(list(sampler.batches(step)), step) for step in range(2)]
    first = {"loss": results[0].loss, "norm": results[0].grad_norm}
    found = {name: torch.tensor(value, dtype=torch.float64) for name, value in first.items()}
    found |= {f"gradient of {name}": view.clone() for name, view in trainer.buckets.named("gradients").items()}
    return found | {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
