"""The dry run: equal to a full replay and to the closed form, its FLOPs the model's, its memory the formulas'."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from shardwright.core.run_config import RunConfig
from shardwright.core.specs import parameter_specs
from shardwright.plan.compute import Shape, layer_kind
from shardwright.plan.memory import MemoryModel, in_flight
from shardwright.plan.stack import Stack
from shardwright.plan.stages import ParameterTable, layers_per_stage, rank_units
from shardwright.train import dryrun
from shardwright.train.dryrun import DryExecutor, dry_run, dry_stage
from shardwright.verify.memory import memory_differences
from shardwright.verify.parity import dry_step, first_of_each_stage

MODEL = {
    "vocab_size": 64, "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip
GRID = (
    "dp=3,zero=1,microbatches=2",
    "tp=2,pp=2,dp=2,zero=3,schedule=zb_h1,microbatches=3,accumulate=reduce",
    "pp=2,schedule=zb_v,microbatches=4,dp=4,zero=2,accumulate=reduce,dp_replicate=2",
    "pp=2,virtual=2,schedule=interleaved,microbatches=2,recompute=full,tp=2",
    "pp=2,schedule=dualpipe_v,microbatches=4,zero=3,dp=2,reshard=after_backward",
    "cp=2,dp=2,zero=1,microbatches=2,recompute=full",
    "cp=2,pp=2,tp=2,microbatches=2,cp_kind=ulysses,recompute=full",
    "pp=2,tp=2,cp=2,virtual=2,schedule=interleaved,microbatches=2,recompute=full-selective",
    "pp=4,dp=512,tp=2,zero=1,microbatches=2,precision=bf16,recompute=full",
)


def config(layout: str, **model: Any) -> RunConfig:
    table = {"model": MODEL | model, "data": {"sources": "synthetic:sentences", "seq_len": 16}, "train": {"steps": 1}}
    return RunConfig.of(table, (), layout)


class FullReplay(DryExecutor):
    """Every micro-batch runs its units."""

    def _unit_forward(self, stage: int, m: int, name: str, x: Tensor, *, again: bool = False) -> Tensor:
        self.first[stage] = m
        return super()._unit_forward(stage, m, name, x, again=again)

    def _unit_backward(self, stage: int, m: int, name: str, x: Tensor, y: Tensor, gradient: Tensor) -> Tensor:
        self.first[stage] = m
        return super()._unit_backward(stage, m, name, x, y, gradient)


@pytest.mark.parametrize("layout", GRID)
def test_the_first_micro_batch_tells_what_all_do(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(layout)
    short = dry_run(run)
    monkeypatch.setattr(dryrun, "DryExecutor", FullReplay)
    for stage, rank in enumerate(first_of_each_stage(run.layout)):
        if stage != run.layout.pp - 1:
            continue
        full, found = dry_stage(run, rank, stage), short.stages[stage]
        assert found.ledger.differences(full.ledger) == []
        assert found.ledger.differences(dry_step(run, rank)) == []
        assert found.memory == full.memory
        assert found.flops == full.flops
        assert found.differences == []  # of the closed form


def test_experts_and_context_are_traced_too() -> None:
    experts = {"num_experts": 4, "top_k": 2, "expert_dim": 16, "aux_coefficient": 0.01}
    run = config("ep=2,tp=2,dp=2,zero=3,microbatches=3,recompute=full", num_layers=2, moe=experts)
    assert dry_run(run).agrees
    assert dry_run(config("cp=2,dp=2,pp=2,microbatches=2", num_layers=2)).agrees


@pytest.mark.parametrize("kind", ["ring", "allgather", "ulysses"])
def test_flops_of_context_parallelism_are_the_models(kind: str) -> None:
    run = config(f"cp=2,cp_kind={kind},microbatches=2")
    total = run.model.flops_per_token(16, convention="causal") * 16 * run.layout.global_batch
    assert dry_run(run).to_json()["flops"]["total"] == total
    again = config(f"cp=2,cp_kind={kind},microbatches=2,recompute=full")
    attention = 4 * 4 * 8 * 128 * 4 * 2  # 4 heads of 8, half of 16 x 16 scores, 4 layers, 2 sequences
    forward = run.model.flops_per_token(16, convention="causal", backward=False) * 16 * run.layout.global_batch
    repeated = forward if kind == "ulysses" else forward - attention  # others keep what attention gave
    assert dry_run(again).to_json()["flops"]["total"] == total + repeated


def test_flops_are_the_models() -> None:
    run = config("tp=2,pp=2,dp=2,microbatches=3,sp=on")
    per_token = run.model.flops_per_token(16, convention="causal")
    assert dry_run(run).to_json()["flops"]["total"] == per_token * 16 * run.layout.global_batch
    again = config("pp=2,dp=2,microbatches=3,recompute=full")
    forward = again.model.flops_per_token(16, convention="causal", backward=False)
    total = dry_run(again).to_json()["flops"]["total"]
    assert total == (per_token + forward) * 16 * again.layout.global_batch


def test_activations_follow_the_schedule() -> None:
    peaks = {}
    for schedule, m in (("gpipe", 6), ("1f1b", 6), ("1f1b", 12)):
        run = config(f"pp=4,schedule={schedule},microbatches={m}", vocab_size=32)
        peaks[schedule, m] = dry_stage(run, 1, 1).memory.activations
    middle = peaks["gpipe", 6] // 6  # one micro-batch of a stage without ends
    assert peaks["1f1b", 6] == middle * in_flight(config("pp=4,microbatches=6").layout, 1) == 3 * middle
    assert peaks["1f1b", 12] == peaks["1f1b", 6]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v", "dualpipe_v", "1f1b"])
def test_what_waits_for_its_weight_gradient_is_planned(schedule: str, tp: int, recompute: str) -> None:
    """x and dy of every product between B and W: to the byte; all activations within a quarter."""
    run = config(f"pp=2,tp={tp},schedule={schedule},microbatches=8,recompute={recompute}", dim=64, ffn_dim=128)
    for rank in first_of_each_stage(run.layout):
        stage = run.layout.grid.coordinates(rank)["pp"]
        found, ledger = dry_stage(run, rank, stage).memory, dry_step(run, rank)
        model, layout = run.model, run.layout
        kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
        units = rank_units(layout, stage, layers_per_stage(model, layout), kinds)
        memory, shape = MemoryModel(model, ParameterTable(model), Stack()), Shape.of(layout, 16)
        waiting = memory.waiting_bytes(layout, stage, units, shape)
        assert found.parts.get("held for W", 0) == ledger.peak.get("held for W", 0) == waiting
        assert (waiting > 0) == (schedule != "1f1b")
        assert (ledger.peak.get("gathered for W", 0) > 0) == (waiting > 0 and tp == 2)
        assert memory_differences(run, ledger, rank) == []
        planned = memory.stage(layout, stage, units, shape)
        assert planned.parts.get("held for W", 0) <= waiting
        assert planned.activations == pytest.approx(found.activations, rel=0.25)


def test_what_is_kept_for_its_weight_gradient_counts_when_inputs_are_all_that_is_saved() -> None:
    """Of ZB-H1 with recompute=full most of it; each storage once, and what sequence parallelism gathered whole."""
    run = config("pp=2,schedule=zb_h1,microbatches=4,recompute=full,precision=bf16")
    dim, ffn, kv = MODEL["dim"], MODEL["ffn_dim"], MODEL["dim"] // 2
    layer = 2 * 16 * (4 * dim + (2 * dim + 2 * kv) + 3 * ffn)
    head = 2 * 16 * (dim + MODEL["vocab_size"])
    assert [stage.memory.parts["held for W"] for stage in dry_run(run).stages] == [2 * layer, 2 * (2 * layer + head)]
    split = dry_run(config("pp=2,tp=2,schedule=zb_h1,microbatches=4,recompute=full,precision=bf16")).stages[0]
    assert split.memory.parts["gathered for W"] == 2 * (2 * 16 * 4 * dim)


def test_activation_bytes_of_a_layer_are_counted_by_storage() -> None:
    run = config("pp=4,microbatches=1,precision=bf16")
    tokens = Shape.of(run.layout, 16).tokens
    stage = dry_stage(run, 2, 2)
    dim, ffn, heads, kv = MODEL["dim"], MODEL["ffn_dim"], MODEL["num_heads"], MODEL["num_kv_heads"]
    width = dim // heads
    norms = 2 * (2 * dim) + 2 * 4  # inputs of both norms and an fp32 factor each
    products = 2 * 2 * dim  # what the norms give to the products
    attention = (
        2 * (heads + kv) * width + 2 * (heads + 2 * kv) * width
    )  # rotated q and k; v, a view of the whole product
    attention += 2 * heads * width + 4 * heads  # output; softmax statistics
    mlp = 2 * 3 * ffn  # gate and up, their product
    out = 2 * dim  # this stage's output, until its backward
    per_token = norms + products + attention + mlp + out
    assert stage.memory.activations == pytest.approx(tokens * per_token, rel=0.02)


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from shardwright import cli

    arguments = ["dryrun", "examples/tiny.toml", "--layout", "tp=2,pp=2,dp=64,zero=3,microbatches=2"]
    monkeypatch.setattr("sys.argv", ["shardwright", *arguments, "--json"])
    assert cli.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert {"layout", "memory", "communication", "parameters", "flops"} <= set(found)
    assert found["closed_form"] == {"equal": True, "differences": []}
    assert found["world_size"] == 256
    assert [set(stage) >= {"stage", "parameters", "activations", "total"} for stage in found["memory"]] == [True, True]
    monkeypatch.setattr("sys.argv", ["shardwright", *arguments])
    assert cli.main() == 0
    assert "closed form" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["shardwright", "dryrun", "examples/tiny.toml", "--layout", "pp=9"])
    assert cli.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_parameters_are_the_slices_of_the_specs() -> None:
    run = config("tp=2,pp=2,dp=2")
    total = sum(stage.parameters for stage in dry_run(run).stages)
    specs = parameter_specs(run.model).values()
    sizes = [spec.local_shape(run.layout, {"tp": 0}) for spec in specs]
    expected = 0
    for shape in sizes:
        size = 1
        for part in shape:
            size *= part
        expected += size
    assert total == expected
