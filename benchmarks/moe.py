"""One layer with experts on two ranks, forward, backward, gradient sums and an SGD update: ours beside PyTorch users' ways.

    .venv/bin/python benchmarks/moe.py [--ranks 2] [--rounds 15] [--comm gloo] [--out benchmarks/results/moe.json]

All sides train the same layer from the same values on the same tokens, in the same processes, and take turns; the figure is
the median over rounds of the slowest rank. ``local`` has all experts on every rank under DDP, ``book`` one all-to-all for
each of a token's choices; ``ours`` one for all, and with tokens sent once (``once``) or in halves (``halves``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from peers.moe import BookMoE, LocalMoE

from shardwright.comm.mesh import Mesh
from shardwright.core.buckets import plan_buckets
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import bucket_members, unit_names
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.model.context import Context
from shardwright.model.init import ParameterTable, full_value, initialise
from shardwright.model.moe import MoE
from shardwright.ops.attention import CausalAttend
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.expert import make_exchange, make_sums
from shardwright.parallel.hooks import AllReduce
from shardwright.parallel.tensor import Region

LR, WARM_UP = 0.05, 3
SIDES = {"ours": "", "ours once": ",ep_deduplicate=on", "ours halves": ",ep_overlap=on"}

Step = Callable[[Tensor, Tensor], Tensor]
"""(x, target) of the rank -> its mean squared error; the parameters are updated."""


def model_config(experts: int, top_k: int, dim: int, ffn: int) -> ModelConfig:
    return ModelConfig.load(
        {
            "name": "layer", "family": "mixtral", "vocab_size": 8, "dim": dim, "num_layers": 1, "num_heads": 4,
            "ffn_dim": ffn, "init_std": 0.1, "moe": {"num_experts": experts, "top_k": top_k, "expert_dim": ffn},
        }
    )  # fmt: skip


class Ours:
    """Our layer, its exchange and its gradient buckets, without a model around them."""

    def __init__(self, config: ModelConfig, layout: Layout, rank: int, seed: int) -> None:
        assert config.moe is not None
        self.mesh = Mesh.distributed(layout, rank)
        table = ParameterTable(config, self.mesh, torch.float32, torch.device("cpu"))
        self.layer = MoE(config, 0, table)
        named = {f"blocks.0.moe.{name}": parameter for name, parameter in self.layer.named_parameters()}
        initialise(named.items(), table.specs, self.mesh, seed)
        members = [m for m in bucket_members(config, layout, self.mesh.coordinates) if m.name in named]
        plans = plan_buckets(members, unit_names(config), layout.bucket_mb)
        self.buckets = GradientBuckets(plans, named, self.mesh, AllReduce(), layout=layout)
        self.exchange, self.sums = make_exchange(self.mesh, config.moe.num_experts), make_sums(self.mesh)

    def step(self, x: Tensor, target: Tensor) -> Tensor:
        numbers = torch.arange(x.shape[0])
        context = Context(
            numbers, numbers, CausalAttend((x.shape[0],), [None]), None, Region(self.mesh.tp, False),
            exchange=self.exchange, sums=self.sums,
        )  # fmt: skip
        self.buckets.begin()
        with self.mesh.recorder.phase("F"):
            loss = (self.layer(x, context) - target).square().mean()
        with self.mesh.recorder.phase("B"):
            (loss / self.mesh.world.size).backward()
        self.buckets.unit_done("blocks.0")
        self.buckets.finish()
        for bucket in self.buckets.buckets:
            for piece in bucket.pieces:
                piece.master.add_(piece.gradients, alpha=-LR)
        return loss.detach()


def peer_step(module: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """A step of ``LocalMoE`` in DDP, or of ``BookMoE``."""
    module.zero_grad(set_to_none=True)
    loss = (module(x) - target).square().mean()
    loss.backward()
    if isinstance(module, BookMoE):
        module.reduce_gradients()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-LR)
    return loss.detach()


def rank_main(env: RankEnv, args: argparse.Namespace) -> dict[str, Any]:
    init_process_group(env)
    torch.manual_seed(100 + env.rank)
    x = torch.randn(args.tokens, args.dim)
    target = torch.randn(args.tokens, args.dim)
    config = model_config(args.experts, args.top_k, args.dim, args.ffn)
    table = ParameterTable(config, Mesh.solo(), torch.float32, torch.device("meta"))
    values = [full_value(table.specs[f"blocks.0.moe.{part}.weight"], 1) for part in ("router", "experts.up", "experts.down")]
    base = f"dp={env.world_size},ep={env.world_size},comm={args.comm}"
    ours = {name: Ours(config, Layout.parse(base + more), env.rank, 1) for name, more in SIDES.items()}
    steps: dict[str, Step] = {name: side.step for name, side in ours.items()}
    steps["book"] = partial(peer_step, BookMoE(*values, args.top_k))
    steps["local"] = partial(peer_step, DistributedDataParallel(LocalMoE(*values, args.top_k), gradient_as_bucket_view=True))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds + WARM_UP):
        for name, step in steps.items():
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            loss = step(x.detach().requires_grad_(), target)  # as inside a model, whose earlier layers want a gradient
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu)
            losses[name].append(loss.item())
    return {
        "seconds": {name: values[WARM_UP:] for name, values in seconds.items()},
        "cpu_seconds": {name: statistics.median(values[WARM_UP:]) for name, values in cpu_seconds.items()},
        "losses": losses,
        "ledgers": {name: side.mesh.recorder.take() for name, side in ours.items()},
    }


def where_it_goes(ledger: Ledger, steps: int, seconds: float) -> dict[str, float]:
    """Milliseconds of a step that rank 0 waited for each kind of message; the rest is work."""
    waited: dict[str, float] = {}
    for entry in ledger.entries.values():
        key = f"{entry.tensor.split('.')[0]} {entry.phase}"
        waited[key] = waited.get(key, 0.0) + entry.exposed_seconds / steps * 1e3
    return {**waited, "work": seconds * 1e3 - sum(waited.values())}


def summary(results: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    names = list(results[0]["seconds"])
    samples = {name: [max(turn) for turn in zip(*(r["seconds"][name] for r in results), strict=True)] for name in names}
    medians = {name: statistics.median(values) for name, values in samples.items()}
    last = {name: sum(r["losses"][name][-1] for r in results) / len(results) for name in names}
    steps = args.rounds + WARM_UP
    first: dict[str, Ledger] = results[0]["ledgers"]
    return {
        "setting": {key: value for key, value in vars(args).items() if key != "out"},
        "step_seconds": medians,
        "cpu_seconds_all_ranks": {name: sum(r["cpu_seconds"][name] for r in results) for name in names},
        "tokens_per_second": {name: args.tokens * len(results) / value for name, value in medians.items()},
        "ratio_to_book": {name: medians[name] / medians["book"] for name in names},
        "ratio_to_local": {name: medians[name] / medians["local"] for name in names},
        "largest_loss_difference": max(abs(value / last["local"] - 1) for value in last.values()),
        "bytes_per_step": {name: ledger.total_bytes // steps for name, ledger in first.items()},
        "milliseconds": {name: where_it_goes(ledger, steps, medians[name]) for name, ledger in first.items()},
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"ranks": 2, "rounds": 15, "experts": 16, "top-k": 4, "dim": 256, "ffn": 128, "tokens": 2048}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--comm", choices=("gloo", "shm"), default="gloo")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = run_local_ranks(rank_main, args.ranks, (args,), threads_per_rank=1, time_limit_s=1800)
    found = summary(results, args)
    text = json.dumps(found, indent=2)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
