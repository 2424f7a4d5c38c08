"""What ``shardwright plan`` does, from its texts to a `Plan`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout, layout_values
from shardwright.core.model_config import ModelConfig
from shardwright.core.plan import Plan
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError, LayoutError
from shardwright.plan.compute import OPERAND_BYTES
from shardwright.plan.explain import assumptions, dropped_terms
from shardwright.plan.neighbours import price_with_neighbours
from shardwright.plan.search import default_global_batch, search
from shardwright.plan.serve_search import ServingPlan, Target, plan_serving
from shardwright.plan.serving import Load, ServingPricer
from shardwright.plan.stack import Fit, fit_of, serving_stack, stack_for
from shardwright.plan.step_time import Pricer

SERVING_KEYS = ("tp", "pp", "dp", "ep", "precision")
SEARCH = "search"
"""In place of a layout: look for the best one."""
DEFAULT_SEQ = 8192
"""Tokens of a sequence where none is given and the model's positions reach so far."""


@dataclass(frozen=True)
class Planned:
    """A plan and the pricer that made it, for further questions."""

    plan: Plan
    pricer: Pricer


@dataclass(frozen=True)
class Given:
    """What a model's text says: the model, and where it is a run file what else of the run a plan depends on."""

    model: ModelConfig
    source: str = ""
    """The run file, where the rest is from one."""
    seq: int | None = None
    layout: str | None = None
    frozen: tuple[str, ...] = ()
    optimizer: str = "adamw"
    loss_chunk: int = 0
    save_every: int = 0


def load_model(text: str) -> ModelConfig:
    """A preset, a Hugging Face file or folder, or a TOML file with a table ``[model]``."""
    return load_given(text).model


def load_given(text: str) -> Given:
    """As `load_model`, with the run's sequence length, layout, frozen parameters and optimizer where the file has them."""
    path = Path(text)
    if path.suffix != ".toml":
        return Given(ModelConfig.load(text))
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; give a preset, a config.json or a TOML file"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML ({error}); write a table [model]") from None
    if not isinstance(content.get("model"), str | Mapping):
        raise ConfigError(f"{path} has no table [model]; add one with preset or the shapes")
    if content.keys() == {"model"}:
        return Given(ModelConfig.load(content["model"]))
    run = RunConfig.of({"data": {"sources": "synthetic:sentences"}, **content})
    layout = content.get("layout")
    if isinstance(layout, Mapping):
        layout = str(run.layout)
    seq = run.data.seq_len if "data" in content else None
    return Given(run.model, str(path), seq, layout, run.train.freeze, run.optim.name, run.train.loss_chunk, run.train.save_every)


def plan_layout(given: str | Mapping[str, str], cluster: Cluster, global_batch: int | None) -> Layout:
    """A layout to price: what its text (or the pairs of it) leaves out has the planner's defaults.

    Planned precision is bf16 (where the chip has it) with gradients in bf16, and micro-batches follow from the batch.
    """
    values = layout_values(given) if isinstance(given, str) else dict(given)
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
    """Price one layout with its neighbours, or search; raises :class:`ConfigError` for what cannot be.

    A run file's sequence length, layout, frozen parameters and optimizer are the defaults; ``layout="search"`` looks for the
    best where it has one.
    """
    given, machine = load_given(model), Cluster.load(cluster)
    _check_precision(precision, layout)
    config = given.model
    length = seq or given.seq or min(config.max_positions, DEFAULT_SEQ)
    stack = stack_for(machine)
    training: dict[str, Any] = {"frozen": given.frozen, "moments": 1 if given.optimizer == "sgd" else 2}
    pricer = Pricer(config, machine, length, stack, **training)
    values = _wanted_layout(given, layout, global_batch, precision)
    notes = _notes(given, seq, layout, length)
    if values is not None:
        plan = price_with_neighbours(pricer, plan_layout(values, machine, global_batch), top)
    else:
        batch = global_batch
        if batch is None and given.layout is not None:
            batch = Layout.parse(given.layout).global_batch
            notes.append(f"{batch} sequences a step, as in {given.source} (--global-batch)")
        elif batch is None:
            notes.append(f"{default_global_batch(machine, length)} sequences a step (--global-batch)")
        wanted = precision or (layout_values(given.layout).get("precision") if given.layout else None)
        wanted = wanted or ("bf16" if machine.chip.bf16 or machine.chip.fp16 else "fp32")
        plan = search(config, machine, length, batch, precision=wanted, top=top, stack=stack, **training)
    if given.save_every:
        saved = pricer.checkpoint_time(plan.layout, given.save_every * plan.step.seconds)
        plan = replace(plan, checkpoint=saved)
    fit = fit_of(stack.name) if stack.name != "default" else Fit("none")
    lines = (*notes, *assumptions(plan, stack, fit, given.optimizer))
    dropped = dropped_terms(plan) + (("train.loss_chunk: all logits are counted",) if given.loss_chunk else ())
    return Planned(replace(plan, assumptions=lines, dropped_terms=dropped), pricer)


