"""A small model with experts on real text, from a skewed start: does balance come back?

Three runs of one process that differ in the method only: no balancing, the auxiliary loss, the correction bias (no loss).

    python benchmarks/moe_balance.py [--text FILE_OR_FOLDER] [--steps 120] [--out benchmarks/results]

Writes moe-balance.json (every step of every run) and moe-balance.png. The text is, unless given, source code of the running
Python's standard library. Under two minutes on one idle core.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.train.data import TrainSampler, open_blend
from shardwright.train.experts import WINDOW, draw_heat_map, spread
from shardwright.train.prepare import prepare_data
from shardwright.train.step import Trainer

METHODS: dict[str, dict[str, Any]] = {
    "no balancing": {"aux_coefficient": 0.0},
    "auxiliary loss": {"aux_coefficient": 0.02},
    "correction bias": {"aux_coefficient": 0.0, "bias_correction": True},
}
SKEW = 0.3
"""The router's biases start between SKEW and -SKEW; other differences of its logits are about 0.2 then."""


def run_config(text: str, steps: int, folder: Path, **moe: Any) -> RunConfig:
    experts = {
        "num_experts": 16, "top_k": 2, "expert_dim": 96, "score": "sigmoid", "router_bias": True, **moe,
    }  # fmt: skip
    model = {
        "vocab_size": 512, "dim": 96, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 192, "moe": experts,
    }  # fmt: skip
    return RunConfig.of(
        {
            "model": model,
            "data": {"sources": text, "seq_len": 128, "cache": str(folder / "datasets")},
            "optim": {"lr": 2e-3, "warmup_steps": 10},
            "router": {"bias_rate": 0.01},
            "train": {"steps": steps, "run_dir": str(folder / "run"), "threads": 1},
            "layout": "micro_batch=8",
        }
    )


def train(config: RunConfig, steps: int) -> dict[str, Any]:
    """Losses and choices of every step."""
    data = prepare_data(config)
    mesh = Mesh.solo()
    mesh.layout = config.layout
    trainer = Trainer(config, mesh)
    moe = config.model.moe
    assert moe is not None
    for name, parameter in trainer.parameters.items():
        if name.endswith("router.bias"):
            parameter.data.copy_(torch.linspace(SKEW, -SKEW, moe.num_experts))
    blend = open_blend(data.train, "train", config.data.seq_len, 0, vocab_size=config.model.vocab_size)
    sampler = TrainSampler(blend, config.layout.micro_batch, 1, 1, 0)
    losses, counts = [], []
    start = time.perf_counter()
    for step in range(steps):
        result = trainer.step(sampler.batches(step), step)
        assert result.balance is not None
        losses.append(result.loss)
        counts.append(result.balance.counts)
    seconds = time.perf_counter() - start
    spreads = [[spread(row) for row in layers] for layers in counts]
    window = min(WINDOW, steps)
    return {
        "loss": losses,
        "max_over_mean": [max(one.max_over_mean for one in step) for step in spreads],
        "entropy": [min(one.entropy for one in step) for step in spreads],
        "without_tokens": [sum(one.dead for one in step) for step in spreads],
        "last_counts": np.sum(counts[-window:], axis=0).tolist(),
        "seconds": seconds,
    }


def draw(runs: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3)
    for place, (key, label) in enumerate(
        (("max_over_mean", "busiest expert over the mean"), ("entropy", "entropy of choices (1: even)"), ("loss", "loss"))
    ):
        axes = figure.add_subplot(grid[0, place])
        for name, run in runs.items():
            axes.plot(range(1, len(run[key]) + 1), run[key], label=name, linewidth=1.6)
        axes.set_title(label, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.grid(True, color="#e4e4e4")
        axes.spines[["top", "right"]].set_visible(False)
        if place == 0:
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False)
    for place, (name, run) in enumerate(runs.items()):
        axes = figure.add_subplot(grid[1, place])
        image = draw_heat_map(axes, run["last_counts"], range(len(run["last_counts"])), f"{name}, last {WINDOW} steps")
        if place == 0:
            axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="times the even share")
    figure.savefig(path, dpi=110)


def measure(text: str, steps: int, out: Path) -> dict[str, Any]:
    """All runs; writes the JSON and the picture, and returns the JSON's content."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: train(run_config(text, steps, Path(folder), **moe), steps) for name, moe in METHODS.items()}
    table = {
        "what": "balance of experts over training from a skewed start, worst layer of each step",
        "command": f"python benchmarks/moe_balance.py --steps {steps}",
        "torch": torch.__version__,
        "runs": runs,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "moe-balance.json").write_text(json.dumps(table) + "\n", encoding="utf-8")
    draw(runs, out / "moe-balance.png")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default=str(Path(sysconfig.get_path("stdlib")) / "asyncio"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, run in measure(given.text, given.steps, given.out)["runs"].items():
        print(
            f"{name:<16} busiest/mean {run['max_over_mean'][0]:.2f} -> {run['max_over_mean'][-1]:.2f}, "
            f"entropy {run['entropy'][0]:.3f} -> {run['entropy'][-1]:.3f}, "
            f"experts without tokens {run['without_tokens'][0]} -> {run['without_tokens'][-1]}, "
            f"loss {run['loss'][0]:.3f} -> {run['loss'][-1]:.3f}, {run['seconds']:.0f} s"
        )


if __name__ == "__main__":
    main()
