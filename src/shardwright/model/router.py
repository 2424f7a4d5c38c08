"""The router: which experts each token goes to and how they are weighed. Always fp32 or wider.

Scores are a softmax over all experts, or sigmoids (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). With groups a token
chooses within its best groups only: group-limited (DeepSeek-V2, arXiv 2405.04434, section 2.1.2), or node-limited where a
group is what one node holds. Weights are the chosen scores, normalised to sum 1 if ``normalise_top_k`` (a softmax after
top-k is the same as one before it, normalised), times ``routed_scale``.

Notation: N tokens, D model dim, E experts, G groups, k choices, S sequences of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.core.model_config import ModelConfig, MoEConfig
from shardwright.model.context import Context
from shardwright.model.init import ParameterTable
from shardwright.ops.capacity import limit_choices
from shardwright.ops.kernels import dropout_key, jitter
from shardwright.ops.linear import wide_linear
from shardwright.ops.routing import Routing, count_experts

JITTER_SITE = 3


@dataclass
class Routed:
    """What a router leaves behind for losses, bias and metrics: of this rank's N tokens, padding left out.

    ``counts`` (S, E) int64, choices per sequence before any was dropped; ``score_sums`` (S, E) the sum of each expert's
    score, normalised per token, and ``z_sum`` scalar, the sum of squared log-sum-exp of the logits, both with gradient;
    ``dropped`` and ``rerouted`` scalars int64.
    """

    layer: int
    counts: Tensor
    score_sums: Tensor
    z_sum: Tensor
    dropped: Tensor
    rerouted: Tensor


class Router(nn.Module):
    """x (N, D) -> `Routing`; appends a `Routed` to ``context.routed`` if that is a list."""

    bias: nn.Parameter | None
    correction: nn.Parameter | None

    def __init__(self, config: ModelConfig, moe: MoEConfig, layer: int, table: ParameterTable) -> None:
        super().__init__()
        name = f"blocks.{layer}.moe.router"
        self.layer, self.moe = layer, moe
        self.weight = table.make(f"{name}.weight")
        self.bias = table.maybe(f"{name}.bias")
        self.correction = table.maybe(f"{name}.correction")

    def forward(self, x: Tensor, context: Context) -> Routing:
        moe = self.moe
        logits = wide_linear(self._jittered(x, context), self.weight, self.bias, context.router.dtype)
        scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
        choice = scores.detach() if self.correction is None else scores.detach() + self.correction
        chosen, choice = self.choose(choice, context)
        expert_ids = self._with_room(chosen, choice, context)
        kept = expert_ids != moe.num_experts
        weights = weigh(scores, torch.where(kept, expert_ids, chosen), moe)
        may_drop = context.limit is not None or context.padded
        if may_drop:
            weights = weights * kept
        if context.routed is not None:
            context.routed.append(self._routed(chosen, expert_ids, scores, logits, context))
        return Routing(expert_ids, weights, moe.num_experts, may_drop)

    def choose(self, choice: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Scores (N, E) to choose by -> the experts (N, k) of each token, and the scores with -inf for what it may not choose.
        Verification follows the choices of another run here."""
        choice = within_best_groups(choice, self.moe)
        return choice.topk(self.moe.top_k, dim=-1).indices, choice

    def _with_room(self, chosen: Tensor, choice: Tensor, context: Context) -> Tensor:
        """The choices (N, k) that have room, `num_experts` for others; padding has none."""
        sequence = self._sequence(chosen, context)
        if context.limit is None:
            return chosen.masked_fill(sequence.unsqueeze(1) < 0, self.moe.num_experts) if context.padded else chosen
        place = torch.arange(len(chosen), device=chosen.device) if context.place is None else context.place
        place = place if context.place is None else context.region.own_tokens(place)
        known = torch.cat([chosen, sequence.unsqueeze(1), place.unsqueeze(1)], dim=1)
        whole, own = context.sums.same_sequences(known, f"blocks.{self.layer} choices")
        ranked = None
        if context.limit.needs_scores:
            ranked, _ = context.sums.same_sequences(choice, f"blocks.{self.layer} scores")
        top_k, num_experts = chosen.shape[1], self.moe.num_experts
        ids, number, place = whole[:, :top_k], whole[:, top_k], whole[:, top_k + 1]
        return limit_choices(ids, ranked, number, place, context.num_sequences, num_experts, context.limit)[own]

    def _sequence(self, chosen: Tensor, context: Context) -> Tensor:
        """The sequence (N,) of each of this rank's tokens."""
        if context.sequence is None:
            return torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)
        return context.region.own_tokens(context.sequence)

    def _routed(self, chosen: Tensor, given: Tensor, scores: Tensor, logits: Tensor, context: Context) -> Routed:
        """The sums for losses and metrics; per sequence if that is what the loss balances over, else of all tokens."""
        num_experts, moe = self.moe.num_experts, self.moe
        num_sequences = context.num_sequences if context.router.balance == "sequence" else 1
        sequence = self._sequence(chosen, context)
        number = torch.where(sequence < 0, num_sequences, sequence.clamp(max=num_sequences - 1))
        flat = (number.unsqueeze(1) * num_experts + chosen).clamp(max=num_sequences * num_experts)
        counts = count_experts(flat, num_sequences * num_experts).view(num_sequences, num_experts)
        shares = scores if moe.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        sums = shares.new_zeros((num_sequences + 1, num_experts)).index_add(0, number, shares)[:num_sequences]
        z_sum = logits.new_zeros(())
        if context.router.z_loss:
            z_sum = (logits.logsumexp(-1).square() * (number < num_sequences)).sum()
        real = (number < num_sequences).unsqueeze(1)
        dropped, rerouted = (given == num_experts) & real, (given != chosen) & (given != num_experts) & real
        return Routed(self.layer, counts, sums, z_sum, dropped.sum(), rerouted.sum())

    def _jittered(self, x: Tensor, context: Context) -> Tensor:
        """Times uniform noise in [1 - jitter, 1 + jitter] in training (Switch, arXiv 2101.03961, section 2.4)."""
        if context.router.jitter == 0.0 or context.token_index is None:
            return x
        index = context.region.own_tokens(context.token_index)
        return jitter(x, context.router.jitter, index, dropout_key(context.seed, context.step, self.layer, JITTER_SITE))


def within_best_groups(choice: Tensor, moe: MoEConfig) -> Tensor:
    """choice (N, E) with -inf outside each token's ``top_groups`` best groups.

    A group is as good as its best expert, or with ``bias_correction`` as the sum of its two best.
    """
    if moe.groups == 1 or moe.top_groups == moe.groups:
        return choice
    return within_groups(choice, group_values(choice, moe).topk(moe.top_groups, dim=-1).indices, moe)


def group_values(choice: Tensor, moe: MoEConfig) -> Tensor:
    """How good each group is (N, G)."""
    grouped = choice.view(choice.shape[0], moe.groups, -1)
    if moe.bias_correction:
        return grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1)
    return grouped.amax(-1)


def within_groups(choice: Tensor, groups: Tensor, moe: MoEConfig) -> Tensor:
    """choice (N, E) with -inf outside each token's ``groups`` (N, top_groups)."""
    grouped = choice.view(choice.shape[0], moe.groups, -1)
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, groups, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).view_as(choice)


def weigh(scores: Tensor, expert_ids: Tensor, moe: MoEConfig) -> Tensor:
    """The weights (N, k) of the chosen experts."""
    weights = scores.gather(1, expert_ids)
    if moe.normalise_top_k:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.routed_scale if moe.routed_scale != 1.0 else weights
