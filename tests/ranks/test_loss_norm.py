"""Normalisation of loss and gradients, the norm, clipping, precision and decisions, with numbers worked by hand.

The model is `Rigged`: zero everywhere but in embedding and head, so that a token of id i with target 0 has the loss
``LOSS_OF[i]`` and every sum can be done by hand. The names LN, GN, US, RN and ZF are those of known defects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks.kit import run_ranks
from shardwright.comm.base import Comm
from shardwright.comm.mesh import Mesh
from shardwright.core.buckets import Member, plan_buckets
from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError, NonFiniteError
from shardwright.launch import RankEnv
from shardwright.ops.kernels import dropout, dropout_key
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.hooks import AllReduce, FunctionHook
from shardwright.plan.collectives import predict_step
from shardwright.train.data import IGNORE, EvalSampler, MicroBatch, WindowDataset
from shardwright.train.indexed import IndexedDataset, IndexedWriter
from shardwright.train.optim import clip, global_norm
from shardwright.train.step import Trainer
from shardwright.verify.parity import max_rel_diff

VOCAB = 11  # does not divide over 2 or 4 ranks
LOSS_OF = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
Values = dict[str, Tensor]


def make_config(layout: str = "dp=1", sets: Sequence[str] = (), **model: Any) -> RunConfig:
    shape = {"vocab_size": VOCAB, "dim": 10, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 9}
    table = {
        "model": shape | {"head_dim": 6, "max_positions": 64, "norm_eps": 1e-12} | model,
        "data": {"sources": "not read here", "seq_len": 8},
        "optim": {"name": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "schedule": "constant"},
        "train": {"steps": 100, "threads": 1},
    }
    return RunConfig.of(table, sets, layout)


def mesh_of(env: RankEnv, config: RunConfig) -> Mesh:
    return Mesh.distributed(config.layout, env.rank)


@torch.no_grad()
def rig(trainer: Trainer) -> Trainer:
    """Token i with target 0 gets the loss ``LOSS_OF[i]``: the head sees one-hot rows, whose logits are chosen for it."""
    dim = trainer.config.model.dim

    def write(name: str, view: Tensor) -> None:
        view.fill_(1.0 if "norm" in name else 0.0)
        if name == "embedding.token.weight":
            view.copy_(torch.eye(VOCAB, dim))
        elif name == "head.norm.weight":
            view.fill_(dim**-0.5)
        elif name == "head.weight":
            for token, loss in LOSS_OF.items():  # -log(e^a / (e^a + V - 1)) = loss
                view[0, token] = math.log((VOCAB - 1) / math.expm1(loss))

    trainer.fill_parameters(write)
    return trainer


def rigged(env: RankEnv | None, layout: str, sets: Sequence[str] = ()) -> Trainer:
    """A rigged trainer in fp64 on this rank of ``layout``; without ``env`` the whole batch in one process."""
    config = make_config(f"{layout},precision=fp64", sets)
    return rig(Trainer(config, Mesh.solo() if env is None else mesh_of(env, config)))


def batch_of(tokens: Sequence[int], valid: int | None = None, first: int = 0, target: int = 0) -> MicroBatch:
    """One document of ``tokens``, whose first ``valid`` (all by default) have a target."""
    size = len(tokens)
    valid = size if valid is None else valid
    targets = torch.full((size,), IGNORE)
    targets[:valid] = target
    index = torch.arange(size)
    return MicroBatch(torch.tensor(tokens), targets, index, index + first, (size,), valid, ())


def gradients(trainer: Trainer) -> Values:
    return {name: view.clone() for name, view in trainer.buckets.named("gradients").items()}


def stepped(trainer: Trainer, batches: Sequence[MicroBatch], step: int = 0) -> tuple[float, Values]:
    """Loss of a step, and its gradients before clipping."""
    kept: Values = {}
    trainer.on_gradients = lambda trainer: kept.update(gradients(trainer))
    loss = trainer.step(batches, step).loss
    trainer.on_gradients = None
    return loss, kept


def apart(first: Values, second: Values) -> float:
    return max_rel_diff(first, second)[0]


def not_finite(values: Values) -> list[str]:
    return [name for name, value in values.items() if not value.isfinite().all()]


# ------------------------------------------------------------------------------------------ what the ranks do

Case = Callable[[RankEnv], Any]


def loss_is_weighted_by_tokens(env: RankEnv) -> tuple[float, float]:
    """LN-02: one valid token of loss 4 beside seven of loss 1: 11/8, where the mean of means is 2.5."""
    mine = [batch_of([4]), batch_of([1] * 7)][env.rank]
    loss, found = stepped(rigged(env, "dp=2"), [mine])
    whole_loss, whole = stepped(rigged(None, "dp=1"), [batch_of([4] + [1] * 7)])
    assert whole_loss == pytest.approx(1.375, rel=1e-9)
    return loss, apart(found, whole)


def a_rank_without_targets(env: RankEnv) -> dict[str, tuple[float, float, list[str]]]:
    """LN-04: a rank, a micro-batch, or everything has ignored targets only."""
    good, ignored = batch_of([2] * 4), batch_of([3] * 5, valid=0)
    alone_loss, alone = stepped(rigged(None, "dp=1"), [good])
    assert alone_loss == pytest.approx(2.0, rel=1e-9)
    found = {}
    for name, shares in {
        "rank": [[good], [ignored]],
        "micro-batch": [[good, ignored], [ignored, ignored]],
        "all": [[ignored], [ignored]],
    }.items():
        trainer = rigged(env, f"dp=2,microbatches={len(shares[0])}")
        loss, values = stepped(trainer, shares[env.rank])
        zero = {key: torch.zeros_like(value) for key, value in alone.items()}
        parameters = dict(trainer.parameters)
        found[name] = loss, apart(values, zero if name == "all" else alone), not_finite(values | parameters)
    return found


def accumulation_is_one_batch(env: RankEnv) -> dict[str, Any]:
    """LN-03, LN-14, ZF-01: the same sequences on 2 ranks as one, three and four micro-batches, with real weights."""
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(VOCAB, (4 + i % 3,), generator=generator).tolist() for i in range(24)]
    batches = [batch_of(s, valid=len(s) - i % 2, first=8 * i, target=i % VOCAB) for i, s in enumerate(sequences)]
    found: dict[str, Any] = {}
    for micro in (1, 3, 4):
        per_micro = len(batches) // (env.world_size * micro)
        shares = [batches[i : i + per_micro] for i in range(0, len(batches), per_micro)]
        mine = [packed(share) for share in shares[env.rank :: env.world_size]]
        config = make_config(f"dp={env.world_size},microbatches={micro},precision=fp64")
        trainer = Trainer(config, mesh_of(env, config))
        loss, values = stepped(trainer, mine)
        found[str(micro)] = loss, values, dict(trainer.buckets.named("parameters"))
    return found


def packed(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Micro-batches as one, each a document of its own."""
    fields = ("tokens", "targets", "positions", "token_index")
    joined = [torch.cat([getattr(batch, name) for batch in batches]) for name in fields]
    lengths = tuple(length for batch in batches for length in batch.lengths)
    return MicroBatch(*joined, lengths, sum(batch.num_valid for batch in batches), ())


