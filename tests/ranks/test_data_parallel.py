"""`DataParallel` around a foreign module, against PyTorch's wrapper and one process, and the smallest complete job."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ranks.kit import TESTS, run_ranks
from shardwright import DataParallel, Layout, Mesh
from shardwright.comm.base import Comm
from shardwright.errors import ConfigError, LayoutError
from shardwright.launch import RankEnv
from shardwright.parallel.hooks import AllReduce, Compressed, FunctionHook, num_ranks

TINY_BUCKET = 100 / 2**20  # 25 fp32 values: about one bucket for each parameter
STEPS, MICRO, ROWS = 3, 3, 4

Gradients = dict[str, Tensor]


class Net(nn.Module):
    """Odd sizes, a layer that a batch may leave out, a buffer, and a layer without elements."""

    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first or nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.side = nn.Linear(7, 7)
        self.nothing = nn.Linear(7, 1)
        self.nothing.weight, self.nothing.bias = nn.Parameter(torch.empty(0, 7)), nn.Parameter(torch.empty(0))
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        x = x + self.nothing(x).sum()
        return self.last(x + self.side(x) if side else x)


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def samples(step: int, micro: int, rank: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """The rows of one rank in one micro-batch: a function of its arguments alone."""
    generator = torch.Generator().manual_seed(1 + step * 10000 + micro * 100 + rank)
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)


def mesh_of(env: RankEnv) -> Mesh:
    return Mesh.distributed(Layout(dp=env.world_size), env.rank)


def gradients(module: nn.Module) -> Gradients:
    """A copy of each gradient by the parameter's own name (wrappers put ``module.`` before it)."""
    found = {name.removeprefix("module."): p.grad for name, p in module.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def furthest(got: Sequence[Gradients], want: Sequence[Gradients]) -> float:
    """The largest difference over steps and tensors, relative to the step's largest value; infinite for other names."""
    worst = 0.0
    for mine, reference in zip(got, want, strict=True):
        if mine.keys() != reference.keys():
            return float("inf")
        scale = max(value.abs().max().item() for value in reference.values() if value.numel())
        for name, value in reference.items():
            if value.numel():
                worst = max(worst, (mine[name] - value).abs().max().item() / scale)
    return worst


# ------------------------------------------------------------------------------------------ what the ranks do

Loop = Callable[[nn.Module, torch.optim.Optimizer, int, Sequence[int], int], None]
"""One optimizer step's forwards and backwards: (module, optimizer, step, ranks whose rows it takes, ranks in all)."""


def mean_loss(module: nn.Module, step: int, micro: int, ranks: Sequence[int], side: bool = True) -> Tensor:
    parts = [samples(step, micro, rank) for rank in ranks]
    x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    return (module(x, side=side) - y).square().mean()


def one_batch(module: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: Sequence[int], world: int) -> None:
    optimizer.zero_grad()
    mean_loss(module, step, 0, ranks).backward()


def zeroed_in_place(
    module: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: Sequence[int], world: int
) -> None:
    loss = mean_loss(module, step, 0, ranks)
    optimizer.zero_grad(set_to_none=False)  # after the forward pass, as many loops do
    loss.backward()


def accumulated(module: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: Sequence[int], world: int) -> None:
    module.zero_grad()
    for micro in range(MICRO):
        quiet = module.no_sync() if micro < MICRO - 1 and hasattr(module, "no_sync") else nullcontext()
        with quiet:
            (mean_loss(module, step, micro, ranks) / MICRO).backward()


def accumulated_in_sync(
    module: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: Sequence[int], world: int
) -> None:
    """Accumulation by a user who has not heard of no_sync, then a quiet backward, then a last one."""
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    for micro in range(MICRO):
        quiet = module.no_sync() if micro == 1 and hasattr(module, "no_sync") else nullcontext()
        with quiet:
            (mean_loss(module, step, micro, ranks) / MICRO).backward()


def sometimes_without_side(
    module: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: Sequence[int], world: int
) -> None:
    """The side layer takes part in quiet backwards only, at step 1 on rank 0 alone, at step 2 nowhere."""
    optimizer.zero_grad(set_to_none=len(ranks) == 1)  # in one process zero too, so that momentum goes on there
    for micro in range(2):
        used = micro == 0 and step < 2
        quiet = module.no_sync() if micro == 0 and hasattr(module, "no_sync") else nullcontext()
        with quiet:
            if len(ranks) == 1:
                used = used and (step == 0 or ranks[0] == 0)
                (mean_loss(module, step, micro, ranks, side=used) / 2).backward()
                continue
            for rank in ranks:  # in one process: each rank's rows in the way that rank takes
                with_side = used and (step == 0 or rank == 0)
                (mean_loss(module, step, micro, [rank], side=with_side) / 2 / world).backward()


def summed(module: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: Sequence[int], world: int) -> None:
    """Rank r has r + 1 rows; the loss is divided by the rows of all ranks; accumulated with and without no_sync."""
    optimizer.zero_grad(set_to_none=step != 1)
    rows = world * (world + 1) // 2
    for micro in range(MICRO):
        quiet = module.no_sync() if micro == 1 and hasattr(module, "no_sync") else nullcontext()
        with quiet:
            for rank in ranks:
                x, y = samples(step, micro, rank, rows=rank + 1)
                ((module(x) - y).square().sum() / (rows * 3 * MICRO)).backward()


def trained(module: nn.Module, loop: Loop, ranks: Sequence[int], world: int, optimizer: Any = None) -> list[Gradients]:
    """The gradients of each step of a short training, and at the end the parameters."""
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(STEPS):
        loop(module, optimizer, step, ranks, world)
        seen.append(gradients(module))
        optimizer.step()
    seen.append({name.removeprefix("module."): p.detach().clone() for name, p in module.named_parameters()})
    return seen


def all_loops(env: RankEnv) -> dict[str, float]:
    """How far `DataParallel` is from one process on all rows, and from PyTorch's wrapper, for each loop."""
    world, everyone = env.world_size, range(env.world_size)
    found: dict[str, float] = {}
    for loop in (one_batch, zeroed_in_place, accumulated, accumulated_in_sync, sometimes_without_side):
        alone = trained(make_net(), loop, everyone, world)
        for bucket_mb in (25.0, TINY_BUCKET):
            ours = trained(DataParallel(make_net(), mesh_of(env), bucket_mb=bucket_mb), loop, [env.rank], world)
            label = f"{loop.__name__}, {bucket_mb:.0e} MiB"
            found[f"{label}, one process"] = furthest(ours, alone)
        theirs = DistributedDataParallel(make_net(), find_unused_parameters=loop is sometimes_without_side)
        if loop is not sometimes_without_side:  # DDP forgets what was used in no_sync only
            found[f"{loop.__name__}, DDP"] = furthest(ours, trained(theirs, loop, [env.rank], world))
    for bucket_mb in (25.0, TINY_BUCKET):
        model = DataParallel(make_net(), mesh_of(env), bucket_mb=bucket_mb, loss_reduction="sum")
        ours = trained(model, summed, [env.rank], world)
        found[f"summed, {bucket_mb:.0e} MiB"] = furthest(ours, trained(make_net(), summed, everyone, world))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_every_loop_equals_one_process_and_pytorchs_wrapper(world: int) -> None:
    for found in run_ranks(all_loops, world):
        assert len(found) == 16
        assert {name: diff for name, diff in found.items() if not diff <= 1e-6} == {}
