"""`DataParallel` around a foreign module, against PyTorch's wrapper and one process, and the smallest complete job."""

from __future__ import annotations

import os
import re
import runpy
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


def accumulated(
    module: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: Sequence[int], world: int
) -> None:
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


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    """What two ranks found in the cases below, one after another."""
    return run_ranks(all_cases, 2)


def all_cases(env: RankEnv) -> dict[str, Any]:
    return {case.__name__: case(env) for case in (all_loops, with_hooks, with_buffers, odd_modules, after_a_failure)}


def test_every_loop_on_two_ranks_equals_one_process_and_pytorchs_wrapper(on_two_ranks: list[dict[str, Any]]) -> None:
    for found in on_two_ranks:
        assert len(found["all_loops"]) == 16
        assert {name: diff for name, diff in found["all_loops"].items() if not diff <= 1e-6} == {}


def test_every_loop_on_three_ranks_does_too() -> None:
    for found in run_ranks(all_loops, 3):
        assert {name: diff for name, diff in found.items() if not diff <= 1e-6} == {}


# ---------------------------------------------------------------------------------------------- hooks and buckets


def halves(gradients: Tensor, comms: Sequence[Comm], name: str) -> None:
    for comm in comms:
        comm.all_reduce(gradients, name=name)
    gradients.div_(2 * num_ranks(comms))


def with_hooks(env: RankEnv) -> dict[str, Any]:
    """Gradients of one backward under each hook, and the bytes that its buckets sent."""
    found: dict[str, Any] = {}
    hooks = {
        "plain": AllReduce("mean"),
        "fp16": Compressed(torch.float16, "mean"),
        "bf16": Compressed(torch.bfloat16, "mean"),
        "function": FunctionHook(halves, reduction="mean"),
    }
    for name, hook in hooks.items():
        mesh = mesh_of(env)
        model = DataParallel(make_net(), mesh, comm_hook=hook)
        mesh.recorder.take()
        mean_loss(model, 0, 0, [env.rank]).backward()
        found[name] = gradients(model), mesh.recorder.take().total_bytes
    large = DataParallel(nn.Linear(1, 1, bias=False), mesh_of(env), comm_hook=Compressed(torch.float16, "mean"))
    large(torch.full((1, 1), 40000.0)).sum().backward()  # the sum of two is beyond fp16
    found["large"] = gradients(large)["weight"].item()
    return found


def test_hooks_compress_or_run_the_users_function(on_two_ranks: list[dict[str, Any]]) -> None:
    first, second = (found["with_hooks"] for found in on_two_ranks)
    plain, full_bytes = first["plain"]
    num_elements = sum(value.numel() for value in plain.values())
    assert full_bytes == 4 * (num_elements + num_elements % 2)
    for name, tolerance in (("fp16", 1e-3), ("bf16", 1e-2)):
        compressed, sent = first[name]
        assert 0 < furthest([compressed], [plain]) < tolerance
        assert sent == full_bytes // 2
    assert furthest([first["function"][0]], [{name: value / 2 for name, value in plain.items()}]) < 1e-6
    assert first["large"] == 40000.0
    for name in ("plain", "fp16", "bf16", "function"):
        assert all(torch.equal(first[name][0][key], second[name][0][key]) for key in plain)


