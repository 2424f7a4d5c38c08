"""`ExpertParallel` inside `DataParallel` on real ranks, against one process that calls all experts on all tokens."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks.kit import run_ranks
from shardwright import DataParallel, ExpertParallel, Layout, Mesh, full_state_dict
from shardwright.errors import ConfigError
from shardwright.launch import RankEnv
from shardwright.ops.grouped import grouped_linear
from shardwright.ops.routing import RowGroups

pytestmark = pytest.mark.timeout(300)  # the first test makes the runs of all; on busy cores that may take minutes

DIM, HIDDEN, EXPERTS, TOP_K, STEPS = 6, 5, 4, 2, 3
TOKENS = 16
"""Of all ranks together."""


class Router(nn.Module):
    """Never chooses the last expert but one; ``drops`` every fifth choice; after a call it knows the scores."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.score, self.drops = nn.Linear(DIM, EXPERTS), drops

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        never = torch.tensor([0.0, 0.0, -torch.inf, 0.0], dtype=x.dtype)
        self.scores = (self.score(x) + never).softmax(-1)
        weights, expert_ids = self.scores.topk(TOP_K, dim=-1)
        if self.drops:
            dropped = (x[:, :1] * 1e6).long() % 5 == torch.arange(TOP_K)
            expert_ids, weights = expert_ids.masked_fill(dropped, EXPERTS), weights * ~dropped
        return expert_ids, weights


class Logits(nn.Linear):
    """The router of ``top_k``."""


class Expert(nn.Module):
    """An MLP that cannot work on nothing, and counts the rows that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: Tensor) -> Tensor:
        assert len(rows)
        self.seen += len(rows)
        y: Tensor = self.down(F.gelu(self.up(rows)))
        return y


class Constant(nn.Module):
    """What it returns does not come from its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(DIM))

    def forward(self, rows: Tensor) -> Tensor:
        return self.value.expand(len(rows), -1)


class Stacked(nn.Module):
    """All experts in two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM))
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN))

    def forward(self, rows: Tensor, groups: RowGroups) -> Tensor:
        return grouped_linear(F.gelu(grouped_linear(rows, self.up, groups)), self.down, groups)


class Model(nn.Module):
    """x (N, DIM) -> (N, DIM): experts between layers that all ranks have, or on the input itself."""

    def __init__(self, moe: nn.Module, first: bool) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.moe = moe
        self.inward = nn.Identity() if first else nn.Linear(DIM, DIM)
        self.outward = nn.Linear(DIM, DIM)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        y: Tensor = self.outward(torch.tanh(self.moe(x.view(1, *x.shape)))[0])
        return y


class Reference(nn.Module):
    """All experts on all tokens, weighed by what the router says; ``counts`` as `ExpertParallel` has them."""

    def __init__(self, router: nn.Module, experts: nn.Module, top_k: int | None) -> None:
        super().__init__()
        self.router, self.experts, self.top_k = router, experts, top_k

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        if self.top_k is None:
            expert_ids, weights = self.router(rows)
        else:
            weights, expert_ids = self.router(rows).softmax(-1).topk(self.top_k)
            weights = weights / (weights.sum(-1, keepdim=True) if self.top_k > 1 else 1)
        self.counts = torch.stack([(expert_ids == number).sum() for number in range(EXPERTS)])
        y = torch.zeros_like(rows)
        for number in range(EXPERTS):
            y = y + (weights * (expert_ids == number)).sum(1, keepdim=True) * self._expert(number, rows)
        return y.view(x.shape)

    def _expert(self, number: int, rows: Tensor) -> Tensor:
        if isinstance(self.experts, nn.ModuleList):
            return self.experts[number](rows)  # type: ignore[no-any-return]
        return F.gelu(rows @ self.experts.up[number].t()) @ self.experts.down[number].t()  # type: ignore[index,operator]


@dataclass(frozen=True)
class Case:
    """``given``: ``list`` or ``stacked`` of all experts, ``local`` a list or stack of this rank's only; ``uneven`` tokens
    of the ranks, with a loss that is summed; ``balance``: the router's own loss of what it chose and how often."""

    layout: str
    given: str = "list"
    top_k: int | None = None
    uneven: bool = False
    drops: bool = False
    first: bool = False
    balance: bool = False
    constant: bool = False
    wrap: dict[str, Any] = field(default_factory=dict)


