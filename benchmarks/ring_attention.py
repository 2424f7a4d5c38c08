"""Ring attention over ranks of one thread each, beside the same causal attention in one process with as many threads.

    python benchmarks/ring_attention.py [--ranks 2] [--tokens 8192] [--json FILE]

Forward and backward, fp32. Both must give the same numbers. ``ratio`` is one process' time over the ring's (medians of runs in
turns): the share of its speed that the ring reaches. ``cpu_ratio`` is the same of CPU time, which other programs hardly change
(moving and merging blocks count). ``critical_path`` is the work on the longest path of a contiguous split over that of the
zigzag split at 4 ranks, counted, not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright import Layout, Mesh, ring_attention, ring_tokens
from shardwright.core.segments import Segments, contiguous, zigzag
from shardwright.launch import RankEnv, init_process_group, run_local_ranks

Shape = tuple[int, int, int, int]
"""Tokens, query heads, KV heads, head dim."""
Run = tuple[list[float], list[Tensor], float, float]
"""Seconds of each repeat; output and gradients of q, k, v of the rank's tokens; seconds waited for other ranks in the last
repeat; CPU seconds of a repeat."""


def values(shape: Shape) -> list[Tensor]:
    """q, k, v and the output's gradient of all tokens, the same in every process."""
    torch.manual_seed(0)
    tokens, heads, kv_heads, size = shape
    return [torch.randn(tokens, count, size) for count in (heads, kv_heads, kv_heads, heads)]


def ring(env: RankEnv, shape: Shape, repeats: int) -> Run:
    init_process_group(env)
    mesh = Mesh.distributed(Layout(cp=env.world_size), env.rank)
    *local, d_out = (torch.cat([x[slice(*part)] for part in ring_tokens(shape[0], mesh)]) for x in values(shape))
    seconds, cpu_seconds, results = [], [], []
    for _ in range(repeats + 1):  # the first warms up
        local = [x.detach().requires_grad_() for x in local]
        mesh.cp.barrier()
        mesh.recorder.take()
        start, cpu = time.perf_counter(), time.process_time()
        out = ring_attention(local[0], local[1], local[2], mesh)
        out.backward(d_out)
        mesh.cp.barrier()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
        results = [out.detach(), *(x.grad for x in local if x.grad is not None)]
    return seconds[1:], results, mesh.recorder.take().exposed_seconds, statistics.median(cpu_seconds[1:])


def whole(env: RankEnv, shape: Shape, repeats: int) -> Run:
    *local, d_out = values(shape)
    seconds, cpu_seconds, results = [], [], []
    for _ in range(repeats + 1):
        local = [x.detach().requires_grad_() for x in local]
        start, cpu = time.perf_counter(), time.process_time()
        heads = [x.transpose(0, 1).unsqueeze(0) for x in local]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=shape[1] != shape[2])
        out.backward(d_out.transpose(0, 1).unsqueeze(0))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
        results = [out.detach()[0].transpose(0, 1), *(x.grad for x in local if x.grad is not None)]
    return seconds[1:], results, 0.0, statistics.median(cpu_seconds[1:])


def largest_difference(ranks: list[Run], reference: Run, tokens: int) -> float:
    """Over output and gradients: max |a - b| / max |b|."""
    split, worst = zigzag(tokens, len(ranks)), 0.0
    for rank, (_, results, _, _) in enumerate(ranks):
        for mine, want in zip(results, reference[1], strict=True):
            own = torch.cat([want[slice(*part)] for part in split.ranges[rank]])
            worst = max(worst, ((mine - own).abs().max() / want.abs().max()).item())
    return worst


def measure(ranks: int, shape: Shape, rounds: int, repeats: int) -> dict[str, object]:
    """Ring and one process in turns; what the module's docstring says."""
    ours: list[float] = []
    theirs: list[float] = []
    waited, cpu_ratios, difference = [], [], 0.0
    for _ in range(rounds):
        found = run_local_ranks(ring, ranks, (shape, repeats), threads_per_rank=1, time_limit_s=600)
        (reference,) = run_local_ranks(whole, 1, (shape, repeats), threads_per_rank=ranks, time_limit_s=600)
        ours += [max(times) for times in zip(*(run[0] for run in found), strict=True)]
        theirs += reference[0]
        waited.append(max(run[2] for run in found))
        cpu_ratios.append(reference[3] / sum(run[3] for run in found))
        difference = max(difference, largest_difference(found, reference, shape[0]))
    paths = [Segments((shape[0],), split(shape[0], 4)).critical_work for split in (contiguous, zigzag)]
    return {
        "ratio": statistics.median(theirs) / statistics.median(ours),
        "cpu_ratio": statistics.median(cpu_ratios),
        "ring_seconds": statistics.median(ours),
        "one_process_seconds": statistics.median(theirs),
        "exposed_seconds": statistics.median(waited),
        "largest_difference": difference,
        "critical_path": paths[0] / paths[1],
        "ranks": ranks,
        "shape": dict(zip(("tokens", "heads", "kv_heads", "head_dim"), shape, strict=True)),
        "samples": {"ring": ours, "one_process": theirs},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("tokens", 8192), ("heads", 8), ("kv-heads", 8), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="keep the result here, too")
    given = parser.parse_args()
    shape = (given.tokens, given.heads, given.kv_heads, given.head_dim)
    text = json.dumps(measure(given.ranks, shape, given.rounds, given.repeats), indent=2)
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
