"""The smallest complete data-parallel job: a linear classifier, 1,024 features to 100 classes.

    python examples/linear_classifier.py                                 # one process
    torchrun --nproc-per-node 2 examples/linear_classifier.py            # two, with the same losses

Each rank reads its own samples; `DataParallel` makes the gradients those of the whole batch. Takes a few seconds.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardwright import DataParallel, Layout, Mesh
from shardwright.launch import init_process_group, torchrun_env

FEATURES, CLASSES, SAMPLES = 1024, 100, 4096
GLOBAL_BATCH, EPOCHS, LEARNING_RATE = 256, 4, 1.0


def make_data() -> TensorDataset:
    """Noisy points around one random centre for each class, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset((centres[labels] + 3 * noise) / FEATURES**0.5, labels)


def join() -> Mesh:
    """The ranks that torchrun started, or this process alone."""
    env = torchrun_env()
    if env is None:
        return Mesh.solo()
    init_process_group(env)
    return Mesh.distributed(Layout(dp=env.world_size), env.rank)


def total(value: Tensor, mesh: Mesh) -> float:
    """The sum of a number over all ranks."""
    return mesh.dp.all_reduce(value.detach().clone(), name="total").item()


def main() -> None:
    torch.manual_seed(0)
    mesh = join()
    data = make_data()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, mesh.dp.size, mesh.dp.rank)
    loader = DataLoader(data, GLOBAL_BATCH // mesh.dp.size, sampler=sampler)
    model = DataParallel(nn.Linear(FEATURES, CLASSES), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        loss_sum, correct = torch.zeros(()), torch.zeros(())
        for x, y in loader:
            logits = model(x)
            loss = criterion(logits, y)
            optimizer.zero_grad()
            loss.backward()  # the gradients are those of all ranks when it returns
            optimizer.step()
            loss_sum += loss.detach() * len(y)
            correct += (logits.argmax(1) == y).sum()
        mean_loss, accuracy = total(loss_sum, mesh) / SAMPLES, total(correct, mesh) / SAMPLES
        if mesh.rank == 0:
            print(f"epoch {epoch + 1}: loss {mean_loss:.6f}, accuracy {accuracy:.1%}", flush=True)
    if mesh.rank == 0:
        print(f"done: {EPOCHS} epochs of {SAMPLES} samples on {mesh.dp.size} rank(s), loss {mean_loss:.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
