"""Three axes at once on hand-made layers: tp=2 with sequence parallelism x dp=2 x pp=2 on 8 ranks, against one process.

The model is a toy: a vocabulary-parallel embedding whose sum is scattered to tokens, learned positions, blocks of
norm -> gather -> column-parallel -> gelu -> row-parallel -> scatter -> residual, and a vocabulary-parallel loss. What runs it is
not: the executor, schedules with early and deferred weight gradients, the autograd pairs, buckets and their reduction by
decision 5, and the optimizer. The reference is plain autograd and plain arithmetic on whole tensors.

Notation: T tokens of a micro-batch, D model dim, F ffn, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks.kit import run_ranks
from shardwright.comm.base import Comm, ReduceOp, Work
from shardwright.comm.mesh import Mesh
from shardwright.comm.regions import gather_tokens, reduce_from_region, reduce_scatter_tokens
from shardwright.comm.solo import SoloComm
from shardwright.core.buckets import Member, plan_buckets
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger
from shardwright.core.run_config import OptimConfig
from shardwright.core.specs import Spec
from shardwright.launch import RankEnv
from shardwright.ops.linear import embedding, linear
from shardwright.ops.norm import rms_norm
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.hooks import AllReduce
from shardwright.parallel.pipeline import Executor, StageUnits, Unit
from shardwright.schedule.action import Action, Kind, Schedule
from shardwright.schedule.make import make_schedule
from shardwright.schedule.passes import add_communication, check, split_backward
from shardwright.train.optim import FlatOptimizer
from shardwright.verify.mutate_comms import ForwardingComm

T, D, FFN, V, NUM_BLOCKS = 6, 4, 6, 11, 3
IGNORE, EPS, NUM_STEPS = -100, 1e-6, 2
SGD = OptimConfig(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.1)
LAYOUT = Layout(tp=2, dp=2, pp=2, microbatches=4)
UNITS = ("embedding", *(f"blocks.{i}" for i in range(NUM_BLOCKS)), "head")
STAGES = (UNITS[:2], UNITS[2:])


def toy_specs() -> dict[str, Spec]:
    def spec(name: str, dims: str, in_tp: bool = False) -> Spec:
        size = {"vocab": V, "embed": D, "positions": T, "ffn": FFN}
        names = tuple(dims.split())
        shape = tuple(size[dim] for dim in names)
        return Spec(name, shape, names, shape, name.rpartition(".")[0], len(shape) == 2, in_tp_region=in_tp)

    found = [spec("embedding.token", "vocab embed", True), spec("embedding.position", "positions embed")]
    for i in range(NUM_BLOCKS):
        found += [
            spec(f"blocks.{i}.norm", "embed"),
            spec(f"blocks.{i}.up", "ffn embed", True),
            spec(f"blocks.{i}.up_bias", "ffn", True),
            spec(f"blocks.{i}.down", "embed ffn", True),
        ]
    found += [spec("head.norm", "embed"), spec("head.weight", "vocab embed", True)]
    return {found_spec.name: found_spec for found_spec in found}


SPECS = toy_specs()


def whole_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(spec.shape, generator=generator, dtype=torch.float64) * 0.5 + (len(spec.shape) == 1)
        for name, spec in SPECS.items()
    }


@dataclass
class Batch:
    """One micro-batch: tokens (T,), targets (T,) with -100 where none counts."""

    tokens: Tensor
    targets: Tensor


def batches(step: int) -> list[Batch]:
    """All micro-batches of a step; the numbers of valid targets differ, one micro-batch has none."""
    generator = torch.Generator().manual_seed(100 + step)
    found = []
    for index in range(LAYOUT.dp * LAYOUT.microbatches):
        tokens, targets = torch.randint(V, (2, T), generator=generator)
        targets[: index if index != 3 else T] = IGNORE
        found.append(Batch(tokens, targets))
    return found


def num_valid(step: int) -> int:
    return sum(int((batch.targets != IGNORE).sum()) for batch in batches(step))


# -- one process -----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Loss of the last step, its gradients, and the parameters after all steps (slices on a rank)."""

    loss: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def reference_loss(values: Mapping[str, Tensor], batch: Batch) -> Tensor:
    x = values["embedding.token"][batch.tokens] + values["embedding.position"]
    for i in range(NUM_BLOCKS):
        h = F.rms_norm(x, (D,), values[f"blocks.{i}.norm"], EPS)
        h = F.gelu(h @ values[f"blocks.{i}.up"].t() + values[f"blocks.{i}.up_bias"])
        x = x + h @ values[f"blocks.{i}.down"].t()
    logits = F.rms_norm(x, (D,), values["head.norm"], EPS) @ values["head.weight"].t()
    return F.cross_entropy(logits, batch.targets, ignore_index=IGNORE, reduction="sum")