CASES = {
    "two ranks": Case("dp=2,ep=2", balance=True),
    "whole experts": Case("dp=2"),
    "uneven, dropped": Case("dp=2,ep=2", uneven=True, drops=True),
    "whole experts, dropped": Case("dp=2", uneven=True, drops=True),
    "logits, k=2": Case("dp=2,ep=2", top_k=2, first=True),
    "logits, k=1": Case("dp=2,ep=2", "stacked", top_k=1),
    "first layer": Case("dp=2,ep=2", first=True, constant=True),
    "local experts": Case("dp=2,ep=2", "local"),
    "stacked": Case("dp=2,ep=2", "stacked", uneven=True),
    "local stack": Case("dp=2,ep=2", "local stacked"),
    "context": Case("cp=2,ep=2"),
    "in halves, once": Case("dp=2,ep=2,ep_overlap=on,ep_deduplicate=on", drops=True, uneven=True),
    "tensor": Case("tp=2,ep=2", balance=True, drops=True),
    "tensor, whole experts": Case("tp=2"),
    "shards, small buckets": Case("dp=2,ep=2", wrap={"zero": 1, "bucket_mb": 1e-4}),
    "copies": Case("dp=4,ep=2", balance=True),
    "copies, uneven": Case("dp=4,ep=2", uneven=True, drops=True),
    "copies, stacked, gloo": Case("dp=4,ep=2,comm=gloo", "stacked"),
    "one each": Case("dp=4,ep=4", constant=True, uneven=True),
    "copies, zero-1": Case("dp=4,ep=2", wrap={"zero": 1}),
    "copies, zero-2": Case("dp=4,ep=2", uneven=True, wrap={"zero": 2}),
    "copies, zero-3": Case("dp=4,ep=2", wrap={"zero": 3}),
    "copies, zero-3, units": Case(
        "dp=4,ep=2", drops=True, wrap={"zero": 3, "units": ["moe.router", "moe.experts", "outward"]}
    ),
    "replicas of shards": Case("dp=4,ep=2,dp_replicate=2", "stacked", wrap={"zero": 2}),
    "replicas of shards, uneven": Case("dp=4,ep=2,dp_replicate=2", uneven=True, wrap={"zero": 2}),
    "tensor and data": Case("tp=2,dp=2,ep=2", balance=True),
    "tensor and data, zero-2": Case("tp=2,dp=2,ep=4", uneven=True, drops=True, wrap={"zero": 2}),
    "tensor and data, zero-3": Case("tp=2,dp=2,ep=2", wrap={"zero": 3}),
}
UNEVEN = {2: [0, 13, 16], 4: [0, 5, 5, 14, 16]}
"""Where the tokens of each rank begin where they are uneven; a rank may have none."""


def parts_of(case: Case) -> tuple[nn.Module, nn.Module]:
    """The router and all experts, in fp64."""
    torch.manual_seed(3)
    router = Router(case.drops) if case.top_k is None else Logits(DIM, EXPERTS)
    made = [Constant() if case.constant and number == 1 else Expert() for number in range(EXPERTS)]
    return router.double(), (Stacked() if "stacked" in case.given else nn.ModuleList(made)).double()


def make_layer(case: Case, mesh: Mesh) -> ExpertParallel:
    router, experts = parts_of(case)
    own = ExpertParallel.local_experts(EXPERTS, mesh)
    if case.given == "local":
        return ExpertParallel(router, list(experts)[own.start : own.stop], mesh, num_experts=EXPERTS, top_k=case.top_k)  # type: ignore[arg-type]
    if case.given == "local stacked":
        for parameter in experts.parameters():
            parameter.data = parameter.data[own.start : own.stop].clone()
        return ExpertParallel(router, experts, mesh, num_experts=EXPERTS, top_k=case.top_k)
    return ExpertParallel(router, experts, mesh, top_k=case.top_k)


def samples(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(2, TOKENS, DIM, generator=generator, dtype=torch.float64)).unbind()


def losses_of(
    model: nn.Module, moe: Any, part: slice, step: int, case: Case, total: Callable[[], Tensor]
) -> list[Tensor]:
    """The mean over the tokens of ``part``, or their share of the mean over all, and what the router adds."""
    x, target = (whole[part] for whole in samples(step))
    losses = [(model(x) - target).square().sum() / (TOKENS if case.uneven else len(x))]
    if case.balance:  # scores are of the tokens that this rank has routed: with tp a part of x
        counts = total()
        losses.append(0.3 * (counts / counts.sum() * moe.router.scores.sum(0) / len(x)).sum())
    return losses


def train(model: nn.Module, moe: Any, case: Case, part: slice, total: Callable[[], Tensor], clip: Any) -> list[float]:
    """Losses of the rank's steps; the second is made of two backward passes, of which the first may not be synchronised."""
    trained = model.shards() if isinstance(model, DataParallel) and case.wrap.get("zero") else list(model.parameters())
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == 1:
            with model.no_sync() if isinstance(model, DataParallel) and not case.uneven else nullcontext():
                torch.stack(losses_of(model, moe, part, step + 50, case, total)).sum().backward()
        losses = losses_of(model, moe, part, step, case, total)
        torch.stack(losses).sum().backward()
        found.append(losses[0].item())
        clip()
        optimizer.step()
    return found


