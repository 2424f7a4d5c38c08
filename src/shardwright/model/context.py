"""`Context`: all that one call of the model is told about its packed tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardwright.ops.attention import Attend
from shardwright.ops.kernels import dropout, dropout_key
from shardwright.ops.rope import Rotation


@dataclass
class Context:
    """One micro-batch (or one serving batch) of T packed tokens, the same value for every unit.

    ``tokens`` (T,) int64, ``positions`` (T,) int64, ``targets`` (T,) int64 with -100 where none counts, or None for
    logits; ``rotation`` cos and sin of the positions, None for learned positions; ``token_index`` (T,) int64, the place of
    each token in the data, for dropout masks.
    """

    tokens: Tensor
    positions: Tensor
    attend: Attend
    rotation: Rotation | None
    targets: Tensor | None = None
    token_index: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    step: int = 0
    recompute: str = "none"

    def drop(self, x: Tensor, layer: int, site: int) -> Tensor:
        """Dropout at one named place of the model; nothing when the rate is 0 or no training data is at hand."""
        if self.dropout == 0.0 or self.token_index is None:
            return x
        return dropout(x, self.dropout, self.token_index, dropout_key(self.seed, self.step, layer, site))
