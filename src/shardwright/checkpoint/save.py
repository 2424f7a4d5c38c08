"""Save a checkpoint from all ranks at once: each byte is written once, by a rank that has it, to its place in the files.

Nothing is gathered. Every rank plans the same files from the Specs (`files`), copies what it is to write, and writes it
in the background while training goes on. Ranks meet in the folder only, so no collective runs beside training's::

    rank 0      removes leftovers, makes step-N.partial with the files in full size, then the note ``prepared``
    every rank  waits for that note, writes and flushes its runs, then leaves their hashes in a note of its own
    rank 0      waits for all notes, checks that they cover every byte once, writes the manifest, renames, removes old ones

The names of the notes hold a token that is new for each run, so what another run left is never taken for an answer. A rank
that fails leaves a note too: rank 0 then removes what there is, and both raise at the next step (`poll`) or save (`wait`).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import hf
from shardwright.checkpoint.files import (
    SHARD_BYTES,
    Dtypes,
    TensorFile,
    index_text,
    plain_places,
    plan_files,
    weight_places,
)
from shardwright.checkpoint.manifest import (
    PARTIAL,
    FileEntry,
    leftovers,
    put_in_place,
    rotate,
    write_manifest,
)
from shardwright.checkpoint.remote import RemoteStore, Uploader
from shardwright.checkpoint.runs import HashedRun, Place, Run, hash_bytes, parts, uncovered, write_runs
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import CheckpointError, ConfigError, ShardwrightError

RUN = "run.json"
STATE = "state"
LEAST_POLL_S, MOST_POLL_S = 0.0005, 0.02


@dataclass(frozen=True)
class Piece:
    """What one rank writes of one parameter: elements ``[start, start + data.numel())``, in row-major order, of the slice
    ``slices`` of the logical tensor. ``data`` is flat."""

    name: str
    slices: tuple[slice, ...]
    start: int
    data: Tensor


@dataclass(frozen=True)
class Group:
    """Tensors that are saved together: shapes and dtypes of all of them, and this rank's pieces."""

    shapes: hf.Shapes
    dtypes: Dtypes
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Snapshot:
    """A run after ``step`` optimizer steps on ``samples`` samples, as one rank has it: views of what goes on changing.

    ``weights`` of None: there is no model in the folder, only ``optimizer``, which maps a kind of state (``exp_avg``,
    ``master``, ...) to its tensors. ``extra`` is anything that JSON can hold.
    """

    step: int
    samples: int
    weights: Group | None
    optimizer: Mapping[str, Group] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def run_text(self) -> str:
        run = {"step": self.step, "samples": self.samples, "optimizer": list(self.optimizer), "extra": self.extra}
        return json.dumps(run, indent=2) + "\n"


@dataclass(frozen=True)
class _Plan:
    """The files of one checkpoint by their path in it, where every parameter lies in them, and small texts beside them."""

    files: dict[str, TensorFile]
    weights: dict[str, tuple[Place, ...]]
    optimizer: dict[str, dict[str, tuple[Place, ...]]]
    texts: dict[str, str]


@dataclass
class SaveTimes:
    """Seconds of one save on this rank. ``blocked``: what training has waited for it; the others pass in the background."""

    blocked: float = 0.0
    copy: float = 0.0
    write: float = 0.0
    processor: float = 0.0
    num_bytes: int = 0


