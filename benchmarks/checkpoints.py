"""Saving and loading a checkpoint beside ``torch.save`` and ``torch.distributed.checkpoint``, on the same ranks and tensors.

Every round takes each of them in turn: a step alone, a step during which ours saves in the background, then each way to save
and to load, all flushed to the disk, all ranks waiting for the last one. Printed are medians and ratios, theirs / ours.

    python benchmarks/checkpoints.py [--layout dp=2,micro_batch=4] [--model bench-25m] [--rounds 5] [--folder DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from shardwright.bench import bench_config
from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.train.checkpoints import RunCheckpoints
from shardwright.train.data import MicroBatch
from shardwright.train.step import Trainer

Times = dict[str, list[float]]


def measure(env: RankEnv, table: dict[str, Any], rounds: int, folder: str) -> Times:
    """One rank's seconds of everything, round by round."""
    warnings.simplefilter("ignore")
    config = RunConfig.of(table)
    init_process_group(env)
    mesh = Mesh.distributed(config.layout, env.rank)
    trainer = Trainer(config, mesh)
    batches = _batches(config)
    times: Times = {}
    with RunCheckpoints(config, trainer, None, env.note) as checkpoints:
        for turn in range(2):
            trainer.step(batches, turn)
        for turn in range(rounds):
            _steps(trainer, checkpoints, batches, 2 + 2 * turn, times)
            _whole_saves(trainer, checkpoints, mesh, Path(folder), times)
    return times


def _batches(config: RunConfig) -> list[MicroBatch]:
    size = config.data.seq_len * config.layout.micro_batch
    tokens = torch.randint(0, config.model.vocab_size, (size,), generator=torch.Generator().manual_seed(0))
    place = torch.arange(size)
    lengths = (config.data.seq_len,) * config.layout.micro_batch
    batch = MicroBatch(tokens, tokens, place % config.data.seq_len, place, lengths, size, ())
    return [batch] * config.layout.microbatches


def _steps(trainer: Trainer, checkpoints: RunCheckpoints, batches: list[MicroBatch], step: int, times: Times) -> None:
    world, saver = trainer.mesh.world, checkpoints.saver
    world.barrier()
    before = time.perf_counter()
    trainer.step(batches, step)
    times.setdefault("step", []).append(time.perf_counter() - before)
    world.barrier()
    before = time.perf_counter()
    checkpoints.save(step, step, last=False)
    began = time.perf_counter() - before
    trainer.step(batches, step + 1)
    times.setdefault("step with a save", []).append(time.perf_counter() - before)
    saver.wait()
    times.setdefault("blocked", []).append(began + saver.times.blocked)
    times.setdefault("background processor", []).append(saver.times.processor)
    times.setdefault("background copy", []).append(saver.times.copy)
    world.barrier()


def _whole_saves(trainer: Trainer, checkpoints: RunCheckpoints, mesh: Mesh, folder: Path, times: Times) -> None:
    state = {"weights": trainer.named_parameters(), "optimizer": trainer.optimizer.named_state()}
    ours, plain, theirs = checkpoints.root / "step-1", folder / "plain.pt", folder / "dcp"

    def save_ours() -> None:
        checkpoints.saver.save(checkpoints.snapshot(1, 1))

    def save_plain() -> None:
        if mesh.rank == 0:
            with plain.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

    def load_plain() -> None:
        _fill(state, torch.load(plain, mmap=True))

    def load_dcp() -> None:
        dcp.load(state, checkpoint_id=theirs)

    for name, act in (
        ("ours save", save_ours),
        ("torch.save save", save_plain),
        ("dcp save", lambda: dcp.save(state, checkpoint_id=theirs)),
        ("ours load", lambda: checkpoints.restore(str(ours))),
        ("torch.save load", load_plain),
        ("dcp load", load_dcp),
    ):
        times.setdefault(name, []).append(_timed(mesh, act))
    if mesh.rank == 0:
        shutil.rmtree(theirs)
        shutil.rmtree(ours)
        plain.unlink()
    mesh.world.barrier()


def _fill(target: dict[str, Any], source: dict[str, Any]) -> None:
    for name, value in target.items():
        if isinstance(value, Tensor):
            value.copy_(source[name])
        else:
            _fill(value, source[name])


def _timed(mesh: Mesh, act: Callable[[], object]) -> float:
    mesh.world.barrier()
    before = time.perf_counter()
    act()
    mesh.world.barrier()
    return time.perf_counter() - before


def summary(ranks: list[Times], num_bytes: int) -> dict[str, Any]:
    """Medians over the rounds of the slowest rank, and ratios."""
    middle = {
        name: statistics.median(max(values) for values in zip(*(rank[name] for rank in ranks), strict=True))
        for name in ranks[0]
    }
    ratios = {
        f"{peer} {what} / ours": middle[f"{peer} {what}"] / middle[f"ours {what}"]
        for what in ("save", "load")
        for peer in ("torch.save", "dcp")
    }
    return {
        "seconds": middle,
        "ratios": ratios,
        "blocked_share_of_a_step": middle["blocked"] / middle["step"],
        "background_processor_share_of_a_step": middle["background processor"] / middle["step"],
        "bytes": num_bytes,
        "ours_save_bytes_per_second": num_bytes / middle["ours save"],
        "ours_load_bytes_per_second": num_bytes / middle["ours load"],
        "samples": ranks,
    }


def run(layout: str, model: str, rounds: int, parent: str | None) -> dict[str, Any]:
    """The whole benchmark; ``parent`` is where the files go."""
    config = bench_config(layout, model, 256)
    with tempfile.TemporaryDirectory(prefix="shardwright-checkpoints-", dir=parent) as folder:
        table = config.to_table()
        table["train"] |= {"run_dir": f"{folder}/run", "keep_last": 1}
        ranks = run_local_ranks(
            measure, config.layout.world_size, (table, rounds, folder), threads_per_rank=1, time_limit_s=3600
        )
    num_bytes = config.model.num_parameters() * 4 * 3  # weights and two moments in fp32
    return {"layout": layout, "model": model, "rounds": rounds, **summary(ranks, num_bytes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp=2,micro_batch=4")
    parser.add_argument("--model", default="bench-25m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the files go (a temporary folder of the system without it)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = run(arguments.layout, arguments.model, arguments.rounds, arguments.folder)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name, value in result["seconds"].items():
        print(f"{name:24} {value * 1e3:9.1f} ms")
    for name, value in result["ratios"].items():
        print(f"{name:24} {value:9.2f}")
    print(f"blocked {result['blocked_share_of_a_step']:.2%} of a step; the background uses "
          f"{result['background_processor_share_of_a_step']:.1%} of a step's time on a core")  # fmt: skip
    save, load = (result[f"ours_{what}_bytes_per_second"] / 2**20 for what in ("save", "load"))
    print(f"save {save:.0f} MiB/s, load {load:.0f} MiB/s")


if __name__ == "__main__":
    main()
