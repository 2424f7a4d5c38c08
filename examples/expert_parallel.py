"""Expert parallelism for a router and experts of one's own: 4 experts over 2 ranks, each with half of the tokens.

    python examples/expert_parallel.py        # two ranks on this machine
    python examples/expert_parallel.py 1      # one, with the same losses

The task: turn points of the plane, of which each quadrant is turned by another angle; the router learns which expert is for
which quadrant, and a balancing loss of its own spreads the tokens. Takes a few seconds.
"""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright import DataParallel, ExpertParallel, Layout, Mesh, full_state_dict
from shardwright.launch import RankEnv, init_process_group, run_local_ranks

EXPERTS, TOP_K, BATCH, STEPS, LEARNING_RATE, BALANCE = 4, 2, 256, 100, 0.03, 0.01


class Router(nn.Module):
    """x (N, 2) -> the experts (N, TOP_K) of each token and their weights; keeps all scores for the balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(2, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.scores = self.score(x).softmax(-1)
        weights, expert_ids = self.scores.topk(TOP_K, dim=-1)
        return expert_ids, weights / weights.sum(-1, keepdim=True)

    def balancing_loss(self, counts: Tensor) -> Tensor:
        """1 where ``counts``, how often all ranks' tokens have chosen each expert, are even; more where they are not."""
        return EXPERTS * (counts / counts.sum() * self.scores.mean(0)).sum()


def make_layer(mesh: Mesh) -> ExpertParallel:
    """All experts are made, so that one seed gives one layer; the rank keeps its own."""
    torch.manual_seed(0)
    return ExpertParallel(Router(), [nn.Linear(2, 2) for _ in range(EXPERTS)], mesh)


def points(step: int) -> tuple[Tensor, Tensor]:
    """The points of a step (BATCH, 2), of all ranks, and where they go."""
    x = torch.randn(BATCH, 2, generator=torch.Generator().manual_seed(step))
    angle = ((x[:, 0] > 0) + 2 * (x[:, 1] > 0)) * (math.pi / 2)
    turned = torch.view_as_complex(x) * torch.polar(torch.ones(BATCH), angle)
    return x, torch.view_as_real(turned)


def train(env: RankEnv) -> None:
    """What each rank does: its part of the points, through experts on all ranks."""
    if env.world_size > 1:
        init_process_group(env)
        mesh = Mesh.distributed(Layout(dp=env.world_size, ep=env.world_size), env.rank)
    else:
        mesh = Mesh.solo()
    layer = make_layer(mesh)
    model = DataParallel(layer, mesh)  # the router's gradients are those of all ranks, an expert's stay with its owner
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    share = BATCH // mesh.dp.size
    mine = slice(mesh.dp.rank * share, (mesh.dp.rank + 1) * share)
    for step in range(STEPS):
        x, target = (whole[mine] for whole in points(step))
        loss = F.mse_loss(model(x), target)
        counts = layer.total_counts()
        optimizer.zero_grad()
        (loss + BALANCE * layer.router.balancing_loss(counts)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        total = mesh.dp.all_reduce(loss.detach().clone(), name="loss").item() / mesh.dp.size
        if mesh.rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {total:.5f}, tokens of each expert {counts.tolist()}", flush=True)

    whole = make_layer(Mesh.solo())
    whole.load_state_dict(full_state_dict(layer))  # all experts, on every rank
    x, target = points(STEPS)
    loss = F.mse_loss(whole(x), target)
    if mesh.rank == 0:
        print(f"done: {STEPS} steps on {env.world_size} rank(s), loss of the whole layer {loss.item():.5f}", flush=True)


if __name__ == "__main__":
    run_local_ranks(train, int(sys.argv[1]) if len(sys.argv) > 1 else 2, threads_per_rank=1)
