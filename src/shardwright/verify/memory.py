"""Memory of a layout: what the planner's formulas say, by the classes in which a run's ledger measures it."""

from __future__ import annotations

from shardwright.core.ledger import Ledger
from shardwright.core.run_config import RunConfig
from shardwright.plan.compute import Shape, layer_kind
from shardwright.plan.memory import MemoryModel
from shardwright.plan.stack import Stack
from shardwright.plan.stages import ParameterTable, layers_per_stage, rank_units

PADDING_BYTES = 128
"""What padding of small shards may add; of a model of any size it is nothing."""


def planned_memory(config: RunConfig, rank: int = 0) -> dict[str, int]:
    """The planner's peak bytes of one rank by class: state with AdamW, all parameters trained, gradients in fp32.

    ``gathered`` and ``buffers`` are what the ledger has under these names; classes in host memory begin with ``host``.
    """
    model, layout = config.model, config.layout
    kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
    stage = layout.grid.coordinates(rank)["pp"]
    units = rank_units(layout, stage, layers_per_stage(model, layout), kinds)
    shape = Shape.of(layout, config.data.seq_len)
    found = MemoryModel(model, ParameterTable(model), Stack()).stage(layout, stage, units, shape)
    state = {"parameters": found.parameters, "gradients": found.gradients, "optimizer": found.optimizer}
    gathered = found.parts.get("gathered units", 0) + found.parts.get("parameters kept gathered", 0)
    buffers = found.parts.get("gradient buffers", 0) + found.parts.get("shards from the host", 0)
    host = {f"host {kind}": size for kind, size in found.host.items()}
    return state | {"gathered": gathered, "buffers": buffers} | host


def memory_differences(config: RunConfig, ledger: Ledger, rank: int = 0, tolerance: float = 0.02) -> list[str]:
    """Where ``rank``'s measured peaks are not within ``tolerance`` of the planner's, one line each. For AdamW."""
    planned = planned_memory(config, rank)
    lines = []
    for kind in sorted(planned.keys() | ledger.peak.keys()):
        got, want = ledger.peak.get(kind, 0), planned.get(kind, 0)
        if abs(got - want) > max(tolerance * want, PADDING_BYTES):
            lines.append(f"rank {rank}, {kind}: {got} bytes at the peak against {want}")
    return lines
