"""Which checkpoints of a folder are complete.

A checkpoint is a folder ``step-N`` with a ``manifest.json``, written last, that lists every file with its size and its
hashes: one for a whole file, or one for each range that a rank has written. It is written as ``step-N.partial`` and
renamed when all of it is on the disk, so a half-written one has no name that is ever looked for. ``step-N.replaced`` is the
older of two checkpoints of one step, between the two renames that swap them; it counts if the newer is not there. Steps are
compared as numbers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from shardwright.checkpoint.hf import write_text
from shardwright.checkpoint.runs import HASH, OLD_HASH, HashedRun, Run, hash_bytes, hash_run, map_file
from shardwright.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 3
READABLE = (1, 2, 3)
"""Version 1 has hashes of whole files only, versions before 3 have SHA-256; version 3 names its hash."""
PARTIAL, REPLACED = ".partial", ".replaced"
_NAME = re.compile(r"step-(\d+)(\.partial|\.replaced)?")


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes of one file, and the hash of each of its parts, which together are all of it."""

    size: int
    hashes: tuple[HashedRun, ...]
    algorithm: str = HASH

    def to_json(self) -> dict[str, Any]:
        runs = [[run.offset, run.size, run.stride, run.count, digest] for run, digest in self.hashes]
        return {"size": self.size, "ranges": runs}

    @classmethod
    def of(cls, entry: Mapping[str, Any], algorithm: str = HASH) -> FileEntry:
        size = int(entry["size"])
        if "ranges" not in entry:
            return cls(size, ((Run(0, size, size, 1), str(entry["sha256"])),), algorithm)
        found = []
        for offset, length, stride, count, digest in entry["ranges"]:
            run = Run(int(offset), int(length), int(stride), int(count))
            if min(run.offset, run.size, run.stride, run.count) < 0 or run.end > size:
                raise ValueError(f"range {offset}, {length}, {stride}, {count} is outside of a file of {size} bytes")
            found.append((run, str(digest)))
        return cls(size, tuple(found), algorithm)


# -- one checkpoint --------------------------------------------------------------------------------


