"""A checkpoint is complete or invisible: kills at every point, a full disk, torn files, rotation, strict loading."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks.kit import FaultPlan, preload
from shardwright.checkpoint import hf
from shardwright.checkpoint.hf import load_hf
from shardwright.checkpoint.io import CheckpointState, copy_weights, load_checkpoint, save_checkpoint
from shardwright.checkpoint.manifest import MANIFEST, check_fresh, is_complete, latest_checkpoint, step_of
from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import CheckpointError, ConfigError, ModelConfigError
from shardwright.launch import start_forkserver
from shardwright.model.transformer import Transformer

CONFIG = ModelConfig(vocab_size=24, dim=16, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=24, tied_head=True)
SPECS = parameter_specs(CONFIG)
POINTS = ("weights_written", "state_written", "manifest_written", "renamed")


def filled(value: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.full(spec.shape, value, dtype=dtype) for name, spec in SPECS.items()}


def make_state(step: int, value: float | None = None) -> CheckpointState:
    """Every tensor of a step has values that no other step has."""
    value = float(step) if value is None else value
    moments = {"exp_avg": filled(value + 0.25), "exp_avg_sq": filled(value + 0.5), "master": filled(value + 1e-3)}
    extra = {"steps_of_optimizer": step, "layout": "dp=2", "value": value}
    return CheckpointState(step, 4 * step, filled(value, torch.bfloat16), moments, extra)


def save(root: Path, step: int, value: float | None = None, **options: Any) -> Path:
    return save_checkpoint(root, make_state(step, value), CONFIG, **options)


def load_latest(root: Path, warnings: list[str] | None = None) -> CheckpointState | None:
    path = latest_checkpoint(root, (warnings if warnings is not None else []).append)
    return None if path is None else load_checkpoint(path, SPECS)


def assert_is(state: CheckpointState | None, step: int, value: float | None = None) -> None:
    """The state is exactly what was saved, nothing of another save mixed in."""
    expected = make_state(step, value)
    assert state is not None
    assert (state.step, state.samples, state.extra) == (step, 4 * step, expected.extra)
    assert state.optimizer.keys() == expected.optimizer.keys()
    pairs = [(state.weights, expected.weights), *((state.optimizer[k], expected.optimizer[k]) for k in state.optimizer)]
    for found, wanted in pairs:
        assert found.keys() == SPECS.keys()
        assert all(found[name].dtype == wanted[name].dtype for name in wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


# -- save and load ---------------------------------------------------------------------------------


def test_ck_07_everything_comes_back(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    points: list[str] = []
    path = save(tmp_path / "run", 5, tokenizer_folder=tokenizer, on_point=points.append)
    assert path == tmp_path / "run" / "step-5" and tuple(points) == POINTS
    state = load_checkpoint(path, SPECS)
    assert_is(state, 5)
    assert all(bool((moment != 0).all()) for moment in state.optimizer["exp_avg"].values())
    assert (path / "tokenizer.json").is_file()
    config, weights = load_hf(path)  # a checkpoint is a model folder
    assert config.model_copy(update={"name": CONFIG.name}) == CONFIG
    assert all(torch.equal(weights[name], state.weights[name]) for name in SPECS)


def test_ck_07_missing_optimizer_state_is_an_error_unless_not_needed(tmp_path: Path) -> None:
    bare = make_state(5)
    bare.optimizer = {}
    path = save_checkpoint(tmp_path, bare, CONFIG)
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        load_checkpoint(path, SPECS)
    assert load_checkpoint(path, SPECS, need_optimizer=False).optimizer == {}
    path = save(tmp_path, 6)
    shutil.rmtree(path / "state")
    with pytest.raises(CheckpointError, match=r"exp_avg\.safetensors is missing"):
        load_checkpoint(path, SPECS)
    state = load_checkpoint(path, SPECS, need_optimizer=False)
    assert state.step == 6 and state.optimizer == {}
    assert bool((state.weights["head.norm.weight"] == 6.0).all())


def test_ck_18_other_names_and_shapes_are_listed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    specs = dict(SPECS)
    specs["blocks.0.mlp.other.weight"] = specs.pop("blocks.0.mlp.up.weight")
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, specs)
    assert "1 missing: blocks.0.mlp.other.weight" in str(caught.value)
    assert "1 unexpected: blocks.0.mlp.up.weight" in str(caught.value)
    wider = parameter_specs(CONFIG.model_copy(update={"ffn_dim": 32}))
    with pytest.raises(CheckpointError, match=r"blocks\.0\.mlp\.up\.weight \(24, 16\) instead of \(32, 16\)"):
        load_checkpoint(path, wider)


def test_ck_18_optimizer_state(tmp_path: Path) -> None:
    """A frozen parameter has no moments; a name that is not a parameter's is an error."""
    state = make_state(1)
    del state.optimizer["exp_avg"]["embedding.token.weight"]
    frozen = load_checkpoint(save_checkpoint(tmp_path, state, CONFIG), SPECS)
    assert frozen.optimizer["exp_avg"].keys() == SPECS.keys() - {"embedding.token.weight"}
    state.optimizer["exp_avg"]["embedding.other.weight"] = torch.zeros(2)
    path = save_checkpoint(tmp_path, state, CONFIG)
    with pytest.raises(CheckpointError, match=r"exp_avg\.safetensors .* 1 unexpected: embedding\.other\.weight"):
        load_checkpoint(path, SPECS)


