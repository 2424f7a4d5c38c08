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
from shardwright.plan.compute import OPERAND_BYTES
from shardwright.plan.explain import assumptions, dropped_terms
from shardwright.plan.search import default_global_batch, price_with_neighbours, search
from shardwright.plan.serve_search import ServingPlan, Target, plan_serving
from shardwright.plan.serving import Load, ServingPricer
from shardwright.plan.stack import Fit, default_stack, fit_of, serving_stack
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
    model: str,
    cluster: str,
    layout: str | None,
    seq: int | None,
    global_batch: int | None,
    top: int,
    precision: str | None = None,
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
        text = f"{layout},precision={precision}" if precision and "precision" not in layout_values(layout) else layout
        plan = price_with_neighbours(pricer, plan_layout(text, machine, global_batch), top)
    else:
        if global_batch is None:
            notes.append(f"{default_global_batch(machine, length)} sequences a step (--global-batch)")
        wanted = precision or ("bf16" if machine.chip.bf16 or machine.chip.fp16 else "fp32")
        plan = search(config, machine, length, global_batch, precision=wanted, top=top, stack=stack)
    fit = fit_of(stack.name) if stack.name != "default" else Fit("none")
    return Planned(
        replace(plan, assumptions=(*notes, *assumptions(plan, stack, fit)), dropped_terms=dropped_terms(plan)), pricer
    )


def make_serving_plan(
    model: str, cluster: str, layout: str | None, load: Load, target: Target, precision: str | None, top: int
) -> ServingPlan:
    """Price one serving group, or search for the best; raises :class:`ConfigError` for what cannot be.

    Without ``precision`` weights are in bf16, where the chip has it.
    """
    config, machine = load_model(model), Cluster.load(cluster)
    if config.max_positions < load.length:
        raise ConfigError(
            f"{load.input_tokens} + {load.output_tokens} tokens are more than the {config.max_positions} positions of "
            f"{config.name}; shorten them"
        )
    chosen = None
    if layout is not None:
        values = layout_values(layout)
        values.setdefault("precision", precision or "bf16")
        chosen = Layout.of(values)
    wanted = chosen.precision if chosen is not None else precision or "bf16"
    if wanted not in OPERAND_BYTES:
        raise ConfigError(f"precision={wanted} is not known; use one of {', '.join(OPERAND_BYTES)}")
    stack = serving_stack(machine.chip)
    fit = fit_of(stack.name) if stack.name != "default" else Fit("none")
    pricer = ServingPricer(config, machine, stack)
    return plan_serving(pricer, load, target, chosen, wanted, top, fit)
