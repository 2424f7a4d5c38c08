"""Memory of a layout: what the planner's formulas say, by the classes in which a run's ledger measures it."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from shardwright.core.ledger import Ledger
from shardwright.core.run_config import RunConfig
from shardwright.plan.compute import Shape, layer_kind
from shardwright.plan.memory import MemoryModel
from shardwright.plan.stack import Stack
from shardwright.plan.stages import ParameterTable, layers_per_stage, rank_units

PADDING_BYTES = 128
"""What padding of small shards may add; of a model of any size it is nothing."""

_NOT_PLANNED = {"held for W", "gathered for W"}
"""Classes of a ledger that are compared only where the planner tells them."""


def planned_memory(config: RunConfig, rank: int = 0) -> dict[str, int]:
    """The planner's peak bytes of one rank by class: state with AdamW, all parameters trained, gradients in fp32.

    ``gathered``, ``buffers`` and ``held for W`` are what the ledger has under these names; classes in host memory begin with
    ``host``. With experts how much waits for W depends on where tokens go: it is left out.
    """
    model, layout = config.model, config.layout
    kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
    stage = layout.grid.coordinates(rank)["pp"]
    units = rank_units(layout, stage, layers_per_stage(model, layout), kinds)
    shape = Shape.of(layout, config.data.seq_len)
    memory = MemoryModel(model, ParameterTable(model), Stack())
    found = memory.stage(layout, stage, units, shape)
    state = {"parameters": found.parameters, "gradients": found.gradients, "optimizer": found.optimizer}
    gathered = found.parts.get("gathered units", 0) + found.parts.get("parameters kept gathered", 0)
    buffers = found.parts.get("gradient buffers", 0) + found.parts.get("shards from the host", 0)
    host = {f"host {kind}": size for kind, size in found.host.items()}
    waiting = ceil(memory.waiting_bytes(layout, stage, units, shape)) if model.moe is None else 0
    return state | {"gathered": gathered, "buffers": buffers} | ({"held for W": waiting} if waiting else {}) | host


def memory_differences(config: RunConfig, ledger: Ledger, rank: int = 0, tolerance: float = 0.02) -> list[str]:
    """Where ``rank``'s measured peaks are not within ``tolerance`` of the planner's, one line each. For AdamW."""
    return [
        f"rank {rank}, {kind}: {got} bytes at the peak against {want}"
        for kind, (got, want) in compared_classes(config, ledger.peak, rank).items()
        if abs(got - want) > max(tolerance * want, PADDING_BYTES)
    ]


def compared_classes(config: RunConfig, peak: Mapping[str, int], rank: int = 0) -> dict[str, tuple[int, int]]:
    """Measured and planned peak bytes of every class that the planner tells."""
    planned = planned_memory(config, rank)
    kinds = sorted(planned.keys() | peak.keys() - _NOT_PLANNED)
    return {kind: (peak.get(kind, 0), planned.get(kind, 0)) for kind in kinds}