def norm_of_the_whole_gradient(env: RankEnv) -> dict[str, Any]:
    """GN-07, GN-11: rank 0 has 3 in one parameter, rank 1 has 4 in another, and a third one takes no part."""
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b", "unused")}
    members = [Member(name, (2,), (name,), True, ("cp", "dp")) for name in parameters]
    mesh = Mesh.distributed(Layout(dp=2), env.rank)
    buckets = GradientBuckets(plan_buckets(members, list(parameters), 8 / 2**20), parameters, mesh, AllReduce())
    slots = {name: parameter.grad_slot for name, parameter in parameters.items()}  # type: ignore[attr-defined]
    slots["unused"].add(torch.full((2,), 100.0))  # of the step before
    buckets.finish()
    buckets.begin()
    mine = "ab"[env.rank]
    slots[mine].add(torch.tensor([3.0 + env.rank, 0.0]))
    buckets.unit_done(mine)
    buckets.finish()
    norm = global_norm(buckets, mesh).item()
    factor = clip(buckets, norm, 1.0)
    return {"norm": norm, "factor": factor, **{name: v.tolist() for name, v in buckets.named("gradients").items()}}


def ranks_decide_alike(env: RankEnv) -> dict[str, Any]:
    """An infinite gradient on one rank only; a request to stop on one rank only."""
    found: dict[str, Any] = {}
    for choice in ("skip", "stop"):
        for bad in (math.inf, math.nan):
            config = make_config("dp=2", [f"train.on_nonfinite={choice}", "optim.name=adamw"])
            trainer = Trainer(config, mesh_of(env, config), hook=FunctionHook(Spoil(env, bad), "sum"))
            before = {name: value.clone() for name, value in trainer.parameters.items()}
            batches = [batch_of([1, 2, 3, 4 + env.rank])]
            outcome: list[Any] = []
            for step in range(3):
                try:
                    result = trainer.step(batches, step)
                except NonFiniteError as error:
                    outcome.append(str(error))
                    break
                outcome.append((result.skipped, result.stop, trainer.optimizer.step_count))
                if step == 0:
                    after = {name: value.clone() for name, value in trainer.parameters.items()}
                    assert apart(before, after) > 0
                if step == 1:
                    assert all(torch.equal(after[name], value) for name, value in trainer.parameters.items())
                trainer.stop_requested = step == 1 and env.rank == 1
            finite = not not_finite(dict(trainer.parameters) | trainer.optimizer.named_state()["exp_avg"])
            found[f"{choice} {bad}"] = outcome, finite
    return found


