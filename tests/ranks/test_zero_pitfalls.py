"""The known defects of groups LN, GN and ZF at every stage of sharding, with numbers worked by hand (test_loss_norm: stage 0)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks.kit import run_ranks
from ranks.test_loss_norm import VOCAB, apart, batch_of, make_config, mesh_of, not_finite, packed, rigged, stepped
from shardwright.comm.mesh import Mesh
from shardwright.launch import RankEnv
from shardwright.ops.gradients import slot_of
from shardwright.train.step import Trainer

STAGES = {
    "1": "zero=1,bucket_mb=0.0005",
    "2": "zero=2,bucket_mb=0.0005",
    "2, reduced": "zero=2,accumulate=reduce",
    "3": "zero=3",
    "3, kept, reduced": "zero=3,reshard=after_backward,accumulate=reduce",
    "2, offloaded": "zero=2,accumulate=reduce,offload=optimizer",
    "3, offloaded": "zero=3,offload=params",
}


def weighted(env: RankEnv, stage: str) -> tuple[float, float]:
    """LN-02: one valid token of loss 4 beside seven of loss 1."""
    loss, found = stepped(rigged(env, f"dp=2,{stage}"), [[batch_of([4]), batch_of([1] * 7)][env.rank]])
    return loss, apart(found, stepped(rigged(None, "dp=1"), [batch_of([4] + [1] * 7)])[1])


def ignored(env: RankEnv, stage: str) -> list[tuple[float, float, list[str]]]:
    """LN-04: a rank, or a micro-batch, or everything has ignored targets only."""
    good, none = batch_of([2] * 4), batch_of([3] * 5, valid=0)
    alone = stepped(rigged(None, "dp=1"), [good])[1]
    found = []
    for shares in ([[good], [none]], [[good, none], [none, none]], [[none], [none]]):
        trainer = rigged(env, f"dp=2,microbatches={len(shares[0])},{stage}")
        loss, values = stepped(trainer, shares[env.rank])
        expected = alone if loss else {name: torch.zeros_like(value) for name, value in alone.items()}
        found.append((loss, apart(values, expected), not_finite(values | trainer.named_parameters())))
    return found


def accumulated(env: RankEnv, stage: str) -> list[tuple[float, float]]:
    """LN-03, LN-14, ZF-01: the same sequences as one, two and four micro-batches; loss and distance from one process."""
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(VOCAB, (4 + i % 3,), generator=generator).tolist() for i in range(8)]
    batches = [batch_of(s, valid=len(s) - i % 2, first=8 * i, target=i % VOCAB) for i, s in enumerate(sequences)]
    whole = Trainer(make_config("precision=fp64"), Mesh.solo())
    expected = stepped(whole, [packed(batches)])[1]
    found = []
    for micro in (1, 2, 4):
        each = len(batches) // (2 * micro)
        shares = [packed(batches[i : i + each]) for i in range(0, len(batches), each)]
        config = make_config(f"dp=2,microbatches={micro},precision=fp64,{stage}")
        loss, values = stepped(Trainer(config, mesh_of(env, config)), shares[env.rank :: 2])
        found.append((loss, apart(values, expected)))
    return found


def clipped(env: RankEnv, stage: str) -> list[float]:
    """GN-07: three norms, of which clipping makes the later ones depend on the first."""
    config = make_config(f"dp=2,precision=fp64,{stage}", ["optim.clip=0.1"])
    trainer = Trainer(config, mesh_of(env, config))
    return [trainer.step([batch_of([1, 2, 3, 4 + env.rank])], step).grad_norm for step in range(3)]


def infinite(env: RankEnv, stage: str) -> tuple[bool, bool, int]:
    """GN-09, GN-10: an infinite gradient on rank 0; whether the step is skipped and nothing has changed."""
    config = make_config(f"dp=2,{stage}", ["train.on_nonfinite=skip", "optim.name=adamw"])
    trainer = Trainer(config, mesh_of(env, config))
    before = {name: value.clone() for name, value in trainer.named_parameters().items()}
    done = trainer.buckets.unit_done

    def poisoned(unit: str) -> None:
        slot = slot_of(trainer.parameters["head.norm.weight"])
        if unit == "head" and env.rank == 0 and slot is not None:
            slot.view[0] = math.inf
        done(unit)

    trainer.buckets.unit_done = poisoned  # type: ignore[method-assign]
    result = trainer.step([batch_of([1, 2, 3])], 0)
    after = trainer.named_parameters()
    same = all(torch.equal(value, after[name]) for name, value in before.items())
    return result.skipped, same, trainer.optimizer.step_count


def in_bf16(env: RankEnv, stage: str) -> dict[str, Any]:
    """ZF-05, ZF-07, ZF-12: fp32 state behind bf16 parameters; recomputation changes nothing."""
    found: dict[str, Any] = {}
    for recompute in ("none", "full"):
        text = f"dp=2,microbatches=2,precision=bf16,recompute={recompute},{stage}"
        config = make_config(text, ["optim.name=adamw", "optim.lr=1e-5"])
        trainer = Trainer(config, mesh_of(env, config))
        kept: dict[str, Tensor] = {}
        trainer.on_gradients = lambda t, kept=kept: kept.update({k: v.clone() for k, v in t.buckets.named("gradients").items()})  # type: ignore[misc]
        for step in range(3):
            trainer.step([batch_of([1, 2, 3, 4 + env.rank]), batch_of([5, 6 + env.rank])], step)
        state = trainer.optimizer.named_state()
        found[recompute] = kept
        found["dtypes"] = {value.dtype for values in state.values() for value in values.values()}
        found["parameters"] = {name: value.clone() for name, value in trainer.named_parameters().items()}
        found["moved"] = (state["master"]["head.norm.weight"] - 1).abs().max().item()
    return found


CASES = (weighted, ignored, accumulated, clipped, infinite, in_bf16)


def everything(env: RankEnv) -> dict[str, dict[str, Any]]:
    stages = {"0": "zero=0", **STAGES}
    return {label: {case.__name__: case(env, stage) for case in CASES} for label, stage in stages.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(everything, 2, time_limit=200.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("label", STAGES)
def test_groups_ln_gn_and_zf_hold(label: str, ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in ranks:
        found, plain = rank[label], rank["0"]
        loss, distance = found["weighted"]
        assert loss == pytest.approx(1.375, rel=1e-9) and distance < 1e-12
        assert [loss for loss, _, _ in found["ignored"]] == pytest.approx([2.0, 2.0, 0.0], rel=1e-9)
        assert all(distance < 1e-12 and not broken for _, distance, broken in found["ignored"])
        assert [loss for loss, _ in found["accumulated"]] == pytest.approx([found["accumulated"][0][0]] * 3, rel=1e-9)
        assert all(distance < 1e-12 for _, distance in found["accumulated"])
        assert found["clipped"] == pytest.approx(plain["clipped"], rel=1e-9) and found["clipped"] == ranks[0][label]["clipped"]
        assert found["infinite"] == (True, True, 0)
        half = found["in_bf16"]
        assert half["dtypes"] == {torch.float32}
        assert all(torch.equal(value, half["full"][name]) for name, value in half["none"].items())
        assert apart(half["none"], plain["in_bf16"]["none"]) < 1e-2
        assert 1e-6 < half["moved"] < 1e-4
        first = ranks[0][label]["in_bf16"]["parameters"]
        assert all(torch.equal(value, first[name]) for name, value in half["parameters"].items())
