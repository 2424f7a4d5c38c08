"""Split layers, loss and table for a module of the user's own, on real ranks against the module before it was split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks.kit import run_ranks
from shardwright import (
    ColumnParallelLinear,
    DataParallel,
    Layout,
    Mesh,
    RowParallelLinear,
    full_state_dict,
    parallelize,
    vocab_parallel_cross_entropy,
    vocab_parallel_log_softmax,
)
from shardwright.comm.base import Comm, ReduceOp, Work
from shardwright.comm.regions import reduce_from_region
from shardwright.errors import ConfigError
from shardwright.launch import RankEnv
from shardwright.ops.kernels import swiglu
from shardwright.parallel.tensor import Region, column_linear, row_linear
from shardwright.verify.mutate_comms import ForwardingComm

VOCAB, DIM, HIDDEN, TOKENS = 11, 6, 7, 5
F64 = torch.float64


class Model(nn.Module):
    """An embedding, two MLPs with a norm between them, and a head, which may be tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(DIM), "up": nn.Linear(DIM, HIDDEN), "down": nn.Linear(HIDDEN, DIM)})
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = x + layer["down"](F.gelu(layer["up"](layer["norm"](x))))
        logits: Tensor = self.head(x)
        return logits


TABLE = {"embed": "vocab", "layers.*.up": "column", "layers.*.down": "row", "head": "column"}


def batch(rank: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets (2, TOKENS), some of which do not count."""
    generator = torch.Generator().manual_seed(5 + rank)
    tokens = torch.randint(VOCAB, (2, TOKENS), generator=generator)
    targets = torch.randint(VOCAB, (2, TOKENS), generator=generator)
    targets[0, 0], targets[1, 2:4] = VOCAB - 1, -100
    return tokens, targets


def make(tied: bool, seed: int = 1) -> Model:
    torch.manual_seed(seed)
    return Model(tied).double()


def own(full: Tensor, dim: int, mesh: Mesh) -> Tensor:
    return full.tensor_split([-(-full.shape[dim] // mesh.tp.size) * r for r in range(1, mesh.tp.size)], dim)[mesh.tp.rank]


def difference(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None and want is not None and got.shape == want.shape, (got, want)
    return (got - want).abs().max().item() if got.numel() else 0.0


def part_difference(got: dict[str, Tensor | None], want: dict[str, Tensor | None], mesh: Mesh) -> float:
    """The worst difference of this rank's parts, by a parameter's name, from the same parts of whole tensors."""
    dims = {"embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1, "head.weight": 0}
    worst = 0.0
    for name, mine in got.items():
        whole = want[name]
        assert whole is not None
        dim = next((dims[end] for end in dims if name.endswith(end)), None)
        worst = max(worst, difference(mine, whole if dim is None else own(whole, dim, mesh)))
    return worst


def local_gradients(model: nn.Module, reference: nn.Module, mesh: Mesh) -> float:
    """The worst difference of the split module's gradients from their part of the reference's."""
    got, want = ({name: p.grad for name, p in module.named_parameters()} for module in (model, reference))
    return part_difference(got, want, mesh)


# ------------------------------------------------------------------------------------------ what the ranks do


def check_model(mesh: Mesh, tied: bool) -> dict[str, float]:
    """One step of the table against the unsplit module. Ranks start from other seeds: rank 0's values count."""
    reference, model = make(tied), parallelize(make(tied, seed=1 + mesh.tp.rank), TABLE, mesh)
    before = full_state_dict(model)
    same_start = all(torch.equal(before[name], value) for name, value in reference.state_dict().items())
    tokens, targets = batch()
    want = F.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten())
    want.backward()
    got = vocab_parallel_cross_entropy(model(tokens), targets, mesh, vocab_size=VOCAB)
    got.backward()
    gradients = local_gradients(model, reference, mesh)
    for module in (reference, model):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    after = full_state_dict(model)
    assert list(after) == list(reference.state_dict())
    worst = max(difference(after[name], value) for name, value in reference.state_dict().items())
    assert same_start and (model.head.weight is model.embed.weight) == tied
    return {"loss": difference(got, want), "gradients": gradients, "after": worst}


