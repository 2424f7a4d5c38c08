"""Checkpoints in an object store: complete or invisible there too, whatever fails on the way."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from shardwright.checkpoint.io import CheckpointState, load_checkpoint, save_checkpoint, whole
from shardwright.checkpoint.manifest import MANIFEST, check_hashes
from shardwright.checkpoint.remote import RemoteStore, Uploader, check_store
from shardwright.checkpoint.save import Saver, Snapshot
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import CheckpointError, ConfigError

CONFIG = ModelConfig(vocab_size=24, dim=16, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=24, tied_head=True)
SPECS = parameter_specs(CONFIG)
URL = "objects://bucket/run"


class Objects(MemoryFileSystem):
    """A store in memory that notes the files it takes, refuses those it is told to, and holds uploads up while asked to."""

    protocol = "objects"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    taken: ClassVar[list[str]] = []
    refused: ClassVar[str | None] = None
    lost: ClassVar[str | None] = None
    go: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("objects://").strip("/")

    def _take(self, path: str) -> None:
        assert Objects.go.wait(20)
        if self.refused is not None and path.endswith(self.refused):
            raise ConnectionError("the store is away")
        Objects.taken.append(path.removeprefix("/bucket/run/"))

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self._take(rpath)
        super().put_file(lpath, rpath, **options)
        if self.lost is not None and rpath.endswith(self.lost):
            self.store[rpath].truncate(3)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._take(path)
        super().pipe_file(path, value, **options)

    def rm_file(self, path: str) -> None:
        if self.refused == "removal":
            raise PermissionError("nothing is removed")
        super().rm_file(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if self.refused == "listing":
            raise PermissionError("nothing is listed")
        return super().ls(path, detail, **options)


@pytest.fixture(autouse=True)
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Objects]]:
    fsspec.register_implementation("objects", Objects, clobber=True)
    for name, value in (("store", {}), ("pseudo_dirs", [""]), ("taken", []), ("go", threading.Event())):
        monkeypatch.setattr(Objects, name, value)
    Objects.refused = Objects.lost = None
    Objects.go.set()
    yield Objects


def save(root: Path, step: int, value: float | None = None, **options: Any) -> Path:
    weights = {name: torch.full(spec.shape, float(step) if value is None else value) for name, spec in SPECS.items()}
    return save_checkpoint(root, CheckpointState(step, 4 * step, weights, {"exp_avg": weights}), CONFIG, **options)


def found(store: RemoteStore) -> list[str]:
    """The names of what is complete."""
    return [stored.path.rpartition("/")[2] for stored in store.steps() if store._problem(stored) is None]


def value_of(store: RemoteStore, root: Path, warnings: list[str] | None = None) -> tuple[int, float]:
    """Step and content of what a resumed run would go on from; every byte is checked."""
    latest = store.latest((warnings if warnings is not None else []).append)
    assert latest is not None
    path = store.download(latest, root)
    state = load_checkpoint(path, SPECS)
    values = {float(tensor.mean()) for tensor in (*state.weights.values(), *state.optimizer["exp_avg"].values())}
    return state.step, values.pop() if len(values) == 1 else float("nan")


@pytest.mark.parametrize("url", [URL, "memory://", "memory://bucket/run", "file"])
def test_a_checkpoint_comes_back_and_its_manifest_was_written_last(url: str, tmp_path: Path) -> None:
    store = RemoteStore(f"file://{tmp_path}/away/run/" if url == "file" else url)
    try:
        assert store.latest(pytest.fail) is None and store.steps() == []
        path = save(tmp_path / "here", 3, shard_bytes=2000, store=store)
        assert value_of(store, tmp_path / "elsewhere") == (3, 3.0)
        copied = tmp_path / "elsewhere" / "step-3"
        names = sorted(file.relative_to(path) for file in path.rglob("*"))
        assert names == sorted(file.relative_to(copied) for file in copied.rglob("*"))
        check_hashes(copied)
        assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["step-3"]
    finally:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
    if url == URL:
        assert Objects.taken[-1] == f"step-3/{MANIFEST}"
        assert len(Objects.taken) == len([name for name in names if (copied / name).is_file()]) > 4


def test_the_highest_step_counts_and_older_ones_are_removed(tmp_path: Path) -> None:
    store = RemoteStore(URL)
    for step in (8, 9, 10, 11, 12):
        save(tmp_path, step, store=store, keep_last=2, keep_every=4)
    assert found(store) == ["step-8", "step-11", "step-12"]
    assert value_of(store, tmp_path / "other")[0] == 12
    save(tmp_path, 100, store=store, keep_last=1)
    assert found(store) == ["step-100"]


@pytest.mark.parametrize("refused", ["run.json", "exp_avg.safetensors", MANIFEST])
def test_an_upload_that_fails_is_told_and_what_was_good_stays(refused: str, tmp_path: Path) -> None:
    store = RemoteStore(URL)
    save(tmp_path, 1, store=store, keep_last=1)
    Objects.refused = refused
    with pytest.raises(CheckpointError, match=r"could not copy step-2 to objects://bucket/run \(ConnectionError: the store"):
        save(tmp_path, 2, store=store, keep_last=1)
    assert value_of(store, tmp_path / "other") == (1, 1.0)
    load_checkpoint(tmp_path / "step-2", SPECS)  # it is safe here
    warnings: list[str] = []
    store.latest(warnings.append)
    assert warnings == ["objects://bucket/run/step-2 is skipped: its upload was interrupted"]
    Objects.refused = None
    save(tmp_path, 3, store=store, keep_last=1)
    assert [stored.step for stored in store.steps()] == [3]  # nothing is left of the one that failed


def test_another_checkpoint_of_the_same_step_does_not_touch_the_first_until_it_is_complete(tmp_path: Path) -> None:
    store = RemoteStore(URL)
    save(tmp_path, 5, store=store)
    Objects.refused = MANIFEST
    with pytest.raises(CheckpointError, match="could not copy"):
        save(tmp_path, 5, value=50.0, store=store)
    assert value_of(store, tmp_path / "other") == (5, 5.0)
    Objects.refused = None
    save(tmp_path, 5, value=50.0, store=store)
    assert found(store) == ["step-5.1"] and value_of(store, tmp_path / "other") == (5, 50.0)
    taken = len(Objects.taken)
    store.upload(tmp_path / "step-5", 2, unless_there=True)
    assert len(Objects.taken) == taken and found(store) == ["step-5.1"]
    save(tmp_path, 5, value=5.0, store=store)  # another one, so step-5.1 goes
    assert found(store) == ["step-5.2"] and value_of(store, tmp_path / "other") == (5, 5.0)


def test_what_is_torn_in_the_store_is_passed_over(tmp_path: Path) -> None:
    store = RemoteStore(URL)
    for step in (1, 2, 3, 4):
        save(tmp_path, step, store=store, keep_last=9)
    fs = fsspec.filesystem("objects")
    fs.pipe_file("/bucket/run/step-4/manifest.json", b'{"format_version": 2, "fil')
    fs.rm_file("/bucket/run/step-3/run.json")
    fs.pipe_file("/bucket/run/step-2/model.safetensors", b"short")
    fs.pipe_file("/bucket/run/step-x/manifest.json", b"no checkpoint")
    warnings: list[str] = []
    assert value_of(store, tmp_path / "other", warnings) == (1, 1.0)
    assert [warning.partition(" is skipped: ")[2].partition(" (")[0] for warning in warnings] == [
        "manifest.json is torn",
        "run.json has no bytes instead of 84",
        "model.safetensors has 5 bytes instead of 10496",
    ]
    Objects.lost = "exp_avg.safetensors"
    with pytest.raises(CheckpointError, match=r"exp_avg\.safetensors has 3 bytes in objects://bucket/run instead of"):
        save(tmp_path, 5, store=store)


def test_a_removal_that_fails_is_tried_again(tmp_path: Path) -> None:
    store = RemoteStore(URL)
    save(tmp_path, 1, store=store, keep_last=1)
    Objects.refused = "removal"
    save(tmp_path, 2, store=store, keep_last=1)
    assert found(store) == ["step-1", "step-2"]
    Objects.refused = None
    save(tmp_path, 3, store=store, keep_last=1)
    assert found(store) == ["step-3"]


def test_a_store_that_cannot_be_listed_is_an_error_and_not_empty(tmp_path: Path) -> None:
    store = RemoteStore(URL)
    save(tmp_path, 1, store=store)
    Objects.refused = "listing"
    with pytest.raises(CheckpointError, match=r"could not look for checkpoints in objects://bucket/run .*PermissionError"):
        store.latest(pytest.fail)


def test_a_full_disk_while_copying_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(URL)
    save(tmp_path, 1, store=store)
    save(tmp_path / "other", 1, value=7.0)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Objects, "get_file", full)
    latest = store.latest(pytest.fail)
    assert latest is not None
    with pytest.raises(CheckpointError, match="No space left on device"):
        store.download(latest, tmp_path / "other")
    assert float(load_checkpoint(tmp_path / "other" / "step-1", SPECS).weights["head.norm.weight"][0]) == 7.0


def test_a_manifest_that_points_outside_is_refused(tmp_path: Path) -> None:
    store = RemoteStore(URL)
    save(tmp_path, 1, store=store)
    fs = fsspec.filesystem("objects")
    content = fs.cat_file("/bucket/run/step-1/manifest.json").replace(b'"run.json"', b'"../../run.json"')
    fs.pipe_file("/bucket/run/step-1/manifest.json", content)
    warnings: list[str] = []
    assert store.latest(warnings.append) is None
    assert "names '../../run.json', which is outside of the checkpoint" in warnings[0]


def test_while_one_is_copied_only_the_newest_and_those_to_keep_wait(tmp_path: Path) -> None:
    store, Objects.go = RemoteStore(URL), threading.Event()
    paths = {step: save(tmp_path, step, keep_last=9) for step in (1, 2, 4, 5, 6)}
    uploader = Uploader(store, keep_last=9, keep_every=4)
    assert uploader.offer(paths[1]) == [paths[1]]
    while not uploader._jobs[paths[1]].running():
        pass
    uploader.offer(paths[2])
    uploader.offer(paths[4])
    uploader.offer(paths[5])
    assert uploader.offer(paths[6]) == [paths[1], paths[4], paths[6]]
    assert not uploader.wait(0.01)
    uploader.poll()
    Objects.go.set()
    while not uploader.wait(1.0):
        pass
    uploader.close()
    assert found(store) == ["step-1", "step-4", "step-6"]


def test_a_checkpoint_stays_here_until_it_is_copied(tmp_path: Path) -> None:
    def snapshot(step: int) -> Snapshot:
        return Snapshot(step, 0, whole({name: torch.full(spec.shape, float(step)) for name, spec in SPECS.items()}))

    store, Objects.go = RemoteStore(URL), threading.Event()
    with Saver(tmp_path, CONFIG, keep_last=1, store=store) as saver:
        saver.save(snapshot(1))
        assert saver.uploads is not None
        while not saver.uploads._jobs[tmp_path / "step-1"].running():
            pass
        saver.save(snapshot(2))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
        Objects.go.set()
    assert found(store) == ["step-2"]
    with Saver(tmp_path, CONFIG, keep_last=1, store=store) as saver:
        saver.save(snapshot(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3"]


def test_an_upload_is_given_up_when_the_run_ends(tmp_path: Path) -> None:
    store, path, Objects.go = RemoteStore(URL), save(tmp_path, 1), threading.Event()
    uploader = Uploader(store, 1)
    uploader.offer(path)
    threading.Timer(0.1, Objects.go.set).start()
    uploader.close()
    with pytest.raises(CheckpointError, match="was given up as the run ends"):
        uploader.poll()
    uploader.poll()  # told once
    assert found(store) == []


def test_a_used_store_is_refused(tmp_path: Path) -> None:
    store = RemoteStore(URL)
    check_store(store)
    path = save(tmp_path, 10, store=store)
    with pytest.raises(CheckpointError, match=r"already holds checkpoints \(up to step 10\); continue with --resume auto"):
        check_store(store)
    check_store(store, path)
    with pytest.raises(CheckpointError, match="already holds"):
        check_store(store, tmp_path / "step-9")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("backup/run", "is no URL; write for instance s3://bucket/run"),
        ("nowhere://bucket", r"Protocol not known: nowhere\); install shardwright\[object-store\] and the file system"),
        ("lacking://bucket", r"Install lacking_package to use it\); install shardwright\[object-store\]"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, words: str) -> None:
    fsspec.register_implementation("lacking", "lacking_package.Fs", errtxt="Install lacking_package to use it", clobber=True)
    with pytest.raises(ConfigError, match=words):
        RemoteStore(url)


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"s3://b/run cannot be used .*fsspec.*install shardwright\[object-store\]"):
        RemoteStore("s3://b/run")


def test_what_an_interrupted_copy_has_left_is_replaced(tmp_path: Path) -> None:
    store = RemoteStore(URL)
    save(tmp_path / "here", 1, store=store)
    (tmp_path / "other" / "step-1.partial").mkdir(parents=True)
    (tmp_path / "other" / "step-1.partial" / "rest").write_text("of an earlier try")
    assert value_of(store, tmp_path / "other") == (1, 1.0)
    shutil.rmtree(tmp_path / "here")
    assert not (tmp_path / "other" / "step-1" / "rest").exists()
