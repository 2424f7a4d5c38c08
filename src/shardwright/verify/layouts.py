"""Which layouts ``verify --matrix`` runs, computed from what this model and these ranks allow; and the model made small.

The factors are a layout's degrees and switches. What `check_supported` refuses is left out with its reason, so an axis
that training learns joins by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from shardwright.core.layout import CHOICES, RECOMPUTE, SCHEDULES, Layout
from shardwright.core.model_config import ModelConfig, MoEConfig
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.schedule.make import INTERLEAVED, make_schedule
from shardwright.train.supported import check_supported
from shardwright.verify.covering import Assignment, Cover, Factor, Pair

DEGREES = ("tp", "cp", "dp", "pp", "ep")
VOCABULARY, SEQUENCE = 321, 32
"""Odd, so that vocabulary rows do not divide over tp; and short, so that documents cross windows."""


def small_model(model: ModelConfig, layers: int = 8) -> ModelConfig:
    """The same switches with a width of 32 and a few layers (eight: four pipeline ranks with two stages each).

    Grouped heads stay grouped, one KV head stays one, a head width of its own stays one.
    """
    heads, kv = 8, {model.num_heads: 8, 1: 1}.get(model.num_kv_heads, 4)
    own_width = model.mla is None and model.head_dim * model.num_heads != model.dim
    changes: dict[str, Any] = {
        "name": f"small {model.name}",
        "vocab_size": VOCABULARY,
        "dim": 32,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv,
        "head_dim": 6 if own_width else 4,
        "ffn_dim": 44,
        "max_positions": max(2 * SEQUENCE, 64),
        "bos_id": None,
        "eos_id": None,
        "extra_eos_ids": (),
    }
    if model.sliding_window is not None:
        changes["sliding_window"] = SEQUENCE // 2
    if model.sliding_layers is not None:
        changes["sliding_layers"] = tuple(layer for layer in model.sliding_layers if layer < layers)
    if model.moe is not None:
        changes["moe"] = _small_experts(model.moe)
    return ModelConfig(**{**model.model_dump(exclude_unset=True), **changes})


def _small_experts(moe: MoEConfig) -> dict[str, Any]:
    experts, groups = 8, min(moe.groups, 2)
    top_groups = min(moe.top_groups, groups)
    shared = {"num_shared_experts": 1, "shared_dim": 20} if moe.num_shared_experts else {}
    return {
        **moe.model_dump(),
        "num_experts": experts,
        "top_k": min(moe.top_k, 2),
        "expert_dim": 20,
        "groups": groups,
        "top_groups": top_groups,
        "first_dense_layers": min(moe.first_dense_layers, 1),
        "layer_step": min(moe.layer_step, 2),
        "dense_layers": tuple(layer for layer in moe.dense_layers if layer < 2),
        **shared,
    }


def _above_one(*axes: str) -> Any:
    return lambda chosen: all(chosen.get(axis, 1) > 1 for axis in axes)


def _zero(*stages: int) -> Any:
    return lambda chosen: chosen.get("zero", 0) in stages


def _replicas(chosen: Mapping[str, Any]) -> bool:
    return bool(chosen.get("zero", 0) and chosen.get("dp", 1) * chosen.get("cp", 1) > 1)


BY_RANK = "by rank"
"""Stands for one policy of recomputation for each of several pipeline ranks."""

_FACTORS = [
    Factor("tp", (1, 2, 4), root=True),
    Factor("cp", (1, 2), root=True),
    Factor("dp", (1, 2, 4), root=True),
    Factor("pp", (1, 2, 4), root=True),
    Factor("ep", (1, 2, 4), root=True),
    Factor("zero", (0, 1, 2, 3), root=True),
    Factor("schedule", SCHEDULES, _above_one("pp"), root=True),
    Factor("microbatches", (1, 3, 4)),
    Factor("micro_batch", (1, 2)),
    Factor("recompute", (*RECOMPUTE, BY_RANK)),
    Factor("precision", ("fp64", "fp32")),
    Factor("bucket_mb", (25.0, 0.01), _zero(0, 1, 2)),
    Factor("sp", ("on", "off"), _above_one("tp")),
    Factor("tp_overlap", (1, 3), _above_one("tp")),
    Factor("cp_kind", CHOICES["cp_kind"], _above_one("cp")),
    Factor("ep_overlap", (False, True), _above_one("ep")),
    Factor("ep_deduplicate", (False, True), _above_one("ep")),
    Factor("moe", ("dropless", "capacity:0.8", "capacity:1:reroute")),
    Factor("order", CHOICES["order"], _above_one("pp", "dp")),
    Factor("stages", ("", "cost"), _above_one("pp")),
    Factor("comm", ("auto", "gloo")),
    Factor("dp_replicate", (1, 2), _replicas),
    Factor("offload", (*CHOICES["offload"], "half of optimizer", "optimizer, delayed")),
    Factor("zero1_reduce", CHOICES["zero1_reduce"], _zero(1)),
    Factor("accumulate", CHOICES["accumulate"], _zero(2, 3)),
    Factor("reshard", CHOICES["reshard"], _zero(3)),
    Factor("prefetch", (1, 0, 2), _zero(3)),
]
"""A layout's degrees and switches. The first value is the one that can always be."""
_TOGETHER: Mapping[str, Mapping[str, Any]] = {
    "half of optimizer": {"offload": "optimizer", "offload_fraction": 0.5},
    "optimizer, delayed": {"offload": "optimizer", "delayed_update": True},
}
"""Values that set several switches."""


