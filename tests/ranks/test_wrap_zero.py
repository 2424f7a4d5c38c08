"""`DataParallel` with sharded state around a module of one's own, against one process that has the whole batch."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks.kit import TESTS, run_ranks
from shardwright.comm.mesh import Mesh
from shardwright.comm.solo import SoloComm
from shardwright.core.layout import Layout
from shardwright.errors import ConfigError, RankError
from shardwright.launch import RankEnv
from shardwright.parallel.hooks import FunctionHook
from shardwright.parallel.units import unit_of_parameters
from shardwright.parallel.wrap import DataParallel

BATCH, STEPS = 24, 3


class Tower(nn.Module):
    """Odd sizes, a norm, a table that two units share, a frozen layer, one that is never used, and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 7)) for _ in range(3))
        self.fixed = nn.Linear(7, 7)
        self.fixed.requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(7, 11, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.recompute = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.out(self.norm(self.fixed(x))) * self.scale  # type: ignore[no-any-return]


UNITS = ["embed", *(f"blocks.{index}" for index in range(3)), "fixed", "norm", "unused", "out"]
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "1": ({"zero": 1}, "dp=2"),
    "2, small buckets": ({"zero": 2, "bucket_mb": 1e-4}, "dp=2"),
    "3": ({"zero": 3}, "dp=2"),
    "3, units": ({"zero": 3, "units": UNITS}, "dp=2"),
    "3, no prefetch, recomputed": ({"zero": 3, "units": UNITS, "prefetch": 0}, "dp=2"),
    "3, kept": ({"zero": 3, "units": UNITS, "prefetch": 3, "reshard": "after_backward"}, "dp=2"),
    "3, sum": ({"zero": 3, "loss_reduction": "sum"}, "dp=2,comm=gloo"),
    "2 of 3": ({"zero": 2}, "dp=3"),
    "3, replicas": ({"zero": 3, "units": UNITS}, "dp=4,dp_replicate=2"),
    "3, alone": ({"zero": 3, "units": UNITS}, "dp=1"),
}


def samples(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (BATCH,), generator=generator), torch.randint(0, 11, (BATCH,), generator=generator)


