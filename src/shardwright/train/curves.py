"""The curves of a run as PNG and SVG: losses and tokens per second against steps. No display and no pyplot state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardwright.train.metrics import read_metrics, series
from shardwright.train.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]

TRAIN_COLOUR, VALID_COLOUR, SPEED_COLOUR, TEXT_COLOUR = "#2f5fd0", "#e0641b", "#14866d", "#333333"
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.5}
MAX_POINTS = 4000  # of the raw curve, so that a long run's SVG stays small
SMOOTH_SHARE = 40  # the smoothed curve averages over a 40th of the run


def plot_curves(run_dir: Path | str, records: Sequence[Record] | None = None) -> list[Path]:
    """Write ``loss.png`` and ``loss.svg`` into ``run_dir`` and return their paths; none if there is nothing to draw.

    Above: training loss, raw and smoothed, and validation loss; below: tokens per second. ``records``: those of the
    run's ``metrics.jsonl`` unless given.
    """
    run_dir = Path(run_dir)
    if records is None:
        records = read_metrics(run_dir)
    if not any(series(records, key)[0] for key in ("loss", "valid_loss")):
        return []
    figure = _draw(records, run_dir.resolve().name)
    paths = [run_dir / "loss.png", run_dir / "loss.svg"]
    for path in paths:
        figure.savefig(path, format=path.suffix[1:], dpi=160)
    return paths


def _draw(records: Sequence[Record], title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 1, height_ratios=(2.6, 1), hspace=0.06)
    above = figure.add_subplot(grid[0])
    below = figure.add_subplot(grid[1], sharex=above)
    above.tick_params(labelbottom=False)
    _draw_loss(above, records)
    _draw_speed(below, records)
    for axes in (above, below):
        _tidy(axes)
    above.set_title(title, loc="left", fontsize=12, fontweight="bold", color=TEXT_COLOUR, pad=10)
    tokens = sum(series(records, "tokens")[1])
    if tokens:
        above.set_title(f"{format_count(tokens)} tokens", loc="right", fontsize=10, color=TEXT_COLOUR, pad=10)
    last = max(record["step"] for record in records)
    above.set_xlim(0, max(1, last) * 1.01)
    figure.align_ylabels()
    return figure


def _draw_loss(axes: Axes, records: Sequence[Record]) -> None:
    steps, losses = series(records, "loss")
    valid_steps, valid = series(records, "valid_loss")
    tops = list(valid)
    if losses:
        smooth, window = _smooth(losses)
        stride = math.ceil(len(steps) / MAX_POINTS)
        axes.plot(steps[::stride], losses[::stride], color=TRAIN_COLOUR, alpha=0.28, linewidth=0.9, label="train")
        if window > 1:
            label = f"train, mean of {window} steps"
            axes.plot(steps[::stride], smooth[::stride], color=TRAIN_COLOUR, linewidth=1.9, label=label)
        tops += [losses[0], float(smooth.max())]
    if valid:
        axes.plot(
            valid_steps, valid, "o-", color=VALID_COLOUR, markersize=4.5, linewidth=1.2, label="validation", zorder=3
        )
        axes.annotate(
            f"{valid[-1]:.3f}", (valid_steps[-1], valid[-1]), xytext=(0, 10), textcoords="offset points", ha="right",
            color=VALID_COLOUR, fontweight="bold", bbox=LABEL_BOX,
        )  # fmt: skip
    low, high = min(losses + valid), max(tops)
    margin = 0.06 * (high - low) or 0.5
    axes.set_ylim(low - margin, high + margin)  # one spike later on does not flatten the curve
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False, loc="upper right", labelcolor=TEXT_COLOUR)


def _draw_speed(axes: Axes, records: Sequence[Record]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    steps, speeds = series(records, "tokens_per_second")
    if speeds:
        stride = math.ceil(len(steps) / MAX_POINTS)
        axes.plot(steps[::stride], speeds[::stride], color=SPEED_COLOUR, alpha=0.8, linewidth=1.0)
        middle = median(speeds)
        axes.axhline(middle, color=SPEED_COLOUR, linewidth=0.9, linestyle=(0, (5, 4)))
        axes.text(
            0.995, 0.1, f"median {format_count(middle)}", transform=axes.transAxes, ha="right", color=SPEED_COLOUR,
            bbox=LABEL_BOX,
        )  # fmt: skip
        axes.set_ylim(0, 1.18 * max(speeds))
    axes.set_ylabel("tokens / s")
    axes.set_xlabel("step")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _tidy(axes: Axes) -> None:
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=TEXT_COLOUR, labelsize=9)
    axes.xaxis.label.set_color(TEXT_COLOUR)
    axes.yaxis.label.set_color(TEXT_COLOUR)


def _smooth(values: Sequence[float]) -> tuple[NDArray[np.float64], int]:
    """(centred running mean, its window); at the ends the window shrinks evenly, so the curve has no lag there."""
    count = len(values)
    half = count // SMOOTH_SHARE // 2
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=float))))
    index = np.arange(count)
    reach = np.minimum(half, np.minimum(index, count - 1 - index))
    return (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1), 2 * half + 1
