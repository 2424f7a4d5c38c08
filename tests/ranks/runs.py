"""Whole training runs on real ranks for comparison with one process: a small text, configurations and their traces."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ranks.kit import run_ranks
from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv
from shardwright.plan.collectives import predict_step
from shardwright.train.prepare import PreparedData
from shardwright.verify.parity import (
    Trace,
    Verification,
    compare,
    dry_step,
    first_of_each_stage,
    reference_run,
    trace_steps,
    train_sampler,
    whole_batches,
)
from shardwright.verify.routing import rounds_choices

STEPS = 3
Run = tuple[RunConfig, str | None]
"""A configuration and the name of a mutation."""


def write_documents(folder: Path) -> None:
    """Documents of 1 to 60 words."""
    rng = random.Random(3)
    words = [rng.choice("bdfgklmnprst") + rng.choice("aeiou") + rng.choice("lmnrst") for _ in range(80)]
    documents = [" ".join(rng.choices(words, k=rng.choice((1, 5, 12, 60)))) for _ in range(300)]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


def make_config(folder: str, model: Mapping[str, Any], layout: str, sets: Sequence[str] = ()) -> RunConfig:
    table = {
        "model": model,
        "data": {"sources": f"{folder}/documents.jsonl", "seq_len": 48, "cache": f"{folder}/datasets"},
        "optim": {"name": "sgd", "lr": 0.1},
        "train": {"steps": 10, "threads": 1, "run_dir": f"{folder}/run"},
    }
    return RunConfig.of(table, sets, layout)


def trace_all(env: RankEnv, data: PreparedData, runs: dict[str, Run]) -> dict[str, Trace]:
    """Several runs one after another on the same ranks."""
    return {
        label: trace_steps(Mesh.distributed(config.layout, env.rank), config, data, STEPS, mutation)
        for label, (config, mutation) in runs.items()
    }


def trace_runs(data: PreparedData, runs: dict[str, Run], time_limit: float = 60.0) -> dict[str, list[Trace]]:
    """Run -> the trace of each rank; all runs of one world size share one launch of at most ``time_limit`` seconds."""
    found: dict[str, list[Trace]] = {}
    for world in sorted({config.layout.world_size for config, _ in runs.values()}):
        chosen = {label: run for label, run in runs.items() if run[0].layout.world_size == world}
        results = run_ranks(trace_all, world, data, chosen, time_limit=time_limit)
        found |= {label: [rank[label] for rank in results] for label in chosen}
    return found


class Judge:
    """Compares traces with one process; what two runs have in common is computed once."""

    def __init__(self, data: PreparedData) -> None:
        self._data = data
        self._references: dict[str, Trace] = {}
        self._dry: dict[str, list[Ledger]] = {}

    def __call__(self, config: RunConfig, found: list[Trace]) -> Verification:
        layout = config.layout
        precision = "bf16" if layout.precision == "bf16" else "fp64"  # of the reference
        alone = Layout(precision=precision, microbatches=layout.dp * layout.microbatches, micro_batch=layout.micro_batch)
        if config.model.moe is not None:  # whose tokens are balanced together and what experts may take
            alone = alone.with_(dp=layout.dp, microbatches=layout.microbatches, moe=layout.moe)
        reference = str(config.model_copy(update={"layout": alone}))
        batches = whole_batches(train_sampler(config, self._data, 0))
        if rounds_choices(config):
            one = reference_run(config, batches, STEPS, found)  # it follows these ranks' choices
        else:
            if reference not in self._references:
                self._references[reference] = reference_run(config, batches, STEPS)
            one = self._references[reference]
        if str(config) not in self._dry:
            self._dry[str(config)] = self._dry_steps(config)
        return compare(config, found, one, self._dry[str(config)])

    def _dry_steps(self, config: RunConfig) -> list[Ledger]:
        """The dry run of one stage, the stages in turn; of the others what it should show. Dry runs take most of the time."""
        ranks, length, frozen = first_of_each_stage(config.layout), config.data.seq_len, config.train.freeze
        found = [predict_step(config.model, config.layout, length, frozen, rank) for rank in ranks]
        stage = len(self._dry) % len(ranks)
        found[stage] = dry_step(config, ranks[stage])
        return found


def red(result: Verification) -> set[str]:
    """The names of what is not as it should be."""
    failed = {name for name, comparison in result.comparisons.items() if not comparison.passed}
    return failed | ({"ledger"} if result.differences else set())