class Saver:
    """Saves the checkpoints of a run under ``root``; one object on each rank, every rank makes the same calls.

    After :meth:`start` the tensors of the snapshot must stay as they are until :meth:`wait_copied`. ``token`` is the same
    on all ranks and new for each run; ``timeout_s`` the longest wait for another rank. Of the older checkpoints the last
    ``keep_last`` stay (the new one counts), and those whose step ``keep_every`` divides (0: none); so it is in ``store``,
    to which rank 0 copies complete checkpoints, with a failure raised as one of the save. ``on_point`` is called with
    "weights_written", "state_written", "manifest_written" and "renamed".
    """

    def __init__(
        self,
        root: Path | str,
        config: ModelConfig,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        token: str = "alone",
        tokenizer_folder: Path | str | None = None,
        keep_last: int = 2,
        keep_every: int = 0,
        shard_bytes: int = SHARD_BYTES,
        timeout_s: float = 120.0,
        store: RemoteStore | None = None,
        on_point: Callable[[str], None] | None = None,
    ) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last={keep_last} must be at least 1; keep 2 to be able to go back one")
        self.root, self.config, self.rank, self.num_ranks, self.token = Path(root), config, rank, num_ranks, token
        self.tokenizer_folder, self.keep_last, self.keep_every = tokenizer_folder, keep_last, keep_every
        self.shard_bytes, self.timeout_s = shard_bytes, timeout_s
        self.times = SaveTimes()
        """Of the last save."""
        self._reached = on_point or (lambda name: None)
        self.uploads = None if store is None or rank else Uploader(store, keep_last, keep_every)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._flushing = ThreadPoolExecutor(8, thread_name_prefix="flush")
        self._running: Future[None] | None = None
        self._copied, self._cancelled = Event(), Event()
        self._count = 0
        self._planned: tuple[dict[str, tuple[hf.Shapes, Dtypes]], _Plan] | None = None

    # -- what training calls -----------------------------------------------------------------------

    def start(self, snapshot: Snapshot) -> Path:
        """Begin to save in the background, once an earlier save is done; where the checkpoint will be."""
        self.wait()
        self.times = SaveTimes()
        self._count += 1
        self._copied.clear()
        self._running = self._pool.submit(self._save, snapshot, f"{self.token}-{self._count}", copy=True)
        return self.root / f"step-{snapshot.step}"

    def save(self, snapshot: Snapshot) -> Path:
        """Save here and now."""
        self.wait()
        self.times = SaveTimes()
        self._count += 1
        self._save(snapshot, f"{self.token}-{self._count}", copy=False)
        return self.root / f"step-{snapshot.step}"

    def wait_copied(self) -> None:
        """Return when the tensors of the save under way may change."""
        if self._running is not None and not self._copied.is_set():
            before = time.perf_counter()
            while not self._copied.wait(0.1) and not self._running.done():
                pass
            self.times.blocked += time.perf_counter() - before

    def poll(self) -> None:
        """Raise the error of the save under way, or of an upload, if it has failed; never waits."""
        if self._running is not None and self._running.done():
            self.wait()
        if self.uploads is not None:
            self.uploads.poll()

    def wait(self) -> None:
        """Return when this rank's part of the save under way is done (on rank 0: all of it, but for the upload); raises
        its error, or that of an upload that has failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
        if self.uploads is not None:
            self.uploads.poll()

    def close(self) -> None:
        """Give up a save and an upload under way and free the threads."""
        self._cancelled.set()
        self._pool.shutdown(wait=True)
        self._flushing.shutdown(wait=True)
        if self.uploads is not None:
            self.uploads.close()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        while kind is None and self.uploads is not None and not self.uploads.wait(1.0):
            pass
        self.close()

    # -- one save ----------------------------------------------------------------------------------

    def _save(self, snapshot: Snapshot, note: str, copy: bool) -> None:
        partial = self.root / f"step-{snapshot.step}{PARTIAL}"
        processor = time.thread_time()
        try:
            plan = self._plan(snapshot)
            copies = self._copy(snapshot, plan, copy)
            if self.rank == 0:
                self._prepare(partial, plan, note)
            start = time.perf_counter()
            self._await(partial / f"{note}.prepared", partial, note)
            written, flushes = self._write(partial, copies, plan)
            if self.rank:
                _wait_for(flushes)
            self.times.write = time.perf_counter() - start
            self.times.processor = time.thread_time() - processor
            if self.rank == 0:
                self._commit(partial, plan, self._all_written(partial, note, written), flushes, snapshot.step)
            else:
                ranges = {name: FileEntry(0, tuple(hashed)).to_json()["ranges"] for name, hashed in written.items()}
                hf.write_text(partial / f"{note}.rank-{self.rank}", json.dumps(ranges))
        except OSError as error:
            message = (
                f"step {snapshot.step} could not be saved in {self.root}: {error.strerror or error}; the checkpoints there "
                "are as they were; make room, or give another run folder"
            )
            self._give_up(partial, note, message)
            raise CheckpointError(message) from error
        except ShardwrightError as error:
            self._give_up(partial, note, str(error))
            raise
        finally:
            self._copied.set()

    def _plan(self, snapshot: Snapshot) -> _Plan:
        """The plan of this checkpoint: that of the one before, where names, shapes and dtypes are as they were."""
        hf.check_tokenizer(self.tokenizer_folder)
        groups = {"": snapshot.weights, **snapshot.optimizer}
        key = {kind: (group.shapes, group.dtypes) for kind, group in groups.items() if group is not None}
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._make_plan(snapshot)
        plan = self._planned[1]
        return replace(plan, texts=plan.texts | {RUN: snapshot.run_text()})

    def _make_plan(self, snapshot: Snapshot) -> _Plan:
        plan = _Plan({}, {}, {}, {}) if snapshot.weights is None else self._plan_weights(snapshot.weights)
        for kind, group in snapshot.optimizer.items():
            planned = plan_files(f"{STATE}/{kind}", group.shapes, group.dtypes, self.shard_bytes)
            plan.files.update((file.name, file) for file in planned)
            plan.optimizer[kind] = plain_places(group.shapes, planned, group.dtypes)
        return plan

    def _plan_weights(self, weights: Group) -> _Plan:
        config, specs = self.config, parameter_specs(self.config)
        expected = {name: spec.shape for name, spec in specs.items()}
        hf.check_shapes(f"{config.name}: the weights given", expected, weights.shapes, "give every parameter in full")
        tensors = hf.hf_names(config)
        shapes = {tensor.name: tensor.shape(specs) for tensor in tensors}
        dtypes = {tensor.name: weights.dtypes[tensor.parts[0]] for tensor in tensors}
        files = plan_files("model", shapes, dtypes, self.shard_bytes)
        narrow = min(dtypes.values(), key=lambda dtype: dtype.itemsize)
        texts = {"config.json": hf.config_text(config, narrow)}
        if len(files) > 1:
            texts[hf.INDEX] = index_text(files)
        return _Plan({file.name: file for file in files}, weight_places(tensors, specs, files), {}, texts)

    def _prepare(self, partial: Path, plan: _Plan, note: str) -> None:
        """Files in their full size, so that a full disk is noticed before anything is written."""
        for path in leftovers(self.root):
            shutil.rmtree(path, ignore_errors=True)
        (partial / STATE).mkdir(parents=True)
        hf.copy_tokenizer(self.tokenizer_folder, partial)
        for name, text in plan.texts.items():
            hf.write_text(partial / name, text)
        allocate = getattr(os, "posix_fallocate", None)  # not on macOS
        for name, file in plan.files.items():
            with (partial / name).open("xb") as opened:
                opened.write(file.header)
                opened.flush()
                if allocate is None:
                    opened.truncate(file.size)
                else:
                    allocate(opened.fileno(), 0, file.size)
        (partial / f"{note}.prepared").touch()

    def _copy(self, snapshot: Snapshot, plan: _Plan, copy: bool) -> dict[str, list[tuple[Run, Tensor]]]:
        """What this rank writes, by file, on the CPU and in the order of the file; with ``copy`` the snapshot is then free
        to change, without it what can be written as it is stays where it is."""
        start = time.perf_counter()
        copies: dict[str, list[tuple[Run, Tensor]]] = {name: [] for name in plan.files}
        groups = [(group, plan.optimizer[kind]) for kind, group in snapshot.optimizer.items()]
        if snapshot.weights is not None:
            groups.insert(0, (snapshot.weights, plan.weights))
        for group, places in groups:
            for piece in group.pieces:
                stop = piece.start + piece.data.numel()
                dtype = group.dtypes[piece.name]
                for part in parts(places[piece.name], piece.slices, piece.start, stop, dtype.itemsize):
                    view = part.take(piece.data.detach(), piece.start)
                    if copy or view.dtype != dtype or view.device.type != "cpu" or not view.is_contiguous():
                        view = torch.empty(view.shape, dtype=dtype).copy_(view)
                    copies[part.file].append((part.run, view.view(-1)))
        for content in copies.values():
            content.sort(key=lambda item: item[0].offset)
        self.times.copy = time.perf_counter() - start
        self._copied.set()
        return copies

    def _write(
        self, partial: Path, copies: Mapping[str, list[tuple[Run, Tensor]]], plan: _Plan
    ) -> tuple[dict[str, list[HashedRun]], list[Future[None]]]:
        """Write, one file while others are flushed: every run with its hash, by file, and the flushes under way."""
        written: dict[str, list[HashedRun]] = {}
        flushes = []
        for name, planned in plan.files.items():
            if name.startswith(STATE) and not any(done.startswith(STATE) for done in written):
                self._reached("weights_written")
            written[name] = []
            if copies[name] or self.rank == 0:  # rank 0 has written the header
                written[name], flush = _write_file(partial / name, copies[name], self._flushing)
                flushes.append(flush)
            if self.rank == 0:
                length = len(planned.header)
                written[name].append((Run(0, length, length, 1), hash_bytes(planned.header)))
            self.times.num_bytes += sum(run.num_bytes for run, _ in copies[name])
            self._check_cancelled(partial)
        self._reached("state_written")
        return written, flushes

    # -- meeting in the folder -----------------------------------------------------------------------

    def _await(self, path: Path, partial: Path, note: str) -> None:
        """Return when ``path`` is there. Raises `CheckpointError` if a rank has failed or time is up."""
        deadline, pause = time.monotonic() + self.timeout_s, LEAST_POLL_S
        while not path.exists():
            for failed in partial.glob(f"{note}.failed-*[0-9]"):  # not one that is being written
                raise CheckpointError(f"rank {failed.name.rpartition('-')[2]}: {failed.read_text(encoding='utf-8')}")
            self._check_cancelled(partial)
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{path} did not appear within {self.timeout_s:g} s: another rank is slow or gone, or the ranks do not "
                    "share the run folder; give a folder that all of them see, or raise train.timeout_s"
                )
            time.sleep(pause)
            pause = min(MOST_POLL_S, pause * 1.5)

    def _check_cancelled(self, partial: Path) -> None:
        if self._cancelled.is_set():
            raise CheckpointError(f"the save in {partial} was given up as the run ends")

    def _all_written(
        self, partial: Path, note: str, mine: Mapping[str, list[HashedRun]]
    ) -> dict[str, list[HashedRun]]:
        every = {name: list(hashed) for name, hashed in mine.items()}
        for rank in range(1, self.num_ranks):
            path = partial / f"{note}.rank-{rank}"
            self._await(path, partial, note)
            for name, hashed in json.loads(path.read_bytes()).items():
                every[name] += [(Run(*numbers), digest) for *numbers, digest in hashed]
        return every

    def _give_up(self, partial: Path, note: str, message: str) -> None:
        """Rank 0 removes what there is; others tell it why."""
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            return
        try:
            hf.write_text(partial / f"{note}.failed-{self.rank}", message)
        except OSError:
            return  # the disk is full, or the folder is gone; this rank's own error says so

    def _commit(
        self,
        partial: Path,
        plan: _Plan,
        written: Mapping[str, list[HashedRun]],
        flushes: Sequence[Future[None]],
        step: int,
    ) -> None:
        entries = {}
        for name, hashed in written.items():
            size = plan.files[name].size
            if wrong := uncovered([run for run, _ in hashed], size):
                raise CheckpointError(f"{partial / name} is not whole: {wrong}; this is an error of shardwright, report it")
            entries[name] = FileEntry(size, tuple(sorted(hashed, key=lambda item: item[0].offset)))
        for path in partial.glob(f"{self.token}-*"):
            path.unlink()
        write_manifest(partial, entries, self._flushing)
        _wait_for(flushes)
        self._reached("manifest_written")
        final = self.root / f"step-{step}"
        put_in_place(partial, final)
        self._reached("renamed")
        busy = [] if self.uploads is None else self.uploads.offer(final)
        rotate(self.root, step, self.keep_last, self.keep_every, busy)


def _write_file(
    path: Path, content: Sequence[tuple[Run, Tensor]], flushing: Executor
) -> tuple[list[HashedRun], Future[None]]:
    """Write, and begin to flush; the runs with their hashes."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        hashed = write_runs(descriptor, [(run, tensor.view(torch.uint8).numpy()) for run, tensor in content])
    except BaseException:
        os.close(descriptor)
        raise
    return hashed, flushing.submit(_flush, descriptor)


def _wait_for(flushes: Sequence[Future[None]]) -> None:
    for flush in flushes:
        flush.result()


def _flush(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
