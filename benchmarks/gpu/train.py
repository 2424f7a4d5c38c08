"""On a GPU: the same losses as the CPU to 1e-3, tokens/s and MFU, peak memory beside what the plan says. Under 5 minutes.

Once for dense models, once for models with experts, with nothing sharded and with ZeRO-3 (on one rank: units are gathered and
freed as on many); dense ones also with the optimizer's state or everything in host memory.

    python benchmarks/gpu/train.py [--json]

Skipped, with the reason, where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any

import torch

from shardwright.bench import random_batches
from shardwright.comm.mesh import Mesh
from shardwright.comm.solo import SoloComm
from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.plan.stack import Stack
from shardwright.plan.step_time import Pricer
from shardwright.train.peak import peak_flops
from shardwright.train.step import Trainer

STEPS = 5
TOLERANCE = 1e-3


MODELS: dict[str, tuple[Any, Any]] = {
    "dense": ("bench-25m", "qwen2-0.5b"),
    "experts": (
        {"preset": "tiny-moe", "dim": 256, "num_layers": 4, "ffn_dim": 256, "vocab_size": 4096},
        {"preset": "qwen3-30b-a3b", "num_layers": 4, "vocab_size": 32768},
    ),
}
"""For each kind a model whose losses are compared, and one whose speed is measured."""
STATES: dict[str, dict[str, str]] = {
    "dense": {
        "zero=0": "", "zero=3": ",zero=3", "offload=optimizer": ",zero=3,offload=optimizer",
        "offload=params": ",zero=3,offload=params",
    },
    "experts": {"zero=0": "", "zero=3": ",zero=3"},
}  # fmt: skip
"""Where the state is. The losses of all are set beside those of the CPU with nothing sharded."""


def run_config(model: Any, layout: str, seq_len: int) -> RunConfig:
    return RunConfig.of(
        {
            "model": model,
            "data": {"sources": "synthetic:sentences", "seq_len": seq_len},
            "optim": {"lr": 1e-3, "schedule": "constant"},
            "layout": layout,
        }
    )


def alone(layout: Layout) -> Mesh:
    """The mesh of one process that trains ``layout``."""
    return Mesh(layout, 0, lambda axis, groups: SoloComm(axis))


def losses(config: RunConfig, device: str, steps: int) -> list[float]:
    trainer = Trainer(config, alone(config.layout), device)
    layout = config.layout
    batches = random_batches(config.model, layout.microbatches, layout.micro_batch, config.data.seq_len, seed=1)
    return [trainer.step(batches, step).loss for step in range(steps)]


def speed(config: RunConfig, steps: int = 20) -> dict[str, Any]:
    """Tokens/s, MFU and memory of bf16 training on one GPU."""
    device = torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    trainer = Trainer(config, alone(config.layout), device)
    layout = config.layout
    batches = random_batches(config.model, layout.microbatches, layout.micro_batch, config.data.seq_len, seed=1)
    batches = [batch.to(device) for batch in batches]
    samples = []
    for step in range(steps):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        trainer.step(batches, step)
        torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - start)
    rate = layout.global_batch * config.data.seq_len / statistics.median(samples[3:])
    peak = peak_flops(config, device)
    flops = config.model.flops_per_token(config.data.seq_len)
    measured = torch.cuda.max_memory_allocated(device) - before
    return {"tokens_per_second": rate, "mfu": rate * flops / peak if peak else None} | memory_beside_the_plan(config, measured)


def memory_beside_the_plan(config: RunConfig, measured: int) -> dict[str, Any]:
    """The peak that was measured and the planner's, state and activations and buffers, with its classes."""
    cluster = Cluster.parse("h100:1x1")  # memory does not depend on the chip
    (plan,) = Pricer(config.model, cluster, config.data.seq_len, Stack()).price(config.layout).memory
    classes = ("parameters", "gradients", "optimizer", "activations", "buffers")
    return {
        "peak_memory_bytes": measured,
        "planned_memory_bytes": plan.total,
        "peak_over_planned": measured / plan.total,
        "planned": {kind: getattr(plan, kind) for kind in classes},
        "planned_on_host": dict(plan.host),
    }


def compare(kind: str) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Summary and losses of one kind of model with its state in each place; whether the losses are those of the CPU."""
    small, large = MODELS[kind]
    layouts = {name: f"micro_batch=4,microbatches=2{state}" for name, state in STATES[kind].items()}
    cpu = losses(run_config(small, layouts["zero=0"], 256), "cpu", STEPS)
    summary, shown = {}, {"cpu": cpu}
    for name, state in STATES[kind].items():
        shown[name] = losses(run_config(small, layouts[name], 256), "cuda", STEPS)
        worst = max(abs(a - b) / abs(a) for a, b in zip(cpu, shown[name], strict=True))
        fast = speed(run_config(large, f"micro_batch=8,precision=bf16{state}", 1024))
        summary[name] = {"largest_loss_difference": worst, **fast}
    return summary, shown, all(row["largest_loss_difference"] <= TOLERANCE for row in summary.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        found: dict[str, object] = {"skipped": "no CUDA device here; run it on a machine with a GPU"}
    else:
        torch.backends.cuda.matmul.allow_tf32 = False
        summary: dict[str, Any] = {}
        found = {"passed": True, "summary": summary}
        for kind in MODELS:
            summary[kind], found[kind], right = compare(kind)
            found["passed"] = found["passed"] and right
    print(json.dumps(found) if arguments.json else json.dumps(found, indent=2))
    return 0 if found.get("passed", True) else 1


if __name__ == "__main__":
    sys.exit(main())
