"""Checkpoints in an object store (S3, Google Cloud Storage, ...) by its URL, through fsspec.

::

    URL/step-N/       the files of the checkpoint, then its manifest.json, which makes it count
    URL/step-N.1/     another checkpoint of the same step, saved later; step-N is removed when this one is complete

An object appears whole or not at all but cannot be renamed, so a checkpoint without its manifest is one whose upload was
interrupted, and nothing that is complete is ever written to. Credentials and endpoints are fsspec's and its file systems'
(``FSSPEC_S3_ENDPOINT_URL``, ``AWS_PROFILE``, ...). One run at a time writes to a URL.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any

from shardwright.checkpoint.manifest import (
    MANIFEST,
    PARTIAL,
    FileEntry,
    expired,
    parse_manifest,
    put_in_place,
    read_manifest,
    step_of,
    sync_all,
)
from shardwright.errors import CheckpointError, ConfigError, ShardwrightError

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, order=True)
class Stored:
    """A checkpoint in the store: ``turn`` counts those of one step, ``sizes`` are bytes by name below ``path``."""

    step: int
    turn: int
    path: str = field(compare=False)
    sizes: Mapping[str, int] = field(compare=False)

    @property
    def finished(self) -> bool:
        return MANIFEST in self.sizes


class RemoteStore:
    """The checkpoints below ``url``. Raises `ConfigError` if fsspec, or what it needs for the protocol, is not installed.

    Every method raises a `CheckpointError` that names the URL if the store cannot be reached or refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._base = _open(url)

    def steps(self) -> list[Stored]:
        """Every checkpoint, ascending, whether its upload was finished or not."""
        with self._reached("look for checkpoints in"):
            self._fs.invalidate_cache()
            found = [(path, _NAME.fullmatch(path.rpartition("/")[2])) for path in self._list(self._base)]
            return sorted(
                Stored(int(match[1]), int(match[2] or 0), path, dict(self._files(path, len(path) + 1)))
                for path, match in found
                if match
            )

    def latest(self, warn: Callable[[str], None], skip: Collection[Stored] = ()) -> Stored | None:
        """The complete checkpoint of the highest step, but those of ``skip``; others are passed over with a warning."""
        for stored in reversed(self.steps()):
            if stored in skip:
                continue
            if (wrong := self._problem(stored)) is None:
                return stored
            warn(f"{self._named(stored)} is skipped: {wrong}")
        return None

    def upload(
        self,
        folder: Path,
        keep_last: int,
        keep_every: int = 0,
        *,
        unless_there: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy a complete checkpoint, its manifest last, then remove what has expired by the rules of `manifest.rotate`.

        ``check`` is called before each file and may raise to give up. ``unless_there``: not if one with the same manifest
        and the same sizes is there.
        """
        content, step = (folder / MANIFEST).read_bytes(), step_of(folder)
        before = self.steps()
        same = [stored for stored in before if stored.step == step and stored.finished]
        with self._reached(f"copy {folder.name} to"):
            there = unless_there and any(self._manifest(old) == content and self._problem(old) is None for old in same)
            if not there:
                for stored in before:
                    if not stored.finished:
                        self._fs.rm(stored.path, recursive=True)
                turn = max((stored.turn + 1 for stored in same), default=0)
                target = f"{self._base}/step-{step}" + (f".{turn}" if turn else "")
                for name, entry in read_manifest(folder).items():
                    check()
                    self._put(folder / name, f"{target}/{name}", entry)
                self._fs.pipe_file(f"{target}/{MANIFEST}", content)
                self._remove(same)
        complete = [stored for stored in before if stored.step < step and self._problem(stored) is None]
        gone = expired([stored.step for stored in complete], step, keep_last, keep_every)
        self._remove([stored for stored in complete if stored.step in gone])

    def download(self, stored: Stored, root: Path) -> Path:
        """Copy a checkpoint to ``root/step-N``, which appears when all of it is on the disk; hashes are not checked here."""
        final = root / f"step-{stored.step}"
        partial = final.with_name(f"{final.name}{PARTIAL}")
        shutil.rmtree(partial, ignore_errors=True)
        with self._reached(f"copy {self._named(stored)} to {root} from"):
            content = self._manifest(stored)
            for name, entry in parse_manifest(content, f"{self._named(stored)}/{MANIFEST}").items():
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(f"{stored.path}/{name}", str(target))
                if (size := target.stat().st_size) != entry.size:
                    raise CheckpointError(f"{self._named(stored)}/{name} has {size} bytes instead of {entry.size}")
            (partial / MANIFEST).write_bytes(content)
            with ThreadPoolExecutor(4) as pool:
                sync_all([*partial.rglob("*"), partial], pool)
            put_in_place(partial, final)
        return final

    # -- the store's files -------------------------------------------------------------------------

    def _list(self, path: str) -> dict[str, Mapping[str, Any]]:
        """What lies directly below ``path``; only a path that does not exist is taken for empty."""
        try:
            found = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return {name: info for info in found if (name := str(info["name"]).rstrip("/")) != path.rstrip("/")}

    def _files(self, path: str, prefix: int) -> Iterator[tuple[str, int]]:
        for name, info in self._list(path).items():
            if info["type"] == "directory":
                yield from self._files(name, prefix)
            else:
                yield name[prefix:], int(info["size"])

    def _put(self, source: Path, target: str, entry: FileEntry) -> None:
        self._fs.put_file(str(source), target)
        size = self._fs.info(target)["size"]
        if size != entry.size:
            raise CheckpointError(f"{target} has {size} bytes in {self.url} instead of {entry.size}")

    def _manifest(self, stored: Stored) -> bytes:
        content: bytes = self._fs.cat_file(f"{stored.path}/{MANIFEST}")
        return content

    def _problem(self, stored: Stored) -> str | None:
        """Why a checkpoint is not complete, by its manifest and the sizes of its files."""
        if not stored.finished:
            return "its upload was interrupted"
        with self._reached("read a manifest in"):
            content = self._manifest(stored)
        try:
            files = parse_manifest(content, MANIFEST)
        except CheckpointError as error:
            return str(error)
        for name, entry in files.items():
            if stored.sizes.get(name) != entry.size:
                return f"{name} has {stored.sizes.get(name, 'no')} bytes instead of {entry.size}"
        return None

    def _remove(self, every: Collection[Stored]) -> None:
        """The manifest first, so that an interrupted removal leaves nothing that counts. What cannot be removed now is
        tried again at the next upload."""
        for stored in every:
            with suppress(Exception):
                self._fs.rm_file(f"{stored.path}/{MANIFEST}")
                self._fs.rm(stored.path, recursive=True)

    def _named(self, stored: Stored) -> str:
        return f"{self.url.rstrip('/')}/{stored.path.rpartition('/')[2]}"

    @contextmanager
    def _reached(self, act: str) -> Iterator[None]:
        try:
            yield
        except ShardwrightError:
            raise
        except Exception as error:  # every file system has errors of its own
            raise CheckpointError(
                f"could not {act} {self.url} ({type(error).__name__}: {error}); complete checkpoints there and in the run "
                "folder are as they were; look at the network and the credentials, or leave train.checkpoint_url out"
            ) from error


class Uploader:
    """Copies the checkpoints of a run to a store in the background, one after another, while training goes on.

    A checkpoint that still waits when a newer one comes is left out, unless ``keep_every`` divides its step.
    """

    def __init__(self, store: RemoteStore, keep_last: int, keep_every: int = 0) -> None:
        self.store, self._keep_last, self._keep_every = store, keep_last, keep_every
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._lock, self._cancelled = Lock(), Event()
        self._jobs: dict[Path, Future[None]] = {}

    def offer(self, folder: Path, *, unless_there: bool = False) -> list[Path]:
        """Copy ``folder`` when those before it are copied; the folders that must stay as they are until then."""
        with self._lock:
            for path, job in [*self._jobs.items()]:
                keep = self._keep_every and step_of(path) % self._keep_every == 0
                if not keep and job.cancel():
                    del self._jobs[path]
            self._jobs[folder] = self._pool.submit(self._upload, folder, unless_there)
            return [path for path, job in self._jobs.items() if not job.done()]

    def _upload(self, folder: Path, unless_there: bool) -> None:
        self.store.upload(folder, self._keep_last, self._keep_every, unless_there=unless_there, check=self._check)

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise CheckpointError(f"the upload to {self.store.url} was given up as the run ends")

    def poll(self) -> None:
        """Raise the error of an upload that has failed, once; never waits."""
        with self._lock:
            for path, job in [*self._jobs.items()]:
                if job.done():
                    del self._jobs[path]
                    job.result()

    def wait(self, timeout_s: float) -> bool:
        """Whether all is copied, after at most ``timeout_s``; raises as `poll`."""
        with self._lock:
            jobs = [*self._jobs.values()]
        wait(jobs, timeout_s)
        self.poll()
        with self._lock:
            return not self._jobs

    def close(self) -> None:
        """Give up what is not copied yet; returns when no file is being sent."""
        self._cancelled.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def check_store(store: RemoteStore, resume: Path | None = None) -> None:
    """As `manifest.check_fresh` for the store: raise `CheckpointError` if it holds checkpoints that a run would mix with."""
    step = -1 if resume is None else step_of(resume)
    if later := [stored for stored in store.steps() if stored.finished and stored.step > step]:
        raise CheckpointError(
            f"{store.url} already holds checkpoints (up to step {later[-1].step}); continue with --resume auto, or give "
            "another train.checkpoint_url"
        )


def _open(url: str) -> tuple[Any, str]:
    """fsspec's file system for ``url``, and the path in it."""
    protocol, separator, _ = url.partition("://")
    if not separator:
        raise ConfigError(f"train.checkpoint_url={url} is no URL; write for instance s3://bucket/run or file:///backup/run")
    options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
    try:
        from fsspec.core import url_to_fs

        file_system, path = url_to_fs(url, **options)
    except Exception as error:  # a package or a protocol is missing, or the file system refuses in its own way
        raise ConfigError(
            f"train.checkpoint_url={url} cannot be used ({type(error).__name__}: {error}); install "
            "shardwright[object-store] and the file system of the protocol (s3fs for s3://, gcsfs for gs://, adlfs for "
            "abfs://), or leave train.checkpoint_url out"
        ) from error
    return file_system, str(path).rstrip("/")
