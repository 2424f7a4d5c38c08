"""How the rounding of one step grows over the next ones, on the tokens and the model of `bench train`.

    python benchmarks/rounding.py --lr 1e-3 --steps 30

One process and ZeRO-1 on two ranks, in fp64 and fp32, a peer, and one process whose first weights are changed by one part in ten
million. Where fp64 runs agree and this last one parts as far as fp32 runs do, what parts them is rounding. Shown: losses of some
steps, and how far each run is at most from one process in fp64.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardwright.bench import bench_config, peer_step, random_batches
from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv, init_process_group, launch
from shardwright.train.step import Trainer

ONE, TWO = "micro_batch=4,microbatches=2", "dp=2,micro_batch=4"
RUNS = {
    "one process, fp64": (f"{ONE},precision=fp64", "", 0.0),
    "ZeRO-1, fp64": (f"{TWO},zero=1,precision=fp64", "", 0.0),
    "one process, fp64, weights changed": (f"{ONE},precision=fp64", "", 1e-7),
    "one process, fp32": (ONE, "", 0.0),
    "ZeRO-0, fp32": (TWO, "", 0.0),
    "ZeRO-1, fp32": (f"{TWO},zero=1", "", 0.0),
    "ZeroRedundancyOptimizer, fp32": (f"{TWO},zero=1", "zero_redundancy", 0.0),
}
"""Name -> (layout, peer, how much the first weights are changed); each has the same eight sequences."""


def config_of(layout: str, lr: float) -> RunConfig:
    config = bench_config(layout, "bench-25m", 256)
    return config.model_copy(update={"optim": config.optim.model_copy(update={"lr": lr})})


def losses(env: RankEnv, layout: str, peer: str, change: float, lr: float, steps: int) -> list[float]:
    """Mean loss of the whole batch at every step."""
    config, mesh = config_of(layout, lr), Mesh.solo()
    if env.world_size > 1:
        init_process_group(env)
        mesh = Mesh.distributed(config.layout, env.rank, env.timeout_s)
    seeds = [mesh.coordinates["dp"]] if env.world_size > 1 else [0, 1]
    batches = [batch for seed in seeds for batch in random_batches(config.model, 1, 4, config.data.seq_len, 100 + seed)]
    if peer:
        step = peer_step(peer, config, mesh, torch.device("cpu"))
        sums = [mesh.world.all_reduce(step(batches).double().reshape(1), name="loss") for _ in range(steps)]
        return [float(value) / env.world_size for value in sums]
    trainer = Trainer(config, mesh)
    if change:
        first = {name: value.clone() for name, value in trainer.named_parameters().items()}
        generator = torch.Generator().manual_seed(1)

        def write(name: str, view: Tensor) -> None:
            noise = torch.randn(view.shape, generator=generator, dtype=view.dtype)
            view.copy_(first[name] * (1 + change * noise))

        trainer.fill_parameters(write)
    return [trainer.step(batches, index).loss for index in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="keep the JSON here")
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    shown = range(0, options.steps, max(1, options.steps // 6))
    table = Table(*("run", *(f"step {index}" for index in shown), "apart"), title=f"losses at a rate of {options.lr:g}")
    for name, (layout, peer, change) in RUNS.items():
        ranks = 2 if "dp=2" in layout else 1
        arguments = (layout, peer, change, options.lr, options.steps)
        (found[name], *_) = launch(losses, ranks, arguments, threads_per_rank=2 // ranks, timeout_s=1200)
        alone = found["one process, fp64"]
        apart = max(abs(a - b) / b for a, b in zip(found[name], alone, strict=True))
        table.add_row(name, *(f"{found[name][index]:.5f}" for index in shown), f"{apart:.1e}")
    Console(width=130).print(table)
    if options.out is not None:
        options.out.write_text(json.dumps({"lr": options.lr, "losses": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
