"""On a GPU: the same losses as the CPU to 1e-3, tokens/s and MFU, peak memory beside what the plan says. Under 5 minutes.

Once for dense models, once for models with experts.

    python benchmarks/gpu/train.py [--json]

Skipped, with the reason, where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

from shardwright.bench import random_batches
from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
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


def run_config(model: Any, layout: str, seq_len: int) -> RunConfig:
    return RunConfig.of(
        {
            "model": model,
            "data": {"sources": "synthetic:sentences", "seq_len": seq_len},
            "optim": {"lr": 1e-3, "schedule": "constant"},
            "layout": layout,
        }
    )


def losses(config: RunConfig, device: str, steps: int) -> list[float]:
    trainer = Trainer(config, Mesh.solo(), device)
    layout = config.layout
    batches = random_batches(config.model, layout.microbatches, layout.micro_batch, config.data.seq_len, seed=1)
    return [trainer.step(batches, step).loss for step in range(steps)]


def speed(config: RunConfig, steps: int = 20) -> dict[str, float | None]:
    """Tokens/s, MFU and memory of bf16 training on one GPU."""
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    trainer = Trainer(config, Mesh.solo(), device)
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
    return {
        "tokens_per_second": rate,
        "mfu": rate * flops / peak if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        "planned_state_bytes": sum(trainer.memory().values()),
    }


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
        for kind, (small, large) in MODELS.items():
            config = run_config(small, "micro_batch=4,microbatches=2", 256)
            cpu, cuda = losses(config, "cpu", STEPS), losses(config, "cuda", STEPS)
            worst = max(abs(a - b) / abs(a) for a, b in zip(cpu, cuda, strict=True))
            fast = speed(run_config(large, "micro_batch=8,precision=bf16", 1024))
            summary[kind] = {"largest_loss_difference": worst, **fast}
            found[kind] = {"cpu": cpu, "cuda": cuda}
            found["passed"] = found["passed"] and worst <= TOLERANCE
    print(json.dumps(found) if arguments.json else json.dumps(found, indent=2))
    return 0 if found.get("passed", True) else 1


if __name__ == "__main__":
    sys.exit(main())