def optimizer_for(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01, fused=name == "fused")


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    part: Callable[[Tensor], Tensor],
    total: int | None,
    clip: Callable[[], Tensor],
) -> list[float]:
    """Three steps, the second over two backward passes of which the first is not synchronised where that is known."""
    norms = []
    for step in range(STEPS):
        tokens, targets = (part(value) for value in samples(step))
        halves = [slice(0, None)] if step != 1 else [slice(0, len(tokens) // 2), slice(len(tokens) // 2, None)]
        optimizer.zero_grad()
        for half in halves:
            loss = F.cross_entropy(model(tokens[half]), targets[half], reduction="sum")
            loss = loss / (total or len(tokens))
            if isinstance(model, DataParallel) and half is not halves[-1]:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        norms.append(float(clip()))
        optimizer.step()
    return norms


def wrapped(env: RankEnv, labels: list[str], optimizer: str) -> dict[str, dict[str, Any]]:
    found = {}
    for label in labels:
        options, layout = CASES[label]
        mesh = Mesh.distributed(Layout.parse(layout), env.rank)
        tower = Tower().double() if optimizer == "adamw" else Tower()
        tower.recompute = "recomputed" in label
        if env.rank:
            with torch.no_grad():
                tower.scale.add_(1)  # parameters start as rank 0's
        model = DataParallel(tower, mesh, **options)
        rank, size = mesh.dp_cp.rank, mesh.dp_cp.size
        part = BATCH // size
        total = BATCH if "sum" in label else None
        norms = train(
            model,
            optimizer_for(optimizer, model.shards()),
            lambda value, rank=rank, part=part: value[rank * part : (rank + 1) * part],  # type: ignore[misc]
            total,
            lambda model=model: model.clip_grad_norm_(0.5),  # type: ignore[misc]
        )
        with torch.no_grad():
            output = model(samples(9)[0])
        storage = model.buckets.storage
        found[label] = {
            "norms": norms,
            "state": model.full_state_dict(),
            "output": output,
            "peak": dict(storage.peak),
            "left": dict(storage._now),
            "bytes": mesh.recorder.ledger.entries,
        }
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {}
    for world in (1, 2, 3, 4):
        labels = [label for label, (_, layout) in CASES.items() if Layout.parse(layout).world_size == world]
        ranks = run_ranks(wrapped, world, labels, "adamw", time_limit=120.0)
        results |= {label: [rank[label] for rank in ranks] for label in labels}
    return results


def reference(optimizer: str) -> tuple[list[float], dict[str, Tensor], Tensor]:
    tower = Tower().double() if optimizer == "adamw" else Tower()
    trained = [p for p in tower.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)  # the unused layer decays like the others
    made = optimizer_for(optimizer, trained)
    made.zero_grad = lambda set_to_none=False: [p.grad.zero_() for p in trained if p.grad is not None]  # type: ignore
    norms = train(tower, made, lambda value: value, BATCH, lambda: nn.utils.clip_grad_norm_(trained, 0.5))
    with torch.no_grad():
        return norms, tower.state_dict(), tower(samples(9)[0])


@pytest.mark.parametrize("label", CASES)
def test_sharded_state_trains_like_one_process(label: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """Also TE-02, TE-03 (a tied table), ZF-08 (a frozen layer), GN-11 (an unused one) and US-10 (sizes below the ranks)."""
    norms, state, output = reference("adamw")
    for rank in found[label]:
        assert rank["norms"] == pytest.approx(norms, rel=1e-9)
        assert rank["state"].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(rank["state"][name], value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(rank["output"], output, rtol=1e-9, atol=1e-12)
        assert torch.equal(rank["state"]["embed.weight"], rank["state"]["out.weight"])
        assert set(rank["left"].values()) <= {0}


def test_what_is_gathered_and_sent(found: dict[str, list[dict[str, Any]]]) -> None:
    whole = sum(p.numel() for p in Tower().parameters()) * 8
    units = {name: sum(p.numel() for p in Tower().get_submodule(name).parameters()) * 8 for name in UNITS}

    def gathers(label: str) -> int:
        entries = found[label][0]["bytes"].values()
        return sum(e.count for e in entries if e.verb == "all_gather" and e.tensor == "parameters.1")

    assert found["3, no prefetch, recomputed"][0]["peak"]["gathered"] < whole / 2
    assert found["3, kept"][0]["peak"]["gathered"] > whole - units["unused"] - 8 * 20
    assert found["3, kept"][0]["peak"]["gathered"] > found["3, units"][0]["peak"]["gathered"]
    assert gathers("2, small buckets") == STEPS  # before each forward that follows a step
    assert gathers("3, kept") < gathers("3, units")


def small_steps(env: RankEnv) -> list[Tensor]:
    """Every optimizer's updates are noticed, in fp32, from bf16 parameters, and without no_sync."""
    found = []
    for name in ("sgd", "adam", "fused"):
        mesh = Mesh.distributed(Layout.parse("dp=2"), env.rank)
        model = DataParallel(nn.Linear(3, 1, bias=False).to(torch.bfloat16), mesh, zero=2)
        optimizer = optimizer_for(name, model.shards())
        for _ in range(2):
            model(torch.ones(1, 3, dtype=torch.bfloat16) * (env.rank + 1)).sum().backward()
        found.append(torch.cat([shard.grad for shard in model.shards() if shard.grad is not None]))
        before = model.module.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.zeros(1, 3, dtype=torch.bfloat16))
        found.append((model.module.weight.detach() != before).all())
        assert all(shard.dtype == torch.float32 for shard in model.shards())
    return found


def test_updates_are_published_and_gradients_add_up() -> None:
    for rank, found in enumerate(run_ranks(small_steps, 2)):
        for gradient, changed in zip(found[::2], found[1::2], strict=True):
            assert gradient.tolist() == ([3.0, 3.0] if rank == 0 else [3.0, 0.0])  # the mean of 1 and 2, twice
            assert changed


def reductions(env: RankEnv, zero: int) -> list[tuple[str, int, int]]:
    mesh = Mesh.distributed(Layout.parse("dp=2,microbatches=4,accumulate=reduce"), env.rank)
    model = DataParallel(nn.Linear(8, 8), mesh, zero=zero)
    mesh.recorder.take()
    model(torch.ones(2, 8)).sum().backward()
    entries = mesh.recorder.take().entries.values()
    return [(e.verb, e.count, e.bytes) for e in entries if e.verb == "reduce_scatter"]


@pytest.mark.parametrize("zero", [2, 3])
def test_each_backward_reduces_once_whatever_the_meshs_layout_accumulates(zero: int) -> None:
    for sent in run_ranks(reductions, 2, zero):
        assert sent == [("reduce_scatter", 1, 72 * 4 // 2)]


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return (self.a(x) + self.b(x) if both else self.a(x)).sum()


def forked(env: RankEnv, zero: int) -> list[float]:
    mesh = Mesh.distributed(Layout.parse("dp=2"), env.rank, 5.0)
    model = DataParallel(Fork(), mesh, zero=zero, loss_reduction="sum")
    model(torch.ones(1, 3), env.rank == 1).backward()
    whole = [group.gathered([group.pieces[0].gradients]) for group in model.buckets.buckets]
    return sorted(float(gradient[: group.plan.numel].sum()) for gradient, group in zip(whole, model.buckets.buckets, strict=True))


def test_a_branch_that_one_rank_does_not_take() -> None:
    """ZF-09: its gradient is that of the others; a gather that others do not make ends with an error that names it."""
    assert run_ranks(forked, 2, 2) == [[9.0], [9.0]]  # 2 x 3 of a, 3 of b
    with pytest.raises(RankError, match=r"parameters\.|gradients\."):
        run_ranks(forked, 2, 3)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="give names as in named_modules"):
        unit_of_parameters(Tower(), ["block"])
    with pytest.raises(ConfigError, match="is a list of modules"):
        unit_of_parameters(Tower(), ["blocks"])
    with pytest.raises(ConfigError, match=r"lies in unit 'blocks\.1'"):
        unit_of_parameters(Tower(), ["blocks.1", "blocks.1.0"])
    with pytest.raises(ConfigError, match=r"with zero=0 give the optimizer module\.parameters"):
        DataParallel(nn.Linear(2, 2), Mesh.solo()).shards()
    sharded = DataParallel(nn.Linear(2, 2), Mesh.solo(), zero=2)
    with pytest.raises(ConfigError, match=r"give it model\.shards"):
        torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    for layout in ("offload=optimizer", "offload=params"):
        with pytest.raises(ConfigError, match="leave offload out of the layout"):
            DataParallel(nn.Linear(2, 2), Mesh(Layout.parse(layout), 0, lambda axis, groups: SoloComm(axis)), zero=2)
    hook = FunctionHook(lambda gradients, comms, name: None, "mean")
    with pytest.raises(ConfigError, match="give it a method scatter"):
        DataParallel(nn.Linear(2, 2), Mesh.solo(), zero=2, comm_hook=hook)


# ------------------------------------------------------------------------------------------ the program


def program(env: RankEnv) -> list[float]:
    mesh = Mesh.distributed(Layout(dp=env.world_size), env.rank) if env.world_size > 1 else Mesh.solo()
    losses: list[float] = runpy.run_path(str(TESTS.parent / "examples" / "sharded_encoder.py"))["train"](mesh)
    return losses


def test_the_sharded_encoder_learns_the_same_on_two_ranks_as_alone() -> None:
    (alone,) = run_ranks(program, 1)
    assert alone[-1] < alone[0] - 0.3
    for losses in run_ranks(program, 2):
        assert losses == pytest.approx(alone, rel=1e-4)
