"""`Stage` and `Schedule`: a user's own modules in every schedule against one process, with data parallelism, and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks.kit import run_ranks
from shardwright import DataParallel, Layout, Mesh, Schedule, Stage
from shardwright.errors import ConfigError, RankError
from shardwright.launch import RankEnv
from shardwright.parallel.module_executor import ModuleExecutor
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.make import gpipe
from shardwright.schedule.passes import split_backward

WIDTHS = (5, 7, 4, 6, 3, 8, 5, 4, 2)
ROWS, TOKENS = 20, 3
Values = dict[str, Tensor]


class Block(nn.Module):
    """x (n, t, I), mask (n, t), side (n) fp32 -> the same with O features; every second block leaves ``side`` unused."""

    def __init__(self, index: int) -> None:
        super().__init__()
        inputs, outputs = WIDTHS[index : index + 2]
        self.uses_side = index % 2 == 1
        self.up, self.again = nn.Linear(inputs, outputs), nn.Linear(outputs, outputs, bias=False)
        self.norm, self.shift = nn.LayerNorm(outputs), nn.Parameter(torch.randn(outputs))
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor, mask: Tensor, side: Tensor) -> tuple[Tensor, ...]:
        x = self.norm(torch.tanh(self.up(x))) * mask[..., None]
        x = self.again(torch.tanh(self.again(x))) + self.shift
        if self.uses_side:
            x = x + side[:, None, None]
        return x, mask, x.mean((1, 2)).float()


class Last(Block):
    """As `Block`, with the mean over tokens as logits (n, O)."""

    def forward(self, x: Tensor, mask: Tensor, side: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, mask, side)[0].mean(1)


def blocks(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [(Last if index == num_stages - 1 else Block)(index).double() for index in range(num_stages)]


def batch(step: int, rows: int = ROWS) -> tuple[tuple[Tensor, ...], Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, TOKENS, WIDTHS[0], generator=generator, dtype=torch.float64)
    mask = torch.randint(2, (rows, TOKENS), generator=generator)
    target = torch.randint(2, (rows,), generator=generator)
    return (x, mask, torch.randn(rows, generator=generator)), target


def loss_of(reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: F.cross_entropy(output[:, :2], target, reduction=reduction)


def gradients(modules: dict[int, nn.Module]) -> Values:
    found = {f"{index}.{name}": p.grad for index, m in modules.items() for name, p in m.named_parameters()}
    return {name.replace(".module.", "."): grad.clone() for name, grad in found.items() if grad is not None}


@dataclass
class Outcome:
    """After each of two steps and an evaluation: gradients, loss, output."""

    gradients: list[Values]
    losses: list[Tensor]
    outputs: list[Tensor]
    late: bool = False
    """Whether no weight of a linear layer had a gradient before the first W, and its bias had one."""


def alone(num_stages: int, reduction: str = "mean") -> Outcome:
    """One process, whole batches; the last step is evaluated once more."""
    modules = blocks(num_stages)
    found = Outcome([], [], [])
    for step in (0, 1):
        values, target = batch(step)
        for module in modules:
            module.zero_grad()
            values = module(*values)
        loss = loss_of(reduction)(values, target)
        loss.backward()
        found.gradients.append(gradients(dict(enumerate(modules))))
        found.losses.append(loss.detach())
        found.outputs.append(values.detach())
    for kept in (found.gradients, found.losses, found.outputs):
        kept.append(kept[-1])  # what an evaluation leaves and finds
    return found


def furthest(got: Values, want: Values) -> float:
    """The largest difference relative to the largest value; infinite for other names."""
    if got.keys() != want.keys():
        return float("inf")
    scale = max(value.abs().max().item() for value in want.values())
    return max((got[name] - value).abs().max().item() for name, value in want.items()) / scale


# ------------------------------------------------------------------------------------------ every schedule


@dataclass
class Case:
    schedule: Any
    pp: int
    num_stages: int
    microbatches: int
    comm: str = "auto"
    reduction: str = "mean"


FILE = "rank 0: F0.0 F0.1 B0.1 B0.0 W0.0 W0.1\nrank 1: F1.0 F1.1 B1.1 W1.1 BW1.0\n"
CASES = {
    "gpipe": Case("gpipe", 2, 2, 4),
    "1f1b": Case("1f1b", 2, 2, 5),
    "1f1b, sum": Case("1f1b", 2, 2, 4, reduction="sum"),
    "1f1b, one micro-batch": Case("1f1b", 2, 2, 1),
    "interleaved": Case("interleaved", 2, 4, 4),
    "zb_h1": Case("zb_h1", 2, 2, 4),
    "interleaved_zb": Case("interleaved_zb", 2, 6, 4),
    "zb_v": Case("zb_v", 2, 4, 5),
    "dualpipe_v": Case("dualpipe_v", 2, 4, 4),
    "file": Case("file:{file}", 2, 2, 2),
    "data": Case(split_backward(gpipe(2, 4)), 2, 2, 4),
    "gpipe over gloo": Case("gpipe", 2, 2, 20, "gloo"),
    "zb_v over gloo": Case("zb_v", 2, 4, 10, "gloo"),
    "1f1b of four": Case("1f1b", 4, 4, 5),
    "zb_v of four": Case("zb_v", 4, 8, 10),
    "interleaved_zb of four over gloo": Case("interleaved_zb", 4, 8, 10, "gloo"),
    "dualpipe_v of four over gloo": Case("dualpipe_v", 4, 8, 10, "gloo"),
    "alone": Case("zb_h1", 1, 1, 4),
}
SPLIT = ("zb_h1", "interleaved_zb", "zb_v", "data", "zb_v of four")


def run_case(mesh: Mesh, case: Case) -> Outcome:
    held = Schedule.stages_of(case.schedule, case.num_stages, mesh)
    modules = {index: module for index, module in enumerate(blocks(case.num_stages)) if index in held}
    stages = [Stage(module, index, case.num_stages) for index, module in modules.items()]
    loss_fn = loss_of(case.reduction)
    schedule = Schedule(case.schedule, stages, case.microbatches, mesh, loss_fn, loss_reduction=case.reduction)
    found = Outcome([], [], [])
    seen: list[bool] = []

    def on_action(action: Action) -> None:
        if action.kind is Kind.W and not seen:
            up = modules[action.stage].up
            seen.append(up.weight.grad is None and up.bias.grad is not None)

    schedule.executor.on_action = on_action
    for step in (0, 1, None):
        for module in modules.values() if step is not None else ():
            module.zero_grad()
        losses: list[Tensor] = []
        x, target = batch(1 if step is None else step)
        with torch.set_grad_enabled(step is not None):
            output = schedule.step(x, target=target, losses=losses)
        if output is not None:
            found.outputs.append(output)
            found.losses.append(torch.stack(losses).sum() / (1 if case.reduction == "sum" else len(losses)))
            assert len(losses) == case.microbatches
        found.gradients.append(gradients(modules))
    found.late = bool(seen) and all(seen)
    return found


def run_cases(env: RankEnv, cases: dict[str, Case], file: str) -> dict[str, Outcome]:
    meshes: dict[str, Mesh] = {}
    found = {}
    for label, case in cases.items():
        if case.comm not in meshes:
            layout = Layout(pp=case.pp, comm=case.comm)
            meshes[case.comm] = Mesh.distributed(layout, env.rank, env.timeout_s) if case.pp > 1 else Mesh.solo()
        if isinstance(case.schedule, str):
            case.schedule = case.schedule.format(file=file)
        found[label] = run_case(meshes[case.comm], case)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    file = tmp_path_factory.mktemp("schedule") / "own.txt"
    file.write_text(FILE)
    found: dict[str, list[Outcome]] = {}
    for pp in (1, 2, 4):
        cases = {label: case for label, case in CASES.items() if case.pp == pp}
        results = run_ranks(run_cases, pp, cases, str(file), time_limit=100.0)
        found |= {label: [rank[label] for rank in results] for label in cases}
    return found


@pytest.mark.parametrize("label", CASES)
def test_a_schedule_computes_what_one_process_does(label: str, outcomes: dict[str, list[Outcome]]) -> None:
    case = CASES[label]
    want, ranks = alone(case.num_stages, case.reduction), outcomes[label]
    for step, expected in enumerate(want.gradients):
        got: Values = {}
        for rank in ranks:
            assert not got.keys() & rank.gradients[step].keys()
            got |= rank.gradients[step]
        assert furthest(got, expected) < 1e-12
    (last,) = [rank for rank in ranks if rank.losses]
    for got_loss, loss in zip(last.losses, want.losses, strict=True):
        assert got_loss.item() == pytest.approx(loss.item(), rel=1e-12)
    for got_output, output in zip(last.outputs, want.outputs, strict=True):
        assert (got_output - output).abs().max().item() < 1e-12


@pytest.mark.parametrize("label", SPLIT)
def test_weight_gradients_of_linear_layers_wait_for_their_w(label: str, outcomes: dict[str, list[Outcome]]) -> None:
    for rank in outcomes[label]:
        assert rank.late


# ------------------------------------------------------------------------------------------ tensors of every kind


class Sends(nn.Module):
    """x (n, 4) -> tensors of many dtypes and shapes, one number and nothing at all among them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * self.weight
        pairs = torch.view_as_complex(x.view(-1, 2, 2))
        return [x.t(), x > 0, x[:0], pairs.conj(), x.sum(), x.bfloat16(), x.to(torch.int8)]