class Spoil:
    """A reduction that puts a value into the last rank's own gradient in the second step."""

    def __init__(self, env: RankEnv, value: float) -> None:
        self.last, self.value, self.calls = env.rank == env.world_size - 1, value, 0

    def __call__(self, gradients: Tensor, comms: Sequence[Comm], name: str) -> Any:
        if self.last and self.calls == 1:
            gradients[0] = self.value
        self.calls += 1
        return AllReduce().start(gradients, comms, name)


def precision_of_bf16(env: RankEnv) -> dict[str, Any]:
    """ZF-05, ZF-07: bf16 parameters, fp32 gradients, moments and masters; what is accumulated is what is reduced."""
    local: list[Tensor] = []

    def keep(gradients: Tensor, comms: Sequence[Comm], name: str) -> Any:
        local.append(gradients.clone())
        return AllReduce().start(gradients, comms, name)

    config = make_config("dp=2,microbatches=2,precision=bf16", ["optim.name=adamw", "optim.lr=1e-5"])
    trainer = Trainer(config, mesh_of(env, config), hook=FunctionHook(keep, "sum"))
    reduced: list[Tensor] = []
    trainer.on_gradients = lambda trainer: reduced.append(trainer.buckets.buckets[0].gradients.clone())
    for step in range(20):
        trainer.step([batch_of([1, 2, 3, 4 + env.rank]), batch_of([5, 6 + env.rank])], step)
    dtypes = {value.dtype for values in trainer.optimizer.named_state().values() for value in values.values()}
    parameter = trainer.parameters["head.norm.weight"].float()
    master = trainer.optimizer.named_state()["master"]["head.norm.weight"]
    moved = (master - 1).abs()
    return {
        "local": local[0],
        "reduced": reduced[0],
        "dtypes": {*dtypes, trainer.buckets.buckets[0].gradients.dtype},
        "model": {value.dtype for value in trainer.parameters.values()},
        "parameter stays": bool((parameter == 1).all()),
        "moved": moved.max().item(),
        "parameters": {name: value.clone() for name, value in trainer.parameters.items()},
    }


def replicas_start_equal(env: RankEnv) -> dict[str, Any]:
    """RN-05, RN-06: initial values depend on the seed alone; equal sums do not make replicas equal."""
    config = make_config("dp=2")
    trainer = Trainer(config, mesh_of(env, config))
    trainer.buckets.check_replicas()
    found: dict[str, Any] = {"start": {name: value.clone() for name, value in trainer.parameters.items()}}
    if env.rank == 1:
        weight = trainer.parameters["blocks.0.mlp.up.weight"].data
        weight.copy_(weight.flip(0))
    try:
        trainer.buckets.check_replicas()
    except ConfigError as error:
        found["error"] = str(error)
    return found


def everything_on_two(env: RankEnv) -> dict[str, Any]:
    cases: list[Case] = [
        loss_is_weighted_by_tokens,
        a_rank_without_targets,
        accumulation_is_one_batch,
        norm_of_the_whole_gradient,
        ranks_decide_alike,
        precision_of_bf16,
        replicas_start_equal,
    ]
    return {case.__name__: case(env) for case in cases}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(everything_on_two, 2)


def of(results: list[dict[str, Any]], case: Case) -> list[Any]:
    return [found[case.__name__] for found in results]


# ------------------------------------------------------------------------------------------ loss and gradients


