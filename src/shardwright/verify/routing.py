"""Routers of a layout against one process: what the reference adds to the loss, and the routing that a dry run repeats."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.dispatch import DispatchPlan
from shardwright.core.run_config import RunConfig
from shardwright.model.context import Context
from shardwright.model.transformer import Transformer
from shardwright.ops.capacity import Limit
from shardwright.plan.dispatch import Dispatches
from shardwright.train.data import MicroBatch
from shardwright.train.step import sequence_numbers


class ReferenceRouters:
    """What the routers of one process add to the loss and do to their biases, for the whole batch at once.

    Sequences are balanced together as ``router.balance`` says; a micro-batch is the union over the data-parallel ranks.
    """

    def __init__(self, config: RunConfig, context: Context, num_tokens: int) -> None:
        self.config, self.choices = config, dict[int, Tensor]()
        self.loss: Tensor = torch.zeros((), dtype=torch.float64)
        together = {"sequence": 1, "microbatch": config.layout.dp * config.layout.micro_batch}
        for one in context.routed or ():
            self.choices[one.layer] = one.counts.sum(0)
            size = together.get(config.router.balance, len(one.counts))
            for counts, scores in zip(one.counts.split(size), one.score_sums.split(size), strict=True):
                self.loss = self.loss + self._auxiliary(counts.sum(0), scores.sum(0)) / num_tokens
            self.loss = self.loss + one.z_sum * (config.router.z_loss / num_tokens)

    def _auxiliary(self, counts: Tensor, scores: Tensor) -> Tensor:
        """a E sum over experts of (share of the choices) x (sum of the scores)."""
        moe = self.config.model.moe
        assert moe is not None
        share = counts.double() / counts.sum()
        return (share * scores).sum() * (moe.aux_coefficient * moe.num_experts)

    def move_biases(self, model: Transformer) -> None:
        """A correction bias goes up where its expert was chosen less often than the mean, else down."""
        parameters = model.spec_parameters()
        for layer, counts in self.choices.items():
            bias = parameters.get(f"blocks.{layer}.moe.router.correction")
            if bias is not None:
                bias.add_((counts.double().mean() - counts).sign(), alpha=self.config.router.bias_rate)


def reference_routing(config: RunConfig, batch: MicroBatch) -> dict[str, Any]:
    """What the routers of one process are told about the whole batch: they count each sequence for itself."""
    if config.model.moe is None:
        return {}
    return {
        "router": config.router.model_copy(update={"balance": "sequence"}),
        "sequence": sequence_numbers(batch, config.data.seq_len),
        "place": batch.token_index,
        "num_sequences": len(batch.samples),
        "limit": Limit.of(config.layout.capacity, config.router.drop_by),
        "routed": [],
    }


class Replayed:
    """Answers for the routing of a dry run with ``dispatches``, the plans that a rank made in a real step, in their order.

    A forward pass that is repeated has the same plans again.
    """

    def __init__(self, dispatches: Dispatches, mesh: Mesh) -> None:
        self._dispatches, self._recorder = dispatches, mesh.recorder
        self._asked: Counter[tuple[str, str]] = Counter()

    def __call__(self, layer: str, **shape: Any) -> DispatchPlan:
        key = self._recorder.current, layer
        self._asked[key] += 1
        return self._dispatches[layer][self._asked[key] - 1]