def one_process(frozen: str = "-") -> Outcome:
    """Parameters whose name starts with ``frozen`` stay as they are."""
    fixed = {name: value for name, value in whole_values().items() if name.startswith(frozen)}
    values = {name: value.requires_grad_() for name, value in whole_values().items() if name not in fixed}
    momentum = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in range(NUM_STEPS):
        loss = sum(reference_loss({**values, **fixed}, batch) for batch in batches(step)) / num_valid(step)
        gradients = dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))
        with torch.no_grad():
            for name, value in values.items():
                momentum[name].mul_(SGD.momentum).add_(gradients[name])
                decay = SGD.weight_decay * value if SPECS[name].decay else 0.0
                value -= SGD.lr * (momentum[name] + decay)
    return Outcome(loss.item(), gradients, {name: value.detach() for name, value in values.items()})


# -- the units, as one rank holds them -------------------------------------------------------------


def embedding_unit(p: Mapping[str, Tensor], tp: Comm, first_row: int) -> Unit:
    def unit(tokens: Tensor, batch: object) -> Tensor:
        local = tokens - first_row
        mine = (local >= 0) & (local < p["embedding.token"].shape[0])
        partial = embedding(local * mine, p["embedding.token"]) * mine.unsqueeze(1)
        rows = T // tp.size
        positions = torch.arange(tp.rank * rows, (tp.rank + 1) * rows)
        return reduce_scatter_tokens(partial, tp, "embedding.scatter") + embedding(positions, p["embedding.position"])

    return unit


def block_unit(p: Mapping[str, Tensor], tp: Comm, name: str) -> Unit:
    def unit(x: Tensor, batch: object) -> Tensor:
        h = gather_tokens(rms_norm(x, p[f"{name}.norm"], EPS), tp, f"{name}.gather")
        h = F.gelu(linear(h, p[f"{name}.up"], p[f"{name}.up_bias"]))
        return x + reduce_scatter_tokens(linear(h, p[f"{name}.down"]), tp, f"{name}.scatter")

    return unit


def head_unit(p: Mapping[str, Tensor], tp: Comm, first_row: int) -> Unit:
    def unit(x: Tensor, batch: object) -> Tensor:
        assert isinstance(batch, Batch)
        h = gather_tokens(rms_norm(x, p["head.norm"], EPS), tp, "head.gather")
        logits = linear(h, p["head.weight"])
        largest = tp.all_reduce(logits.detach().amax(1), "max", name="head.max")
        shifted = logits - largest.unsqueeze(1)
        total = reduce_from_region(shifted.exp().sum(1), tp, "head.sum")
        local = batch.targets - first_row
        mine = (local >= 0) & (local < logits.shape[1])
        picked = shifted.gather(1, (local * mine).unsqueeze(1)).squeeze(1) * mine
        losses = total.log() - reduce_from_region(picked, tp, "head.target")
        return (losses * (batch.targets != IGNORE)).sum()

    return unit


def make_units(p: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Unit]:
    first_row = SPECS["head.weight"].slices(mesh.layout, mesh.coordinates)[0].start
    units = {"embedding": embedding_unit(p, mesh.tp, first_row), "head": head_unit(p, mesh.tp, first_row)}
    units |= {name: block_unit(p, mesh.tp, name) for name in UNITS[1:-1]}
    return {name: units[name] for name in held_units(mesh)}


def held_units(mesh: Mesh) -> tuple[str, ...]:
    return UNITS if mesh.pp.size == 1 else STAGES[mesh.coordinates["pp"]]


# -- what can be run, rightly and wrongly ----------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A way to run the step, and what is broken in it."""

    schedule: str = "1f1b"
    split: bool = False
    recompute: str = "none"
    mutation: str = ""

    def __str__(self) -> str:
        parts = [self.schedule, "B then W" * self.split, "recompute" * (self.recompute == "full"), self.mutation]
        return ", ".join(filter(None, parts))

    def make(self, layout: Layout) -> Schedule:
        schedule = make_schedule(replace(layout, schedule=self.schedule))
        schedule = add_communication(split_backward(schedule) if self.split else schedule)
        assert check(schedule) == []
        return schedule


