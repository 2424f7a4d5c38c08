"""Saves of several ranks that meet in the folder only: here two objects of one process."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.checkpoint import save
from shardwright.checkpoint.io import load_checkpoint
from shardwright.checkpoint.manifest import check_hashes, latest_checkpoint, named_steps
from shardwright.checkpoint.save import Group, Piece, Saver, Snapshot
from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import CheckpointError

CONFIG = ModelConfig(vocab_size=24, dim=16, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=24, tied_head=True)
SPECS = parameter_specs(CONFIG)
LAYOUT = Layout.parse("tp=2")
Savers = Callable[..., list[Saver]]


def values(step: int) -> dict[str, Tensor]:
    return {name: torch.arange(float(spec.numel)).view(spec.shape) + 1000 * step for name, spec in SPECS.items()}


def group(rank: int, tensors: dict[str, Tensor]) -> Group:
    """What rank ``rank`` of tp=2 writes: its slice, or half of what both have."""
    pieces = []
    for name, spec in SPECS.items():
        slices = spec.slices(LAYOUT, {"tp": rank})
        flat = tensors[name][slices].contiguous().view(-1)
        if spec.shard_axes():
            pieces.append(Piece(name, slices, 0, flat))
        else:
            half = flat.numel() // 2
            pieces.append(Piece(name, slices, half * rank, flat[half * rank :][: half if rank == 0 else None]))
    return Group({name: spec.shape for name, spec in SPECS.items()}, dict.fromkeys(SPECS, torch.float32), pieces)


def snapshot(rank: int, step: int) -> Snapshot:
    return Snapshot(step, 4 * step, group(rank, values(step)), {"exp_avg": group(rank, values(step + 1))})


@pytest.fixture
def savers(tmp_path: Path) -> Iterator[Savers]:
    """Makes the savers of two ranks, which are closed at the end."""
    with ExitStack() as stack:

        def make(token: str = "a", timeout_s: float = 30.0, **options: Any) -> list[Saver]:
            ranks = range(2)
            return [
                stack.enter_context(
                    Saver(tmp_path, CONFIG, rank=rank, num_ranks=2, token=token, timeout_s=timeout_s, **options)
                )
                for rank in ranks
            ]

        yield make


def save_step(both: list[Saver], step: int) -> Path:
    paths = {saver.start(snapshot(saver.rank, step)) for saver in both}
    for saver in both:
        saver.wait()
    return paths.pop()


def assert_is(path: Path, step: int) -> None:
    state = load_checkpoint(path, SPECS)
    assert (state.step, state.samples) == (step, 4 * step)
    for found, wanted in ((state.weights, values(step)), (state.optimizer["exp_avg"], values(step + 1))):
        assert all(torch.equal(found[name], wanted[name]) for name in SPECS)


def test_two_ranks_write_one_checkpoint_in_the_background(tmp_path: Path, savers: Savers) -> None:
    both = savers()
    path = save_step(both, 3)
    assert path == tmp_path / "step-3"
    assert_is(path, 3)
    assert {file.name for file in path.iterdir()} == {
        "config.json", "manifest.json", "model.safetensors", "run.json", "state",
    }  # fmt: skip
    first, second = (saver.times.num_bytes for saver in both)
    assert first and second and first + second == 2 * sum(4 * spec.numel for spec in SPECS.values())


def test_ck_03_what_changes_after_the_copy_is_not_saved(savers: Savers, monkeypatch: pytest.MonkeyPatch) -> None:
    both = savers()
    held, written = threading.Event(), save._write_file

    def slow(*arguments: Any) -> Any:
        assert held.wait(10)
        return written(*arguments)

    monkeypatch.setattr(save, "_write_file", slow)
    snapshots = [snapshot(rank, 1) for rank in range(2)]
    for saver, mine in zip(both, snapshots, strict=True):
        saver.start(mine)
        saver.wait_copied()
        for piece in (*mine.weights.pieces, *mine.optimizer["exp_avg"].pieces):
            piece.data.fill_(-1.0)
        saver.poll()  # still writing: nothing to say
    held.set()
    for saver in both:
        saver.wait()
    assert_is(both[0].root / "step-1", 1)


def test_the_next_save_waits_for_the_one_before(savers: Savers, monkeypatch: pytest.MonkeyPatch) -> None:
    both, order, original = savers(), [], Saver._save

    def noted(self: Saver, mine: Snapshot, note: str, copy: bool) -> None:
        order.append(("begin", self.rank, mine.step))
        original(self, mine, note, copy)
        order.append(("end", self.rank, mine.step))

    monkeypatch.setattr(Saver, "_save", noted)
    for step in (1, 2, 3):
        for saver in reversed(both):  # rank 1 runs ahead, as far as it may
            saver.start(snapshot(saver.rank, step))
    for saver in both:
        saver.wait()
    for rank in range(2):
        mine = [(what, step) for what, who, step in order if who == rank]
        assert mine == [(what, step) for step in (1, 2, 3) for what in ("begin", "end")]
    assert list(named_steps(both[0].root)) == [2, 3]


def test_a_rank_that_cannot_write_is_named_by_both_and_leaves_nothing(
    tmp_path: Path, savers: Savers, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = savers()
    save_step(both, 1)
    original = save.write_runs

    def full(descriptor: int, content: Any) -> Any:
        if threading.current_thread() in both[1]._pool._threads:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(descriptor, content)

    replace = os.replace

    def slow(source: Any, target: Any) -> None:
        if "failed" in str(target):  # rank 0 looks meanwhile
            time.sleep(0.3)
        replace(source, target)

    monkeypatch.setattr(save, "write_runs", full)
    monkeypatch.setattr(os, "replace", slow)
    for saver in both:
        saver.start(snapshot(saver.rank, 2))
    with pytest.raises(CheckpointError, match=r"^step 2 could not be saved .*No space left on device"):
        both[1].wait()
    with pytest.raises(CheckpointError, match=r"^rank 1: step 2 could not be saved .*No space left on device"):
        both[0].wait()
    assert {path.name for path in tmp_path.iterdir()} == {"step-1"}
    monkeypatch.undo()
    assert_is(save_step(both, 2), 2)


def test_an_error_in_the_background_surfaces_at_the_next_look(savers: Savers, monkeypatch: pytest.MonkeyPatch) -> None:
    both = savers()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    for saver in both:
        saver.start(snapshot(saver.rank, 2))
    assert both[0]._running is not None
    both[0]._running.exception(10)
    with pytest.raises(CheckpointError, match="full"):
        both[0].poll()
    both[0].poll()  # raised once
    both[1].close()  # it waits for files that nobody makes
    with pytest.raises(CheckpointError, match="given up"):
        both[1].wait()


def test_a_rank_that_never_comes_is_waited_for_with_a_limit(tmp_path: Path, savers: Savers) -> None:
    both = savers(timeout_s=0.2)
    both[0].start(snapshot(0, 1))
    with pytest.raises(CheckpointError, match=r"rank-1 did not appear within 0\.2 s: another rank is slow or gone"):
        both[0].wait()
    assert list(tmp_path.iterdir()) == []
    both[1].start(snapshot(1, 1))
    with pytest.raises(CheckpointError, match=r"prepared did not appear within 0\.2 s"):
        both[1].wait()


def test_notes_of_a_run_before_are_not_taken_for_answers(tmp_path: Path, savers: Savers) -> None:
    """LH-09: the folder of an interrupted save of the same step, complete with its notes."""
    old = tmp_path / "step-1.partial"
    old.mkdir()
    for name in ("old-1.prepared", "old-1.rank-1", "old-1.failed-1"):
        (old / name).write_text("{}")
    both = savers("new")
    both[1].start(snapshot(1, 1))  # it must not write into the old folder
    both[0].start(snapshot(0, 1))
    for saver in both:
        saver.wait()
    assert_is(tmp_path / "step-1", 1)


def test_ck_19_what_is_written_twice_or_by_nobody_is_refused(tmp_path: Path, savers: Savers) -> None:
    for wrong, words in ((lambda rank: 0, "written twice"), (lambda rank: 1 - rank, None)):
        both = savers("ab"[words is None])
        for saver in both:
            saver.start(snapshot(wrong(saver.rank), 1))
        both[1].wait()
        if words is None:
            both[0].wait()
            assert_is(tmp_path / "step-1", 1)
        else:
            with pytest.raises(CheckpointError, match=words):
                both[0].wait()
            assert list(tmp_path.iterdir()) == []


def test_keep_every(savers: Savers) -> None:
    both = savers(keep_last=1, keep_every=4)
    for step in range(1, 11):
        save_step(both, step)
    assert list(named_steps(both[0].root)) == [4, 8, 10]


def test_ranks_share_the_checking_of_hashes(tmp_path: Path, savers: Savers) -> None:
    path = save_step(savers(), 1)
    file = path / "state" / "exp_avg.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = []
    for rank in range(3):
        try:
            check_hashes(path, share=(rank, 3))
        except CheckpointError as error:
            found.append(str(error))
    (message,) = found  # one of them reads the byte
    assert "exp_avg.safetensors is corrupt (its crc32 differs in bytes" in message
    assert latest_checkpoint(tmp_path, pytest.fail) == path
    assert latest_checkpoint(tmp_path, pytest.fail, skip=[path]) is None
