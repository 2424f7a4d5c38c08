"""What verification does where rounding may send a token to another expert: one process follows, and the choices are judged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.comm.mesh import Mesh
from shardwright.core.model_config import ModelConfig, MoEConfig
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.model.router import Routed
from shardwright.model.transformer import Transformer
from shardwright.ops.attention import CausalAttend
from shardwright.verify.parity import comparable
from shardwright.verify.routing import FollowedChoices, judged, rounds_choices

MODEL: dict[str, Any] = {
    "family": "mixtral", "vocab_size": 48, "dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 24,
    "moe": {"num_experts": 8, "top_k": 2, "expert_dim": 12},
}  # fmt: skip
MOE = MoEConfig(**MODEL["moe"])


def cost(choice: list[float], taken: tuple[int, ...], moe: MoEConfig) -> float:
    found, best = judged(torch.tensor([choice]), torch.tensor([taken]), moe)
    assert found.shape == best.shape
    return (best - found).max().item()


@pytest.mark.parametrize(("taken", "expected"), [((1, 2), 0), ((2, 1), 0), ((1, 3), 0.2999), ((3, 0), 0.3999)])
def test_a_choice_costs_what_its_experts_score_less(taken: tuple[int, ...], expected: float) -> None:
    assert cost([0.1, 0.5, 0.4999, 0.2, 0, 0, 0, 0], taken, MOE) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("taken", "expected"),
    [((0, 2), 0), ((0, 4), 1e-4), ((0, 3), 0.1), ((4, 5), 0.2001), ((0, 6), 0.2), ((2, 4), 0.2)],
)
def test_groups_are_judged_too(taken: tuple[int, ...], expected: float) -> None:
    """Groups of two experts are as good as the better one; the third group is nearly as good as the second."""
    grouped = MOE.model_copy(update={"groups": 4, "top_groups": 2})
    assert cost([0.5, 0.1, 0.3, 0.2, 0.2999, 0.2998, 0.1, 0.1], taken, grouped) == pytest.approx(expected, abs=1e-6)


def test_more_groups_than_are_allowed_cost_everything() -> None:
    grouped = MOE.model_copy(update={"groups": 4, "top_groups": 2, "top_k": 3})
    assert cost([0.5, 0.1, 0.3, 0.2, 0.2999, 0.2998, 0.1, 0.1], (0, 2, 4), grouped) == torch.inf


def test_one_process_follows_the_choices_of_all_ranks_token_by_token() -> None:
    model = Transformer(ModelConfig(**MODEL), Mesh.solo(), torch.float64).initialise(0)
    tokens, places = torch.arange(16) % 5, torch.arange(100, 116)
    generator = torch.Generator().manual_seed(2)
    chosen = [torch.rand(16, 8, generator=generator).topk(2).indices for _ in range(2)]
    known = [torch.cat([places.unsqueeze(1), ids], dim=1).flip(0) for ids in chosen]
    ranks = [{layer: table[part] for layer, table in enumerate(known)} for part in (slice(0, 5), slice(5, 15))]  # one is left out
    follow, routed = FollowedChoices(model, [ranks]), list[Routed]()
    follow.begin(0)
    model.run(model.context(tokens, torch.arange(16), CausalAttend([16]), token_index=places, routed=routed))
    scores = list(follow.take().values())
    assert len(scores) == len(routed) == 2 and follow.take() == {}
    for (found, best), ids, one in zip(scores, chosen, routed, strict=True):
        assert torch.isinf(found).any(1).tolist() == [True] + [False] * 15  # of this token nobody has told
        assert (best >= found).all() and (best > found)[1:].any()
        rest = one.counts[0] - torch.bincount(ids[1:].flatten(), minlength=8)
        assert rest.sum() == 2 and (rest >= 0).all()


def run_config(layout: str, drop_by: str = "position") -> RunConfig:
    return RunConfig.of({"model": MODEL, "data": {"sources": "x"}, "layout": layout, "router": {"drop_by": drop_by}})


@pytest.mark.parametrize(
    ("layout", "drop_by", "words"),
    [
        ("precision=bf16,moe=capacity:1:reroute", "position", "precision=bf16 with moe=capacity:1:reroute cannot be verified"),
        ("reduce_dtype=bf16,moe=capacity:1", "probability", r"reduce_dtype=bf16 with router\.drop_by=probability cannot"),
    ],
)
def test_room_that_goes_by_scores_cannot_be_verified_where_these_are_rounded(layout: str, drop_by: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        comparable(run_config(layout, drop_by))
    comparable(run_config(layout.replace("=bf16", "=fp32"), drop_by))


def test_where_choices_are_followed() -> None:
    assert rounds_choices(comparable(run_config("dp=2,ep=2,precision=bf16,moe=capacity:1")))
    assert rounds_choices(run_config("dp=2,reduce_dtype=fp16"))
    assert rounds_choices(run_config("dp=2,ep=2"))
    assert not rounds_choices(run_config("dp=2,ep=2,precision=fp64"))
    assert not rounds_choices(RunConfig.of({"model": "tiny", "data": {"sources": "x"}, "layout": "precision=bf16"}))
