"""A stack of PyTorch's own encoder layers with every state sharded (ZeRO-3): each rank keeps a part of every layer.

    python examples/sharded_encoder.py                                 # one process
    torchrun --nproc-per-node 2 examples/sharded_encoder.py            # two, with the same losses

The task: say which number comes most often in a sequence. Layers are gathered around their use and freed after it. The
optimizer updates flat shards; the next forward gathers what it has written. Takes a few seconds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright import DataParallel, Layout, Mesh
from shardwright.launch import init_process_group, torchrun_env

NUMBERS, LENGTH, DIM, LAYERS = 6, 12, 32, 3
GLOBAL_BATCH, STEPS = 64, 60


class Counter(nn.Module):
    """tokens (B, LENGTH) -> logits (B, NUMBERS)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUMBERS, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(DIM, NUMBERS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def batch(step: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """This rank's part of the step's sequences, and the most frequent number of each."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(NUMBERS, (GLOBAL_BATCH, LENGTH), generator=generator)
    size = GLOBAL_BATCH // mesh.dp.size
    mine = tokens[mesh.dp.rank * size : (mesh.dp.rank + 1) * size]
    return mine, torch.nn.functional.one_hot(mine, NUMBERS).sum(1).argmax(1)


def train(mesh: Mesh) -> list[float]:
    """The loss of every step, over all ranks."""
    torch.manual_seed(0)
    model = DataParallel(Counter(), mesh, zero=3)  # units: embed, each of the layers, head
    optimizer = torch.optim.AdamW(model.shards(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        tokens, most = batch(step, mesh)
        loss = nn.functional.cross_entropy(model(tokens), most)
        optimizer.zero_grad()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(mesh.dp.all_reduce(loss.detach().clone(), name="loss").item() / mesh.dp.size)
    if mesh.rank == 0:
        kept = sum(shard.numel() for shard in model.shards())
        print(f"this rank keeps {kept} of {sum(p.numel() for p in Counter().parameters())} parameters")
    return losses


def main() -> None:
    env = torchrun_env()
    if env is None:
        mesh = Mesh.solo()
    else:
        init_process_group(env)
        mesh = Mesh.distributed(Layout(dp=env.world_size), env.rank)
    losses = train(mesh)
    if mesh.rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {STEPS} steps on {mesh.dp.size} rank(s)")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