def check_layers(mesh: Mesh) -> dict[str, float]:
    """`gather_output` and an input that is not split, with more ranks than features among the shapes, without a bias too."""
    found = {}
    for features, outputs, bias in ((6, 4, True), (7, 5, False), (2, 2, True)):
        torch.manual_seed(3)
        column, row = nn.Linear(features, outputs, bias).double(), nn.Linear(features, outputs, bias).double()
        x = torch.randn(2, 3, features, dtype=F64, requires_grad=True)
        dy = torch.randn(2, 3, outputs, dtype=F64)
        for name, full, dim, split in (
            ("gather", column, 0, ColumnParallelLinear(features, outputs, mesh, bias, gather_output=True, full=column)),
            ("scatter", row, 1, RowParallelLinear(features, outputs, mesh, bias, input_is_parallel=False, full=row)),
        ):
            mine = x.detach().clone().requires_grad_()
            full.zero_grad()
            x.grad = None
            want, got = full(x), split(mine)
            want.backward(dy)
            got.backward(dy)
            values = [difference(got, want), difference(mine.grad, x.grad)]
            values.append(difference(split.weight.grad, own(full.weight.grad, dim, mesh)))
            if bias:
                gradient = full.bias.grad
                values.append(difference(split.bias.grad, own(gradient, 0, mesh) if dim == 0 else gradient))
            found[f"{name} {features}x{outputs}"] = max(values)
    return found


def check_losses(mesh: Mesh) -> dict[str, float]:
    """Value and gradient of every variant, with the target on each side of each cut, against PyTorch's."""
    found = {}
    for vocab in (8, 11, 2):
        torch.manual_seed(4)
        full = torch.randn(vocab + 2, vocab, dtype=F64) * 3
        targets = torch.tensor([*range(vocab), -100, 0])
        for label, smoothing, z_loss in (("plain", 0.0, 0.0), ("smoothed", 0.1, 0.0), ("z", 0.0, 0.01), ("both", 0.2, 0.3)):
            x, mine = full.clone().requires_grad_(), own(full, 1, mesh).clone().requires_grad_()
            valid = targets != -100
            want = F.cross_entropy(x, targets, label_smoothing=smoothing)
            want = want + z_loss * (x.logsumexp(1).square() * valid).sum() / valid.sum()
            want.backward()
            got = vocab_parallel_cross_entropy(mine, targets, mesh, smoothing, z_loss)
            got.backward()
            found[f"{label} {vocab}"] = max(difference(got, want), difference(mine.grad, own(x.grad, 1, mesh)))
        x, mine = full.clone().requires_grad_(), own(full, 1, mesh).clone().requires_grad_()
        log_p, log_p_local = x.log_softmax(1), vocab_parallel_log_softmax(mine, mesh)
        (F.cross_entropy(x, targets, reduction="sum") - 0.1 * (log_p * log_p.exp()).sum()).backward()
        loss = vocab_parallel_cross_entropy(mine, targets, mesh, reduction="sum")
        entropy = reduce_from_region(-(log_p_local * log_p_local.exp()).sum(), mesh.tp, "entropy")
        (loss + 0.1 * entropy).backward()
        found[f"entropy {vocab}"] = max(
            difference(log_p_local, own(log_p, 1, mesh)), difference(mine.grad, own(x.grad, 1, mesh))
        )
    return found


