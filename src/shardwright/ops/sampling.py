"""Choosing the next token from logits (V,)."""

from __future__ import annotations

import torch
from torch import Tensor


def sample(logits: Tensor, temperature: float = 0.0, top_p: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """One token id, a tensor of shape (): the largest logit at temperature 0, else drawn from the nucleus ``top_p``.

    Nucleus sampling: Holtzman et al. 2019, the smallest set of tokens whose probability reaches ``top_p``.
    """
    if temperature == 0.0:
        return logits.argmax()
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        outside = ordered.cumsum(0) - ordered >= top_p
        probabilities = torch.zeros_like(probabilities).scatter_(0, order, ordered.masked_fill(outside, 0.0))
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(0)
