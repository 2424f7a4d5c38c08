"""Memory of random layouts on real ranks against the planner's formulas, by class.

    python benchmarks/planned_memory.py --count 30 --out benchmarks/results/planned-memory.json [--most 5]

Layouts of 2 to 4 ranks, dense models and models with experts in turn, every ZeRO stage in turn, the rest at random. Each
trains two steps; the peak of each class (parameters, gradients, optimizer, gathered, buffers; host memory apart) on each
rank is set beside `plan`'s. What stays between steps is also counted without the ledger: the storages of all tensors that
are alive. The file keeps what was measured, and is set beside today's plan: layouts that it has are not run again, so ``--most``
cuts the work into pieces.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.schedule.make import make_schedule
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.train.step import Trainer
from shardwright.train.supported import check_supported
from shardwright.verify.memory import PADDING_BYTES, compared_classes
from shardwright.verify.parity import train_sampler

STEPS, BAR = 2, 2.0
BASE: dict[str, Any] = {
    "vocab_size": 320, "dim": 96, "num_layers": 8, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 256, "max_positions": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "top_k": 2, "expert_dim": 64}
MODELS: tuple[dict[str, Any], ...] = (
    BASE,
    BASE | {"moe": EXPERTS},
    BASE | {"tied_head": True},
    BASE | {"tied_head": True, "moe": EXPERTS | {"shared_dim": 32, "num_shared_experts": 1, "dense_layers": [0, 3]}},
)
"""Dense ones at even places, ones with experts at odd places."""
WORLDS = (2, 3, 4, 4)
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
NOT_THE_LEDGERS = 1 << 18
"""Bytes that tensors of a run may hold beside its state: batches, positions, statistics."""


@dataclass(frozen=True)
class Sample:
    """One layout of one of `MODELS`."""

    model: int
    layout: str

    @property
    def key(self) -> str:
        return f"model {self.model}: {self.layout}"


def config(sample: Sample, folder: str) -> RunConfig:
    table = {
        "model": MODELS[sample.model],
        "data": {"sources": "synthetic:sentences", "seq_len": 32, "cache": f"{folder}/datasets"},
        "optim": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 10, "threads": 1, "run_dir": f"{folder}/run"},
    }
    return RunConfig.of(table, (), sample.layout)


def draw(rng: random.Random, index: int) -> Sample:
    """A legal layout: whether there are experts, the number of ranks and the ZeRO stage follow from ``index``."""
    model = index % 2 + rng.choice((0, 2))
    ranks, zero = WORLDS[index // 8 % len(WORLDS)], index // 2 % 4
    while True:
        degrees, rest = {}, ranks
        for axis in rng.sample(("tp", "cp", "pp"), 3):
            degrees[axis] = rng.choice([k for k in (1, 2, 4) if rest % k == 0])
            rest //= degrees[axis]
        stage = ranks // degrees["pp"]
        schedule = rng.choice(SCHEDULES) if degrees["pp"] > 1 else "1f1b"
        try:
            layout = Layout(
                **degrees, dp=rest, zero=zero, schedule=schedule, comm="gloo",
                ep=rng.choice([k for k in (1, 2, 4) if stage % k == 0]) if model % 2 else 1,
                virtual=2 if schedule.startswith("interleaved") else 1,
                microbatches=rng.choice((1, 2, 3, 4, 8)), micro_batch=rng.choice((1, 2)),
                recompute=rng.choice(("none", "selective", "full")), bucket_mb=rng.choice((25.0, 0.2)),
                accumulate=rng.choice(("defer", "reduce")) if zero >= 2 else "defer",
                reshard=rng.choice(("auto", "always", "after_backward")) if zero == 3 else "auto",
                prefetch=rng.choice((0, 1, 2)), cp_kind=rng.choice(("ring", "allgather", "ulysses")),
                dp_replicate=rng.choice((1, 2)) if zero else 1, precision=rng.choice(("fp32", "bf16")),
                offload=rng.choice(("none", "none", "none", "optimizer", "params")),
            ).without_idle()  # fmt: skip
            sample = Sample(model, str(layout))
            run = config(sample, "runs")
            check_supported(run)
            make_schedule(layout)
        except ConfigError:
            continue
        return sample


def live_bytes() -> int:
    """Bytes of the storages of all tensors of this process that are alive."""
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def measure_rank(env: RankEnv, runs: Sequence[tuple[RunConfig, PreparedData]]) -> list[tuple[dict[str, int], int, int]]:
    """Of each run: peak bytes by class of its last step, state bytes by the ledger, and those of live tensors."""
    init_process_group(env)
    return [measure(env, run, data) for run, data in runs]


def measure(env: RankEnv, run: RunConfig, data: PreparedData) -> tuple[dict[str, int], int, int]:
    gc.collect()
    before = live_bytes()
    trainer = Trainer(run, Mesh.distributed(run.layout, env.rank))
    sampler = train_sampler(run, data, trainer.mesh.coordinates["dp"])
    for step in range(STEPS):
        ledger = trainer.step(list(sampler.batches(step)), step).ledger
    gc.collect()
    return dict(ledger.peak), sum(ledger.memory.values()), live_bytes() - before


def worst_class(run: RunConfig, peaks: Sequence[dict[str, int]]) -> tuple[float, str]:
    """Over every class of every rank: the largest error in per cent, beyond what padding adds, and where."""
    worst, where = 0.0, ""
    for rank, peak in enumerate(peaks):
        for kind, (got, want) in compared_classes(run, peak, rank).items():
            error = 100 * max(0, abs(got - want) - PADDING_BYTES) / max(got, want, 1)
            if error > worst:
                worst, where = error, f"rank {rank}, {kind}: {got} bytes against {want} by the plan"
    return worst, where


def run_samples(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Train every sample; those of one number of ranks share a launch."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="shardwright-memory-") as folder:
        runs = [(sample, config(sample, folder)) for sample in samples]
        data = prepare_data(runs[0][1])
        for world in sorted({run.layout.world_size for _, run in runs}):
            chosen = [(sample, run) for sample, run in runs if run.layout.world_size == world]
            pairs = [(run, data) for _, run in chosen]
            ranks = run_local_ranks(measure_rank, world, (pairs,), threads_per_rank=1, time_limit_s=1800)
            for (sample, _), results in zip(chosen, zip(*ranks, strict=True), strict=True):
                beside = max(abs(live - state) for _, state, live in results)
                found[sample.key] = {"peaks": [peak for peak, _, _ in results], "beside_state": beside}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30, help="layouts in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, help="run at most so many of those that the file lacks")
    parser.add_argument("--out", type=Path, help="keep the JSON here, after each few layouts")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    samples = [draw(rng, index) for index in range(options.count)]
    kept = json.loads(options.out.read_text()) if options.out is not None and options.out.is_file() else {}
    kept = {sample.key: kept[sample.key] for sample in samples if sample.key in kept}
    missing = [sample for sample in samples if sample.key not in kept][: options.most]
    for first in range(0, len(missing), 8):
        kept |= run_samples(missing[first : first + 8])
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    largest = 0.0
    for sample in (sample for sample in samples if sample.key in kept):
        result = kept[sample.key]
        worst, where = worst_class(config(sample, "runs"), result["peaks"])
        largest = max(largest, worst)
        print(f"{worst:6.2f} %  {result['beside_state'] >> 10:5d} KiB  {sample.key}  {where}")
    print(f"{len(kept)} of {options.count} layouts: largest difference of a class {largest:.2f} %")
    beside = any(result["beside_state"] > NOT_THE_LEDGERS for result in kept.values())
    return 1 if largest > BAR or beside or len(kept) < options.count else 0


if __name__ == "__main__":
    sys.exit(main())