class Takes(nn.Module):
    """What `Sends` returns -> two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        x, positive, nothing, pairs, total, rough, whole = tensors
        y = x.t() * self.weight * positive + torch.view_as_real((pairs * pairs).resolve_conj()).flatten(1)
        return y + total + rough + whole + nothing.sum(), total


def two_losses(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    return (output[0] - target[0]).square().mean() + (output[1] - target[1].sum()).square()


def run_kinds(env: RankEnv, comm: str) -> tuple[list[float], Any]:
    mesh = Mesh.distributed(Layout(pp=2, comm=comm), env.rank, env.timeout_s)
    module = (Sends, Takes)[mesh.pp.rank]()
    schedule = Schedule("1f1b", Stage(module, mesh.pp.rank, 2), 2, mesh, two_losses)
    output = schedule.step(kinds_input(), target=(kinds_input() / 2, torch.arange(6.0)))
    return module.weight.grad.tolist(), output


def kinds_input() -> Tensor:
    return torch.linspace(-2, 3, 24, dtype=torch.float64).view(6, 4)


@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_tensors_of_any_shape_and_dtype_go_from_stage_to_stage(comm: str) -> None:
    sends, takes = Sends(), Takes()
    outputs = []
    for x, number in zip(kinds_input().chunk(2), torch.arange(6.0).chunk(2), strict=True):
        output = takes(*sends(x))
        (two_losses(output, (x / 2, number)) / 2).backward()
        outputs.append(output)
    first, (second, (whole, numbers)) = run_ranks(run_kinds, 2, comm)
    assert sends.weight.grad is not None and takes.weight.grad is not None
    assert first == (pytest.approx(sends.weight.grad.tolist(), rel=1e-12), None)
    assert second == pytest.approx(takes.weight.grad.tolist(), rel=1e-12)
    assert torch.equal(whole, torch.cat([output[0] for output in outputs]))
    assert torch.equal(numbers, torch.stack([output[1] for output in outputs]))


# ------------------------------------------------------------------------------------------ with data parallelism


@dataclass
class Replicated:
    schedule: str
    num_stages: int
    reduction: str
    zero: int = 0


REPLICATED = {
    "1f1b": Replicated("1f1b", 2, "mean"),
    "zb_h1": Replicated("zb_h1", 2, "sum"),
    "zb_v": Replicated("zb_v", 4, "mean"),
    "1f1b, ZeRO-1": Replicated("1f1b", 2, "mean", zero=1),
    "zb_v, ZeRO-3": Replicated("zb_v", 4, "mean", zero=3),
}


def run_replicated(env: RankEnv, cases: dict[str, Replicated]) -> dict[str, Any]:
    """Two steps that add up; the gradients after each, and how many reductions there were for each bucket."""
    mesh = Mesh.distributed(Layout(dp=2, pp=2), env.rank, env.timeout_s)
    found: dict[str, Any] = {}
    for label, case in cases.items():
        held = Schedule.stages_of(case.schedule, case.num_stages, mesh)
        modules: dict[int, Any] = {
            index: DataParallel(module, mesh, zero=case.zero, loss_reduction=case.reduction, bucket_mb=1e-4)
            for index, module in enumerate(blocks(case.num_stages))
            if index in held
        }
        stages = [Stage(module, index, case.num_stages) for index, module in modules.items()]
        loss_fn = loss_of(case.reduction)
        schedule = Schedule(case.schedule, stages, 5, mesh, loss_fn, loss_reduction=case.reduction)
        steps, counts = [], set()
        for step in (0, 1, None):
            x, target = batch(1 if step is None else step)
            mine = [tensor.chunk(2)[mesh.dp.rank] for tensor in (*x, target)]
            mesh.recorder.take()
            with torch.set_grad_enabled(step is not None):
                schedule.step(tuple(mine[:3]), target=mine[3])
            reductions = sum(e.count for e in mesh.recorder.take().entries.values() if e.phase == "reduce")
            counts.add((step is None, reductions, sum(len(m.timings) for m in modules.values())))
            named = {index: m.buckets.named("gradients") for index, m in modules.items()}  # put together from shards
            steps.append(
                {f"{index}.{name}": grad.clone() for index, all_ in named.items() for name, grad in all_.items()}
            )
        found[label] = steps, counts
    return found


@pytest.fixture(scope="module")
def replicated() -> list[dict[str, Any]]:
    return run_ranks(run_replicated, 4, REPLICATED, time_limit=100.0)


@pytest.mark.parametrize("label", REPLICATED)
def test_stages_that_are_data_parallel_reduce_once_a_step(label: str, replicated: list[dict[str, Any]]) -> None:
    case = REPLICATED[label]
    want = alone(case.num_stages, case.reduction).gradients
    added = {name: want[0][name] + want[1][name] for name in want[0]}
    for step, expected in enumerate((want[0], added, added)):
        seen: set[str] = set()
        for rank in replicated:
            got = {name: grad for name, grad in rank[label][0][step].items() if ".never." not in name}
            assert furthest(got, {name: expected[name] for name in got}) < 1e-12
            seen |= got.keys()
        assert seen == expected.keys()
    for rank in replicated:
        training, evaluation = sorted(rank[label][1])
        assert training[1] == training[2] > 0 and evaluation[1] == 0


# ------------------------------------------------------------------------------------------ what is refused


def solo(schedule: Any = "1f1b", num_stages: int = 1, microbatches: int = 2, **options: Any) -> Schedule:
    options.setdefault("loss_fn", nn.MSELoss())
    return Schedule(schedule, Stage(nn.Linear(2, 2), 0, num_stages), microbatches, Mesh.solo(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Stage(nn.Linear(2, 2), 2, 2), "stage 2 is not one of num_stages=2; stages are 0 to 1"),
        (lambda: Stage(torch.tanh, 0, 1), "stage 0: needs an nn.Module"),  # type: ignore[arg-type]
        (lambda: solo(num_stages=2), "is for num_stages=1, and num_stages=2 was given"),
        (lambda: solo(gpipe(2, 2), num_stages=2), "is for pp=2, and pp=1 was given"),
        (lambda: solo(gpipe(1, 3)), "is for microbatches=3, and microbatches=2 was given"),
        (lambda: solo("1f2b"), "did you mean"),
        (lambda: solo(microbatches=0), "microbatches=0 must be at least 1"),
        (lambda: solo(loss_fn=None), r"the last stage \(0\) needs a loss; give Schedule\(..., loss_fn=\)"),
        (lambda: solo(loss_reduction="max"), "use 'mean' or 'sum'"),
        (lambda: Schedule("1f1b", [], 2, Mesh.solo()), "no stage was given"),
        (lambda: solo().step(target=torch.ones(4, 2)), "needs x, the batch, where stage 0 is"),
        (lambda: solo().step(torch.ones(4, 2)), r"needs target= where the last stage \(0\) is"),
        (lambda: solo().step(torch.ones(3, 2), target=torch.ones(3, 2)), "x has 3 rows .* give a multiple of 2"),
        (lambda: solo().step(torch.ones(4, 2), target=torch.ones(3, 2)), "target has 3 rows"),
        (lambda: solo().step(torch.ones(()), target=torch.ones(4, 2)), "x has 0 rows"),
        (lambda: solo().step((), target=torch.ones(4, 2)), "x must be a tensor or a tuple of tensors"),
        (
            lambda: solo(loss_fn=nn.MSELoss(reduction="none")).step(torch.ones(4, 2), target=torch.ones(4, 2)),
            r"loss_fn returned a tensor of shape \(2, 2\); it must be one number",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_is_needed(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def message_of(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        make()
    return str(error.value)


def refused(env: RankEnv) -> list[str]:
    """What each rank of two is told when one or both ask for what does not fit."""
    mesh = Mesh.distributed(Layout(pp=2), env.rank, env.timeout_s)
    own, other = mesh.pp.rank, 1 - mesh.pp.rank

    def make(name: str, indices: Sequence[int], num_stages: int = 2, microbatches: int = 2, **options: Any) -> Schedule:
        stages = [Stage(nn.Linear(2, 2), index, num_stages) for index in indices]
        return Schedule(name, stages, microbatches, mesh, options.get("loss_fn", nn.MSELoss()))

    return [
        message_of(lambda: make("1f1b", [other])),
        message_of(lambda: make("1f1b", [0])),  # right on rank 0
        message_of(lambda: make("zb_v", [own], 4)),
        message_of(lambda: make("interleaved", [own], 3)),
        message_of(lambda: make("1f1b", [own], loss_fn=None)),
        message_of(lambda: make("1f1b", [own], microbatches=2 + own)),
        message_of(lambda: make("1f1b" if own else "gpipe", [own])),
    ]


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(refused, 2)
    assert "stage 1 belongs on pipeline rank 1 under schedule 1f1b, and this is rank 0; build stage 0 here" in first[0]
    assert "stage 0 belongs on pipeline rank 0" in second[0]
    assert first[1].startswith("pipeline rank 1: stage 0 belongs on pipeline rank 0") and second[1] in first[1]
    assert "rank 0 holds stages 0 and 3 under schedule zb_v, given are stage 0" in first[2]
    assert "rank 1 holds stages 1 and 2 under schedule zb_v, given are stage 1" in second[2]
    assert first[3] == second[3] and "needs a multiple of 2 stages, 4 or more; num_stages=3" in first[3]
    assert first[4].startswith("pipeline rank 1: the last stage (1) needs a loss") and second[4] in first[4]
    for message in (*first[5:], *second[5:]):
        assert message.startswith("pipeline rank 1 has another schedule than rank 0")


class Wider(nn.Module):
    """x (n, 4), of the third call on with one row less."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x[1:] if self.calls > 2 else x


