"""metrics.jsonl and TensorBoard: each step once, whole lines, also after a kill in the middle of one."""

from __future__ import annotations

import builtins
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import ConfigError, DataError
from shardwright.train.metrics import (
    METRICS_FILE,
    MetricsWriter,
    Throughput,
    bits_per_byte,
    peak_memory_bytes,
    read_metrics,
    series,
)

CONTRACT_KEYS = (
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "step_seconds", "data_seconds",
    "exposed_communication_seconds", "peak_memory_bytes",
)  # fmt: skip


def record(step: int, **values: Any) -> dict[str, Any]:
    plain: dict[str, Any] = dict.fromkeys(CONTRACT_KEYS, 1.0)
    return plain | {"step": step, "loss": 8.0 / step if step else 9.0, "tokens": 64, "mfu": None} | values


def write(folder: Path, steps: range, resume_step: int | None = None, **values: Any) -> None:
    with MetricsWriter(folder, resume_step, tensorboard=False) as writer:
        for step in steps:
            writer.write(record(step, **values))


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder)]


def test_one_line_a_step_and_each_is_readable_at_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "new" / "run", tensorboard=False) as writer:
        for step in (1, 2):
            writer.write(record(step))
            lines = (tmp_path / "new" / "run" / METRICS_FILE).read_text().splitlines()
            assert json.loads(lines[-1]) == record(step) and len(lines) == step
    assert tuple(json.loads(lines[0])) == CONTRACT_KEYS


def test_resume_drops_later_steps(tmp_path: Path) -> None:
    write(tmp_path, range(1, 9), lr=0.1)
    write(tmp_path, range(6, 8), resume_step=5, lr=0.2)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert [line["lr"] for line in read_metrics(tmp_path)] == [0.1] * 5 + [0.2] * 2
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_resume_from_the_start_drops_everything(tmp_path: Path) -> None:
    write(tmp_path, range(0, 3))
    write(tmp_path, range(0, 2), resume_step=0)
    assert steps_of(tmp_path) == [0, 1]


def test_a_torn_last_line_is_left_out_and_not_glued_to_the_next(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    path = tmp_path / METRICS_FILE
    for torn in (b'{"step": 4, "lo', b'{"step": 4}', b'{"step": 4, "\xff', b"null\n", b"\0\0\0\n"):
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]) + torn)
        assert steps_of(tmp_path) == [1, 2, 3]
    write(tmp_path, range(4, 6), resume_step=3)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


def test_a_wrong_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(path)
    with pytest.raises(DataError, match="line 2"):
        MetricsWriter(tmp_path, 3, tensorboard=False)
    assert path.read_text().count("\n") == 3


def test_a_new_run_does_not_write_into_another(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    before = (tmp_path / METRICS_FILE).read_bytes()
    with pytest.raises(ConfigError, match="another run"):
        MetricsWriter(tmp_path, tensorboard=False)
    assert (tmp_path / METRICS_FILE).read_bytes() == before


def test_an_empty_file_is_no_other_run(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).touch()
    write(tmp_path, range(1, 2))
    assert steps_of(tmp_path) == [1]


def test_the_same_step_twice_is_a_bug(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    with MetricsWriter(tmp_path, 3, tensorboard=False) as writer, pytest.raises(AssertionError, match="step 3"):
        writer.write(record(3))


def test_not_finite_is_null(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2), loss=math.nan, grad_norm=math.inf)
    text = (tmp_path / METRICS_FILE).read_text()
    assert "NaN" not in text and "Infinity" not in text
    (line,) = read_metrics(tmp_path)
    assert line["loss"] is None and line["grad_norm"] is None and line["tokens"] == 64


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no metrics at .*metrics\.jsonl"):
        read_metrics(tmp_path)


def test_series_skips_what_is_missing() -> None:
    values: list[dict[str, Any]] = [{}, {"x": None}, {"x": math.nan}, {"x": 2}]
    assert series([{"step": step} | value for step, value in enumerate(values)], "x") == ([3], [2.0])


# ------------------------------------------------------------------------------------------------- TensorBoard


def events(folder: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [event for path in sorted(folder.iterdir()) for event in LegacyEventFileLoader(str(path)).Load()]


def test_tensorboard_has_the_scalars(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(record(1, valid_loss=7.5))
        writer.write(record(2, skipped=True))
    found = {(e.step, v.tag): v.simple_value for e in events(tmp_path / "tensorboard") for v in e.summary.value}
    assert found[1, "train/loss"] == 8.0 and found[2, "train/loss"] == 4.0
    assert found[1, "valid/loss"] == 7.5 and (2, "valid/loss") not in found
    assert found[2, "train/skipped"] == 1.0
    assert not any(tag == "speed/mfu" for _, tag in found)  # it was None


def test_tensorboard_hides_dropped_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((None, range(1, 6)), (3, range(4, 5))):
        with MetricsWriter(tmp_path, resume_step) as writer:
            for step in steps:
                writer.write(record(step))
    for index, path in enumerate(sorted((tmp_path / "tensorboard").iterdir())):
        path.rename(path.with_name(f"events.out.tfevents.{index}"))  # both were made within one second
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [scalar.step for scalar in board.Scalars("train/loss")] == [1, 2, 3, 4]


def test_without_tensorboard_it_says_so_once_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    real_import = builtins.__import__

    def no_tensorboard(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "tensorboard":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_tensorboard)
    said: list[str] = []
    with MetricsWriter(tmp_path, say=said.append) as writer:
        writer.write(record(1))
        writer.write(record(2))
    assert len(said) == 1 and "pip install tensorboard" in said[0]
    assert steps_of(tmp_path) == [1, 2] and not (tmp_path / "tensorboard").exists()


# ------------------------------------------------------------------------------------------------- numbers


def test_bits_per_byte() -> None:
    assert bits_per_byte(math.log(256), num_tokens=100, num_bytes=100) == pytest.approx(8.0)  # uniform over bytes
    assert bits_per_byte(math.log(2) * 4, num_tokens=50, num_bytes=200) == pytest.approx(1.0)
    assert bits_per_byte(4.0, num_tokens=50, num_bytes=0) is None


def test_throughput() -> None:
    speed = Throughput(flops_per_token=6e6, peak_flops=1e9, window=2)
    assert speed.eta_seconds(10) is None
    for seconds in (100.0, 1.0, 3.0):
        speed.add(200, seconds)
    assert speed.tokens_per_second == pytest.approx(200 / 3)
    assert speed.mfu == pytest.approx(6e6 * 200 / 3 / 1e9)
    assert speed.eta_seconds(10) == pytest.approx(20.0)  # the slow first step is out of the window
    unknown = Throughput(flops_per_token=6e6)
    unknown.add(200, 1.0)
    assert unknown.mfu is None and unknown.tokens_per_second == 200


def test_peak_memory_is_that_of_this_process() -> None:
    import psutil

    resident = psutil.Process().memory_info().rss
    assert resident * 0.9 <= peak_memory_bytes() < 100 * resident  # a factor of 1024 would show
    assert peak_memory_bytes(123) == 123
