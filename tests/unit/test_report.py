"""What users see: tables, curves, the live display and its log lines."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.image
import pytest
from rich.console import Console, RenderableType

from shardwright.core.ledger import BucketTiming, Ledger
from shardwright.train.curves import plot_curves
from shardwright.train.display import TrainDisplay, tokenise_progress
from shardwright.train.experts import WINDOW, ExpertHistory, balance_record, expert_table, read_experts, spread
from shardwright.train.metrics import MetricsWriter
from shardwright.train.report import bucket_table, final_report, ledger_table, memory_table, summary_panel
from shardwright.train.units import format_bytes, format_count, format_duration, format_seconds, sparkline


def record(step: int, **values: Any) -> dict[str, Any]:
    plain = {
        "step": step, "loss": 3 + 5 / step, "grad_norm": 1.0, "lr": 3e-4, "tokens": 1000, "tokens_per_second": 2000.0,
        "mfu": 0.4, "step_seconds": 0.5, "data_seconds": 0.001, "exposed_communication_seconds": 0.02,
        "peak_memory_bytes": 300 * 2**20,
    }  # fmt: skip
    return plain | values


def shown(*things: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    for thing in things:
        console.print(thing)
    return output(console)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line_with(text: str, *words: str) -> str:
    (line,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return line


# ------------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("call", "number", "text"),
    [
        (format_bytes, 0, "0 B"),
        (format_bytes, 1023, "1023 B"),
        (format_bytes, 1024, "1.00 KiB"),
        (format_bytes, 2**20 - 1, "1.00 MiB"),
        (format_bytes, 23.4 * 2**20, "23.4 MiB"),
        (format_bytes, -3 * 2**30, "-3.00 GiB"),
        (format_seconds, 0, "0"),
        (format_seconds, 85e-6, "85 µs"),
        (format_seconds, 0.0009999, "1.00 ms"),
        (format_seconds, 0.412, "412 ms"),
        (format_seconds, 0.9999, "1.00 s"),
        (format_seconds, 12.34, "12.3 s"),
        (format_seconds, 3600, "1:00:00"),
        (format_duration, 59.6, "1:00"),
        (format_duration, 754, "12:34"),
        (format_duration, 18367, "5:06:07"),
        (format_duration, 273900, "3d 04:05"),
        (format_count, 950, "950"),
        (format_count, 12345, "12,345"),
        (format_count, 999_900, "1.00 M"),
        (format_count, 45.6e9, "45.6 B"),
    ],
)
def test_units(call: Callable[[float], str], number: float, text: str) -> None:
    assert call(number) == text


def test_sparkline() -> None:
    assert sparkline(range(8), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([8, 8, 1, 1, 1, 1], 3) == "█▁▁"
    assert sparkline([1.0, None, math.nan, 3.0], 4) == "▁  █"
    assert sparkline([5.0, 5.0], 10) == "▁▁"
    assert sparkline([], 10) == "" and sparkline([math.inf], 10) == " "
    assert len(sparkline(range(1000), 40)) == 40


# ------------------------------------------------------------------------------------------------- the ledger


def ledgers() -> tuple[Ledger, Ledger]:
    predicted, measured = Ledger(), Ledger()
    for ledger in (predicted, measured):
        for index in range(12):
            ledger.add("reduce", "all_reduce", "dp", f"gradients.{index}", 2**20, seconds=0.01, exposed_seconds=0.001)
        ledger.add("F", "all_reduce", "dp", "loss", 8, seconds=0.0002)
    return predicted, measured


def test_equal_ledgers() -> None:
    text = shown(ledger_table(*ledgers()), width=80)
    assert "✗" not in text and text.count("✓") == 3  # loss, gradients, total
    buckets = line_with(text, "gradients.*")
    assert "12.0 MiB 12.0 MiB ✓" in buckets and "120 ms" in buckets and "12.0 ms" in buckets
    assert "buckets)" in text and "gradients.3" not in text
    assert "…" not in text  # nothing is cut off in 80 columns


def test_a_difference_that_cancels_out_inside_a_group_is_found() -> None:
    predicted, measured = ledgers()
    measured.add("reduce", "all_reduce", "dp", "gradients.3", 64, count=0)
    measured.add("reduce", "all_reduce", "dp", "gradients.4", -64, count=0)
    text = shown(ledger_table(predicted, measured))
    assert "12.0 MiB 12.0 MiB ✗" in line_with(text, "gradients.*")
    assert "✗" in line_with(text, "total") and "✓" in line_with(text, " loss ")
    assert "gradients.3: 1048576 B in 1 calls against 1048640 B in 1 calls" in text
    assert "gradients.4: 1048576 B in 1 calls against 1048512 B in 1 calls" in text


def test_a_message_in_one_ledger_only_is_found() -> None:
    predicted, measured = ledgers()
    predicted.add("update", "all_reduce", "dp", "norm", 4)
    measured.add("metrics", "all_gather", "dp", "[times]", 16)
    text = shown(ledger_table(predicted, measured))
    assert "4 B      0 B ✗" in line_with(text, "norm", "✗") and "[times]" in text
    assert "norm: 4 B in 1 calls against 0 B in 0 calls" in text


def test_many_differences_are_counted_not_listed() -> None:
    text = shown(ledger_table(Ledger(), ledgers()[1]))
    assert text.count("against") == 1 + 8 and "and 5 more" in text


def test_without_a_prediction_nothing_is_compared() -> None:
    text = shown(ledger_table(None, ledgers()[1]))
    assert "predicted" not in text and "✓" not in text and "12.0 MiB" in line_with(text, "gradients.*")
    assert "0 B" in shown(ledger_table(None, Ledger()))


def test_buckets() -> None:
    buckets = [
        BucketTiming("gradients.0", 4 << 20, ready=0.1, launch=0.1, end=0.15, waited=0.0),
        BucketTiming("gradients.1", 2 << 20, ready=0.12, launch=0.16, end=0.2, waited=0.004),
    ]
    text = shown(bucket_table(buckets), width=80)
    assert all(word in line_with(text, "gradients.1") for word in ("2.00 MiB", "120 ms", "160 ms", "200 ms", "4.00 ms"))
    assert "·" in line_with(text, "gradients.1") and "·" not in line_with(text, "gradients.0")
    assert "6.00 MiB" in line_with(text, "exposed tail") and "4.00 ms" in line_with(text, "exposed tail")
    long = shown(bucket_table([BucketTiming(f"gradients.{i}", 1, 0, 0, 1, 0) for i in range(70)]))
    assert "gradients.0" in long and "gradients.69" in long and "… 58 more" in long and "gradients.30" not in long


def test_memory() -> None:
    classes = {"parameters": 100 << 20, "optimizer": 200 << 20, "master": 0}
    text = shown(memory_table(classes, 400 << 20))
    assert text.index("optimizer") < text.index("parameters") and "master" not in text
    assert "50%" in line_with(text, "optimizer") and "100 MiB" in line_with(text, "workspace")
    assert "400 MiB" in line_with(text, "peak")
    assert "300 MiB" in line_with(shown(memory_table(classes)), "total")


# ------------------------------------------------------------------------------------------------- the summary


def test_summary() -> None:
    records = [record(step, rank_skew_seconds=0.004, slowest_rank=1 if step > 5 else 0) for step in range(1, 21)]
    records[9] |= {"valid_loss": 3.2, "bits_per_byte": 1.5}
    records[19] |= {"valid_loss": 3.4, "bits_per_byte": 1.6}
    text = shown(summary_panel(records))
    assert "1 to 20, 20,000 tokens in 0:10 of steps" in text
    assert "8.000 → 3.250" in line_with(text, "train loss") and "best" not in line_with(text, "train loss")
    assert "3.200 → 3.400" in line_with(text, "valid loss") and "best 3.200 at step 10" in line_with(text, "valid loss")
    assert "1.600" in line_with(text, "bits per byte")
    assert "2,000 tokens/s, MFU 40.0%" in text and "500 ms median" in text
    assert "1.00 ms, 0.2% of a step" in line_with(text, "data wait")
    assert "20.0 ms, 4.0% of a step" in line_with(text, "exposed comm")
    assert "rank 1 slowest in 75%" in text and "300 MiB per rank" in text
    assert "█" in text and "not finite" not in text


def test_summary_names_what_went_wrong() -> None:
    records = [record(1), record(2, loss=None, skipped=True), record(3)]
    text = shown(summary_panel(records))
    assert "1 of 3 steps: the loss was not finite" in text and "1 of 3 updates" in line_with(text, "skipped")


def test_summary_of_little() -> None:
    assert "none" in shown(summary_panel([]))
    assert "9.100" in shown(summary_panel([{"step": 0, "valid_loss": 9.1}]))
    assert "MFU" not in shown(summary_panel([record(1, mfu=None)]))


# ------------------------------------------------------------------------------------------------- curves


def test_curves(tmp_path: Path) -> None:
    records = [record(step) for step in range(1, 201)]
    records[99]["valid_loss"] = 3.4
    png, svg = plot_curves(tmp_path, records)
    pixels = matplotlib.image.imread(png)
    assert pixels.shape[0] > 600 and pixels.shape[1] > 1000 and pixels[..., :3].std() > 0.02
    drawn = ElementTree.tostring(ElementTree.parse(svg).getroot(), "unicode")
    assert "#2f5fd0" in drawn and "#e0641b" in drawn and "#14866d" in drawn  # train, validation, tokens per second
    assert "matplotlib.pyplot" not in sys.modules


def test_curves_of_little(tmp_path: Path) -> None:
    assert plot_curves(tmp_path, [{"step": 1, "loss": None}]) == [] and not list(tmp_path.iterdir())
    assert len(plot_curves(tmp_path, [record(1)])) == 2
    assert len(plot_curves(tmp_path, [{"step": 0, "valid_loss": 9.0}])) == 2


def test_a_long_run_makes_a_small_svg(tmp_path: Path) -> None:
    _, svg = plot_curves(tmp_path, [record(step, loss=math.sin(step)) for step in range(1, 50_001)])
    assert svg.stat().st_size < 1_000_000


def test_final_report(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 31):
            writer.write(record(step))
    for step in (9, 10):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    predicted, measured = ledgers()
    measured.memory = {"parameters": 100 << 20}
    measured.buckets = [BucketTiming("gradients.0", 4 << 20, 0.1, 0.1, 0.15, 0.0)]
    console = Console(file=io.StringIO(), width=80)
    paths = final_report(console, tmp_path, predicted=predicted, measured=measured)
    text = output(console)
    assert [path.name for path in paths] == ["loss.png", "loss.svg"] and all(path.stat().st_size for path in paths)
    for words in (
        "train loss",
        "gradients.*",
        "exposed tail",
        "parameters",
        "300 MiB",
        "loss.png",
        "checkpoints/step-10",
    ):
        assert words in text
    assert str(tmp_path) in text.replace("\n", " ")  # never wrapped, so that it can be copied


def test_final_report_of_a_run_without_a_step(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    assert final_report(console, tmp_path) == [] and str(tmp_path) in output(console)


# ------------------------------------------------------------------------------------------------- the display


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run_display(console: Console, steps: range, seconds: float = 1.0, **values: Any) -> None:
    clock = Clock()
    with TrainDisplay(20, steps.start - 1, console, clock=clock, **values) as display:
        display.message("model [tiny]")
        for step in steps:
            clock.now += seconds
            display.update(record(step, **({"valid_loss": 3.5} if step == 15 else {})))


def test_a_log_gets_plain_lines_now_and_then() -> None:
    console = Console(file=io.StringIO(), width=40)
    run_display(console, range(1, 21))
    lines = output(console).splitlines()
    assert lines[0] == "model [tiny]"
    assert [line.split("/")[0] for line in lines[1:]] == ["step  1", "step 11", "step 15", "step 20"]
    for words in (
        "loss 3.455",
        "2,000 tokens/s",
        "500 ms/step",
        "MFU 40.0%",
        "grad norm 1.00",
        "lr 3.00e-04",
        "ETA 0:09",
    ):
        assert words in lines[2]
    assert "valid 3.500" in lines[3] and "ETA" not in lines[4]


def test_the_last_step_is_logged_when_a_run_stops_early() -> None:
    console = Console(file=io.StringIO(), width=80)
    run_display(console, range(1, 8), seconds=0.1)
    assert [line.split("/")[0] for line in output(console).splitlines()[1:]] == ["step  1", "step  7"]


def test_the_time_left_after_a_resume_counts_new_steps_only() -> None:
    console = Console(file=io.StringIO(), width=80)
    run_display(console, range(11, 13), seconds=30.0)
    assert "ETA 2:02" in output(console).splitlines()[-1]  # 8 steps of (0.5 + 30) / 2 s


def test_starting_the_ranks_does_not_count_as_a_step() -> None:
    console, clock = Console(file=io.StringIO(), width=80), Clock()
    with TrainDisplay(11, console=console, clock=clock) as display:
        clock.now += 60
        display.update(record(1))
    assert "ETA 0:05" in output(console)  # 10 steps of 0.5 s


def test_quiet_prints_nothing() -> None:
    for terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=terminal)
        run_display(console, range(1, 21), quiet=True)
        with tokenise_progress(console, quiet=True) as report:
            report(10, 10, "x")
        assert output(console) == ""


@pytest.mark.parametrize("width", [50, 80, 120])
def test_the_live_display(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    run_display(console, range(1, 21))
    text = output(console)
    assert "model [tiny]" in text
    last = text.rsplit("20/20", 1)[1]
    assert "100%" in last and "loss 3.250 · valid 3.500 · 2,000 tokens/s" in last
    if width >= 80:
        assert "500 ms/step · MFU 40.0% · █" in last
    assert "━" in last or "━" in text


def test_a_loss_that_is_not_finite_is_said() -> None:
    for value in (math.nan, None):
        console = Console(file=io.StringIO(), width=80)
        with TrainDisplay(2, console=console) as display:
            display.update(record(1, loss=value, grad_norm=math.inf, skipped=True))
        assert "loss not finite" in output(console) and "skipped 1" in output(console)


def test_tokenising_in_a_log() -> None:
    console, clock = Console(file=io.StringIO(), width=40), Clock()
    with tokenise_progress(console, clock=clock) as report:
        report(0, 1, "waiting for another process")
        for done in range(0, 31):
            clock.now += 1
            report(done << 20, 30 << 20, f"{done} [documents]")
        report(30 << 20, 30 << 20, "30 [documents]")
    lines = output(console).splitlines()
    assert lines[0] == "tokenising: waiting for another process, 0:00"
    assert lines[-1] == "tokenising: 30.0 MiB of 30.0 MiB, 30 [documents], 0:31"
    assert len(lines) == 5 and lines[1].startswith("tokenising: 9.00 MiB of 30.0 MiB")


def test_tokenising_in_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with tokenise_progress(console) as report:
        assert output(console) == ""
        report(0, 1, "waiting")
        for done in (0, 10, 20):
            report(done << 20, 20 << 20, f"{done} documents")
    last = output(console).rsplit("tokenising", 1)[1]
    assert "100%" in last and "20.0 MiB of 20.0 MiB" in last and "20 documents" in last


def test_no_torch_and_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, shardwright.train.metrics, shardwright.train.report, shardwright.train.display\n"
        "print([name for name in ('torch', 'tensorboard', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------- experts


def test_spread_of_choices() -> None:
    even, skewed, nothing = spread([5, 5, 5, 5]), spread([90, 10, 0, 0]), spread([0, 0])
    assert (even.max_over_mean, even.dead, skewed.max_over_mean, skewed.dead) == (1.0, 0, 3.6, 2)
    assert even.entropy == pytest.approx(1.0) and spread([7, 0, 0, 0]).entropy == 0.0
    assert skewed.entropy == pytest.approx(-(0.9 * math.log(0.9) + 0.1 * math.log(0.1)) / math.log(4))
    assert (nothing.max_over_mean, nothing.dead) == (1.0, 2)
    counts = [[5, 5, 5, 5], [20, 0, 0, 0]]
    assert balance_record(counts, [0, 0], [0, 0], ep=2)["expert_rank_max_over_mean"] == 2.0
    assert balance_record(counts, [2, 2], [1, 0]) == {
        "expert_max_over_mean": 4.0, "expert_entropy": 0.0, "dead_experts": 3, "dropped_share": 0.1, "rerouted_share": 0.025,
    }  # fmt: skip


def test_the_end_report_shows_the_experts(tmp_path: Path) -> None:
    history = ExpertHistory((1, 3))
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        for step in range(1, 50):
            counts = [[40, 40, 40, 40], [160 - step, step, 0, 0]]
            history.add(counts)
            seen = balance_record(counts, [8, 8], [0, 0], ep=2)
            writer.write(record(step) | {"aux_loss": 0.1, "expert_bytes": 3 << 20} | seen)
    history.write(tmp_path)
    table = read_experts(tmp_path)
    assert table is not None and table["window"] == WINDOW and table["layers"] == [1, 3]
    assert table["first"][1][1] == sum(range(1, 21)) and table["last"][1][1] == sum(range(30, 50))
    heat = shown(expert_table(table))
    assert line_with(heat, "1.00").split()[1] == "▒" * 8 and "█" in line_with(heat, "3.01")
    console = Console(file=io.StringIO(), width=100)
    pictures = final_report(console, tmp_path)
    assert {path.name for path in pictures} >= {"experts.png", "experts.svg"}
    text = output(console)
    assert "busiest 3.98 → 2.77 times the mean" in text and "4 experts got no token" not in text
    assert "3.00 MiB sent per step and rank, busiest rank 2.00 times the mean" in text
    assert "2 experts got no token" in text and "5.0% of choices" in text and "Tokens of each expert" in text
    assert matplotlib.image.imread(tmp_path / "experts.png").shape[1] > 600
    (tmp_path / "experts.json").write_text("{")
    assert read_experts(tmp_path) is None