def check_corners(mesh: Mesh) -> dict[str, Any]:
    """US-01, LN-04, TP-03, and what is refused."""
    zeros = own(torch.zeros(4, 11, dtype=F64), 1, mesh)
    each = vocab_parallel_cross_entropy(zeros, torch.tensor([0, 5, 6, 10]), mesh, reduction="none")
    nothing = own(torch.randn(3, 11, dtype=F64), 1, mesh).clone().requires_grad_()
    none = vocab_parallel_cross_entropy(nothing, torch.full((3,), -100), mesh)
    none.backward()
    refused = []
    for attempt in (
        lambda: vocab_parallel_cross_entropy(torch.zeros(4, 11), torch.zeros(4).long(), mesh, vocab_size=11),
        lambda: vocab_parallel_cross_entropy(zeros, torch.tensor([0, 5, 6, 11]), mesh),
        lambda: ColumnParallelLinear(4, 6, mesh)(torch.zeros(2, 3)),
        lambda: RowParallelLinear(6, 4, mesh)(torch.zeros(2, 6)),
        lambda: parallelize(make(False), {"embed": "vocab"}, mesh)(torch.tensor([[11]])),
    ):
        refused.append(message_of(attempt))
    return {"uneven": each.tolist(), "none": (none.item(), nothing.grad.abs().sum().item()), "refused": refused}  # type: ignore[union-attr]


