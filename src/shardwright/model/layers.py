"""Small layers whose parameters come from the spec table: linear and norm."""

from __future__ import annotations

from torch import Tensor, nn

from shardwright.core.model_config import ModelConfig
from shardwright.model.init import ParameterTable
from shardwright.ops.linear import linear
from shardwright.ops.norm import layer_norm, rms_norm, rms_norm_beside


class Linear(nn.Module):
    """x (T, I) -> (T, O); weight (O, I), bias (O) if the table has one."""

    bias: nn.Parameter | None

    def __init__(self, name: str, table: ParameterTable) -> None:
        super().__init__()
        self.weight = table.make(f"{name}.weight")
        self.bias = table.maybe(f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dim, as the model's config says."""

    bias: nn.Parameter | None

    def __init__(self, name: str, config: ModelConfig, table: ParameterTable) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = table.make(f"{name}.weight")
        self.bias = table.maybe(f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x, and x for the residual."""
        return rms_norm_beside(x, self.weight, self.eps) if self.bias is None else (self(x), x)
