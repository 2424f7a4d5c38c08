"""Which units belong to which pipeline stage.

``stages`` of a layout: empty splits the layers by count (what does not divide goes to the earlier stages, the last one
has the head), ``cost`` by work (layers and head weighed by their matrix products), ``3-3-2`` gives the layers of each
stage. The embedding goes with the first stage, the head with the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shardwright.core.model_config import ModelConfig
from shardwright.errors import LayoutError


def split_units(config: ModelConfig, num_stages: int, stages: str = "") -> tuple[tuple[str, ...], ...]:
    """The unit names of each stage, in order of use. Raises `LayoutError` where layers and stages do not fit."""
    counts = layers_per_stage(config, num_stages, stages)
    found: list[tuple[str, ...]] = []
    first = 0
    for index, count in enumerate(counts):
        units = [f"blocks.{layer}" for layer in range(first, first + count)]
        if index == 0:
            units.insert(0, "embedding")
        if index == num_stages - 1:
            units.append("head")
        found.append(tuple(units))
        first += count
    return tuple(found)


def layers_per_stage(config: ModelConfig, num_stages: int, stages: str = "") -> list[int]:
    """How many layers each stage has; they sum to the model's."""
    layers = config.num_layers
    if num_stages > layers:
        raise LayoutError(
            f"{num_stages} pipeline stages need as many layers, the model has {layers}; use a smaller pp or virtual"
        )
    if stages == "":
        return [layers // num_stages + (index < layers % num_stages) for index in range(num_stages)]
    if stages == "cost":
        return _by_cost(_costs(config), num_stages)
    parts = stages.split("-")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise LayoutError(f"stages={stages} is not a list of layers per stage; write for instance stages=3-3-2, or cost")
    counts = [int(part) for part in parts]
    if len(counts) != num_stages or sum(counts) != layers:
        raise LayoutError(
            f"stages={stages} gives {sum(counts)} layers to {len(counts)} stages; "
            f"the model has {layers} layers and the layout {num_stages} stages"
        )
    return counts


def _costs(config: ModelConfig) -> list[int]:
    """Work of each layer, and last of the head, in parameters of matrix products per token."""
    layers = [config.num_layer_parameters(layer) for layer in range(config.num_layers)]
    return [*layers, config.vocab_size * config.dim]


def _by_cost(costs: Sequence[int], num_stages: int) -> list[int]:
    """Contiguous layers per stage, the head in the last: the least largest cost, and among those the most even."""
    *layers, head = costs
    ends = [0, *accumulate(layers)]

    def cost(first: int, last: int) -> int:
        return ends[last] - ends[first] + (head if last == len(layers) else 0)

    def best(limit: int | None) -> list[tuple[int, list[int]]]:
        """For each number of layers: the best split over all stages; by largest cost, or by squares within a limit."""
        row: list[tuple[int, list[int]] | None] = [(0, [])] + [None] * len(layers)
        for stage in range(num_stages):
            new: list[tuple[int, list[int]] | None] = [None] * len(row)
            for last in range(stage + 1, len(layers) - (num_stages - 1 - stage) + 1):
                for first in range(stage, last):
                    before, piece = row[first], cost(first, last)
                    if before is None or (limit is not None and piece > limit):
                        continue
                    value = max(before[0], piece) if limit is None else before[0] + piece * piece
                    kept = new[last]
                    if kept is None or value < kept[0]:
                        new[last] = (value, [*before[1], last - first])
            row = new
        return [entry for entry in row if entry is not None]

    least = best(None)[-1][0]
    return best(least)[-1][1]