def test_micro_batches_weigh_by_their_tokens() -> None:
    """LN-01: two tokens of loss 1 and six of loss 3 are 20/8, where the mean of means is 2.0."""
    loss, found = stepped(rigged(None, "dp=1,microbatches=2"), [batch_of([1, 1]), batch_of([3] * 6)])
    whole_loss, whole = stepped(rigged(None, "dp=1"), [batch_of([1, 1] + [3] * 6)])
    assert loss == pytest.approx(2.5, rel=1e-9) and whole_loss == pytest.approx(2.5, rel=1e-9)
    assert apart(found, whole) < 1e-12


def test_ranks_weigh_by_their_tokens(two_ranks: list[dict[str, Any]]) -> None:
    for loss, difference in of(two_ranks, loss_is_weighted_by_tokens):
        assert loss == pytest.approx(1.375, rel=1e-9)
        assert difference < 1e-12


def test_a_rank_or_micro_batch_with_ignored_targets_only_changes_nothing(two_ranks: list[dict[str, Any]]) -> None:
    for found in of(two_ranks, a_rank_without_targets):
        for name, expected in {"rank": 2.0, "micro-batch": 2.0, "all": 0.0}.items():
            loss, difference, bad = found[name]
            assert loss == pytest.approx(expected, rel=1e-9), name
            assert difference < 1e-12 and bad == [], name


def test_the_same_sequences_in_more_micro_batches_are_the_same_step(two_ranks: list[dict[str, Any]]) -> None:
    for found in of(two_ranks, accumulation_is_one_batch):
        loss, values, parameters = found["1"]
        for micro in ("3", "4"):
            other_loss, other_values, other_parameters = found[micro]
            assert other_loss == pytest.approx(loss, rel=1e-12)
            assert apart(other_values, values) < 1e-12 and apart(other_parameters, parameters) < 1e-12


def on_four_ranks(env: RankEnv, prefix: str) -> dict[str, Any]:
    """LN-03, LN-12, LN-13, US-08, LH-02: equal tokens everywhere; an evaluation of ten windows; the schedule; odd sizes."""
    sets = ["optim.schedule=linear", "optim.min_lr_ratio=0"]
    config = make_config("dp=4,microbatches=2,precision=fp64,bucket_mb=0.0005", sets)
    trainer = rig(Trainer(config, mesh_of(env, config)))
    trainer.mesh.recorder.take()
    mine = [batch_of([1, 2]), batch_of([3, 4])]
    loss, values = stepped(trainer, mine)
    moved = {name: value.clone() for name, value in trainer.parameters.items()}
    results = [trainer.step(mine, step) for step in (25, 50, 100)]

    evaluator = rigged(env, "dp=4")
    sampler = EvalSampler([WindowDataset(IndexedDataset(prefix), 8, cross_documents=True)], 1, 4, env.rank)
    return {
        "loss": loss,
        "gradients": values,
        "parameters": moved,
        "rates": [result.lr for result in results],
        "differences": predict_step(config.model, config.layout, config.data.seq_len).differences(results[0].ledger),
        "sizes": [bucket.plan.numel for bucket in trainer.buckets.buckets],
        "evaluated": evaluator.evaluate(sampler),
    }


