"""The least that a data-parallel step can take here: ranks of ours that never talk, in turns with a peer whose ranks do.

    python benchmarks/silent_ranks.py --out benchmarks/results/silent-ranks.json

Each rank of "ours" trains alone, with the whole optimizer's work; ZeRO would do a share of it. ``forward_backward`` is a step
without that. What a real layout takes beyond is communication and ranks that wait for one another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright import bench
from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv
from shardwright.train.data import MicroBatch

bench_rank = bench._bench_rank
SETTINGS = {
    "fsdp2": ("zero=3,reshard=always", "zero=3,reshard=after_backward"),
    "zero_redundancy": ("zero=1",),
}
"""What a peer does, by its name; ours has no use for it."""


def silent_rank(env: RankEnv, side: bench.Side) -> dict[str, Any]:
    """`bench`'s rank with a trainer that has no peers."""
    our_step = bench._our_step

    def silent_step(config: RunConfig, mesh: Mesh, *rest: Any) -> Callable[[list[MicroBatch]], Tensor]:
        alone = config.layout.with_(dp=1, zero=0, reshard="auto")
        return our_step(config.model_copy(update={"layout": alone}), Mesh.solo(), *rest)

    bench._our_step = silent_step
    return bench_rank(env, side)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", choices=sorted(SETTINGS), help="repeatable; all by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="keep the JSON here")
    options = parser.parse_args()
    bench._bench_rank = silent_rank
    results = {}
    chosen = [(peer, setting) for peer in options.peer or SETTINGS for setting in SETTINGS[peer]]
    for peer, setting in chosen:
        found = bench.bench_training(f"dp=2,micro_batch=4,{setting},comm=auto", peer, "bench-25m", 256, options.rounds, 1)
        ours, theirs = found["ours"], found["peer"]["step_seconds"]
        update = ours["step_seconds"] - ours["forward_backward"]
        found["ratio_with_its_share_of_the_update"] = (ours["forward_backward"] + update / 2) / theirs
        results[f"{peer} {setting}"] = found
        share = found["ratio_with_its_share_of_the_update"]
        ratios = f"{found['ratio']:.3f} of {peer}'s step, {share:.3f} with half of the update"
        times = f"{ours['step_seconds']:.3f} against {theirs:.3f} s"
        print(f"{setting}: {ratios} ({times}, of processor time {found['ratio_of_processor_time']:.3f})", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
