"""Pipeline parallelism for a model of one's own: an MLP that tells two spirals apart, its layers in a row over 2 ranks.

    python examples/pipeline_mlp.py        # two ranks on this machine
    python examples/pipeline_mlp.py 1      # one, with the same losses

Each rank builds the layers of its own stage; `Schedule` sends what goes between them. Takes a few seconds.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from shardwright import Layout, Mesh, Schedule, Stage
from shardwright.launch import RankEnv, init_process_group, run_local_ranks

LAYERS, DIM, POINTS, STEPS, LEARNING_RATE = 4, 32, 256, 100, 0.01
SCHEDULE, MICROBATCHES = "zb_h1", 4


def layer(index: int) -> nn.Module:
    """Layer ``index``, with the same values wherever it is built."""
    torch.manual_seed(index)
    inputs, outputs = (2 if index == 0 else DIM), (2 if index == LAYERS - 1 else DIM)
    linear = nn.Linear(inputs, outputs)
    return linear if index == LAYERS - 1 else nn.Sequential(linear, nn.Tanh())


def spirals() -> tuple[Tensor, Tensor]:
    """Points (POINTS, 2), and which of the two spirals each lies on."""
    which = torch.arange(POINTS) % 2
    turn = torch.linspace(0.5, 3.0, POINTS) * torch.pi
    angle = turn + which * torch.pi
    return torch.stack((angle.cos(), angle.sin()), 1) * turn[:, None] / 5, which


def train(env: RankEnv) -> None:
    """What each rank does: its layers, its optimizer, and one call for each batch."""
    if env.world_size > 1:
        init_process_group(env)
        mesh = Mesh.distributed(Layout(pp=env.world_size), env.rank)
    else:
        mesh = Mesh.solo()
    num_stages, each = mesh.pp.size, LAYERS // mesh.pp.size
    stages = []
    for index in Schedule.stages_of(SCHEDULE, num_stages, mesh):
        module = nn.Sequential(*(layer(index * each + place) for place in range(each)))
        stages.append(Stage(module, index, num_stages))
    schedule = Schedule(SCHEDULE, stages, MICROBATCHES, mesh, nn.CrossEntropyLoss())
    optimizer = torch.optim.Adam([p for stage in stages for p in stage.module.parameters()], LEARNING_RATE)
    points, which = spirals()

    for step in range(STEPS):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        logits = schedule.step(points, target=which, losses=losses)  # whole batches; each rank takes what it needs
        optimizer.step()
        if logits is not None and step % 20 == 19:  # where the last stage is
            loss, accuracy = torch.stack(losses).mean().item(), (logits.argmax(1) == which).double().mean().item()
            print(f"step {step + 1}: loss {loss:.5f}, accuracy {accuracy:.1%}, {len(losses)} micro-batches", flush=True)


if __name__ == "__main__":
    run_local_ranks(train, int(sys.argv[1]) if len(sys.argv) > 1 else 2, threads_per_rank=1)