def test_a_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(tmp_path / "step-3", SPECS)
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        load_checkpoint(tmp_path, SPECS)
    assert latest_checkpoint(tmp_path / "nowhere", pytest.fail) is None


def test_wrong_arguments_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last=0"):
        save(tmp_path, 1, keep_last=0)
    with pytest.raises(ModelConfigError):
        save_checkpoint(tmp_path, make_state(1), CONFIG.model_copy(update={"sliding_window": 4}))
    with pytest.raises(CheckpointError, match="tokenizer folder"):
        save(tmp_path, 1, tokenizer_folder=tmp_path / "nowhere")
    assert names(tmp_path) == set()


@pytest.mark.parametrize("coordinate", [0, 1])
def test_copy_weights_takes_the_slice_of_the_rank(coordinate: int) -> None:
    weights = {name: torch.arange(float(spec.numel)).view(spec.shape) for name, spec in SPECS.items()}
    mesh = Mesh.dry(Layout.parse("tp=2"), rank=coordinate)
    model = Transformer(CONFIG, mesh, torch.float64)
    copy_weights(model.named_parameters(), SPECS, weights, mesh.layout, mesh.coordinates)
    rows = slice(8 * coordinate, 8 * coordinate + 8)
    assert torch.equal(model.blocks["0"].attention.q.weight, weights["blocks.0.attention.q.weight"][rows].double())
    assert torch.equal(model.blocks["0"].attention.out.weight, weights["blocks.0.attention.out.weight"][:, rows].double())


# -- killed in the middle --------------------------------------------------------------------------


def run_each(function: Callable[..., None], arguments: list[tuple[Any, ...]]) -> list[int]:
    """Each call in a process of its own; the exit codes (negative: the signal that ended it)."""
    start_forkserver(preload())
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=fork_each, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    codes: list[int] = ours.recv() if ours.poll(60) else []
    process.join(10)
    assert len(codes) == len(arguments), "a process hangs or could not start"
    return codes


def fork_each(codes: Connection, function: Callable[..., None], arguments: list[tuple[Any, ...]]) -> None:
    """In a process without threads."""
    found = []
    for each in arguments:
        pid = os.fork()
        if pid == 0:
            try:
                function(*each)
                os._exit(0)
            finally:
                os._exit(1)
        found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    codes.send(found)


def save_and_die_at(root: Path, step: int, plan: FaultPlan) -> None:
    plan.wrap(os, "replace")
    plan.wrap(os, "posix_fallocate")
    plan.wrap(os, "pwritev")
    plan.wrap(os, "fsync")
    plan.wrap(Path, "rename")
    plan.wrap(shutil, "rmtree")
    save(root, step, 100.0 + step, keep_last=1, on_point=plan.at)


def save_and_die_after(root: Path, step: int, num_bytes: int) -> None:
    """The kernel ends the process when a file would become longer than ``num_bytes``."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    save(root, step, 100.0 + step, keep_last=1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with step 3, to copy."""
    root = tmp_path_factory.mktemp("saved")
    save(root, 3)
    return root