class Branches(nn.Module):
    """Two layers after one another, in the order that the caller asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


def in_own_order(env: RankEnv, orders: Sequence[Sequence[int]]) -> tuple[list[str], dict[str, float], list[float]]:
    launched: list[str] = []

    def note(gradients: Tensor, comms: Sequence[Comm], name: str) -> Any:
        launched.append(name)
        return AllReduce().start(gradients, comms, name)

    torch.manual_seed(env.rank)  # other values on each rank until they are wrapped
    model = DataParallel(
        Branches(), mesh_of(env), bucket_mb=TINY_BUCKET, comm_hook=FunctionHook(note, "sum"), loss_reduction="sum"
    )
    model(torch.ones(1, 4), orders[env.rank]).sum().backward()
    sums = {name: value.sum().item() for name, value in gradients(model).items()}
    ends = [timing.end - timing.ready for timing in model.timings]
    return launched, sums, ends


def test_buckets_are_launched_in_one_order_though_ranks_use_layers_in_another() -> None:
    orders = [(0, 1, 2, 3), (3, 1, 0), (2,)]
    results = run_ranks(in_own_order, 3, orders)
    names = results[0][0]
    assert names == [f"gradients.{index}" for index in range(len(names))] and len(names) >= 4
    assert all(launched == names for launched, _, _ in results)
    assert all(sums == results[0][1] for _, sums, _ in results)
    assert all(value != 0 for value in results[0][1].values())  # also of layer 2, which rank 1 does not use
    assert all(end >= 0 for _, _, ends in results for end in ends)


# ---------------------------------------------------------------------------------------------- state of the module


class Counted(nn.Module):
    """Running statistics, an integer and a boolean buffer; a frozen weight; strides that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.out = nn.Linear(3, 2)
        self.out.bias.requires_grad_(False)
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).mean((2, 3)))


def with_buffers(env: RankEnv) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("ours", "theirs"):
        torch.manual_seed(env.rank)
        module = Counted()
        with torch.no_grad():
            module.out.bias.fill_(env.rank + 1.0)
            module.flag.fill_(env.rank == 0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)  # made before the module is wrapped
        model: nn.Module = DataParallel(module, mesh_of(env)) if name == "ours" else DistributedDataParallel(module)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + env.rank)
            optimizer.zero_grad()
            (model(torch.randn(4, 2, 5, 5, generator=generator)) ** 2).sum().backward()
            optimizer.step()
        found[name] = {key: value.clone() for key, value in model.state_dict().items()}
    return found


def test_parameters_and_buffers_are_rank_0s_at_the_start_and_after_each_backward(
    on_two_ranks: list[dict[str, Any]],
) -> None:
    first, second = (found["with_buffers"] for found in on_two_ranks)
    assert first["ours"].keys() == first["theirs"].keys()
    for key, value in first["ours"].items():
        assert torch.equal(value, second["ours"][key]), key
        torch.testing.assert_close(value, first["theirs"][key], rtol=1e-6, atol=1e-6)
    assert first["ours"]["module.out.bias"].tolist() == [1.0, 1.0]
    assert first["ours"]["module.flag"].tolist() == [True, True]
    assert first["ours"]["module.norm.num_batches_tracked"].item() == 3


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(x.bfloat16()).float())


