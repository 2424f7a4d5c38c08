"""Which checkpoints of a folder are complete.

A checkpoint is a folder ``step-N`` with a ``manifest.json``, written last, that lists every file with its size and
SHA-256. It is written as ``step-N.partial`` and renamed when it is complete, so a half-written one has no name that is
ever looked for. ``step-N.replaced`` is the older of two checkpoints of one step, between the two renames that swap
them; it counts if the newer is not there. Steps are compared as numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shardwright.checkpoint.hf import write_text
from shardwright.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
PARTIAL, REPLACED = ".partial", ".replaced"
_NAME = re.compile(r"step-(\d+)(\.partial|\.replaced)?")


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 (hexadecimal) of one file."""

    size: int
    sha256: str


# -- one checkpoint --------------------------------------------------------------------------------


def write_manifest(folder: Path) -> None:
    """Flush every file of ``folder`` to the disk, then write its manifest and flush that; raises OSError."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    entries = {name: _flush(path) for name, path in files.items()}
    for directory in {path.parent for path in files.values()} | {folder}:
        sync_directory(directory)
    content = {
        "format_version": FORMAT_VERSION,
        "files": {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in entries.items()},
    }
    write_text(folder / MANIFEST, json.dumps(content, indent=2) + "\n")
    _flush(folder / MANIFEST)
    sync_directory(folder)


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """The files of a checkpoint; raises `CheckpointError` if there is no readable manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: not a checkpoint, or a save that was interrupted")
    try:
        content = json.loads(path.read_bytes())
        version = content["format_version"]
        files = {name: FileEntry(int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is torn ({type(error).__name__}: {error}); use another checkpoint") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {version}, this program reads {FORMAT_VERSION}; update it")
    if outside := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise CheckpointError(f"{path} names {outside[0]!r}, which is outside of the checkpoint")
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


def check_hashes(folder: Path, skip: Collection[str] = ()) -> None:
    """`check_sizes`, and the content of every file."""
    for name, entry in check_sizes(folder, skip).items():
        if _sha256(folder / name) != entry.sha256:
            raise CheckpointError(f"{folder / name} is corrupt (its SHA-256 differs); use another checkpoint")


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


def latest_checkpoint(root: Path | str, warn: Callable[[str], None]) -> Path | None:
    """The complete checkpoint of the highest step, or None. Incomplete ones are passed over with a warning."""
    root = Path(root)
    for path in _folders(root, PARTIAL):
        warn(f"{path} is skipped: its save was interrupted")
    for path in reversed(named_steps(root).values()):
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


# -- files -----------------------------------------------------------------------------------------


def sync_directory(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush(path: Path) -> FileEntry:
    """Size and hash of a file whose content is then on the disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return FileEntry(os.fstat(file.fileno()).st_size, digest)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; use another checkpoint") from None