def check_after_kill(root: Path, step: int) -> bool:
    """The latest is the old or the new one (True), whole, and the same step can be saved again."""
    warnings: list[str] = []
    state = load_latest(root, warnings)
    is_new = (root / f"step-{step}").is_dir() and state is not None and state.extra["value"] == 100.0 + step
    assert_is(state, step if is_new else 3, 100.0 + step if is_new else None)
    partial = {name for name in names(root) if name.endswith(".partial")}
    assert len(warnings) == len(partial) and all("interrupted" in warning for warning in warnings)
    save(root, step, 200.0 + step, keep_last=1)  # LH-09
    assert_is(load_latest(root), step, 200.0 + step)
    assert names(root) == {f"step-{step}"}
    return is_new


@pytest.mark.parametrize(("step", "num_renames"), [(4, 2), (3, 3)], ids=["next-step", "same-step"])
def test_ck_01_lh_09_killed_at_a_point(saved: Path, tmp_path: Path, step: int, num_renames: int) -> None:
    """kill -9 at each named point, and before each rename and each removal."""
    points = [(name, 0) for name in POINTS] + [("replace", n) for n in range(3)]
    points += [("posix_fallocate", 2), ("pwritev", 0), ("pwritev", 3), ("fsync", 0), ("fsync", 3), ("fsync", 8)]
    points += [("rename", n) for n in range(num_renames)] + [("rmtree", 0)]
    cases = []
    for point, occurrence in points:
        root = tmp_path / f"{point}-{occurrence}"
        shutil.copytree(saved, root)
        cases.append((root, step, FaultPlan(kill={point: occurrence})))
    assert run_each(save_and_die_at, cases) == [-signal.SIGKILL] * len(cases)
    is_new = [point for point, (root, _, _) in zip(points, cases, strict=True) if check_after_kill(root, step)]
    assert is_new == [("renamed", 0), ("rename", num_renames - 1), ("rmtree", 0)]


def test_ck_01_killed_after_some_bytes(saved: Path, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    limits = [*(int(largest * (n / 20) ** 2) for n in range(20)), largest + 1]
    for limit in limits:
        shutil.copytree(saved, tmp_path / str(limit))
    codes = run_each(save_and_die_after, [(tmp_path / str(limit), 4, limit) for limit in limits])
    assert codes == [-signal.SIGXFSZ] * 20 + [0]
    assert [check_after_kill(tmp_path / str(limit), 4) for limit in limits] == [False] * 20 + [True]


def test_the_older_of_two_counts_while_they_are_swapped(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    (root / "step-3").rename(root / "step-3.replaced")
    assert_is(load_latest(root), 3)
    with pytest.raises(CheckpointError, match=r"step-3\.replaced"):
        check_fresh(root)


# -- disk full and rotation ------------------------------------------------------------------------


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Writing more than this into one file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [0, 1000, 7000], ids=["nothing", "config", "weights"])
def test_ck_17_a_failed_write_leaves_the_previous(tmp_path: Path, num_bytes: int) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep_last=1)
    assert names(tmp_path) == {"step-3"}
    with files_up_to(num_bytes), pytest.raises(CheckpointError, match=r"(?i)file too large"):
        save(tmp_path, 4, keep_last=1)
    assert names(tmp_path) == {"step-3"}
    assert_is(load_latest(tmp_path), 3)


@pytest.mark.parametrize("where", ["pwrite", "fallocate", "write_text", "manifest", "rename"])
def test_ck_17_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    save(tmp_path, 3, keep_last=1)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner = {
        "pwrite": "os.pwritev",
        "fallocate": "os.posix_fallocate",
        "write_text": "shardwright.checkpoint.hf.write_text",
        "manifest": "shardwright.checkpoint.manifest.write_text",
        "rename": "pathlib.Path.rename",
    }[where]
    monkeypatch.setattr(owner, full)
    for step in (4, 3):
        with pytest.raises(CheckpointError, match=r"No space left on device; .*as they were; make room") as caught:
            save(tmp_path, step, 9.0, keep_last=1)
        assert "\n" not in str(caught.value)
        assert names(tmp_path) == {"step-3"}
    monkeypatch.undo()
    assert_is(load_latest(tmp_path), 3)
    save(tmp_path, 4, keep_last=1)
    assert_is(load_latest(tmp_path), 4)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be saved"):
        save(tmp_path / "file", 1)


