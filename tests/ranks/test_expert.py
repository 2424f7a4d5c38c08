"""Tokens to their experts on other ranks and back: values, gradients and bytes against one process that has all experts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ranks.kit import run_ranks
from shardwright.comm.mesh import Mesh
from shardwright.core.dispatch import DispatchPlan
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger
from shardwright.core.model_config import ModelConfig
from shardwright.launch import RankEnv
from shardwright.ops.routing import LocalExchange, Routing, RowGroups
from shardwright.parallel.expert import ExpertExchange, make_exchange
from shardwright.plan.dispatch import dispatch_traffic

DIM, EXPERTS = 6, 8
MODEL = ModelConfig.load({"vocab_size": 8, "dim": DIM, "num_layers": 1, "num_heads": 1, "ffn_dim": 8})


@dataclass(frozen=True)
class Case:
    """Tokens of each rank, choices of each token, and how they choose: evenly, 90 % for one expert and some for none, or all
    for the experts of rank 0. ``dropped``: every third choice goes nowhere."""

    tokens: tuple[int, ...]
    top_k: int
    choice: str = "even"
    dropped: bool = False


CASES = {
    "even": Case((5, 5, 5, 5), 2),
    "uneven": Case((7, 1, 4, 3), 3),
    "skewed": Case((20, 20, 20, 20), 1, "skewed"),
    "skewed, k=4": Case((9, 9, 9, 9), 4, "skewed"),
    "one rank only": Case((6, 6, 6, 6), 2, "first"),
    "a rank without tokens": Case((6, 0, 6, 6), 2, "first"),
    "no tokens at all": Case((0, 0, 0, 0), 2),
    "dropped": Case((8, 8, 8, 8), 3, "even", dropped=True),
    "all dropped": Case((4, 4, 4, 4), 1, "none"),
}
LAYOUTS = {
    "pairs": "dp=4,ep=4",
    "two of four": "dp=4,ep=2",
    "tokens once": "dp=4,ep=4,ep_deduplicate=on",
    "halves": "dp=4,ep=4,ep_overlap=on",
    "halves once": "dp=4,ep=2,ep_overlap=on,ep_deduplicate=on",
    "tensor parallel": "tp=2,dp=2,ep=4",
    "over gloo": "dp=4,ep=2,ep_overlap=on,ep_deduplicate=on,comm=gloo",
}


def routing(case: Case, rank: int) -> tuple[Tensor, Routing]:
    """x and the routing of one rank's tokens."""
    generator = torch.Generator().manual_seed(17 * rank + case.top_k)
    count = case.tokens[rank]
    x = torch.randn(count, DIM, generator=generator, dtype=torch.float64)
    scores = torch.rand(count, EXPERTS, generator=generator)
    if case.choice == "skewed":
        scores[:, 2] += 0.9 * (torch.rand(count, generator=generator) < 0.9)
        scores[:, 5:] -= 2  # never, as long as others are left
    if case.choice == "first":
        scores[:, :2] += 2
    ids = scores.topk(case.top_k, dim=1).indices
    if case.choice == "none":
        ids.fill_(EXPERTS)
    if case.dropped:
        ids.view(-1)[::3] = EXPERTS
    weights = torch.rand(ids.shape, generator=generator, dtype=torch.float64) * (ids < EXPERTS)
    return x.requires_grad_(), Routing(ids, weights.requires_grad_(), EXPERTS, may_drop=bool((ids == EXPERTS).any()))


def expert_weights(first: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(EXPERTS, DIM, DIM, generator=generator, dtype=torch.float64)
    return whole[first : first + count].clone().requires_grad_()


def experts(weights: Tensor, rows: Tensor, groups: RowGroups) -> Tensor:
    assert rows.shape[0] == groups.num_rows == sum(groups.sizes)
    blocks = [torch.tanh(block @ weight) for block, weight in zip(rows.split(groups.sizes), weights, strict=True)]
    return torch.cat(blocks)


def gradient_of(y: Tensor) -> Tensor:
    """A loss's gradient that differs from place to place."""
    return torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)


@dataclass
class Seen:
    y: Tensor
    dx: Tensor
    d_routing: Tensor
    d_experts: Tensor
    first_expert: int
    ledger: Ledger
    plans: list[DispatchPlan]


