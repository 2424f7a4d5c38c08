"""``--check replicas``: what ranks hold alike and between them, on layouts that are right and on some that are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ranks.kit import run_ranks
from ranks.runs import make_config, write_documents
from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import PlacementError
from shardwright.launch import RankEnv
from shardwright.train.placement import Holdings, check_placement, find_problems
from shardwright.train.placement import _holdings as holdings
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.train.step import Trainer
from shardwright.verify.mutate import UNBROKEN, find_mutation
from shardwright.verify.parity import train_sampler

MODEL: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
    "tied_head": True,
}  # fmt: skip
RUNS: dict[str, tuple[str, str | None]] = {
    "tp x dp, zero 1": ("tp=2,dp=2,zero=1", None),
    "tp x pp, bf16": ("tp=2,pp=2,microbatches=2,precision=bf16", None),
    "pp x dp, zero 3": ("dp=2,pp=2,zero=3,microbatches=2", None),
    "drift": ("tp=2,dp=2", "replica-drift"),
    "others' samples": ("tp=2,dp=2", "same-samples"),
    "own seed": ("dp=4", "own-seed"),
}
SPECS = parameter_specs(RunConfig.of({"model": MODEL, "data": {"sources": "a"}}).model)


def one_step(env: RankEnv, data: PreparedData, runs: dict[str, tuple[RunConfig, str | None]]) -> dict[str, Any]:
    """What the check says after one step of each run, and in the first run what this rank holds."""
    found: dict[str, Any] = {}
    for label, (config, mutation) in runs.items():
        broken = find_mutation(mutation) if mutation is not None else UNBROKEN
        trainer = Trainer(config, Mesh.distributed(config.layout, env.rank).wrap(broken.comm))
        broken.trainer(trainer)
        dp = 0 if mutation == "same-samples" else trainer.mesh.coordinates["dp"]
        batches = train_sampler(config, data, dp).batches(0)
        trainer.step(batches, 0)
        try:
            check_placement(trainer, batches, 0)
            found[label] = ""
        except PlacementError as error:
            found[label] = str(error)
        found.setdefault("held", holdings(trainer, batches))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("placement")
    write_documents(folder)
    runs = {label: (make_config(str(folder), MODEL, layout), mutation) for label, (layout, mutation) in RUNS.items()}
    return run_ranks(one_step, 4, prepare_data(make_config(str(folder), MODEL, "dp=1")), runs)


@pytest.mark.parametrize("label", [label for label, (_, mutation) in RUNS.items() if mutation is None])
def test_what_is_right_passes_on_every_rank(label: str, found: list[dict[str, Any]]) -> None:
    assert [rank[label] for rank in found] == [""] * 4


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("drift", ["step 1: ", "differs between ranks 0 and 2, which must hold the same (dp)"]),
        ("others' samples", ["ranks 0 and 2 are different replicas and both read sample 0"]),
        ("own seed", ["differs between ranks 0 and 1", "and", "more; run verify"]),
    ],
)
def test_what_differs_is_named_on_every_rank(label: str, words: list[str], found: list[dict[str, Any]]) -> None:
    said = {rank[label] for rank in found}
    assert len(said) == 1 and all(word in next(iter(said)) for word in words), said


def test_holes_overlaps_and_shards_that_do_not_fit_are_seen(found: list[dict[str, Any]]) -> None:
    layout = Layout.parse("tp=2,dp=2,zero=1")
    every: list[Holdings] = [rank["held"] for rank in found]
    assert find_problems(layout, SPECS, every) == []

    def changed(rank: int, name: str, **changes: Any) -> list[str]:
        parts = every[rank].tensors["parameter"]
        tensors = {**every[rank].tensors, "parameter": {**parts, name: replace(parts[name], **changes)}}
        others = [replace(held, tensors=tensors) if index == rank else held for index, held in enumerate(every)]
        return find_problems(layout, SPECS, others)

    up = "blocks.0.mlp.up.weight"
    (_, columns) = every[0].tensors["parameter"][up].where
    assert any("overlap" in line for line in changed(0, up, where=((0, 30), columns)))
    assert any("has shape (24, 32)" in line and "(20, 32)" in line for line in changed(0, up, where=((0, 20), columns)))
    without = [replace(held, tensors={kind: {n: p for n, p in parts.items() if n != up} for kind, parts in held.tensors.items()})
               if rank in (1, 3) else held for rank, held in enumerate(every)]  # fmt: skip
    assert f"parameter {up}: all ranks together hold {24 * 32} of its {48 * 32} elements" in find_problems(layout, SPECS, without)
    name, shard = next(iter(every[2].shards.items()))
    short = [replace(held, shards={**held.shards, name: replace(shard, first=shard.first - 1)}) if rank == 2 else held
             for rank, held in enumerate(every)]  # fmt: skip
    assert any(f"{name}: the shard of rank 2 does not begin" in line for line in find_problems(layout, SPECS, short))


def test_the_check_changes_no_ledger(tmp_path: Path) -> None:
    write_documents(tmp_path)
    config = make_config(str(tmp_path), MODEL, "dp=1,zero=1")
    trainer = Trainer(config, Mesh.solo())
    batches = train_sampler(config, prepare_data(config), 0).batches(0)
    trainer.step(batches, 0)
    before = trainer.mesh.recorder.ledger.to_json()
    check_placement(trainer, batches, 0)
    assert trainer.mesh.recorder.ledger.to_json() == before
