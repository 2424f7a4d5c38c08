"""The dense MLP: gated (SwiGLU) or plain (GELU). Notation: T tokens, D model dim, F ffn (local to the rank)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.core.model_config import ModelConfig
from shardwright.model.context import Context
from shardwright.model.init import ParameterTable
from shardwright.model.layers import Linear
from shardwright.ops.kernels import swiglu
from shardwright.parallel.tensor import column_linear, row_linear


class MLP(nn.Module):
    """x (T, D) -> (T, D); with sequence parallelism both are the rank's T/tp rows. ``name``: of a shared expert."""

    def __init__(self, config: ModelConfig, layer: int, table: ParameterTable, name: str = "") -> None:
        super().__init__()
        name = name or f"blocks.{layer}.mlp"
        self.gate = Linear(f"{name}.gate", table) if config.activation == "swiglu" else None
        self.up = Linear(f"{name}.up", table)
        self.down = Linear(f"{name}.down", table)
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"

    def forward(self, x: Tensor, context: Context) -> Tensor:
        parts = [self.up] if self.gate is None else [self.gate, self.up]
        biases = [part.bias for part in parts if part.bias is not None]
        hidden = column_linear(x, [part.weight for part in parts], biases, context.region, "mlp in")
        if context.recompute == "selective":
            active = checkpoint(self._activation, hidden, use_reentrant=False, preserve_rng_state=False)
        else:
            active = self._activation(hidden)
        return row_linear(active, self.down.weight, self.down.bias, context.region, "mlp out")

    def _activation(self, hidden: Tensor) -> Tensor:
        """(T, 2F) -> (T, F) when gated, (T, F) -> (T, F) else."""
        return F.gelu(hidden, approximate=self.approximate) if self.gate is None else swiglu(hidden)
