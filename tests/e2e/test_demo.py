"""``make demo`` in small: all four parts, and a second time with the dataset of the first."""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from pathlib import Path
from unittest import mock

import pytest

from e2e.kit import Outcome, finish, program
from shardwright import demo

SMALL = (
    "data.sources=text", "model.vocab_size=400", "data.seq_len=32", "layout=dp=2,micro_batch=2", "train.threads=1",
    "train.steps=4", "train.eval_every=2", "optim.warmup_steps=1", "train.peak_tflops=0.05",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run the demo in, with a little of the text that it reads in earnest."""
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(Path(sysconfig.get_path("stdlib")) / "json", folder / "text")
    return folder


@pytest.fixture(scope="module")
def first(place: Path) -> Outcome:
    with program(["-m", "shardwright.demo", *SMALL], place) as process:
        return finish(process)


def test_it_shows_all_four_parts(first: Outcome) -> None:
    assert (first.code, first.err) == (0, "")
    parts = re.findall(r"^─+ (\d)  (.+?) ─+$", first.out, re.MULTILINE)
    assert parts == [
        ("1", "text"), ("2", "train over 2 processes"), ("3", "what happened"), ("4", "generate, one process")
    ]  # fmt: skip
    assert re.search(r"tokens to train on, [\d,]+ held out in [1-9]\d* files", first.out)
    assert re.search(r"^step 4/4 .* valid ", first.out, re.MULTILINE)
    assert re.search(r"held-out loss \d\.\d{3} nats per token, \d\.\d{3} bits per byte", first.out)
    assert "all_reduce" in first.out and "run folder" in first.out


def test_the_cache_gives_the_tokens_of_recomputing(first: Outcome) -> None:
    assert "the same as recomputing the whole text for each: yes" in " ".join(first.out.split())
    assert demo.PROMPT in first.out
    assert re.search(r"60 tokens with a key-value cache at \d+ tokens/s", first.out)


def test_a_second_time_reuses_the_dataset(
    first: Outcome, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (place / "runs" / "datasets").rglob("*.[bij]*")}

    before = files()
    assert "tokenising" in first.out and len(before) >= 6
    monkeypatch.chdir(place)
    with mock.patch.object(sys, "argv", ["demo", *SMALL, "train.run_dir=runs/second"]):
        assert demo.main() == 0
    captured = capsys.readouterr()
    assert "tokenising" not in captured.out and captured.err == ""
    assert "yes" in captured.out.splitlines()[-1]
    assert files() == before
    assert (place / "runs" / "second" / "loss.png").is_file()


def test_a_mistake_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    with mock.patch.object(sys, "argv", ["demo", "train.step=4"]):
        assert demo.main() == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: unknown key train.step; did you mean 'steps'?\n")