def other_shape(env: RankEnv, comm: str, unchecked: bool) -> None:
    mesh = Mesh.distributed(Layout(pp=2, comm=comm), env.rank, env.timeout_s)
    if unchecked and env.rank == 0:
        ModuleExecutor._check_forms = lambda self, action, y: (
            self._forms.setdefault(  # type: ignore[method-assign]
                action.stage, tuple((tuple(tensor.shape), tensor.dtype) for tensor in y)
            )
            and None
        )
    schedule = Schedule("1f1b", Stage((Wider(), nn.Linear(4, 4))[mesh.pp.rank], mesh.pp.rank, 2), 4, mesh, nn.MSELoss())
    schedule.step(torch.ones(8, 4), target=torch.ones(8, 4))


@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_a_stage_that_returns_another_shape_is_named_with_action_and_micro_batch(comm: str) -> None:
    message = (
        r"stage 0, action F0\.2, micro-batch 2: the module returned \(1, 4\) float32, and \(2, 4\) float32 at first"
    )
    with pytest.raises(ConfigError, match=message):
        run_ranks(other_shape, 2, comm, False)


def test_a_receive_of_another_shape_names_stage_action_and_micro_batch() -> None:
    with pytest.raises(RankError, match=r"stage 1, action RECV_F1\.2, micro-batch 2"):
        run_ranks(other_shape, 2, "auto", True)
