"""What routers add to the loss, and how they are kept in balance without a loss.

The auxiliary loss of one layer is  a E sum_e f_e P_e  with f_e the share of choices that expert e got and P_e its mean
score (Switch, arXiv 2101.03961, section 2.2): a for uniform routing. Over which tokens f and P are taken is
`RouterConfig.balance`; the losses of micro-batches or sequences are weighed by their tokens, those of layers are added.
f has no gradient, so what a rank must know of others is f only: a rank's share of the loss is a constant times the sums
of its own scores, which leave each unit as a further output. `Balancer` gives these outputs their gradients when the
unit's own backward runs; so a loss of the whole batch may still be made of counts that came after the forward.

Without a loss: an expert's correction bias goes up by a constant if it got fewer choices than the mean in the whole
batch, else down (arXiv 2408.15664). Choices are counted in the first forward only, not when it is recomputed.

Notation: E experts, S sequences, N tokens of the rank, T tokens of the whole batch over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.model_config import ModelConfig
from shardwright.core.run_config import RouterConfig
from shardwright.model.router import Routed
from shardwright.ops.routing import RouterSums


def score_gradient(counts: Tensor, coefficient: float, num_tokens: int) -> Tensor:
    """The gradient (S, E) of the auxiliary loss with respect to the sums of scores, for choices ``counts`` (S, E) that all
    tokens of each row made; ``num_tokens`` T of the whole batch."""
    share = counts.to(torch.float64) / counts.sum(-1, keepdim=True).clamp(min=1)
    return share * (coefficient * counts.shape[-1] / max(num_tokens, 1))


def auxiliary_loss(routed: Iterable[Routed], config: ModelConfig, router: RouterConfig, num_tokens: int) -> Tensor:
    """The loss that the routers of one process add, with gradient: of all its tokens together, or per sequence, with the
    weight that these have in a batch of ``num_tokens`` tokens."""
    assert config.moe is not None
    total = torch.zeros((), dtype=torch.float64)
    for one in routed:
        if config.moe.aux_coefficient:
            gradient = score_gradient(one.counts, config.moe.aux_coefficient, num_tokens)
            total = total + (gradient * one.score_sums).sum()
        if router.z_loss:
            total = total + one.z_sum.double() * (router.z_loss / max(num_tokens, 1))
    return total


@dataclass
class Balance:
    """What the routers of a model did in one step, over all ranks. Layers without experts are not in the lists."""

    layers: tuple[int, ...]
    counts: list[list[int]]
    """Choices of each expert of each layer, before any was dropped."""
    dropped: list[int]
    rerouted: list[int]
    aux_loss: float
    """What was added to the loss."""


class Balancer:
    """The routers' losses, counts and biases of one rank over the micro-batches of a step."""

    def __init__(
        self,
        config: ModelConfig,
        router: RouterConfig,
        sums: RouterSums,
        correction: Mapping[int, nn.Parameter],
        device: torch.device | str = "cpu",
    ) -> None:
        assert config.moe is not None
        self.config, self.moe, self.router, self.sums = config, config.moe, router, sums
        self.layers = tuple(layer for layer in range(config.num_layers) if config.is_moe_layer(layer))
        self.correction, self.device = correction, torch.device(device)
        self.begin(1)

    def begin(self, num_tokens: int) -> None:
        """A step begins whose batch has ``num_tokens`` tokens over all ranks."""
        self.num_tokens = num_tokens
        self.totals = torch.zeros((len(self.layers), self.moe.num_experts + 2), dtype=torch.float64, device=self.device)
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._counts: dict[tuple[int, int], Tensor] = {}
        self._so_far: dict[int, Tensor] = {}
        self._open: dict[tuple[str, int], list[Routed]] = {}

    # -- what the executor tells ---------------------------------------------------------------------------

    def forward_done(self, unit: str, m: int, microbatch: Any, *, again: bool) -> None:
        """The forward of ``unit`` on micro-batch ``m`` has run; ``again``: once more, for its backward."""
        routed: list[Routed] = list(microbatch.routed or ())
        if not routed:
            return
        microbatch.routed.clear()
        if not again:
            for one in routed:
                self._count(one, m)
        self._open[unit, m] = [one for one in routed if one.score_sums.requires_grad]

    def _count(self, one: Routed, m: int) -> None:
        row = self.totals[self.layers.index(one.layer)]
        row[:-2] += one.counts.sum(0)
        row[-2] += one.dropped
        row[-1] += one.rerouted
        if not self.moe.aux_coefficient:
            return
        name = f"blocks.{one.layer} choices of experts"
        if self.router.balance == "sequence":
            self._counts[one.layer, m] = self.sums.sequences(one.counts, name)
            return
        counts = self.sums.microbatch(one.counts, name)
        if self.router.balance == "microbatch":
            self._counts[one.layer, m] = counts
        else:
            so_far = self._so_far.get(one.layer)
            self._so_far[one.layer] = counts if so_far is None else so_far + counts

    def side_losses(self, unit: str, m: int) -> tuple[list[Tensor], list[Tensor]]:
        """Further outputs of ``unit`` on micro-batch ``m`` and their gradients, for its backward."""
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for one in self._open.pop((unit, m), ()):
            if self.moe.aux_coefficient:
                whole = self.router.balance == "global"
                counts = self._so_far[one.layer] if whole else self._counts.pop((one.layer, m))
                outputs.append(one.score_sums)
                gradients.append(score_gradient(counts, self.moe.aux_coefficient, self.num_tokens))
            if self.router.z_loss:
                outputs.append(one.z_sum)
                gradients.append(torch.full_like(self.loss, self.router.z_loss / max(self.num_tokens, 1)))
        for output, gradient in zip(outputs, gradients, strict=True):
            self.loss += (output.detach() * gradient).sum()
        return outputs, [gradient.to(output.dtype) for output, gradient in zip(outputs, gradients, strict=True)]

    # -- after the last backward ---------------------------------------------------------------------------

    def report(self) -> Tensor:
        """This rank's part of the step, to be summed over all ranks (L (E + 2) + 1,) fp64, for :meth:`finish`."""
        return torch.cat([self.totals.flatten(), self.loss.view(1)])

    @torch.no_grad()
    def update_bias(self, report: Tensor) -> None:
        """Move each correction bias by ``bias_rate`` towards balance; ``report`` summed over all ranks."""
        counts = report[:-1].view(len(self.layers), -1)[:, :-2]
        for layer, bias in self.correction.items():
            row = counts[self.layers.index(layer)]
            bias.add_(torch.sign(row.mean() - row).to(bias.dtype), alpha=self.router.bias_rate)

    def balance(self, report: Sequence[float]) -> Balance:
        """The report, summed over all ranks and read on the host, as a value."""
        width = self.moe.num_experts + 2
        rows = [[int(value) for value in report[start : start + width]] for start in range(0, len(report) - 1, width)]
        return Balance(
            self.layers, [row[:-2] for row in rows], [row[-2] for row in rows], [row[-1] for row in rows], report[-1]
        )
