"""The layer with experts: route, then dispatch, experts and combine as the exchange runs them; beside them a shared expert
that every token meets.

Notation: N tokens of the rank (with sequence parallelism its T/tp), k choices of each, M rows, D model dim, E experts
(those of the rank), F their ffn. What moves rows between ranks is ``context.exchange`` (`ops.routing.Exchange`).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.core.model_config import ModelConfig
from shardwright.model.context import Context
from shardwright.model.init import ParameterTable
from shardwright.model.layers import Linear
from shardwright.model.mlp import MLP
from shardwright.model.router import Router
from shardwright.ops.grouped import grouped_linear
from shardwright.ops.kernels import swiglu
from shardwright.ops.routing import RowGroups


class Weight(nn.Module):
    """One stacked weight of the spec table."""

    def __init__(self, name: str, table: ParameterTable) -> None:
        super().__init__()
        self.weight = table.make(f"{name}.weight")


class Experts(nn.Module):
    """rows (M, D) sorted by expert -> (M, D): gated MLPs, gate and up stacked in one weight (E, 2F, D), down (E, D, F)."""

    def __init__(self, layer: int, table: ParameterTable) -> None:
        super().__init__()
        name = f"blocks.{layer}.moe.experts"
        self.up, self.down = Weight(f"{name}.up", table), Weight(f"{name}.down", table)

    def forward(self, rows: Tensor, groups: RowGroups, context: Context) -> Tensor:
        hidden = grouped_linear(rows, self.up.weight, groups)
        if context.recompute == "selective":
            active = checkpoint(swiglu, hidden, use_reentrant=False, preserve_rng_state=False)
        else:
            active = swiglu(hidden)
        return grouped_linear(active, self.down.weight, groups)


class MoE(nn.Module):
    """x (N, D) -> (N, D)."""

    def __init__(self, config: ModelConfig, layer: int, table: ParameterTable) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.name = f"blocks.{layer}.moe"
        self.router = Router(config, moe, layer, table)
        self.experts = Experts(layer, table)
        self.shared = MLP(config, layer, table, f"{self.name}.shared") if moe.shared_dim else None
        self.shared_gate = Linear(f"{self.name}.shared_gate", table) if moe.shared_gate else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        def experts(rows: Tensor, groups: RowGroups) -> Tensor:
            return self.experts(rows, groups, context)  # type: ignore[no-any-return]

        y = context.exchange.run(x, self.router(x, context), experts, self.name)
        if self.shared is not None:
            shared = self.shared(x, context)
            y = y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())
        return y
