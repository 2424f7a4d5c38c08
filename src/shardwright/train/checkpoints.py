"""The checkpoints of a run on one rank: which one to go on from, when to save, and that training need not wait for it.

With ``train.checkpoint_url`` rank 0 copies complete checkpoints to an object store and looks for a later one there. What it
does alone may take longer than a collective waits for a rank, so meanwhile the ranks meet again and again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from shardwright.checkpoint.io import CheckpointState, copy_weights, load_checkpoint, verify_checkpoint
from shardwright.checkpoint.manifest import latest_checkpoint, step_of
from shardwright.checkpoint.remote import RemoteStore, Stored
from shardwright.checkpoint.save import Saver, SaveTimes, Snapshot
from shardwright.core.run_config import RunConfig
from shardwright.errors import CheckpointError, ConfigError, NonFiniteError, ShardwrightError
from shardwright.train.state import StateWriter, local_tensors
from shardwright.train.step import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class Restored:
    """Where a run goes on: ``step`` steps were done on ``samples`` samples."""

    path: Path
    step: int
    samples: int


class RunCheckpoints:
    """Restores and saves; every rank makes the same calls. Leave it as a context, so that no save is left running."""

    def __init__(
        self, config: RunConfig, trainer: Trainer, tokenizer_folder: Path | str | None, say: Callable[[str], None]
    ) -> None:
        train, mesh = config.train, trainer.mesh
        self.config, self.trainer, self.mesh, self._say = config, trainer, mesh, say
        self.root = Path(train.run_dir) / "checkpoints"
        self.last: Path | None = None
        """The last checkpoint that was begun or resumed from."""
        self._begun = 0
        """The step after which the last save began."""
        token = mesh.world.gather_objects(secrets.token_hex(4))[0]
        url = train.checkpoint_url
        self.store = RemoteStore(url) if url is not None and mesh.rank == 0 else None
        self.saver = Saver(
            self.root,
            config.model,
            rank=mesh.rank,
            num_ranks=mesh.world.size,
            token=token,
            tokenizer_folder=tokenizer_folder,
            keep_last=train.keep_last,
            keep_every=train.keep_every,
            shard_bytes=int(train.shard_gb * 1e9),
            timeout_s=train.timeout_s,
            store=self.store,
        )
        self._writer = StateWriter(trainer)
        trainer.before_update = self.saver.wait_copied

    @property
    def times(self) -> SaveTimes:
        return self.saver.times

    # -- save ------------------------------------------------------------------------------------------

    def save(self, step: int, samples: int, *, last: bool) -> None:
        """Save in the background if the run says so, the last one at once; an error of an earlier save is raised here."""
        snapshot = self.snapshot(step, samples)
        self._begun = step
        self.last = self.saver.start(snapshot) if self.config.train.async_save else self.saver.save(snapshot)
        if last:
            self.finish()

    def snapshot(self, step: int, samples: int) -> Snapshot:
        """The run as this rank has it, after an update that is outstanding; views."""
        trainer = self.trainer
        with self.mesh.recorder.aside():
            trainer.settle()
        extra = {
            "optimizer_steps": trainer.optimizer.step_count,
            "norms": list(trainer.norms.norms),
            "config": self.config.to_table(),
            "data": {"samples": samples, "seed": self.config.train.seed},
            "random_numbers": "by counter: seed, step and token number say each, whatever the layout",
        }
        return Snapshot(step, samples, self._writer.weights(), self._writer.optimizer(), extra)

    def finish(self) -> None:
        """Return when the save under way is complete on every rank, and uploaded."""
        self.saver.wait()
        with self.mesh.recorder.aside():
            self.mesh.world.barrier(name="checkpoint saved")
            if self.config.train.checkpoint_url is not None:
                self._on_rank_0(self._uploaded)

    def _uploaded(self) -> None:
        while self.saver.uploads is not None and not self.saver.uploads.wait(1.0):
            pass

    def poll(self, step: int) -> None:
        """Raise what has gone wrong in the background; after ``step`` steps, wait for a save that has had its time
        (``train.async_lag_steps``), so that a kill never costs more than an interval and that."""
        self.saver.poll()
        if step - self._begun >= self.config.train.save_lag:
            self.saver.wait()

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, NonFiniteError):  # all ranks stop after the same step, so the save can be finished
            self.saver.wait()
        if error is None and self.config.train.checkpoint_url is not None:
            self.finish()
        self.saver.close()

    # -- restore ---------------------------------------------------------------------------------------

    def restore(self, resume: str) -> Restored | None:
        """Continue from a checkpoint (``auto``, or its path), or take initial weights, as the run says.

        ``auto`` passes over checkpoints that are torn or whose content has changed, with a message for each.
        """
        path = None if resume == "none" else self._choose(resume)
        if path is None:
            if self.config.train.init_from is not None:
                self._load_weights(Path(self.config.train.init_from))
            return None
        specs, mesh = self.trainer.model.specs, self.mesh
        state = load_checkpoint(path, specs, model=self.config.model, check=False)
        self._compare(state)
        self._copy_weights(state.weights)
        held = self.trainer.parameters.keys()
        optimizer = {
            kind: local_tensors({name: full for name, full in named.items() if name in held}, specs, mesh)
            for kind, named in state.optimizer.items()
        }
        self.trainer.optimizer.load(optimizer, int(state.extra["optimizer_steps"]))
        self.trainer.norms.norms.clear()
        self.trainer.norms.norms.extend(state.extra.get("norms", ()))
        self.last = path
        self._say(f"resumed from {path.name}: step {state.step}, {state.samples} samples read")
        return Restored(path, state.step, state.samples)

    def _choose(self, resume: str) -> Path | None:
        """A checkpoint of which every byte was checked, the ranks sharing the work; the same on all ranks."""
        passed: list[Path] = []
        fetched: list[Stored] = []
        while True:
            path = Path(resume) if resume != "auto" else self._on_rank_0(lambda: self._latest(passed, fetched))
            if path is None:
                if passed:
                    raise CheckpointError(f"no checkpoint in {self.root} is whole; give a new run folder to start again")
                return None
            wrong = verify_checkpoint(path, self.mesh.world)
            if wrong is None:
                if self.saver.uploads is not None and path.parent == self.root:
                    self.saver.uploads.offer(path, unless_there=True)  # an upload may have been interrupted
                return path
            if resume != "auto":
                raise CheckpointError(wrong)
            self._say(f"{path} is skipped: {wrong}")
            passed.append(path)

    def _latest(self, passed: list[Path], fetched: list[Stored]) -> Path | None:
        """The newest complete checkpoint here but those ``passed`` over, or a newer one from the store, ``fetched`` once."""
        here = latest_checkpoint(self.root, self._say, skip=passed)
        there = None if self.store is None else self.store.latest(self._say, skip=fetched)
        if self.store is None or there is None or (here is not None and step_of(here) >= there.step):
            return here
        fetched.append(there)
        path = self.store.download(there, self.root)
        self._say(f"{path.name} was copied from {self.store.url}")
        if path in passed:
            passed.remove(path)
        return path

    def _on_rank_0(self, act: Callable[[], T]) -> T:
        """What ``act`` returns on rank 0, or its `ShardwrightError`, on all ranks; however long it takes, no collective
        waits long."""
        world, found = self.mesh.world, None
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(act) if world.rank == 0 else None
            while found is None:
                mine = None if job is None else _outcome(job, self.config.train.timeout_s / 4)
                found = world.gather_objects(mine)[0]
        error, result = found
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def _compare(self, state: CheckpointState) -> None:
        """Say what makes the numbers of samples mean other samples than before."""
        saved = state.extra.get("config", {})
        for section, key in (("train", "seed"), ("data", "seq_len"), ("data", "sources")):
            before, now = saved.get(section, {}).get(key), self.config.to_table()[section].get(key)
            if before is not None and before != now:
                self._say(f"{section}.{key} is {now}, the checkpoint's run had {before}: the order of samples is another")

    def _load_weights(self, folder: Path) -> None:
        from shardwright.checkpoint.hf import load_hf  # only a run that starts from weights needs it

        found, weights = load_hf(folder)
        if changes := self.config.model.changes_from(found):
            raise ConfigError(
                f"train.init_from={folder} is another model than [model]; set model = {str(folder)!r} to take its shapes "
                f"({'; '.join(changes)})"
            )
        self._copy_weights(weights)

    def _copy_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        trainer = self.trainer

        def write(name: str, view: torch.Tensor) -> None:
            copy_weights([(name, view)], trainer.model.specs, weights, trainer.layout, self.mesh.coordinates)

        trainer.fill_parameters(write)  # masters in fp32 also where the parameters are not


def _outcome(job: Future[Any], wait_s: float) -> tuple[ShardwrightError | None, Any] | None:
    """The error or the result, or None if there is neither after ``wait_s`` seconds."""
    if not wait([job], wait_s).done:
        return None
    try:
        return None, job.result()
    except ShardwrightError as error:
        return error, None