class DropGradients(ForwardingComm):
    """No all-reduce of gradient buckets."""

    def all_reduce_start(self, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        return Work() if name.startswith("gradients") else super().all_reduce_start(tensor, op, name=name)


class HalveSentGradients(ForwardingComm):
    """Half of the activation gradient reaches the stage before."""

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        return super().send(tensor.mul_(0.5) if name.startswith("activation_gradients") else tensor, to, name=name)


class OwnGradientOnly(ForwardingComm):
    """The backward of gather_tokens takes its own rows without summing those of the others."""

    def reduce_scatter_start(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, name: str) -> Work:
        work = super().reduce_scatter_start(output, tensor, op, name=name)
        work.wait()
        if name.endswith(".gather"):
            output.copy_(tensor.chunk(self.size)[self.rank])
        return Work()


WRAPPERS: dict[str, tuple[str, Callable[[Comm], Comm]]] = {
    "no dp all-reduce": ("dp_cp", DropGradients),
    "no tp all-reduce": ("tp", DropGradients),
    "sent gradients halved": ("pp", HalveSentGradients),
    "gather without its sum": ("tp", OwnGradientOnly),
}
NORMS_ALONE = "norms not summed over tp"
TOO_EARLY = "reduced before W"
MUTATIONS = [Case(mutation=name) for name in (*WRAPPERS, NORMS_ALONE)] + [Case(split=True, mutation=TOO_EARLY)]
RIGHT = [
    Case("1f1b"), Case("gpipe"), Case("1f1b", split=True), Case("gpipe", split=True),
    Case("1f1b", recompute="full"), Case("gpipe", split=True, recompute="full"),
]  # fmt: skip


def members(mesh: Mesh, mutation: str) -> list[Member]:
    found = []
    for spec in SPECS.values():
        axes = spec.reduce_axes(mesh.layout)
        if mutation == NORMS_ALONE and spec.name.endswith("norm"):
            axes = tuple(axis for axis in axes if axis != "tp")
        if spec.unit in held_units(mesh):
            shape = spec.local_shape(mesh.layout, mesh.coordinates)
            found.append(Member(spec.name, shape, (spec.unit,), spec.decay, axes))
    return found


def reduce_too_early(buckets: GradientBuckets) -> Callable[[Action], None]:
    """Says at the first W that all units are done, as a hook of autograd would."""

    def on_action(action: Action) -> None:
        if action.kind is Kind.W and action.microbatch == 0:
            buckets.finish()

    return on_action


def run_case(mesh: Mesh, case: Case, frozen: str = "-") -> tuple[Outcome, Ledger]:
    if case.mutation in WRAPPERS:
        axis, wrapper = WRAPPERS[case.mutation]
        mesh = copy.copy(mesh)
        setattr(mesh, axis, wrapper(mesh.axis(axis)))
    values, parameters = whole_values(), {}
    for member in members(mesh, case.mutation):
        part = SPECS[member.name].slices(mesh.layout, mesh.coordinates)
        parameters[member.name] = nn.Parameter(values[member.name][part].clone())
        parameters[member.name].requires_grad_(not member.name.startswith(frozen))
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    held = [member for member in members(mesh, case.mutation) if member.name in trained]
    plans = plan_buckets(held, UNITS, bucket_mb=160 / 2**20, element_bytes=8)
    assert len(plans) > 3
    buckets = GradientBuckets(plans, trained, mesh, AllReduce())
    optimizer = FlatOptimizer(SGD, buckets.buckets)
    executor = Executor(
        case.make(mesh.layout), {mesh.coordinates["pp"]: StageUnits(make_units(parameters, mesh), D)}, mesh.pp, buckets,
        mesh.recorder, recompute=case.recompute, dtype=torch.float64, token_shards=mesh.tp.size,
    )  # fmt: skip
    if case.mutation == TOO_EARLY:
        executor.on_action = reduce_too_early(buckets)
    for step in range(NUM_STEPS):
        mesh.recorder.take()
        buckets.begin()
        scale = torch.tensor(1 / num_valid(step), dtype=torch.float64)
        first = mesh.coordinates["dp"] * mesh.layout.microbatches
        loss = executor.run(batches(step)[first : first + mesh.layout.microbatches], scale)
        buckets.finish()
        gradients = {name: view.clone() for name, view in buckets.named("gradients").items()}
        optimizer.step(SGD.lr)
    ledger = mesh.recorder.take()
    total = mesh.pp.all_reduce(mesh.dp_cp.all_reduce(loss, name="loss"), name="loss").item() / num_valid(step)
    return Outcome(total, gradients, {name: p.detach().clone() for name, p in trained.items()}), ledger


def run_cases(env: RankEnv, cases: Sequence[Case]) -> dict[Case, tuple[Outcome, Ledger]]:
    mesh = Mesh.distributed(LAYOUT, env.rank)
    return {case: run_case(mesh, case) for case in cases}


# -- compared --------------------------------------------------------------------------------------

Results = list[dict[Case, tuple[Outcome, Ledger]]]


@pytest.fixture(scope="module")
def results() -> Results:
    found: Results = run_ranks(run_cases, LAYOUT.world_size, [*RIGHT, *MUTATIONS])
    return found


def differences(outcomes: Sequence[Outcome], layout: Layout, expected: Outcome) -> dict[str, float]:
    """The largest |a - b| / max|b| of the loss and of each parameter's gradient and value, over the ranks' slices."""
    worst = {"loss": max(abs(ours.loss / expected.loss - 1) for ours in outcomes)}
    seen = {name: torch.zeros(SPECS[name].shape, dtype=torch.bool) for name in expected.parameters}
    for rank, ours in enumerate(outcomes):
        for kind in ("gradients", "parameters"):
            for name, value in getattr(ours, kind).items():
                part = SPECS[name].slices(layout, layout.grid.coordinates(rank))
                reference = getattr(expected, kind)[name]
                difference = float((value - reference[part]).abs().max() / reference.abs().max())
                worst[f"{kind} {name}"] = max(worst.get(f"{kind} {name}", 0.0), difference)
                seen[name][part] = True
    assert all(bool(covered.all()) for covered in seen.values())
    return worst


def on_eight_ranks(results: Results, case: Case) -> dict[str, float]:
    return differences([result[case][0] for result in results], LAYOUT, one_process())


@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_eight_ranks_equal_one_process(results: Results, case: Case) -> None:
    worst = on_eight_ranks(results, case)
    assert len(worst) == 1 + 2 * len(SPECS)
    assert max(worst.values()) < 1e-9, {name: value for name, value in worst.items() if value >= 1e-9}


# What each mutation must spoil, and what it must leave alone in its last step's gradients.
@pytest.mark.parametrize("case", MUTATIONS, ids=str)
def test_a_mutation_turns_it_red(results: Results, case: Case) -> None:
    worst = on_eight_ranks(results, case)
    spoilt = {name for name, value in worst.items() if value > 1e-4}
    assert spoilt, "nothing was noticed"
    assert max(worst.values()) > 1e-2
    if case.mutation in (NORMS_ALONE, "no tp all-reduce"):
        assert "gradients blocks.0.norm" in spoilt
    if case.mutation in ("no dp all-reduce", TOO_EARLY):
        assert {"gradients embedding.token", "gradients blocks.2.down", "gradients head.weight"} <= spoilt


def test_every_case_has_its_own_ledger(results: Results) -> None:
    """What stage 0 sends and both stages gather, in bytes and calls, in the phase where it happens."""
    m, tokens = LAYOUT.microbatches, T // LAYOUT.tp * D * 8
    for case in RIGHT:
        ledgers = [result[case][1] for result in results]
        first, last = (ledgers[ranks[0]] for ranks in (LAYOUT.grid.stage_ranks(0), LAYOUT.grid.stage_ranks(1)))
        sent = first.entries["F", "send", "pp", "activations.0"]
        assert (sent.bytes, sent.count) == (m * tokens, m)
        back = last.entries["B", "send", "pp", "activation_gradients.1"]
        assert (back.bytes, back.count) == (m * tokens, m)
        assert last.entries["F", "all_gather", "tp", "blocks.1.gather"].count == m
        recomputed = last.entries.get(("recompute", "all_gather", "tp", "blocks.1.gather"))
        assert (recomputed.count if recomputed else 0) == (m if case.recompute == "full" else 0)
        reduced = [entry for entry in last.entries.values() if entry.verb == "all_reduce" and entry.axis == "dp_cp"]
        assert reduced and all(entry.phase == "reduce" and entry.count == 1 for entry in reduced)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("frozen", ["-", "embedding.", "blocks.1."])
def test_one_rank_takes_the_same_path(frozen: str, recompute: str) -> None:
    """All axes of size 1, and units whose parameters are frozen: the first of them has no backward at all."""
    layout = Layout(microbatches=LAYOUT.dp * LAYOUT.microbatches)
    mesh = Mesh(layout, 0, lambda axis, groups: SoloComm(axis))
    outcome, ledger = run_case(mesh, Case(split=True, recompute=recompute), frozen)
    expected = one_process(frozen)
    assert outcome.gradients.keys() == expected.gradients.keys()
    assert max(differences([outcome], layout, expected).values()) < 1e-9
    assert ledger.total_bytes == 0
