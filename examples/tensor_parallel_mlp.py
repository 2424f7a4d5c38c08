"""Tensor parallelism for a model of one's own: an MLP that guesses the next character, its matrices split over 2 ranks.

    python examples/tensor_parallel_mlp.py        # two ranks on this machine
    python examples/tensor_parallel_mlp.py 1      # one, with the same losses

A table says how each layer is split; the model's code stays as it was. Takes a few seconds.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright import Layout, Mesh, full_state_dict, parallelize, vocab_parallel_cross_entropy
from shardwright.launch import RankEnv, init_process_group, run_local_ranks

TEXT = "she sells sea shells by the sea shore; the shells she sells are sea shells for sure. " * 4
WINDOW, DIM, HIDDEN, STEPS, LEARNING_RATE = 5, 24, 64, 60, 0.1
LETTERS = sorted(set(TEXT))

TABLE = {"embed": "vocab", "up": "column", "down": "row", "head": "column"}
"""Column then row: the activation between them works on each channel alone, so one sum after ``down`` is enough."""


class NextLetter(nn.Module):
    """letters (N, WINDOW) -> logits (N, V) of the next; with a split head each rank has its own columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), DIM)
        self.up = nn.Linear(WINDOW * DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.head = nn.Linear(DIM, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        x = self.embed(letters).flatten(1)
        logits: Tensor = self.head(self.down(F.gelu(self.up(x))))
        return logits


def train(env: RankEnv) -> None:
    """What each rank does; all see the same batch."""
    if env.world_size > 1:
        init_process_group(env)
        mesh = Mesh.distributed(Layout(tp=env.world_size), env.rank)
    else:
        mesh = Mesh.solo()
    torch.manual_seed(0)
    model = parallelize(NextLetter(), TABLE, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    codes = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    windows = codes.unfold(0, WINDOW + 1, 1)

    for step in range(STEPS):
        logits = model(windows[:, :-1])
        loss = vocab_parallel_cross_entropy(logits, windows[:, -1], mesh, vocab_size=len(LETTERS))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if mesh.rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.5f}, logits of this rank {tuple(logits.shape)}", flush=True)

    whole = NextLetter()
    whole.load_state_dict(full_state_dict(model))  # the full weights again, on every rank
    loss = F.cross_entropy(whole(windows[:, :-1]), windows[:, -1])
    if mesh.rank == 0:
        print(f"done: {STEPS} steps on {env.world_size} rank(s), loss of the whole model {loss.item():.5f}", flush=True)


if __name__ == "__main__":
    run_local_ranks(train, int(sys.argv[1]) if len(sys.argv) > 1 else 2, threads_per_rank=1)
