"""The peers of ``bench train`` compute what we compute: from the same values, over several steps, the same losses."""

from __future__ import annotations

import pytest
import torch

from ranks.kit import run_ranks
from shardwright.bench import bench_config, check_peer, peer_step, random_batches
from shardwright.comm.mesh import Mesh
from shardwright.errors import ConfigError
from shardwright.launch import RankEnv
from shardwright.train.step import Trainer

STEPS = 3
RUNS = (
    ("ddp", "dp=2,microbatches=2"),
    ("zero_redundancy", "dp=2,zero=1,microbatches=2"),
    ("fsdp1", "dp=2,zero=3,microbatches=2"),
    ("fsdp1", "dp=2,zero=3,reshard=after_backward,accumulate=reduce,microbatches=2"),
    ("fsdp2", "dp=2,zero=3,microbatches=2"),
    ("fsdp2", "dp=2,zero=3,reshard=after_backward,accumulate=reduce,microbatches=2"),
    ("parallelize_module", "tp=2,micro_batch=2"),
    ("parallelize_module", "tp=2,sp=off,micro_batch=2"),
    ("pipelining", "pp=2,schedule=1f1b,microbatches=2"),
)


def both_losses(env: RankEnv) -> dict[str, tuple[list[float], list[float]]]:
    """Losses of the whole batch by us and by each peer."""
    found = {}
    for name, layout in RUNS:
        config = bench_config(layout, "tiny", 16)
        mesh = Mesh.distributed(config.layout, env.rank)
        shape = config.layout.microbatches, config.layout.micro_batch, config.data.seq_len
        batches = random_batches(config.model, *shape, seed=mesh.coordinates["dp"])
        trainer = Trainer(config, mesh)
        ours = [trainer.step(batches, step).loss for step in range(STEPS)]
        step = peer_step(name, config, mesh, torch.device("cpu"))
        own = torch.stack([step(batches) for _ in range(STEPS)])
        theirs = [row for row in mesh.world.gather_objects(own.tolist()) if row[0] == row[0]]
        found[f"{name} {layout}"] = ours, [sum(column) / len(theirs) for column in zip(*theirs, strict=True)]
    return found


def test_peers_have_our_losses() -> None:
    for found in run_ranks(both_losses, 2, time_limit=110):
        for name, (ours, theirs) in found.items():
            assert ours[0] > ours[-1], name
            assert theirs == pytest.approx(ours, rel=1e-5), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit, by PyTorch's own optimizers
def test_a_run_that_a_peer_is_not_made_for_is_refused() -> None:
    for name, layout, why in (
        ("fsdp2", "dp=2,zero=2", "ZeRO-3 over dp and not"),
        ("zero_redundancy", "dp=2", "ZeRO-1 over dp and not"),
        ("ddp", "tp=2", "cannot run tp=2"),
        ("parallelize_module", "tp=1", "use tp=2"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_peer(name, bench_config(layout, "tiny", 16))