def difference(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape, (got.shape, want.shape)
    return float((got - want).abs().max()) if want.numel() else 0.0


def check(env: RankEnv, case: Case) -> dict[str, Any]:
    """How far losses, gradients, norms and the state after three steps are from those of one process."""
    mesh = Mesh.distributed(Layout.parse(case.layout), env.rank)
    router, experts = parts_of(case)
    alone = Model(Reference(router, experts, case.top_k), case.first)
    module = Model(make_layer(case, mesh), case.first)
    with torch.no_grad():  # copies start as those of the first rank that has them
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            tensor += mesh.edp.rank if ".experts." in name else mesh.dp_cp.rank
    model = DataParallel(module, mesh, loss_reduction="sum" if case.uneven else "mean", **case.wrap)
    bounds, index, size = UNEVEN[mesh.dp_cp.size] if case.uneven else [], mesh.dp_cp.rank, mesh.dp_cp.size
    bounds = bounds or [TOKENS * rank // size for rank in range(size + 1)]
    part = slice(bounds[index], bounds[index + 1])
    found: dict[str, Any] = {"norms": [], "gradients": 0.0}
    wanted: list[tuple[float, dict[str, Tensor]]] = []

    def clip_alone() -> None:
        gradients = {name: p.grad.clone() for name, p in alone.named_parameters() if p.grad is not None}
        wanted.append((float(nn.utils.clip_grad_norm_(alone.parameters(), 1.0)), gradients))

    def clip_ours() -> None:
        norm, gradients = wanted[len(found["norms"])]
        with mesh.recorder.aside():
            got = model.buckets.named("gradients")
        for name, value in got.items():
            want = gradients.get(name, torch.zeros_like(value))
            found["gradients"] = max(found["gradients"], difference(value, own_part(want, name, module.moe)))
        found["norms"].append(abs(float(model.clip_grad_norm_(1.0)) - norm))

    losses = train(alone, alone.moe, case, slice(0, TOKENS), lambda: alone.moe.counts, clip_alone)  # type: ignore
    ours = train(model, module.moe, case, part, module.moe.total_counts, clip_ours)
    summed = mesh.dp_cp.all_reduce(torch.tensor(ours, dtype=torch.float64), name="losses") / (
        1 if case.uneven else size
    )
    found["losses"] = difference(summed, torch.tensor(losses, dtype=torch.float64))
    found["counts"] = torch.equal(module.moe.total_counts(), alone.moe.counts)
    state = model.full_state_dict()
    if case.wrap.get("zero", 0) < 3:
        state = full_state_dict(module)
        assert state.keys() == alone.state_dict().keys()
    found["seen"] = {name: int(value) for name, value in module.named_buffers()}
    states = {name: own_part(alone.state_dict()[name], name, module.moe, value.shape) for name, value in state.items()}
    found["state"] = max(difference(value, states[name]) for name, value in state.items() if not name.endswith("seen"))
    return found


def own_part(whole: Tensor, name: str, moe: Any, shape: torch.Size | None = None) -> Tensor:
    """What this rank has of a stacked weight; other tensors as they are."""
    if whole.shape == shape or not re.search(r"experts\.(up|down)$", name):
        return whole
    own = ExpertParallel.local_experts(EXPERTS, moe.mesh)
    return whole[own.start : own.stop]


def check_all(env: RankEnv, labels: list[str]) -> dict[str, dict[str, Any]]:
    return {label: check(env, CASES[label]) for label in labels}


def bare(env: RankEnv) -> dict[str, Any]:
    """The layer without a wrapper, on tokens without a gradient: the worst difference, and the experts whose gradients are
    written zeros. Rank 1 has an expert that no token reaches, one that makes nothing of its rows, and nothing else."""
    mesh = Mesh.distributed(Layout.parse("dp=2,ep=2"), env.rank)
    torch.manual_seed(4)
    router, made = Router(False).double(), [Expert(), Expert(), Expert(), Constant()]
    experts = nn.ModuleList(made).double()
    alone = Reference(router, experts, None)
    layer = ExpertParallel(copy.deepcopy(router), copy.deepcopy(experts), mesh)
    x, _ = samples(0)
    alone(x[None]).square().sum().backward()
    layer(x[8 * env.rank : 8 * env.rank + 8]).square().sum().backward()
    wanted, zeros, worst = dict(alone.named_parameters()), set[str](), 0.0
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        if name.startswith("router"):
            mesh.dp.all_reduce(parameter.grad, name=name)
        if not parameter.grad.any():
            zeros.add(name.rpartition(".")[0])
        want = wanted[name].grad
        worst = max(worst, difference(parameter.grad, torch.zeros_like(parameter) if want is None else want))
    return {"worst": worst, "zeros": zeros}


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {}
    for world in (2, 4):
        labels = [label for label, case in CASES.items() if Layout.parse(case.layout).world_size == world]
        ranks = run_ranks(check_all, world, labels, time_limit=200.0)
        results |= {label: [rank[label] for rank in ranks] for label in labels}
    return results


@pytest.mark.parametrize("label", CASES)
def test_same_as_one_process(label: str, found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found[label]:
        assert max(rank["losses"], rank["gradients"], rank["state"], *rank["norms"]) < 1e-12, rank
        assert len(rank["norms"]) == STEPS and rank["counts"], rank
    seen = [item for rank in found[label] for item in rank["seen"].items()]
    assert len(set(seen)) == len(dict(seen)), "copies of a buffer differ"


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    first, second = run_ranks(bare, 2)
    assert max(first["worst"], second["worst"]) < 1e-12
    assert (first["zeros"], second["zeros"]) == (set(), {"experts.2.up", "experts.2.down"})


# ------------------------------------------------------------------------------------------ what is refused


def refuse(message: str, attempt: Callable[[], Any], error: type[Exception] = ConfigError) -> None:
    with pytest.raises(error, match=message):
        attempt()


def experts(count: int = EXPERTS) -> list[nn.Module]:
    return [nn.Linear(DIM, DIM) for _ in range(count)]


def test_experts_that_cannot_be_shared_out_are_refused() -> None:
    two, three = Mesh.dry(Layout.parse("dp=2,ep=2"), 1), Mesh.dry(Layout.parse("dp=3,ep=3"))
    router, one = Router(False), nn.Linear(DIM, DIM)
    refuse(
        "4 experts cannot be shared evenly by ep=3 ranks; use a multiple of 3",
        lambda: ExpertParallel(router, experts(), three),
    )
    refuse(
        r"3 experts are given; give all 4, or the 2 of this rank \(2 to 3\)",
        lambda: ExpertParallel(router, experts(3), two, num_experts=4),
    )
    refuse(
        r"experts 1 and 2 share a tensor of shape \(6, 6\)",
        lambda: ExpertParallel(router, [*experts(1), one, one, one], two),
    )
    refuse(
        r"of Expert must be the expert, but their shapes are .*'down\.bias': \(6,\).*a list of modules",
        lambda: ExpertParallel(router, Expert(), two),
    )
    refuse(
        "top_k=5 must be from 1 to the number of experts, 4", lambda: ExpertParallel(router, experts(), two, top_k=5)
    )
    assert [name for name, _ in ExpertParallel(router, experts(), two).experts.named_children()] == ["2", "3"]


def test_wrong_shapes_of_routers_and_experts_are_refused() -> None:
    x, mesh = torch.randn(3, DIM), Mesh.solo()

    def layer(router: Any, of_experts: Any = None, top_k: int | None = None) -> Callable[[], Any]:
        module = nn.Identity()
        module.forward = router  # type: ignore[method-assign]
        return lambda: ExpertParallel(module, of_experts or experts(), mesh, top_k=top_k)(x)

    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    refuse(r"expert ids and weights, both \(3, k\), not \(3, 4\); give top_k", layer(lambda x: x[:, :4]))
    refuse(r"both \(3, k\), not \(\(3, 1\), \(3, 2\)\)", layer(lambda x: (ids, x[:, :2])))
    refuse(
        r"must return logits \(3, 4\), not \(\(3, 1\), \(3, 1\)\); leave top_k out",
        layer(lambda x: (ids, weights), top_k=1),
    )
    refuse("must be int64 and weights floating point, not torch.int32", layer(lambda x: (ids.int(), weights)))
    refuse("an expert id is not from 0 to 4", layer(lambda x: (ids - 1, weights)), RuntimeError)
    narrow = [nn.Linear(DIM, 2) for _ in range(EXPERTS)]
    refuse(r"expert 0 must return \(3, 6\), as it is given, not \(3, 2\)", layer(lambda x: (ids, weights), narrow))


def test_data_parallelism_refuses_what_it_cannot_keep_alike() -> None:
    mesh = Mesh.dry(Layout.parse("dp=2,ep=2"))
    refuse(
        "made for the layout dp=2.*give both one mesh",
        lambda: DataParallel(ExpertParallel(Router(False), experts(), mesh), Mesh.solo()),
    )
    router, made, odd = Router(False), experts(), nn.Linear(2, 2)
    odd.gradient_axes = {"weight": ("pp",)}
    router.score.weight = made[0].weight = nn.Parameter(torch.randn(DIM, DIM))
    refuse(
        "router.score.weight and experts.0.weight are one tensor, but .* over cp, dp and of the second over edp",
        lambda: DataParallel(ExpertParallel(router, made, mesh), mesh),
    )
    refuse(r"gradient_axes of weight is \('pp',\); it must be one of \('cp', 'dp'\)", lambda: DataParallel(odd, mesh))
