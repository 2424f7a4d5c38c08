"""`Context`: all that one call of the model is told about its packed tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwright.core.run_config import RouterConfig
from shardwright.ops.attention import Attend
from shardwright.ops.capacity import Limit
from shardwright.ops.kernels import dropout, dropout_key
from shardwright.ops.rope import Rotation
from shardwright.ops.routing import Exchange, LocalExchange, LocalSums, RouterSums
from shardwright.parallel.tensor import Region


@dataclass
class Context:
    """One micro-batch (or one serving batch) of T packed tokens, the same value for every unit.

    ``tokens`` (T,) int64, ``positions`` (T,) int64, ``targets`` (T,) int64 with -100 where none counts, or None for
    logits; ``rotation`` cos and sin of the positions, None for learned positions; ``token_index`` (T,) int64, the place of
    each token in the data, for dropout masks; ``region`` the tensor-parallel axis;
    ``loss_chunk`` tokens whose logits the head makes at a time, 0 for all.

    For layers with experts: ``exchange`` and ``sums`` are what other ranks have to do with them, ``router`` how routers
    train. ``sequence`` (T,) int64 the sequence of each token among the ``num_sequences`` of the micro-batch, -1 for padding
    (which there may be if ``padded``), ``place`` (T,) its place among them; None: one sequence, in order. ``limit``: what
    each expert may take of a sequence, None for all. ``routed``: a list to which each router appends what it did
    (`model.router.Routed`), or None.
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
    exchange: Exchange = field(default_factory=LocalExchange)
    sums: RouterSums = field(default_factory=LocalSums)
    router: RouterConfig = field(default_factory=RouterConfig)
    sequence: Tensor | None = None
    place: Tensor | None = None
    num_sequences: int = 1
    padded: bool = False
    limit: Limit | None = None
    routed: list[Any] | None = None

    def drop(self, x: Tensor, layer: int, site: int) -> Tensor:
        """Dropout of x (T, D), or of its own T/tp rows, at one named place of the model; nothing when the rate is 0."""
        if self.dropout == 0.0 or self.token_index is None:
            return x
        index = self.region.own_tokens(self.token_index)
        return dropout(x, self.dropout, index, dropout_key(self.seed, self.step, layer, site))