def write_manifest(folder: Path, written: Mapping[str, FileEntry], pool: Executor) -> None:
    """Write the manifest of ``folder``, and flush it, the folders and all files but those ``written``, in ``pool``.

    ``written`` are files that others have hashed, and flush. Raises OSError.
    """
    entries = dict(written)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    others = {name: path for name, path in files.items() if name not in entries}
    entries |= {name: whole_file(path.read_bytes()) for name, path in others.items()}
    content = {
        "format_version": FORMAT_VERSION,
        "hash": HASH,
        "files": {name: entry.to_json() for name, entry in sorted(entries.items())},
    }
    write_text(folder / MANIFEST, json.dumps(content) + "\n")
    sync_all([*others.values(), folder / MANIFEST, *{path.parent for path in files.values()} | {folder}], pool)


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """The files of a checkpoint; raises `CheckpointError` if there is no readable manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: not a checkpoint, or a save that was interrupted")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; use another checkpoint") from None
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, where: str) -> dict[str, FileEntry]:
    """The files that a manifest lists; ``where`` it lies is for the `CheckpointError` of one that cannot be used."""
    try:
        table = json.loads(content)
        version = table["format_version"]
        if version not in READABLE:
            raise CheckpointError(f"{where} has format version {version}, this program reads {FORMAT_VERSION}; update it")
        algorithm = table["hash"] if version > 2 else OLD_HASH
        if algorithm not in (HASH, OLD_HASH):
            raise CheckpointError(f"{where} has hashes by {algorithm!r}, this program knows {HASH} and {OLD_HASH}; update it")
        files = {name: FileEntry.of(entry, algorithm) for name, entry in table["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} is torn ({type(error).__name__}: {error}); use another checkpoint") from None
    if outside := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise CheckpointError(f"{where} names {outside[0]!r}, which is outside of the checkpoint")
    return files


def check_sizes(folder: Path, skip: Collection[str] = ()) -> dict[str, FileEntry]:
    """The files of a checkpoint, but those in a folder of ``skip``.

    Raises a `CheckpointError` that names the first file that is missing or not of the size saved.
    """
    files = {name: entry for name, entry in read_manifest(folder).items() if PurePosixPath(name).parts[0] not in skip}
    for name, entry in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry.size:
            found = "is missing" if size is None else f"has {size} bytes instead of {entry.size}"
            raise CheckpointError(f"{path} {found}; use another checkpoint")
    return files


def check_hashes(folder: Path, skip: Collection[str] = (), share: tuple[int, int] = (0, 1)) -> None:
    """`check_sizes`, and the content of every file, or share ``(rank, ranks)`` of it: about as many bytes for each rank.

    Raises a `CheckpointError` that names the file and the bytes at fault.
    """
    files = check_sizes(folder, skip)
    for name, hashes in _share(files, *share):
        path, algorithm = folder / name, files[name].algorithm
        try:
            content = map_file(path)
            wrong = next((run for run, digest in hashes if hash_run(content, run, algorithm) != digest), None)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}; use another checkpoint") from None
        if wrong is not None:
            raise CheckpointError(
                f"{path} is corrupt (its {algorithm} differs in bytes {wrong.offset} to {wrong.end}); use another checkpoint"
            )


def _share(files: Mapping[str, FileEntry], rank: int, ranks: int) -> Iterator[tuple[str, list[HashedRun]]]:
    """Those parts of every file whose middle byte, over all files in a row, is in the rank's share."""
    total = max(1, sum(run.num_bytes for entry in files.values() for run, _ in entry.hashes))
    before = 0
    for name, entry in files.items():
        mine = []
        for run, digest in entry.hashes:
            middle = before + run.num_bytes // 2
            before += run.num_bytes
            if min(middle * ranks // total, ranks - 1) == rank:
                mine.append((run, digest))
        if mine:
            yield name, mine


def is_complete(folder: Path) -> bool:
    """True if every file is there in full size (`check_hashes` also reads them)."""
    try:
        check_sizes(folder)
    except CheckpointError:
        return False
    return True


# -- all checkpoints of a run ----------------------------------------------------------------------


def step_of(folder: Path) -> int:
    """N of ``step-N``, with or without an ending; -1 for any other name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def named_steps(root: Path) -> dict[int, Path]:
    """Every ``step-N`` by its step, ascending, complete or not; ``step-N.replaced`` where there is no ``step-N``."""
    found = {step_of(path): path for ending in (REPLACED, "") for path in _folders(root, ending)}
    return dict(sorted(found.items()))


def leftovers(root: Path) -> list[Path]:
    """What interrupted saves and removals left behind."""
    finished = {step_of(path) for path in _folders(root, "")}
    return _folders(root, PARTIAL) + [path for path in _folders(root, REPLACED) if step_of(path) in finished]


def latest_checkpoint(
    root: Path | str, warn: Callable[[str], None], skip: Collection[Path] = ()
) -> Path | None:
    """The complete checkpoint of the highest step, or None, but those of ``skip``. Incomplete ones are passed over with a
    warning (not again where some are skipped)."""
    root = Path(root)
    for path in _folders(root, PARTIAL) if not skip else ():
        warn(f"{path} is skipped: its save was interrupted")
    for path in reversed(named_steps(root).values()):
        if path in skip:
            continue
        try:
            check_sizes(path)
        except CheckpointError as error:
            warn(f"{path} is skipped: {error}")
            continue
        return path
    return None


def check_fresh(root: Path | str, resume: Path | str | None = None) -> None:
    """Call at the start of a run: raise `CheckpointError` if ``root`` holds checkpoints that the run would mix with.

    ``resume`` is the checkpoint that the run continues from. Without one, that is any checkpoint; with one, a complete
    one of a higher step.
    """
    root = Path(root)
    steps = named_steps(root)
    if resume is None or Path(resume).resolve().parent != root.resolve():
        if steps:
            raise CheckpointError(
                f"{root} already holds checkpoints ({_listed(steps)}); continue with --resume auto, "
                "or give a new run folder"
            )
        return
    higher = {step: path for step, path in steps.items() if step > step_of(Path(resume)) and is_complete(path)}
    if higher:
        raise CheckpointError(
            f"{root} holds later checkpoints ({_listed(higher)}) than {Path(resume).name}, from which this run would "
            "continue; move them away, use --resume auto, or give a new run folder"
        )


def _listed(steps: Mapping[int, Path]) -> str:
    names = [path.name for path in steps.values()]
    return ", ".join(names if len(names) <= 3 else [names[0], "...", names[-1]])


def _folders(root: Path, ending: str) -> list[Path]:
    """The folders ``step-N`` with this ending, by step."""
    if not root.is_dir():
        return []
    matches = {path: _NAME.fullmatch(path.name) for path in root.iterdir()}
    found = [path for path, match in matches.items() if match and (match[2] or "") == ending and path.is_dir()]
    return sorted(found, key=step_of)


# -- one more, one less ----------------------------------------------------------------------------


def put_in_place(partial: Path, final: Path) -> None:
    """Rename; at each moment the old or the new checkpoint of this step has a name that is looked for."""
    replaced = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)
    if replaced.exists():
        _remove(replaced)


def expired(complete: Iterable[int], written: int, keep_last: int, keep_every: int = 0) -> list[int]:
    """The steps to remove now that ``written`` is safe: older ones, by number, but the last ``keep_last`` (the new one
    counts) and those of every ``keep_every`` steps; neither the one just written nor a higher one."""
    older = sorted({step for step in complete if step < written})
    return [step for step in older[: max(0, len(older) - (keep_last - 1))] if not keep_every or step % keep_every]


def rotate(root: Path, written: int, keep_last: int, keep_every: int = 0, busy: Collection[Path] = ()) -> None:
    """Remove what has `expired`, but not a torn one (which is left for somebody to look at), nor the ``busy`` ones."""
    complete = {step: path for step, path in named_steps(root).items() if step < written and is_complete(path)}
    for step in expired(complete, written, keep_last, keep_every):
        if complete[step] not in busy:
            _remove(complete[step])


def _remove(path: Path) -> None:
    """Take the name away first, so that an interrupted removal leaves no torn checkpoint. What cannot be removed now
    (a file held open on a network disk, say) is tried again at the next save."""
    aside = path.with_name(f"step-{step_of(path)}{PARTIAL}")
    with suppress(OSError):
        path.rename(aside)
        shutil.rmtree(aside)


# -- files -----------------------------------------------------------------------------------------


def whole_file(content: bytes) -> FileEntry:
    """Size and hash of a file with this content."""
    return FileEntry(len(content), ((Run(0, len(content), len(content), 1), hash_bytes(content)),))


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Iterable[Path], pool: Executor) -> None:
    """`sync` all of them, several at a time: a disk does that in hardly more time than one."""
    for done in [pool.submit(sync, path) for path in paths]:
        done.result()
