"""Peers of one layer with experts, as PyTorch users write it: all experts on every rank under `DistributedDataParallel`, and
experts split over ranks with a plain all-to-all for each of a token's k choices.

Both take the initial values of `shardwright.model.moe.MoE` (stacked, gate rows before up rows) and give the gradient of the
mean over all ranks' tokens. `benchmarks/moe.py` runs them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError

AXES = ()


def check(config: RunConfig) -> None:
    raise ConfigError("peer moe is a layer, not a model that can be trained; run benchmarks/moe.py")


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        gate, inward = up.chunk(2)
        self.gate, self.up, self.down = (nn.Parameter(part.clone()) for part in (gate, inward, down))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


def route(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights (N, k), normalised, and experts (N, k)."""
    weights, chosen = F.linear(x, router).softmax(-1).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


class LocalMoE(nn.Module):
    """All experts at hand, a loop over them with `index_add`: the layer that is wrapped in DDP."""

    def __init__(self, router: Tensor, up: Tensor, down: Tensor, top_k: int) -> None:
        super().__init__()
        self.top_k, self.router = top_k, nn.Parameter(router.clone())
        self.experts = nn.ModuleList(Expert(*pair) for pair in zip(up, down, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = route(x, self.router, self.top_k)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, slots = torch.where(chosen == number)
            y = y.index_add(0, tokens, expert(x[tokens]) * weights[tokens, slots].unsqueeze(1))
        return y


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, send: list[int], receive: list[int]) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.sizes = send, receive
        output = x.new_empty((sum(receive), x.shape[1]))
        dist.all_to_all_single(output, x.contiguous(), receive, send)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        send, receive = ctx.sizes
        dx = dy.new_empty((sum(send), dy.shape[1]))
        dist.all_to_all_single(dx, dy.contiguous(), send, receive)
        return dx, None, None


class BookMoE(nn.Module):
    """Experts split over the ranks of the world: for each of the k choices the tokens are sorted by expert, counts are
    exchanged, tokens go out, experts run one by one, and tokens come back and are weighed.
    """

    def __init__(self, router: Tensor, up: Tensor, down: Tensor, top_k: int) -> None:
        super().__init__()
        self.top_k, self.size, rank = top_k, dist.get_world_size(), dist.get_rank()
        self.router = nn.Parameter(router.clone())
        self.num_experts = len(up)
        self.num_local = self.num_experts // self.size
        own = slice(rank * self.num_local, (rank + 1) * self.num_local)
        self.experts = nn.ModuleList(Expert(*pair) for pair in zip(up[own], down[own], strict=True))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = route(x, self.router, self.top_k)
        y = torch.zeros_like(x)
        for slot in range(self.top_k):
            y = y + weights[:, slot : slot + 1] * self._one_choice(x, chosen[:, slot])
        return y

    def _one_choice(self, x: Tensor, chosen: Tensor) -> Tensor:
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts)
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts)
        send = counts.view(self.size, -1).sum(1).tolist()
        per_source = came.view(self.size, -1)
        receive = per_source.sum(1).tolist()
        rows = _AllToAll.apply(x[order], send, receive)
        number = torch.repeat_interleave(torch.arange(self.num_local).repeat(self.size), per_source.flatten())
        outputs = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            mine = torch.where(number == index)[0]
            outputs = outputs.index_copy(0, mine, expert(rows[mine]))
        back = _AllToAll.apply(outputs, receive, send)
        return torch.empty_like(back).index_copy(0, order, back)

    def reduce_gradients(self) -> None:
        """Of a mean over each rank's tokens: the mean over ranks of what all hold, the sum's share of what one rank holds."""
        assert self.router.grad is not None
        dist.all_reduce(self.router.grad)
        self.router.grad.div_(self.size)
        for parameter in self.experts.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.size)
