"""Watching experts: how evenly the tokens of a step, and of a run, were spread. No torch.

``counts[i][e]``: choices of expert e in the i-th layer with experts, over all ranks, before any was dropped. Rank 0 keeps
the first and the last steps of a run and writes them as ``experts.json``; the end report draws them.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXPERTS_FILE = "experts.json"
WINDOW = 20
"""Steps at each end of a run that are kept."""
MAX_CELLS = 48
"""Cells of one row of the heat map in a terminal; more experts share a cell, which shows the busiest of them."""
SHADES = "·░▒▓█"
HOT = 2.0
"""Times the mean that has the strongest colour."""

Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Spread:
    """How evenly one layer's choices are spread: the busiest expert over the mean (1 is even, E the worst), the entropy over
    that of even choices (1 to 0), and how many experts got none."""

    max_over_mean: float
    entropy: float
    dead: int


def spread(counts: Sequence[int]) -> Spread:
    """Of one layer; even where nothing was chosen."""
    total, num_experts = sum(counts), len(counts)
    if total == 0:
        return Spread(1.0, 1.0, num_experts)
    shares = [count / total for count in counts if count]
    entropy = -sum(share * math.log(share) for share in shares) / math.log(num_experts) if num_experts > 1 else 1.0
    return Spread(max(counts) * num_experts / total, entropy, sum(count == 0 for count in counts))


def balance_record(counts: Counts, dropped: Sequence[int], rerouted: Sequence[int], ep: int = 1) -> dict[str, Any]:
    """The keys of a `StepRecord` about experts: of the worst layer, or over all layers; of ranks where ``ep`` > 1."""
    spreads = [spread(row) for row in counts]
    choices = max(sum(map(sum, counts)), 1)
    ranks = {}
    if ep > 1:
        local = len(counts[0]) // ep
        loads = [[sum(row[first : first + local]) for first in range(0, len(row), local)] for row in counts]
        ranks = {"expert_rank_max_over_mean": max(spread(load).max_over_mean for load in loads)}
    return ranks | {
        "expert_max_over_mean": max(one.max_over_mean for one in spreads),
        "expert_entropy": min(one.entropy for one in spreads),
        "dead_experts": sum(one.dead for one in spreads),
        "dropped_share": sum(dropped) / choices,
        "rerouted_share": sum(rerouted) / choices,
    }


@dataclass
class ExpertHistory:
    """The choices of the first and the last steps of a run."""

    layers: Sequence[int]
    steps: int = 0
    first: NDArray[np.int64] | None = None
    last: deque[NDArray[np.int64]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, counts: Counts) -> None:
        """One step."""
        step = np.array(counts, dtype=np.int64)
        if self.steps < WINDOW:
            self.first = step if self.first is None else self.first + step
        self.last.append(step)
        self.steps += 1

    def write(self, run_dir: Path) -> None:
        """``experts.json``; nothing before the first step."""
        if self.first is None:
            return
        table = {
            "layers": list(self.layers),
            "steps": self.steps,
            "window": min(WINDOW, self.steps),
            "first": self.first.tolist(),
            "last": sum(self.last, np.zeros_like(self.first)).tolist(),
        }
        (run_dir / EXPERTS_FILE).write_text(json.dumps(table), encoding="utf-8")


def read_experts(run_dir: Path | str) -> dict[str, Any] | None:
    """The content of a run's ``experts.json``; None where there is none, or where it is not whole."""
    path = Path(run_dir) / EXPERTS_FILE
    if not path.is_file():
        return None
    try:
        table = json.loads(path.read_bytes())
    except ValueError:
        return None
    return table if isinstance(table, dict) and table.keys() >= {"layers", "first", "last", "window"} else None


# ------------------------------------------------------------------------------------------------- pictures


def expert_table(experts: Mapping[str, Any]) -> Table:
    """A heat map of layer x expert over the last steps, in a terminal: grey is an even share, blue less, red `HOT` times it."""
    table = Table.grid(padding=(0, 2))
    table.title = f"Tokens of each expert, last {experts['window']} steps (▒ an even share, █ over 1.6 of it)"
    table.title_justify, table.title_style = "left", "bold"
    for name in ("layer", "expert 0 ...", "max/mean", "entropy", "no tokens"):
        table.add_column(name, no_wrap=True)
    table.add_row(*(Text(name, "dim") for name in ("layer", "experts", "max/mean", "entropy", "no tokens")))
    for layer, row in zip(experts["layers"], experts["last"], strict=True):
        seen = spread(row)
        numbers = (f"{seen.max_over_mean:.2f}", f"{seen.entropy:.3f}", str(seen.dead) if seen.dead else "")
        table.add_row(str(layer), _cells(row), *numbers)
    return table


def _cells(row: Sequence[int]) -> Text:
    mean = sum(row) / len(row) or 1.0
    each = -(-len(row) // MAX_CELLS)
    line = Text()
    for start in range(0, len(row), each):
        times = max(row[start : start + each]) / mean
        shade = SHADES[min(int(times / HOT * len(SHADES)), len(SHADES) - 1)]
        line.append(shade * (2 if len(row) <= MAX_CELLS // 2 else 1), style=_colour(times))
    return line


def _colour(times: float) -> str:
    """Grey at 1, blue towards 0, red towards `HOT` and above."""
    if times <= 1.0:
        low, high, share = (60, 110, 220), (150, 150, 150), times
    else:
        low, high, share = (150, 150, 150), (220, 50, 40), min((times - 1.0) / (HOT - 1.0), 1.0)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def plot_experts(run_dir: Path | str) -> list[Path]:
    """Write ``experts.png`` and ``experts.svg`` of a run's first and last steps, and return their paths; none without."""
    run_dir = Path(run_dir)
    experts = read_experts(run_dir)
    if experts is None:
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = experts["layers"]
    figure = Figure(figsize=(10, 1.8 + 0.28 * min(len(layers), 40)), layout="constrained")
    FigureCanvasAgg(figure)
    sides = figure.subplots(1, 2, sharey=True, squeeze=False)[0]
    for axes, name in zip(sides, ("first", "last"), strict=True):
        image = draw_heat_map(axes, experts[name], layers, f"{name} {experts['window']} steps")
    sides[0].set_ylabel("layer")
    figure.colorbar(image, ax=list(sides), label="times the even share", shrink=0.9)
    paths = [run_dir / "experts.png", run_dir / "experts.svg"]
    for path in paths:
        figure.savefig(path, format=path.suffix[1:], dpi=160)
    return paths


def draw_heat_map(axes: Axes, counts: Counts, layers: Sequence[int], title: str) -> Any:
    """Layer x expert in ``axes``, in times of the even share; returns the image, for a colour bar."""
    from matplotlib.ticker import MaxNLocator

    values = np.asarray(counts, dtype=float)
    values /= np.maximum(values.mean(axis=1, keepdims=True), 1e-9)
    image = axes.imshow(values, cmap="RdBu_r", vmin=0.0, vmax=HOT, aspect="auto", interpolation="nearest")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("expert")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    return image