def _check_precision(precision: str | None, layout: str | None) -> None:
    """Refuse one that is not known, or that the layout's text contradicts."""
    if precision is None:
        return
    if precision not in OPERAND_BYTES:
        raise ConfigError(f"precision={precision} is not known; use one of {', '.join(OPERAND_BYTES)}")
    named = layout_values(layout).get("precision", precision) if layout not in (None, SEARCH) else precision
    if named != precision:
        raise ConfigError(f"--precision {precision} contradicts precision={named} in --layout; leave one of them out")


def _wanted_layout(
    given: Given, layout: str | None, global_batch: int | None, precision: str | None
) -> dict[str, str] | None:
    """The layout to price: the run file's changed by ``layout``, as a run has it; None where one is to be searched for."""
    if layout == SEARCH or (layout is None and given.layout is None):
        return None
    named = layout_values(layout or "")
    values = layout_values(given.layout or "")
    if global_batch is not None and "microbatches" not in named:
        values.pop("microbatches", None)
    if precision is not None:
        values["precision"] = precision
    values |= named
    if given.seq is not None:  # a run's own defaults, not a plan's
        values.setdefault("precision", "fp32")
        values.setdefault("reduce_dtype", "fp32")
    return values


def _notes(given: Given, seq: int | None, layout: str | None, length: int) -> list[str]:
    """Where the numbers that nobody gave on the command line are from."""
    taken = []
    if seq is None and given.seq is not None:
        taken.append(f"sequences of {length} tokens")
    if given.layout is not None and layout != SEARCH:
        taken.append("its layout" + (" with the changes given" if layout else f" (--layout {SEARCH} looks for the best)"))
    if given.frozen:
        taken.append(f"no gradients of {', '.join(given.frozen)} (MFU counts them)")
    notes = [f"from {given.source}: {', '.join(taken)}"] if taken else []
    if seq is None and given.seq is None:
        notes.append(f"sequences of {length} tokens (--seq)")
    return notes


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
    _check_precision(precision, layout)
    chosen = None
    if layout is not None and layout != SEARCH:
        values = layout_values(layout)
        values.setdefault("precision", precision or "bf16")
        chosen = Layout.of(values)
        if ignored := [key for key in values if key not in SERVING_KEYS]:
            raise ConfigError(
                f"layout: a serving group has tp, pp, dp and ep only, and a precision; leave {ignored[0]}="
                f"{values[ignored[0]]} out"
            )
    wanted = chosen.precision if chosen is not None else precision or "bf16"
    if wanted not in OPERAND_BYTES:
        raise ConfigError(f"precision={wanted} is not known; use one of {', '.join(OPERAND_BYTES)}")
    stack = serving_stack(machine.chip)
    fit = fit_of(stack.name) if stack.name != "default" else Fit("none")
    pricer = ServingPricer(config, machine, stack)
    return plan_serving(pricer, load, target, chosen, wanted, top, fit)
