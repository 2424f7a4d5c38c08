"""What a plan promises is what a run shows, for tied, frozen and large parameters (group PL of the pitfalls)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.run_config import RunConfig
from shardwright.errors import ShardwrightError
from shardwright.plan.collectives import gradient_buckets
from shardwright.plan.command import make_plan
from shardwright.plan.compute import Shape
from shardwright.plan.memory import MemoryModel
from shardwright.plan.stack import Stack
from shardwright.plan.stages import ParameterTable, layers_per_stage, rank_units
from shardwright.plan.step_time import Pricer
from shardwright.train.dryrun import dry_stage

SMALL: dict[str, Any] = {"dim": 8, "num_layers": 1, "num_heads": 2, "ffn_dim": 16, "max_positions": 64}


def model(**fields: Any) -> ModelConfig:
    return ModelConfig(**SMALL | fields)


def test_PL_01_tied_weights_are_one_parameter_and_two_uses() -> None:
    tied, untied = (model(vocab_size=100, tied_head=flag) for flag in (True, False))
    assert untied.num_parameters() - tied.num_parameters() == 800
    without_head = tied.flops_per_token(1, backward=False) - 2 * 100 * 8
    assert tied.flops_per_token(1, backward=False) == untied.flops_per_token(1, backward=False)
    assert without_head == model(vocab_size=200).flops_per_token(1, backward=False) - 2 * 200 * 8
    for config in (tied, untied):
        layout = Layout()
        units = rank_units(layout, 0, layers_per_stage(config, layout), Pricer(config, CPU, 16).kinds)
        assert ParameterTable(config).of_rank(units, 1, 1).total == config.num_parameters()


CPU = Cluster.parse("a100-80gb:1x8")


def test_PL_03_frozen_parameters_have_no_optimizer_state() -> None:
    table = {
        "model": SMALL | {"vocab_size": 100},
        "data": {"sources": "synthetic:sentences", "seq_len": 16},
        "train": {"steps": 1, "freeze": ["embedding", "blocks", "head.weight"]},
    }
    stage = dry_stage(RunConfig.of(table, (), "precision=bf16"), 0, 0)
    trained = 8  # the final norm
    assert stage.memory.optimizer == trained * (2 * 4 + 4)  # two fp32 moments and a master copy
    assert stage.memory.gradients == trained * 4
    assert stage.memory.parameters == 2 * model(vocab_size=100).num_parameters()


RUN = """layout = "precision=bf16"
[model]
{shapes}
[data]
sources = "synthetic:sentences"
seq_len = 16
[train]
freeze = {freeze}
[optim]
name = "{optimizer}"
"""


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("freeze", [["embedding", "blocks", "head.weight"], ["blocks.0.attention", "head"], ["blocks.1"], []])
@pytest.mark.parametrize("layout", ["dp=1", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "pp=2,microbatches=2"])
def test_PL_03_the_plan_of_a_run_file_is_the_run(tmp_path: Path, freeze: list[str], layout: str, optimizer: str) -> None:
    """Sequence length, frozen parameters and optimizer of the file, byte for byte the state that the dry run holds."""
    shapes = SMALL | {"vocab_size": 100, "num_layers": 2}
    lines = "\n".join(f"{key} = {value}" for key, value in shapes.items())
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(shapes=lines, freeze=freeze, optimizer=optimizer))
    made = make_plan(str(file), "a100-80gb:1x8", layout, None, None, 1)
    assert made.plan.seq == 16
    for planned in made.plan.memory:
        run = RunConfig.load(file, (), layout)
        real = dry_stage(run, run.layout.grid.rank({"pp": planned.stage}), planned.stage).memory
        assert (planned.parameters, planned.gradients, planned.optimizer) == pytest.approx(
            (real.parameters, real.gradients, real.optimizer), abs=64  # shards are padded to equal size
        )


def test_PL_03_a_run_file_gives_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    lines = "\n".join(f"{key} = {value}" for key, value in (SMALL | {"vocab_size": 100}).items())
    text = RUN.format(shapes=lines, freeze=["embedding"], optimizer="adamw")
    file.write_text(text.replace("precision=bf16", "tp=2,microbatches=4"))
    whole, changed, longer = (
        make_plan(str(file), "a100-80gb:1x2", *options, 1).plan
        for options in ((None, None, None), ("tp=1,dp=2", None, 16), (None, 32, None))
    )
    assert (whole.layout.tp, whole.layout.precision, whole.layout.microbatches) == (2, "fp32", 4)
    assert (changed.layout.tp, changed.layout.microbatches) == (1, 8)
    assert longer.seq == 32
    assert any("embedding" in line and "sequences of 16" in line for line in whole.assumptions)
    found = make_plan(str(file), "a100-80gb:1x2", "search", None, None, 1).plan
    assert found.candidates
    assert found.layout.global_batch == 4
    file.write_text(file.read_text().replace("embedding", "nothing"))
    with pytest.raises(ShardwrightError, match="matches no parameter"):
        make_plan(str(file), "a100-80gb:1x2", None, None, None, 1)


def test_PL_04_vocabulary_tables_are_reduced_one_at_a_time() -> None:
    config = model(vocab_size=1000, dim=64, num_heads=4)
    norm = 64
    for text in ("dp=2,zero=3", "dp=2,zero=2,bucket_mb=0.25"):
        layout = Layout.parse(text)
        buckets = gradient_buckets(config, layout)
        assert 256_000 <= max(bucket.numel for bucket in buckets) * 4 <= 256_000 + 2 * 4 * norm  # with norms of its unit
    layout = Layout.parse("dp=2,zero=3,precision=bf16,reduce_dtype=fp32")
    units = rank_units(layout, 0, layers_per_stage(config, layout), Pricer(config, CPU, 16).kinds)
    memory = MemoryModel(config, ParameterTable(config), Stack()).stage(layout, 0, units, Shape.of(layout, 16))
    assert memory.parts["gradient buffers"] >= 256_000


@pytest.mark.parametrize(
    ("name", "cluster", "layout", "seq", "message"),
    [
        ("llama-3.1-8b", "h100-80gb:0x8", None, None, "both must be at least 1"),
        ("llama-3.1-8b", "h100-80gb:1x0", None, None, "both must be at least 1"),
        ("llama-3.1-8b", "h999:1x8", None, None, "h999"),
        ("llama-3.1-8b", "eight GPUs", None, None, "is not CHIP:NODESxGPUS"),
        ("llama-9", "h100-80gb:1x8", None, None, "neither a preset nor a file"),
        ("llama-3.1-8b", "h100-80gb:1x8", "tp=16", None, "needs 16 GPUs"),
        ("llama-3.1-8b", "h100-80gb:1x8", "tp=3", None, "tp=3 must divide"),
        ("llama-3.1-8b", "h100-80gb:1x8", "pp=64", None, "need as many layers"),
        ("llama-3.1-8b", "h100-80gb:1x8", "precision=fp4", None, "no fp4 peak is known"),
        ("llama-3.1-8b", "h100-80gb:1x8", "cp=8", 100, "cp=8 must divide the sequence"),
    ],
)
def test_impossible_inputs_get_one_clear_line(
    name: str, cluster: str, layout: str | None, seq: int | None, message: str
) -> None:
    with pytest.raises(ShardwrightError, match=message) as caught:
        make_plan(name, cluster, layout, seq, None, 1)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("vocab", [{}, {"vocab_size": 0}])
def test_impossible_model_without_a_vocabulary(vocab: dict[str, int]) -> None:
    with pytest.raises(ShardwrightError, match="vocab_size") as caught:
        ModelConfig(**SMALL | vocab)
    assert "\n" not in str(caught.value)
