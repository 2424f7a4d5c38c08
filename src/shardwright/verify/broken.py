"""``verify --mutate``: break one thing at a time on the smallest layout that has it, and show which check catches it.

Each layout is first run unbroken and must pass: else what is red under a mutation says nothing. All mutations are made to
run to the end, so one whose ranks end with an error is not caught by that: it may be the mutation's own code that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.train.prepare import prepare_data
from shardwright.train.supported import check_supported
from shardwright.verify.matrix import Runner, small_config
from shardwright.verify.mutate import (
    MUTATIONS,
    OFFLOAD_MUTATIONS,
    PIPELINE_MUTATIONS,
    TENSOR_MUTATIONS,
    ZERO_MUTATIONS,
    Mutation,
)
from shardwright.verify.mutate_context import CONTEXT_MUTATIONS
from shardwright.verify.mutate_experts import EXPERT_MUTATIONS
from shardwright.verify.mutate_values import PLACE_MUTATIONS, VALUE_MUTATIONS
from shardwright.verify.parity import Verification, comparable

LAYERS = 2


@dataclass(frozen=True)
class Base:
    """What a mutation breaks: a layout, and switches of the model and of the run that must be on to see it."""

    layout: str
    model: Mapping[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ()


_DATA = Base("dp=2,microbatches=2,bucket_mb=0.01", {"dropout": 0.1}, ("optim.clip=0.05", "optim.warmup_steps=2"))
_TENSOR = Base("tp=2", {"out_bias": True, "mlp_bias": True})
_PIPELINE = Base("pp=2,schedule=zb_h1,microbatches=3,precision=fp64", {"tied_head": True}, ("optim.clip=0.05",))
_MOE: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_dim": 20, "aux_coefficient": 0.05}
_EXPERTS = Base("dp=2,ep=2,microbatches=2,precision=fp64", {"moe": _MOE}, ("optim.clip=0.05",))
_ONCE = Base("dp=2,ep=2,ep_deduplicate=on,precision=fp64", {"moe": _MOE})
_COPIES = Base("dp=4,ep=2,zero=3,precision=fp64", {"moe": _MOE}, ("optim.clip=0.05",))
_FULL = Base("tp=2,ep=2,moe=capacity:0.8,precision=fp64", {"moe": _MOE, "position": "learned"}, ("router.drop_by=probability",))
_BIAS = Base("dp=2,ep=2,recompute=full,precision=fp64", {"moe": _MOE | {"score": "sigmoid", "bias_correction": True}})
_OUT = "dp=2,offload=optimizer"
_DELAYED = Base(f"{_OUT},zero=1,delayed_update=on,precision=fp64", {}, ("optim.name=adamw",))

FAMILIES: tuple[tuple[Mapping[str, Mutation], Base], ...] = (
    (MUTATIONS, _DATA),
    (VALUE_MUTATIONS, _DATA),
    (TENSOR_MUTATIONS, _TENSOR),
    (PIPELINE_MUTATIONS, _PIPELINE),
    (ZERO_MUTATIONS, Base("dp=2,zero=3")),
    (OFFLOAD_MUTATIONS, _DELAYED),
    (PLACE_MUTATIONS, Base("tp=2")),
    (EXPERT_MUTATIONS, _EXPERTS),
    (CONTEXT_MUTATIONS, Base("cp=2", sets=("data.cross_documents=true",))),
)
"""Mutations and the layout that has what they break."""

BASES: Mapping[str, Base] = {
    "drop-loss-target": Base("tp=2,sp=off"),
    "drop-reduce-scatter": Base("dp=2,zero=2,bucket_mb=0.01"),
    "drop-parameter-gather": Base("dp=2,zero=1"),
    "drop-shard-norm": Base("dp=2,zero=2"),
    "drop-replica-sum": Base("dp=4,zero=3,dp_replicate=2,microbatches=2"),
    "dirty-padding": Base("dp=3,zero=2"),
    "last-reduction-only": Base("dp=2,zero=2,microbatches=2,accumulate=reduce"),
    "drop-heads-in": Base("cp=2,cp_kind=ulysses"),
    "drop-heads-out": Base("cp=2,cp_kind=ulysses"),
    "drop-dp-cp-gradients": Base("cp=2,dp=2"),
    "overwritten-on-host": Base(f"{_OUT},zero=2,microbatches=4,accumulate=reduce,bucket_mb=0.02"),
    "drop-copy-out": Base(f"{_OUT},zero=1,bucket_mb=0.02"),
    "drop-copy-in": Base(f"{_OUT},zero=3"),
    "swap-shard-ranks": Base("dp=2,zero=3"),
    "lose-dispatch-weights": _ONCE,
    "lose-dispatch-weights-gradient": _ONCE,
    "drop-expert-gradients": Base("dp=4,ep=2,precision=fp64", {"moe": _MOE}),
    "drop-expert-scatter": _COPIES,
    "drop-expert-gather": _COPIES,
    "drop-expert-shard-norm": _COPIES,
    "own-part-of-sequence": Base("tp=2,precision=fp64", {"moe": _MOE}, ("router.balance=sequence",)),
    "own-capacity": Base("tp=2,ep=2,moe=capacity:0.8,precision=fp64", {"moe": _MOE}),
    "own-scores": _FULL,
    "own-report": _BIAS,
    "count-again": _BIAS,
}
"""Those of a family that need another layout than the rest."""


@dataclass(frozen=True)
class Caught:
    """One mutation. ``caught_by``: the checks that are red. ``error``: what ended the ranks; then nothing was checked."""

    name: str
    stands_for: str
    layout: str
    caught_by: list[str]
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Breakages:
    """``unsound``: layouts that fail without a mutation. ``skipped``: mutation -> why its layout cannot be run."""

    caught: list[Caught]
    unsound: dict[str, list[str]]
    skipped: dict[str, str]
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.unsound and bool(self.caught) and all(one.caught_by for one in self.caught)

    @property
    def stopped(self) -> list[str]:
        """Those of which nothing is known, since the ranks ended with an error."""
        return [one.name for one in self.caught if one.error]

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "kinds": len(self.caught),
            "missed": [one.name for one in self.caught if not one.caught_by],
            "stopped": self.stopped,
            "mutations": [asdict(one) for one in self.caught],
            "unsound": self.unsound,
            "skipped": self.skipped,
            "seconds": self.seconds,
        }


def base_of(mutation: Mutation) -> Base:
    """The layout on which ``mutation`` is to be seen."""
    family = next(base for family, base in FAMILIES if mutation.name in family)
    return BASES.get(mutation.name, family)


def red(answer: Verification) -> list[str]:
    """What is not as it should be."""
    found = [name for name, comparison in answer.comparisons.items() if not comparison.passed]
    return [*found, "ledger"] if answer.differences else found


def break_everything(
    config: RunConfig,
    folder: Path,
    steps: int = 3,
    *,
    names: tuple[str, ...] | None = None,
    on_caught: Callable[[int, int, Caught | str], None] = lambda done, total, what: None,
) -> Breakages:
    """Every mutation (or ``names``) on the run's model made small. ``on_caught(done, total, one or a layout's text)``."""
    start = time.perf_counter()
    mutations = [one for family, _ in FAMILIES for one in family.values() if names is None or one.name in names]
    small = small_config(config, folder, LAYERS)
    runs: list[tuple[RunConfig, Mutation | None]] = []
    skipped: dict[str, str] = {}
    for mutation in mutations:
        try:
            runs.append((_broken_config(small, base_of(mutation)), mutation))
        except ConfigError as error:
            skipped[mutation.name] = str(error)
    plain = {str(one.to_table()): one for one, _ in runs}
    runs = [*((one, None) for one in plain.values()), *runs]
    runs.sort(key=lambda run: run[0].layout.world_size)
    caught: dict[str, Caught] = {}
    unsound: dict[str, list[str]] = {}
    runner = Runner(prepare_data(small), steps, config.train.timeout_s)
    for _, group in groupby(runs, key=lambda run: run[0].layout.world_size):
        chosen = list(group)

        def note(index: int, answer: Verification | str, seconds: float, chosen: Any = chosen) -> None:
            one, mutation = chosen[index]
            wrong, error = ([], answer) if isinstance(answer, str) else (red(answer), "")
            if mutation is None:
                if wrong or error:
                    unsound[str(one.layout)] = wrong or [error]
                on_caught(len(caught), len(mutations), str(one.layout))
            else:
                found = Caught(mutation.name, mutation.stands_for, str(one.layout), wrong, seconds, error)
                caught[mutation.name] = found
                on_caught(len(caught), len(mutations), found)

        names_ = [mutation.name if mutation is not None else None for _, mutation in chosen]
        runner.run([one for one, _ in chosen], names_, note)
    order = [caught[mutation.name] for mutation in mutations if mutation.name in caught]
    return Breakages(order, unsound, skipped, time.perf_counter() - start)


def _broken_config(small: RunConfig, base: Base) -> RunConfig:
    """The run with what the mutation needs; raises `ConfigError` where this model cannot have it."""
    table = small.to_table()
    table["model"] = {**table["model"], **base.model}
    table["layout"] = str(Layout.parse(base.layout))
    config = comparable(RunConfig.of(table, base.sets))
    check_supported(config)
    return config