def message_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (ConfigError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


class LeaveOut(ForwardingComm):
    """Without the reduction of one tensor."""

    left_out = "first"

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return Work() if name == self.left_out else super().all_reduce_start(tensor, op, name=name)


def check_order(env: RankEnv, first_row: bool, wrap: Callable[[Comm], Comm] | None = None) -> tuple[float, list[str], list[str]]:
    """An MLP of two split layers: (difference from the whole one, reductions and gathers forward, backward)."""
    mesh = Mesh.distributed(Layout(tp=env.world_size, sp="off"), env.rank)
    if wrap is not None:
        mesh.wrap(wrap)
    torch.manual_seed(6)
    one, two = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()
    x = torch.randn(4, 6, dtype=F64)
    if first_row:
        inner: nn.Module = RowParallelLinear(6, 8, mesh, input_is_parallel=False, full=one, name="first")
        outer: nn.Module = ColumnParallelLinear(8, 6, mesh, gather_output=True, full=two, name="second")
    else:
        inner = ColumnParallelLinear(6, 8, mesh, full=one, name="first")
        outer = RowParallelLinear(8, 6, mesh, full=two, name="second")
    mine, full = x.clone().requires_grad_(), x.clone().requires_grad_()
    mesh.recorder.take()
    y = outer(F.gelu(inner(mine)))
    forward = verbs(mesh)
    want = two(F.gelu(one(full)))
    want.sum().backward()
    y.sum().backward()
    return max(difference(y, want), difference(mine.grad, full.grad)), forward, verbs(mesh)


def verbs(mesh: Mesh) -> list[str]:
    return [f"{entry.verb} {entry.tensor}" for entry in mesh.recorder.take().entries.values() for _ in range(entry.count)]


def swiglu_rank(env: RankEnv, given: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The worked example of a split SwiGLU; its matrices are (in, out)."""
    mesh = Mesh.distributed(Layout(tp=env.world_size), env.rank)
    gate, up, down = (torch.tensor(given[name][mesh.tp.rank], dtype=F64).t().contiguous() for name in ("gate", "up", "down"))
    region = Region(mesh.tp, sequence=False)
    active = swiglu(column_linear(torch.tensor(given["x"], dtype=F64), [gate, up], [], region, "in"))
    return (active @ down.t())[0].tolist(), row_linear(active, down, None, region, "out")[0].tolist()


def check_all(env: RankEnv) -> dict[str, Any]:
    mesh = Mesh.distributed(Layout(tp=env.world_size), env.rank)
    return {
        "model": check_model(mesh, tied=False),
        "tied": check_model(mesh, tied=True),
        "layers": check_layers(mesh),
        "losses": check_losses(mesh),
        "corners": check_corners(mesh),
        "column first": check_order(env, first_row=False),
        "row first": check_order(env, first_row=True),
        "row first, left out": check_order(env, True, LeaveOut),
    }


def train_on_both_axes(env: RankEnv, zero: int) -> dict[str, float]:
    """tp=2 inside dp=2 and what one process makes of the whole batch, with gradients that are clipped."""
    mesh = Mesh.distributed(Layout(tp=2, dp=2), env.rank)
    reference = make(True)
    model = DataParallel(parallelize(make(True), TABLE, mesh), mesh, zero=zero, loss_reduction="sum")
    trained = (reference.parameters(), model.shards() if zero else model.parameters())
    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in trained]
    batches = [batch(rank) for rank in range(2)]
    count = sum((targets != -100).sum() for _, targets in batches)
    worst = {"gradients": 0.0, "norm": 0.0}
    for most in (0.05, 0.1, 100.0):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for tokens, targets in batches:
            (F.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / count).backward()
        tokens, targets = batches[mesh.dp.rank]
        (vocab_parallel_cross_entropy(model(tokens), targets, mesh, reduction="sum") / count).backward()
        if not zero:
            worst["gradients"] = max(worst["gradients"], local_gradients(model.module, reference, mesh))
        norm = nn.utils.clip_grad_norm_(reference.parameters(), most)
        assert (float(norm) > most) == (most < 1)  # the last step is not clipped
        worst["norm"] = max(worst["norm"], difference(model.clip_grad_norm_(most), norm))
        for optimizer in optimizers:
            optimizer.step()
    state = reference.state_dict()
    return worst | {"after": part_difference(dict(model.full_state_dict()), dict(state), mesh)}


# ------------------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_ranks(check_all, request.param)
    return results


@pytest.mark.parametrize("part", ["model", "tied", "layers", "losses"])
def test_split_equals_whole_in_value_and_in_every_gradient(part: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert max(rank[part].values()) < 1e-12, rank[part]


def test_uneven_vocabularies_and_batches_without_targets(found: list[dict[str, Any]]) -> None:
    for rank in found:
        corners = rank["corners"]
        assert corners["uneven"] == pytest.approx([2.397895273] * 4, abs=1e-9)  # ln 11, not ln 12
        assert corners["none"] == (0.0, 0.0)


def test_what_would_be_silently_wrong_is_refused(found: list[dict[str, Any]]) -> None:
    gathered, target, column, row, token = found[0]["corners"]["refused"]
    assert "these logits have 11 columns" in gathered and "not gathered ones" in gathered
    assert "a target is neither a token id nor -100" in target
    assert "column: the input has 3 features on this rank, 4 are needed" in column
    assert "row: the input has 6 features on this rank" in row
    assert "embed: a token id is not below 11" in token


def test_row_then_column_needs_one_reduction_more_before_the_nonlinearity(found: list[dict[str, Any]]) -> None:
    for rank in found:
        error, forward, backward = rank["column first"]
        assert error < 1e-12 and forward == ["all_reduce second"] and backward == ["all_reduce first gradient"]
        error, forward, backward = rank["row first"]
        assert error < 1e-12 and forward == ["all_reduce first", "all_gather second output"]
        assert backward == ["all_reduce second gradient", "all_gather first input"]
        assert rank["row first, left out"][0] > 1e-2


def test_the_swiglu_of_two_ranks(shared: Path) -> None:
    example = json.loads((shared / "vectors" / "worked_examples.json").read_text())["swiglu_two_ranks"]
    for rank, (partial, total) in enumerate(run_ranks(swiglu_rank, 2, example["inputs"])):
        assert partial == pytest.approx(example["partial"][rank], abs=example["tol_abs"])
        assert total == pytest.approx(example["all_reduced"], abs=example["tol_abs"])


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_tensor_inside_data_parallelism(zero: int) -> None:
    for rank in run_ranks(train_on_both_axes, 4, zero):
        assert max(rank.values()) < 1e-12, rank
