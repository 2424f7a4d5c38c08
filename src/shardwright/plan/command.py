"""What ``shardwright plan`` does, from its texts to a `Plan`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout, layout_values
from shardwright.core.model_config import ModelConfig
from shardwright.core.plan import Plan
from shardwright.errors import ConfigError, LayoutError
from shardwright.plan.explain import assumptions, dropped_terms
from shardwright.plan.search import default_global_batch, price_with_neighbours, search
from shardwright.plan.stack import Fit, default_stack, fit_of
from shardwright.plan.step_time import Pricer

DEFAULT_SEQ = 8192
"""Tokens of a sequence where none is given and the model's positions reach so far."""


@dataclass(frozen=True)
class Planned:
    """A plan and the pricer that made it, for further questions."""

    plan: Plan
    pricer: Pricer


def load_model(text: str) -> ModelConfig:
    """A preset, a Hugging Face file or folder, or a TOML file with a table ``[model]``."""
    path = Path(text)
    if path.suffix != ".toml":
        return ModelConfig.load(text)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; give a preset, a config.json or a TOML file"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML ({error}); write a table [model]") from None
    table = content.get("model")
    if isinstance(table, str):
        return ModelConfig.load(table)
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path} has no table [model]; add one with preset or the shapes")
    return ModelConfig.load(table)


def plan_layout(text: str, cluster: Cluster, global_batch: int | None) -> Layout:
    """A layout to price: what its text leaves out has the planner's defaults.

    Planned precision is bf16 (where the chip has it) with gradients in bf16, and micro-batches follow from the batch.
    """
    values = layout_values(text)
    chip = cluster.chip
    values.setdefault("precision", "bf16" if chip.bf16 or chip.fp16 else "fp32")
    values.setdefault("reduce_dtype", "fp32" if values["precision"] in ("fp32", "fp64") else "bf16")
    layout = Layout.of(values)
    if global_batch is None:
        return layout
    per_rank = layout.dp * layout.micro_batch
    if "microbatches" not in values:
        if global_batch % per_rank:
            raise LayoutError(f"dp*micro_batch={per_rank} must divide the global batch of {global_batch} sequences")
        return layout.with_(microbatches=global_batch // per_rank)
    if layout.global_batch != global_batch:
        raise LayoutError(
            f"dp*microbatches*micro_batch={layout.global_batch} is not the global batch of {global_batch}; drop one of them"
        )
    return layout


def make_plan(
    model: str, cluster: str, layout: str | None, seq: int | None, global_batch: int | None, top: int
) -> Planned:
    """Price one layout with its neighbours, or search; raises :class:`ConfigError` for what cannot be."""
    config, machine = load_model(model), Cluster.load(cluster)
    length = min(config.max_positions, DEFAULT_SEQ) if seq is None else seq
    stack = default_stack(machine.chip)
    pricer = Pricer(config, machine, length, stack)
    notes = []
    if seq is None:
        notes.append(f"sequences of {length} tokens (--seq)")
    if layout is not None:
        plan = price_with_neighbours(pricer, plan_layout(layout, machine, global_batch), top)
    else:
        if global_batch is None:
            notes.append(f"{default_global_batch(machine, length)} sequences a step (--global-batch)")
        precision = "bf16" if machine.chip.bf16 or machine.chip.fp16 else "fp32"
        plan = search(config, machine, length, global_batch, precision=precision, top=top, stack=stack)
    fit = fit_of(stack.name) if stack.name != "default" else Fit("none")
    return Planned(
        replace(plan, assumptions=(*notes, *assumptions(plan, stack, fit)), dropped_terms=dropped_terms(plan)), pricer
    )
