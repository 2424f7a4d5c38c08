"""Routers of a layout against one process: what the reference adds to the loss, and the routing that a dry run repeats.

A choice of experts is no matter of degree: where two score nearly the same, rounding decides (of bf16 often, of fp32 once in
many thousand tokens), and a token that goes to the other one changes both experts' gradients by more than any tolerance of
rounding. So where a layout rounds otherwise than the process that it is compared with, that process follows its choices, token
by token, and they are judged by themselves: by its own scores they must be as good as the best, within the tolerance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.dispatch import DispatchPlan
from shardwright.core.model_config import MoEConfig
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.model.context import Context
from shardwright.model.router import Router, group_values, within_groups
from shardwright.model.transformer import Block, Transformer
from shardwright.ops.capacity import Limit
from shardwright.plan.dispatch import Dispatches
from shardwright.train.data import MicroBatch
from shardwright.train.step import Trainer, sequence_numbers


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


# -- choices that rounding decides -----------------------------------------------------------------------------

Choices = Mapping[int, Tensor]
"""Layer -> (n, 1 + k) int64: a token's place in the data, and its experts."""


def rounds_choices(config: RunConfig) -> bool:
    """Whether rounding may send tokens to other experts than in one process: in all but fp64."""
    return config.model.moe is not None and (config.layout.precision != "fp64" or config.layout.reduce_dtype != "fp32")


def check_comparable(config: RunConfig) -> None:
    """Refuse what cannot be compared: rounding that decides which tokens a full expert keeps."""
    limit, half_sums = Limit.of(config.layout.capacity, config.router.drop_by), config.layout.reduce_dtype != "fp32"
    halves = config.layout.precision == "bf16" or half_sums
    if config.model.moe is not None and halves and limit is not None and limit.needs_scores:
        asked = "router.drop_by=probability" if limit.by_score else f"moe={config.layout.moe}"
        half = "precision=bf16" if config.layout.precision == "bf16" else f"reduce_dtype={config.layout.reduce_dtype}"
        raise ConfigError(
            f"{half} with {asked} cannot be verified: rounding decides which tokens find room in a full expert, so one process "
            "keeps others; verify it with precision=fp32 and reduce_dtype=fp32, or with dropless or capacity:F by position"
        )


def routers_of(model: Transformer) -> dict[int, Router]:
    found: dict[int, Router] = {}
    for layer, block in model.blocks.items():
        if isinstance(block, Block) and block.moe is not None:
            found[int(layer)] = block.moe.router
    return found


class NotedChoices:
    """Notes which experts a rank's routers choose for its tokens; not again in a forward that is repeated."""

    def __init__(self, trainer: Trainer) -> None:
        self._recorder, self._noted = trainer.mesh.recorder, dict[int, list[Tensor]]()
        for layer, router in routers_of(trainer.model).items():
            router.choose = self._noting(layer, router.choose)  # type: ignore[method-assign]

    def _noting(self, layer: int, choose: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def noted(choice: Tensor, context: Context) -> tuple[Tensor, Tensor]:
            chosen, limited = choose(choice, context)
            if self._recorder.current == "F":
                assert context.token_index is not None
                tokens = context.region.own_tokens(context.token_index).to(chosen.device)
                self._noted.setdefault(layer, []).append(torch.cat([tokens.unsqueeze(1), chosen], dim=1)[tokens >= 0].cpu())
            return chosen, limited

        return noted

    def take(self) -> Choices:
        """The choices since the last call."""
        noted, self._noted = self._noted, {}
        return {layer: torch.cat(parts) for layer, parts in noted.items()}


class FollowedChoices:
    """Makes the routers of one process take the experts that ``steps`` say: for each step, the choices of every rank."""

    def __init__(self, model: Transformer, steps: Sequence[Sequence[Choices]]) -> None:
        self._steps, self._tables = steps, dict[int, Tensor]()
        self._scores: list[tuple[Tensor, Tensor]] = []
        for layer, router in routers_of(model).items() if steps else ():
            router.choose = self._following(layer, router)  # type: ignore[method-assign]

    def begin(self, step: int) -> None:
        if self._steps:
            ranks = self._steps[step]
            layers = {layer for rank in ranks for layer in rank}
            tables = {layer: torch.cat([rank[layer] for rank in ranks if layer in rank]) for layer in layers}
            self._tables = {layer: table[table[:, 0].argsort()] for layer, table in tables.items()}

    def _following(self, layer: int, router: Router) -> Callable[..., tuple[Tensor, Tensor]]:
        choose = router.choose

        def followed(choice: Tensor, context: Context) -> tuple[Tensor, Tensor]:
            own, limited = choose(choice, context)
            table, tokens = self._tables[layer], context.token_index
            assert tokens is not None
            row = torch.searchsorted(table[:, 0].contiguous(), tokens).clamp(max=len(table) - 1)
            known = (table[row, 0] == tokens).unsqueeze(1)
            taken = torch.where(known, table[row, 1:], own)
            found, best = judged(choice, taken, router.moe)
            self._scores.append((found.masked_fill(~known, -torch.inf), best))
            return taken, limited

        return followed

    def take(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of the step's layers: the scores of what was followed, and of the best choices."""
        scores, self._scores = self._scores, []
        return {f"scores of choices {index}": pair for index, pair in enumerate(scores)}


def judged(choice: Tensor, taken: Tensor, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """choice (N, E), taken (N, k) -> scores of what is taken, and of the best, each in descending order (N, k): of the experts
    among those of the groups that are taken, and before them of these groups (N, top_groups + k)."""
    if moe.groups == 1 or moe.top_groups == moe.groups:
        return _descending(choice.gather(1, taken)), choice.topk(moe.top_k, dim=1).values
    values = group_values(choice, moe)
    in_use = torch.zeros_like(values).scatter_(1, taken // (moe.num_experts // moe.groups), torch.inf)
    groups = (values + in_use).topk(moe.top_groups, dim=1).indices
    within = within_groups(choice, groups, moe)
    found = _descending(values.gather(1, groups)), _descending(within.gather(1, taken))
    best = values.topk(moe.top_groups, dim=1).values, within.topk(moe.top_k, dim=1).values
    return torch.cat(found, dim=1), torch.cat(best, dim=1)


def _descending(values: Tensor) -> Tensor:
    return values.sort(dim=1, descending=True).values