@pytest.fixture(scope="module")
def ten_windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 tokens and one more: ten windows of eight, whose last has targets too."""
    prefix = tmp_path_factory.mktemp("indexed") / "ten"
    with IndexedWriter(prefix, VOCAB) as writer:
        writer.add_document([(7 * i * i + 3 * i) % VOCAB for i in range(81)])
    return prefix


@pytest.fixture(scope="module")
def four_ranks(ten_windows: Path) -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, 4, str(ten_windows))


def test_the_step_of_four_ranks_with_odd_sizes_is_that_of_one_process(four_ranks: list[dict[str, Any]]) -> None:
    alone = rigged(None, "dp=1", ["optim.schedule=linear", "optim.min_lr_ratio=0"])
    loss, values = stepped(alone, [batch_of([1, 2] * 4 + [3, 4] * 4)])
    assert loss == pytest.approx(2.5, rel=1e-9)
    for found in four_ranks:
        assert found["loss"] == pytest.approx(loss, rel=1e-12)
        assert apart(found["gradients"], values) < 1e-12  # LN-03: the bug is a factor of 8
        assert apart(found["parameters"], dict(alone.parameters)) < 1e-12
        assert found["differences"] == []
        assert any(size % 4 for size in found["sizes"])


def test_the_rate_follows_optimizer_steps_not_processes_or_micro_batches(four_ranks: list[dict[str, Any]]) -> None:
    for found in four_ranks:
        assert found["rates"] == [0.75, 0.5, 0.0]


def test_an_evaluation_counts_every_sample_once(four_ranks: list[dict[str, Any]], ten_windows: Path) -> None:
    """LN-12: ten windows on four ranks; three rounds, of which the last has two ranks without a sample."""
    sampler = EvalSampler([WindowDataset(IndexedDataset(ten_windows), 8, cross_documents=True)], 1, 1, 0)
    assert len(sampler) == 10
    loss, tokens = rigged(None, "dp=1").evaluate(sampler)
    assert tokens == 80
    for found in four_ranks:
        assert found["evaluated"] == (pytest.approx(loss, rel=1e-12), 80)


# ------------------------------------------------------------------------------------------ norm and decisions


def test_the_norm_is_that_of_the_sum_on_every_rank_and_an_unused_parameter_is_zero(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in of(two_ranks, norm_of_the_whole_gradient):
        assert found["norm"] == 5.0 and found["factor"] == pytest.approx(0.2, rel=1e-6)
        assert found["a"] == pytest.approx([0.6, 0.0]) and found["b"] == pytest.approx([0.8, 0.0])
        assert found["unused"] == [0.0, 0.0]


@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_the_same_decision_on_all(
    bad: str, two_ranks: list[dict[str, Any]]
) -> None:
    for found in of(two_ranks, ranks_decide_alike):
        skipped, finite = found[f"skip {bad}"]
        assert finite and skipped == [(False, False, 1), (True, False, 1), (False, True, 2)]
        stopped, finite = found[f"stop {bad}"]
        assert finite and stopped[0] == (False, False, 1) and len(stopped) == 2
        assert stopped[1].startswith("step 1: the gradient norm is") and "train.on_nonfinite=skip" in stopped[1]


# ------------------------------------------------------------------------------------------ precision, masks, start


def test_bf16_runs_sum_reduce_and_update_in_fp32(two_ranks: list[dict[str, Any]]) -> None:
    first, second = of(two_ranks, precision_of_bf16)
    assert first["model"] == {torch.bfloat16} and first["dtypes"] == {torch.float32}
    assert torch.equal(first["reduced"], first["local"] + second["local"])
    assert not torch.equal(first["reduced"], first["reduced"].bfloat16().float())  # it is not a bf16 sum
    assert all(torch.equal(value, second["parameters"][name]) for name, value in first["parameters"].items())
    assert first["parameter stays"] and first["moved"] == pytest.approx(20 * 1e-5, rel=0.1)


def test_dropout_masks_belong_to_the_tokens_not_to_the_rank() -> None:
    """RN-02, RN-04: other samples have other masks, the same sample has the same one in every layout and again."""
    key = dropout_key(seed=0, step=3, layer=1, site=2)
    ones = torch.ones(8, 16)

    def mask(first: int) -> Tensor:
        return dropout(ones, 0.5, torch.arange(8) + first, key) > 0

    assert torch.equal(mask(0), mask(0))
    assert not torch.equal(mask(0), mask(8))
    both = dropout(torch.ones(16, 16), 0.5, torch.arange(16), key) > 0
    assert torch.equal(both, torch.cat([mask(0), mask(8)]))
    others = [
        dropout(ones, 0.5, torch.arange(8), dropout_key(0, *place)) > 0 for place in ((4, 1, 2), (3, 0, 2), (3, 1, 1))
    ]
    assert all(not torch.equal(mask(0), other) for other in others)
    assert 0.4 < both.float().mean() < 0.6


def test_replicas_start_equal_and_a_replica_with_other_values_is_refused(two_ranks: list[dict[str, Any]]) -> None:
    alone = dict(Trainer(make_config(), Mesh.solo()).parameters)
    for found in of(two_ranks, replicas_start_equal):
        assert all(torch.equal(value, alone[name]) for name, value in found["start"].items())
        assert found["error"].startswith("parameter blocks.0.mlp.up.weight differs between rank 0 and rank 1")


def test_a_hook_that_averages_is_refused_in_training() -> None:
    with pytest.raises(ConfigError, match=r"training divides the loss .* need a sum, but .* averages"):
        Trainer(make_config(), Mesh.solo(), hook=AllReduce("mean"))