def factors(model: ModelConfig, seq_len: int = SEQUENCE) -> list[Factor]:
    """The factors for ``model`` trained on sequences of ``seq_len`` tokens: no experts, no ep; windows, Ulysses first."""
    windows = {model.layer_window(layer) for layer in range(model.num_layers)}
    short = any(window is not None and window < seq_len for window in windows)
    found = list(_FACTORS)
    if short:
        found = [replace(f, values=f.values[::-1]) if f.name == "cp_kind" else f for f in found]
    if model.moe is None:
        found = [replace(f, values=(1,)) if f.name == "ep" else f for f in found if f.name != "moe"]
    return found


@dataclass(frozen=True)
class Plan:
    """The layouts of one matrix. ``refused``: pairs of values that no layout can have, with the reason."""

    layouts: list[Layout]
    num_pairs: int
    refused: dict[Pair, str]


class _Checker:
    """Says why a combination cannot be trained, by asking for it."""

    def __init__(self, config: RunConfig, most_ranks: int) -> None:
        self._model, self._most = config.model, most_ranks
        shallow = config.model.model_copy(update={"num_layers": min(config.model.num_layers, 3)})
        self._config = config.model_copy(update={"model": shallow})  # what is asked of each parameter is asked of few

    def layout(self, assignment: Mapping[str, Any]) -> Layout:
        """Interleaved schedules get two stages for each pipeline rank."""
        values = {**assignment, **_TOGETHER.get(assignment.get("offload", ""), {})}
        if values.get("pp", 1) > 1 and values.get("schedule") in INTERLEAVED:
            values["virtual"] = 2
        if values.get("recompute") == BY_RANK:
            values["recompute"] = "-".join(RECOMPUTE[rank % 3 - 1] for rank in range(max(2, values.get("pp", 1))))
        return Layout(**values)

    def __call__(self, assignment: Mapping[str, Any]) -> str | None:
        try:
            layout = self.layout(assignment)
            if layout.world_size > self._most:
                return f"needs {layout.world_size} ranks, at most {self._most} are to be started"
            layout.check_model(self._model)
            check_supported(self._config.model_copy(update={"layout": layout}))
            make_schedule(layout)
        except ConfigError as error:
            return str(error)
        return None


def shown_values(layout: Layout) -> set[str]:
    """``tp=2``, ``schedule=1f1b`` and so on: every factor's value that has a meaning in this layout."""
    chosen: dict[str, Any] = {name: getattr(layout, name) for name in (*DEGREES, "zero", "schedule")}
    found = set()
    for factor in _FACTORS:
        if factor.applies(chosen):
            value = getattr(layout, factor.name)
            value = ("on" if layout.sequence_parallel else "off") if factor.name == "sp" else value
            if factor.name == "recompute" and "-" in value:
                value = BY_RANK
            if factor.name == "offload":
                value = next((name for name, changes in _TOGETHER.items() if layout == layout.with_(**changes)), value)
            found.add(f"{factor.name}={value}")
    return found


def plan_layouts(config: RunConfig, most_ranks: int = 8, least: int = 60, seed: int = 0) -> Plan:
    """Every pair of values that can be; every three axes at once with every ZeRO stage; all axes at once.

    The last may need more than ``most_ranks`` ranks. Random layouts are added until there are ``least``.
    """
    known = factors(config.model, config.data.seq_len)
    checker = _Checker(config, most_ranks)
    cover = Cover(known, checker, seed)
    usable = [axis for axis in DEGREES if cover.refusal({axis: 2, **({"dp": 2} if axis == "ep" else {})}) is None]
    found = cover.compute(_together(usable), least)
    layouts = [checker.layout(assignment) for assignment in found.assignments]
    whole = Layout(zero=2, microbatches=2, schedule="zb_h1", recompute="full", precision="fp64").with_(**dict.fromkeys(usable, 2))
    if whole not in layouts and _Checker(config, 16)(dict.fromkeys(usable, 2)) is None:
        layouts.append(whole)
    return Plan(layouts, found.num_pairs, found.refused)


def _together(usable: list[str]) -> list[Assignment]:
    """Three of tp, cp, dp and pp at once with every ZeRO stage, with experts spread over two of their ranks."""
    experts = {"ep": 2} if "ep" in usable else {}
    dense = [axis for axis in usable if axis != "ep"]
    return [
        {**dict.fromkeys(axes, 2), **experts, "zero": zero} for axes in combinations(dense, 3) for zero in (0, 1, 2, 3)
    ]
