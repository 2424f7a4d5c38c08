"""The autograd pairs: ``<y, f(x)> = <f*(y), x>`` on real ranks in fp64, and that a dropped collective breaks it.

The inner product knows the type of each end: invariant ends are equal on all ranks, with equal gradients, and count once;
varying, partial and replicated ends are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks.kit import run_ranks
from shardwright.comm import regions
from shardwright.comm.base import Comm, ReduceOp, Work
from shardwright.comm.dist import dist_comm
from shardwright.comm.solo import SoloComm
from shardwright.comm.transport import transport_maker
from shardwright.launch import RankEnv
from shardwright.verify.mutate_comms import ForwardingComm

WORLDS = (2, 3, 4, 8)
TRANSPORTS = ("gloo", "shm")
ROWS, COLUMNS = 24, 3


def sizes(source: int, target: int) -> int:
    """Rows from one rank to another in the uneven exchange; some are 0."""
    return (2 * source + target + 1) % 3


@dataclass(frozen=True)
class Pair:
    """Types of the two ends, local rows of the input on each rank, and which passes hold a collective."""

    source: str
    target: str
    rows: Callable[[int, int], int]
    communicates: tuple[str, ...]


def whole(rank: int, size: int) -> int:
    return ROWS


def share(rank: int, size: int) -> int:
    return ROWS // size


def sent(rank: int, size: int) -> int:
    return sum(sizes(rank, target) for target in range(size))


PAIRS = {
    "copy_to_region": Pair("invariant", "replicated", whole, ("backward",)),
    "reduce_from_region": Pair("partial", "invariant", whole, ("forward",)),
    "scatter_to_region": Pair("invariant", "varying", whole, ("backward",)),
    "gather_from_region": Pair("varying", "invariant", share, ("forward",)),
    "gather_tokens": Pair("varying", "replicated", share, ("forward", "backward")),
    "reduce_scatter_tokens": Pair("partial", "varying", whole, ("forward", "backward")),
    "exchange_tokens": Pair("varying", "varying", sent, ("forward", "backward")),
    "TokenExchange": Pair("varying", "varying", sent, ("forward", "backward")),
}


class Broken(ForwardingComm):
    """Leaves collectives out: every rank goes on with what it has, in the shape that is due."""

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return Work()

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        output.copy_(tensor.chunk(self.size)[self.rank])
        return Work()

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        output.copy_(tensor.repeat(self.size, *[1] * (tensor.dim() - 1)))
        return Work()

    def all_to_all_start(
        self, output: Tensor, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Work:
        rows = min(len(output), len(tensor))
        output.zero_()[:rows] = tensor[:rows]
        return Work()


class Averaging(ForwardingComm):
    """Averages where a sum is due."""

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return self.inner.all_reduce_start(tensor, "avg", name=name)

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return self.inner.reduce_scatter_start(output, tensor, "avg", name=name)


class Switched(ForwardingComm):
    """The comm of one pass may be another than that of the other pass."""

    def __init__(self, forward: Comm, backward: Comm) -> None:
        super().__init__(forward)
        self.backward = backward

    def to_backward(self) -> None:
        self.inner = self.backward


@dataclass
class Ends:
    """What one rank saw: input, output, gradient given at the output, gradient found at the input."""

    x: Tensor
    out: Tensor
    y: Tensor
    dx: Tensor


def draw(kind: str, shape: Sequence[int], seed: int, rank: int) -> Tensor:
    """Random values: the same on every rank for ``equal``, else the rank's own."""
    generator = torch.Generator().manual_seed(1000 * seed + (0 if kind == "equal" else rank + 1))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def apply(name: str, x: Tensor, comm: Comm) -> Tensor:
    arguments: list[Any] = [comm]
    if name in ("exchange_tokens", "TokenExchange"):
        arguments += [[sizes(comm.rank, r) for r in range(comm.size)], [sizes(r, comm.rank) for r in range(comm.size)]]
    if name == "TokenExchange":
        exchange = regions.TokenExchange(*arguments, name)
        return exchange.finish(exchange.start(x))
    result: Tensor = getattr(regions, name)(x, *arguments, name)
    return result


def both_ends(name: str, comm: Switched) -> Ends:
    pair = PAIRS[name]
    rows = pair.rows(comm.rank, comm.size)
    x = draw("equal" if pair.source == "invariant" else "own", (rows, COLUMNS), 1, comm.rank).requires_grad_()
    before = x.detach().clone()
    out = apply(name, x, comm)
    y = draw("equal" if pair.target == "invariant" else "own", out.shape, 2, comm.rank)
    given = y.clone()
    comm.to_backward()
    out.backward(y)
    assert x.grad is not None
    assert torch.equal(x, before) and torch.equal(y, given)  # collectives work in place: on copies
    return Ends(x.detach(), out.detach(), y, x.grad)


Wrap = Callable[[Comm], Comm] | None


def run_pairs(env: RankEnv, kind: str, forward: Wrap, backward: Wrap) -> dict[str, Ends]:
    comm = transport_maker(kind, env.rank, 30.0, ("tp",))("tp", (tuple(range(env.world_size)),))
    ways = [wrap(comm) if wrap else comm for wrap in (forward, backward)]
    return {name: both_ends(name, Switched(*ways)) for name in PAIRS}


def run_pairs_on_each(env: RankEnv) -> dict[str, dict[str, Ends]]:
    return {kind: run_pairs(env, kind, None, None) for kind in TRANSPORTS}


