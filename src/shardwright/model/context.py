"""`Context`: all that one call of the model is told about its packed tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardwright.ops.attention import Attend
from shardwright.ops.kernels import dropout, dropout_key
from shardwright.ops.rope import Rotation
from shardwright.parallel.tensor import Region


@dataclass
class Context:
    """One micro-batch (or one serving batch) of T packed tokens, the same value for every unit.

    ``tokens`` (T,) int64, ``positions`` (T,) int64, ``targets`` (T,) int64 with -100 where none counts, or None for
    logits; ``rotation`` cos and sin of the positions, None for learned positions; ``token_index`` (T,) int64, the place of
    each token in the data, for dropout masks; ``region`` the tensor-parallel axis;
    ``loss_chunk`` tokens whose logits the head makes at a time, 0 for all.
    """

    tokens: Tensor
    positions: Tensor
    attend: Attend
    rotation: Rotation | None
    region: Region
    targets: Tensor | None = None
    token_index: Tensor | None = None
    dropout: float = 0.0
    seed: int = 0
    step: int = 0
    recompute: str = "none"
    loss_chunk: int = 0

    def drop(self, x: Tensor, layer: int, site: int) -> Tensor:
        """Dropout of x (T, D), or of its own T/tp rows, at one named place of the model; nothing when the rate is 0."""
        if self.dropout == 0.0 or self.token_index is None:
            return x
        index = self.region.own_tokens(self.token_index)
        return dropout(x, self.dropout, index, dropout_key(self.seed, self.step, layer, site))