class Reentrant(nn.Module):
    """Each layer's backward is a backward pass of its own inside the outer one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.layers[-1](x)


def odd_modules(env: RankEnv) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mixed = DataParallel(Mixed(), mesh_of(env))
    mixed(torch.ones(2, 3) * (env.rank + 1)).sum().backward()
    found["mixed"] = {name: (grad.dtype, grad.float().sum().item()) for name, grad in gradients(mixed).items()}

    rows = torch.arange(8.0).reshape(2, 4).requires_grad_()
    alone = Reentrant()
    (alone(rows).square().sum() / 2).backward()
    for reduction, divisor in (("mean", 1), ("sum", 2)):
        model = DataParallel(Reentrant(), mesh_of(env), loss_reduction=reduction)
        (model(rows[env.rank : env.rank + 1]).square().sum() / divisor).backward()
        found[f"reentrant {reduction}"] = furthest([gradients(model)], [gradients(alone)])

    sparse = DataParallel(nn.Embedding(4, 2, sparse=True), mesh_of(env))
    sparse(torch.tensor([env.rank])).sum().backward()
    found["sparse"] = gradients(sparse)["weight"].tolist()

    frozen_later = DataParallel(make_net(), mesh_of(env))
    frozen_later.module.side.requires_grad_(False)
    mean_loss(frozen_later, 0, 0, [env.rank]).backward()
    found["frozen later"] = sorted(set(dict(frozen_later.module.named_parameters())) - set(gradients(frozen_later)))
    return found


def test_mixed_dtypes_nested_backwards_sparse_gradients_and_late_freezing(on_two_ranks: list[dict[str, Any]]) -> None:
    for found in (results["odd_modules"] for results in on_two_ranks):
        assert {name: dtype for name, (dtype, _) in found["mixed"].items()} == {
            "low.weight": torch.bfloat16,
            "low.bias": torch.bfloat16,
            "high.weight": torch.float32,
            "high.bias": torch.float32,
        }
        assert found["mixed"]["high.bias"][1] == 2.0
        assert found["reentrant mean"] < 1e-6 and found["reentrant sum"] < 1e-6
        assert found["sparse"] == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]
        assert found["frozen later"] == ["side.bias", "side.weight"]


def fail(gradient: Tensor) -> None:
    raise ZeroDivisionError


def after_a_failure(env: RankEnv) -> float:
    """How far the gradients of a backward are off after one that raised on all ranks, with buckets on their way."""
    model = DataParallel(make_net(), mesh_of(env), bucket_mb=TINY_BUCKET)
    handle = model.module.first.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        mean_loss(model, 0, 0, [env.rank]).backward()
    handle.remove()
    model.zero_grad()
    mean_loss(model, 0, 0, [env.rank]).backward()
    alone = make_net()
    mean_loss(alone, 0, 0, range(env.world_size)).backward()
    return furthest([gradients(model)], [gradients(alone)])


def test_a_backward_that_failed_leaves_nothing_behind(on_two_ranks: list[dict[str, Any]]) -> None:
    assert all(found["after_a_failure"] < 1e-6 for found in on_two_ranks)


# ---------------------------------------------------------------------------------------------- what is refused


def refuse(message: str, error: type[Exception], call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()


def test_what_cannot_be_right_is_refused() -> None:
    net, mesh = make_net(), Mesh.solo()
    refuse("zero=4 is not a ZeRO stage", LayoutError, lambda: DataParallel(net, mesh, zero=4))
    refuse("loss_reduction='max'", ConfigError, lambda: DataParallel(net, mesh, loss_reduction="max"))  # type: ignore[arg-type]
    refuse("need a mean.* sums", ConfigError, lambda: DataParallel(net, mesh, comm_hook=AllReduce("sum")))
    refuse(
        "need a sum.* averages",
        ConfigError,
        lambda: DataParallel(net, mesh, comm_hook=Compressed(torch.bfloat16, "mean"), loss_reduction="sum"),
    )
    refuse("'halves' does not say", ConfigError, lambda: DataParallel(net, mesh, comm_hook=halves))  # type: ignore[arg-type]
    refuse("nothing to reduce", ConfigError, lambda: DataParallel(nn.ReLU(), mesh))

    model = DataParallel(make_net(), mesh)
    loss = mean_loss(model, 0, 0, [0])
    refuse("create_graph", ConfigError, lambda: torch.autograd.backward(loss, create_graph=True))
    model.double()
    refuse("became torch.float64 on cpu after", ConfigError, lambda: model(torch.ones(1, 5).double()).sum().backward())


def with_another_module(env: RankEnv) -> None:
    DataParallel(Net(nn.Linear(5, 7, bias=env.rank == 0)), mesh_of(env))


def test_ranks_with_different_modules_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 is not that of rank 0 .*'first\.bias'"):
        run_ranks(with_another_module, 2)


def test_one_process_is_not_special() -> None:
    wrapped, plain = make_net(), make_net()
    ours = trained(DataParallel(wrapped, Mesh.solo(), comm_hook=FunctionHook(halves, "mean")), one_batch, [0], 1)
    assert furthest(ours[:1], [{name: value / 2 for name, value in trained(plain, one_batch, [0], 1)[0].items()}]) == 0


# ---------------------------------------------------------------------------------------------- the smallest whole job

CLASSIFIER = TESTS.parent / "examples" / "linear_classifier.py"


def losses_in(printed: str) -> list[float]:
    """The loss of each epoch, and the last one again."""
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]


def test_the_linear_classifier_learns_the_same_under_torchrun_as_alone(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(CLASSIFIER), run_name="__main__")
    alone = losses_in(capsys.readouterr().out)
    assert len(alone) == 5 and alone[0] > 4 and alone[-1] < 1
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(CLASSIFIER)], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert losses_in(done.stdout) == pytest.approx(alone, abs=2e-6)