def test_rotation_is_by_number_and_counts_complete_ones(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, step, keep_last=2)
    assert names(tmp_path) == {"step-10", "step-11"}
    (tmp_path / "step-11" / "run.json").write_text("")  # torn: neither kept instead of a good one, nor removed
    save(tmp_path, 12, keep_last=2)
    assert names(tmp_path) == {"step-10", "step-11", "step-12"}
    save(tmp_path, 13, keep_last=1)
    assert names(tmp_path) == {"step-11", "step-13"}


def test_ck_20_a_higher_old_step_never_costs_the_new_one(tmp_path: Path) -> None:
    save(tmp_path, 1000)
    with pytest.raises(CheckpointError, match=r"already holds checkpoints \(step-1000\).*--resume auto"):
        check_fresh(tmp_path)
    save(tmp_path, 10, keep_last=1)
    assert names(tmp_path) == {"step-10", "step-1000"}
    assert_is(load_checkpoint(tmp_path / "step-10", SPECS), 10)


def test_ck_20_fresh_or_resumed(tmp_path: Path) -> None:
    check_fresh(tmp_path / "nowhere")
    (tmp_path / "step-4.partial").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-7").write_text("a file")
    check_fresh(tmp_path)
    for step in (4, 5, 6, 7):
        (tmp_path / "step-7").unlink(missing_ok=True)
        save(tmp_path, step, keep_last=4)
    check_fresh(tmp_path, resume=tmp_path / "step-7")
    with pytest.raises(CheckpointError, match=r"later checkpoints \(step-6, step-7\) than step-5"):
        check_fresh(tmp_path, resume=tmp_path / "step-5")
    with pytest.raises(CheckpointError, match=r"step-4, \.\.\., step-7"):
        check_fresh(tmp_path, resume=tmp_path / "elsewhere" / "step-9")
    for step in (6, 7):  # torn ones do not block what --resume auto chooses
        (tmp_path / f"step-{step}" / MANIFEST).unlink()
    check_fresh(tmp_path, resume=tmp_path / "step-5")


# -- torn and corrupt ------------------------------------------------------------------------------


def test_ck_16_steps_are_numbers_and_time_does_not_count(tmp_path: Path) -> None:
    for step in (10000, 9000):
        save(tmp_path, step)
    os.utime(tmp_path / "step-9000")
    assert latest_checkpoint(tmp_path, pytest.fail) == tmp_path / "step-10000"
    assert [step_of(Path(name)) for name in ("step-010", "step-3.partial", "step-x", "astep-1")] == [10, 3, -1, -1]


def test_torn_ones_are_skipped_with_a_warning(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep_last=9)
    (tmp_path / "step-4" / MANIFEST).write_text('{"format')
    weights = tmp_path / "step-3" / hf.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "step-2" / "state" / "master.safetensors").unlink()
    warnings: list[str] = []
    assert latest_checkpoint(tmp_path, warnings.append) == tmp_path / "step-1"
    assert ["step-4" in w for w in warnings] == [True, False, False]
    assert "manifest.json is torn" in warnings[0]
    assert "model.safetensors has" in warnings[1] and "master.safetensors is missing" in warnings[2]
    assert [is_complete(tmp_path / f"step-{step}") for step in (1, 2, 3, 4)] == [True, False, False, False]
    with pytest.raises(CheckpointError, match=r"model\.safetensors has \d+ bytes instead of \d+"):
        load_checkpoint(tmp_path / "step-3", SPECS)


def test_a_corrupt_file_is_named(saved: Path, tmp_path: Path) -> None:
    files = [path.relative_to(saved) for path in saved.rglob("*") if path.is_file() and path.name != MANIFEST]
    assert len(files) == 6
    for file in files:
        root = tmp_path / file.name
        shutil.copytree(saved, root)
        content = bytearray((root / file).read_bytes())
        content[len(content) // 2] ^= 1
        (root / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{file} is corrupt"):
            load_checkpoint(root / "step-3", SPECS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 4}, "format version 4"),
        ({"hash": "md5"}, "has hashes by 'md5', this program knows crc32 and sha256"),
        ({"files": {"../other": {"size": 0, "sha256": ""}}}, "outside"),
        ({"files": []}, "torn"),
    ],
)
def test_manifests_that_cannot_be_used(saved: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    shutil.copytree(saved, tmp_path / "run")
    path = tmp_path / "run" / "step-3" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(path.parent, SPECS)
