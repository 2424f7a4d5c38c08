"""Context parallelism for a module of one's own: one long sequence over 2 ranks, each with half of its tokens.

    python examples/ring_attention.py        # two ranks on this machine
    python examples/ring_attention.py 1      # one, with the same losses

The task: copy what was said half a sequence ago, which only attention across the cut can see. Takes a few seconds.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright import Layout, Mesh, ring_attention, ring_tokens
from shardwright.launch import RankEnv, init_process_group, run_local_ranks

VOCABULARY, HALF, DIM, HEADS, STEPS, LEARNING_RATE = 8, 16, 32, 1, 120, 0.01


class Copier(nn.Module):
    """tokens and positions (t,) of this rank -> logits (t, VOCABULARY): one layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, DIM), nn.Embedding(HALF, DIM)
        self.qkv, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, mesh: Mesh) -> Tensor:
        x = self.embed(tokens) + self.place(positions % HALF)
        q, k, v = self.qkv(x).view(len(tokens), 3, HEADS, -1).unbind(1)
        logits: Tensor = self.head(ring_attention(q, k, v, mesh).flatten(1))
        return logits


def train(env: RankEnv) -> None:
    """What each rank does: cut the sequence, and sum gradients over the ranks, since each has the loss of its own tokens."""
    if env.world_size > 1:
        init_process_group(env)
        mesh = Mesh.distributed(Layout(cp=env.world_size), env.rank)
    else:
        mesh = Mesh.solo()
    torch.manual_seed(0)
    model = Copier()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    ranges = ring_tokens(2 * HALF, mesh)

    def own(whole: Tensor) -> Tensor:
        return torch.cat([whole[start:stop] for start, stop in ranges])

    positions = own(torch.arange(2 * HALF))
    for step in range(STEPS):
        said = torch.randint(VOCABULARY, (HALF,))
        tokens = own(torch.cat((said, torch.zeros(HALF, dtype=torch.int64))))
        targets = own(torch.cat((torch.full((HALF,), -100), said)))
        loss = F.cross_entropy(model(tokens, positions, mesh), targets, reduction="sum") / HALF
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            mesh.cp.all_reduce(parameter.grad, name=name)
        optimizer.step()
        total = mesh.cp.all_reduce(loss.detach().clone(), name="loss")
        if mesh.rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {total.item():.5f}, tokens of this rank {len(tokens)}", flush=True)


if __name__ == "__main__":
    run_local_ranks(train, int(sys.argv[1]) if len(sys.argv) > 1 else 2, threads_per_rank=1)