def inner_products(name: str, ranks: Sequence[Ends]) -> tuple[float, float]:
    """<y, f(x)> and <f*(y), x>, by the types of the ends."""
    pair = PAIRS[name]
    outputs = [float((end.y * end.out).sum()) for end in ranks]
    inputs = [float((end.dx * end.x).sum()) for end in ranks]
    left = outputs[0] if pair.target == "invariant" else sum(outputs)
    right = inputs[0] if pair.source == "invariant" else sum(inputs)
    return left, right


@pytest.fixture(scope="module", params=WORLDS)
def each(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Ends]]]:
    results: list[dict[str, dict[str, Ends]]] = run_ranks(run_pairs_on_each, request.param)
    return results


@pytest.fixture(scope="module", params=TRANSPORTS)
def ends(request: pytest.FixtureRequest, each: list[dict[str, dict[str, Ends]]]) -> list[dict[str, Ends]]:
    return [rank[request.param] for rank in each]


def test_two_ranks_see_the_same_bits_over_both_transports(each: list[dict[str, dict[str, Ends]]]) -> None:
    for rank in each:
        for name in PAIRS:
            one, other = (rank[kind][name] for kind in TRANSPORTS)
            close = torch.equal if len(each) == 2 else torch.allclose
            assert close(one.out, other.out) and close(one.dx, other.dx), name


@pytest.mark.parametrize("name", PAIRS)
def test_the_backward_is_the_adjoint_of_the_forward(ends: list[dict[str, Ends]], name: str) -> None:
    left, right = inner_products(name, [rank[name] for rank in ends])
    assert abs(left) > 1e-3
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_ends_have_the_types_that_they_say(ends: list[dict[str, Ends]], name: str) -> None:
    """An invariant or replicated value is equal on all ranks; so is the gradient of an invariant or partial one."""
    pair, ranks = PAIRS[name], [rank[name] for rank in ends]

    def equal(tensors: list[Tensor]) -> bool:
        return all(torch.equal(tensors[0], other) for other in tensors)

    assert equal([end.out for end in ranks]) == (pair.target in ("invariant", "replicated"))
    assert equal([end.dx for end in ranks]) == (pair.source in ("invariant", "partial"))
    assert equal([end.x for end in ranks]) == (pair.source == "invariant")


def test_values_of_the_pairs(ends: list[dict[str, Ends]]) -> None:
    size = len(ends)
    rows = ROWS // size

    def all_x(name: str) -> list[Tensor]:
        return [rank[name].x for rank in ends]

    for index, rank in enumerate(ends):
        own = slice(index * rows, (index + 1) * rows)
        expected = {
            "copy_to_region": rank["copy_to_region"].x,
            "reduce_from_region": torch.stack(all_x("reduce_from_region")).sum(0),
            "scatter_to_region": rank["scatter_to_region"].x[own],
            "gather_from_region": torch.cat(all_x("gather_from_region")),
            "gather_tokens": torch.cat(all_x("gather_tokens")),
            "reduce_scatter_tokens": torch.stack(all_x("reduce_scatter_tokens")).sum(0)[own],
        }
        for name, value in expected.items():
            assert torch.allclose(rank[name].out, value, rtol=1e-12), name
        assert len(rank["exchange_tokens"].out) == sum(sizes(source, index) for source in range(size))


DROPPED = [(name, part) for name, pair in PAIRS.items() for part in pair.communicates]


@pytest.fixture(scope="module")
def broken() -> dict[str, list[dict[str, Ends]]]:
    """By what is left out: the pairs without the collective of one pass, or with an average for a sum."""
    return {
        "forward": run_ranks(run_pairs, 3, "gloo", Broken, None),
        "backward": run_ranks(run_pairs, 3, "gloo", None, Broken),
        "average": run_ranks(run_pairs, 3, "gloo", None, Averaging),
    }


@pytest.mark.parametrize(("name", "part"), DROPPED)
def test_a_dropped_collective_is_noticed(broken: dict[str, list[dict[str, Ends]]], name: str, part: str) -> None:
    left, right = inner_products(name, [rank[name] for rank in broken[part]])
    assert left != pytest.approx(right, rel=1e-3)


@pytest.mark.parametrize("name", ["copy_to_region", "gather_tokens"])
def test_an_average_for_a_sum_is_noticed(broken: dict[str, list[dict[str, Ends]]], name: str) -> None:
    left, right = inner_products(name, [rank[name] for rank in broken["average"]])
    assert left == pytest.approx(3 * right, rel=1e-12)  # the classic factor


@pytest.mark.parametrize("name", PAIRS)
def test_on_one_rank_a_pair_is_nothing(name: str) -> None:
    x = torch.randn(4, 2, requires_grad=True)
    assert apply(name, x, SoloComm("tp")) is x


def differentiate_twice(env: RankEnv) -> list[str]:
    comm = dist_comm("tp", [tuple(range(env.world_size))], 30.0)
    refused = []
    for name, pair in PAIRS.items():
        x = torch.ones(pair.rows(comm.rank, comm.size), COLUMNS, requires_grad=True)
        (gradient,) = torch.autograd.grad(apply(name, x, comm).square().sum(), x, create_graph=True)
        try:
            gradient.sum().backward()
        except RuntimeError as error:
            refused.append(name if "once_differentiable" in str(error) else str(error))
    return refused


def test_a_second_derivative_is_refused() -> None:
    assert run_ranks(differentiate_twice, 2) == [list(PAIRS)] * 2
