"""The longest sequence that trains on one rank under a memory limit, and 7 and 8 times that on cp=8 under the same limit.

    python benchmarks/long_context.py [--limit-mib 480] [--json FILE]

The limit is RLIMIT_DATA (private writable memory, the interpreter and libraries included) of each process, so an allocation
beyond it fails. Messages go over gloo, so that no buffer lies in memory which the limit does not count. ``one`` is the
longest sequence (a multiple of ``--step`` tokens) that one rank trains; then ``7 x`` on cp=8, ``8 x`` with zero=3, both again on
one rank, where they must not fit, and the losses against a forward pass of one process without a limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
from pathlib import Path
from typing import Any

import torch

from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.errors import RankError
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.train.data import IGNORE, MicroBatch
from shardwright.train.step import Trainer

MIB = 2**20
MODEL = {
    "vocab_size": 256, "dim": 256, "num_layers": 8, "num_heads": 8, "num_kv_heads": 2, "ffn_dim": 512, "max_positions": 1 << 20,
}  # fmt: skip
STEPS = 2
OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "MemoryError")


def one_document(tokens: int) -> MicroBatch:
    """Random tokens, the same in every process."""
    stream = torch.randint(MODEL["vocab_size"], (tokens,), generator=torch.Generator().manual_seed(0))
    targets = torch.cat((stream[1:], torch.tensor([IGNORE])))
    places = torch.arange(tokens)
    return MicroBatch(stream, targets, places, places, (tokens,), tokens - 1, (0,))


def run_config(layout: str) -> RunConfig:
    table = {
        "model": MODEL,
        "data": {"sources": "synthetic:sentences", "seq_len": 1 << 20},
        "optim": {"name": "adamw", "lr": 1e-9},  # so that every step shows the loss of the initial weights
       
        "train": {"steps": STEPS, "threads": 1, "run_dir": "run", "loss_chunk": 256},
    }
    return RunConfig.of(table, (), f"comm=gloo,{layout}")


def data_bytes() -> int:
    """What RLIMIT_DATA counts of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmData:")[1].split()[0]) * 1024


def trained(env: RankEnv, layout: str, tokens: int, limit: int) -> dict[str, Any]:
    """A few steps under the limit (0: none); losses, and the memory held before the limit was set."""
    config = run_config(layout)
    if env.world_size > 1:
        init_process_group(env)
        mesh = Mesh.distributed(config.layout, env.rank)
    else:
        mesh = Mesh.solo()
    trainer = Trainer(config, mesh)
    trainer.step([one_document(128)], 0)  # what a process starts once (threads, connections) is there
    gc.collect()
    before = data_bytes()
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    batch = one_document(tokens)
    losses = [trainer.step([batch], step).loss for step in range(STEPS)]
    return {"losses": losses, "before": before, "after": data_bytes()}


def forward_loss(env: RankEnv, tokens: int) -> float:
    """One process without a limit, forward only."""
    trainer = Trainer(run_config("dp=1"), Mesh.solo())
    return trainer.evaluate([one_document(tokens)])[0]


def tried(layout: str, ranks: int, tokens: int, limit: int) -> list[dict[str, Any]] | None:
    """What the ranks found, or None when one ran out of memory."""
    try:
        return run_local_ranks(trained, ranks, (layout, tokens, limit), threads_per_rank=1, time_limit_s=1800, tune_memory=False)
    except RankError as error:
        if any(words in str(error) for words in OUT_OF_MEMORY):
            return None
        raise


def longest(limit: int, step: int) -> int:
    """Tokens that one rank trains: doubled until they do not fit, then halved in between."""
    good, bad = 0, step
    while tried("dp=1", 1, bad, limit):
        good, bad = bad, 2 * bad
    while bad - good > step:
        middle = (good + bad) // 2 // step * step
        good, bad = (middle, bad) if tried("dp=1", 1, middle, limit) else (good, middle)
    return good


def measure(limit: int, step: int) -> dict[str, Any]:
    one = longest(limit, step)
    found: dict[str, Any] = {"limit_mib": limit // MIB, "one": one}
    for times, layout in ((7, "cp=8"), (8, "cp=8,zero=3")):
        ranks = tried(layout, 8, times * one, limit)
        alone = tried("dp=1", 1, times * one, limit)
        (expected,) = run_local_ranks(forward_loss, 1, (times * one,), threads_per_rank=2)
        found[f"{times} x"] = {
            "layout": layout,
            "tokens": times * one,
            "trained": ranks is not None,
            "fits_one_rank": alone is not None,
            "losses": ranks[0]["losses"] if ranks else None,
            "first_loss_of_one_process": expected,
            "mib_before": [rank["before"] // MIB for rank in ranks or ()],
            "mib_after": [rank["after"] // MIB for rank in ranks or ()],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=int, default=480)
    parser.add_argument("--step", type=int, default=128)
    parser.add_argument("--json", type=Path, help="keep the result here, too")
    given = parser.parse_args()
    text = json.dumps(measure(given.limit_mib * MIB, given.step), indent=2)
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