def run_cases(env: RankEnv, layouts: dict[str, str], cases: dict[str, Case]) -> dict[tuple[str, str], Seen]:
    found = {}
    for layout_name, text in layouts.items():
        mesh = Mesh.distributed(Layout.parse(text), env.rank)
        exchange = make_exchange(mesh, EXPERTS)
        assert isinstance(exchange, ExpertExchange)
        for name, case in cases.items():
            found[layout_name, name] = run_case(mesh, exchange, case, env.rank)
    return found


def run_case(mesh: Mesh, exchange: ExpertExchange, case: Case, rank: int) -> Seen:
    x, chosen = routing(case, rank)
    first = mesh.ep.rank * exchange.num_local
    weights = expert_weights(first, exchange.num_local)
    with mesh.recorder.phase("F"):
        y = exchange.run(x, chosen, lambda rows, groups: experts(weights, rows, groups), "layer")
    with mesh.recorder.phase("B"):
        y.backward(gradient_of(y))
    ledger = mesh.recorder.take()
    assert x.grad is not None and chosen.weights.grad is not None and weights.grad is not None
    return Seen(
        y.detach(), x.grad, chosen.weights.grad, weights.grad, first, ledger, ledger.dispatches.get("layer", [])
    )


def one_process(case: Case) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """y, dx, d routing of each rank's tokens, and its part of the experts' gradients."""
    found = []
    for rank in range(len(case.tokens)):
        x, chosen = routing(case, rank)
        weights = expert_weights(0, EXPERTS)
        local = LocalExchange()
        sent = local.dispatch(x, chosen, "layer")
        y = local.combine(experts(weights, sent.rows, sent.groups), sent, chosen, "layer")
        y.backward(gradient_of(y))
        assert x.grad is not None and chosen.weights.grad is not None and weights.grad is not None
        found.append((y.detach(), x.grad, chosen.weights.grad, weights.grad))
    return found


@pytest.fixture(scope="module")
def seen() -> list[dict[tuple[str, str], Seen]]:
    results: list[dict[tuple[str, str], Seen]] = run_ranks(run_cases, 4, LAYOUTS, CASES)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_routing(seen: list[dict[tuple[str, str], Seen]], layout: str, name: str) -> None:
    """What is sent equals the closed form of the plans, to the byte; and the plans are those of the choices."""
    parsed = Layout.parse(layout_text := LAYOUTS[layout])
    case = CASES[name]
    for rank, found in enumerate(ranks := [one[layout, name] for one in seen]):
        expected = Ledger()
        dispatch_traffic(expected, MODEL, parsed.with_(precision="fp64"), {"layer": found.plans}, 8)
        assert expected.differences(found.ledger) == [], (layout_text, rank)
        chosen = routing(case, rank)[1].expert_ids
        sent = [sum(counts) for counts in zip(*(plan.sent for plan in found.plans), strict=True)]
        assert sent == [int((chosen == expert).sum()) for expert in range(EXPERTS)]
        for plan in found.plans:
            assert sum(plan.local_counts) == sum(plan.receive_sizes)
    row = DIM * 8
    rows = [entry for one in ranks for entry in one.ledger.entries.values() if entry.tensor in ("dispatch", "combine")]
    stay = sum(plan.row_sizes[0][plan.rank] for one in ranks for plan in one.plans)
    there = sum(sum(plan.row_sizes[0]) for one in ranks for plan in one.plans)
    assert sum(entry.bytes for entry in rows) == 4 * (there - stay) * row  # out and back, twice; local routes excluded


def close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_same_as_with_all_experts_at_hand(seen: list[dict[tuple[str, str], Seen]], layout: str, name: str) -> None:
    wanted = one_process(CASES[name])
    d_experts = torch.stack([d for *_, d in wanted]).sum(0)
    found = torch.zeros_like(d_experts)
    for rank, (y, dx, d_routing, _) in enumerate(wanted):
        got = seen[rank][layout, name]
        assert close(got.y, y) and close(got.dx, dx) and close(got.d_routing, d_routing), rank
        found[got.first_expert : got.first_expert + len(got.d_experts)] += got.d_experts  # the sum over edp
    assert close(found, d_experts)
