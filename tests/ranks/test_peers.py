"""The peers of ``bench train`` compute what we compute: from the same values, over several steps, the same losses."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranks.kit import run_ranks
from shardwright.bench import (
    TURN_LIMIT_S,
    Side,
    _load_peer,
    _run_both,
    bench_config,
    check_peer,
    peer_step,
    random_batches,
)
from shardwright.comm.mesh import Mesh
from shardwright.errors import ConfigError, RankError
from shardwright.launch import RankEnv
from shardwright.model.transformer import Transformer
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


def both_losses(env: RankEnv, runs: tuple[tuple[str, str], ...] = RUNS) -> dict[str, tuple[list[float], list[float]]]:
    """Losses of the whole batch by us and by each peer."""
    found = {}
    for name, layout in runs:
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


def test_deepspeed_has_our_losses() -> None:
    """It clips gradients unless told not to."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed; benchmarks/peers/deepspeed.py says how")
    runs = tuple(("deepspeed", f"dp=2,zero={stage},microbatches=2") for stage in (1, 2, 3))
    for found in run_ranks(both_losses, 2, runs, time_limit=300):
        for name, (ours, theirs) in found.items():
            assert theirs == pytest.approx(ours, rel=1e-5), name


def test_a_peer_that_fails_ends_the_bench(tmp_path: Path) -> None:
    """Its own words are shown, and our ranks do not wait for its turn."""
    table = bench_config("dp=2", "tiny", 16).to_table()
    ours = Side("ours", "nobody", table, 1, 1, str(tmp_path))
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)peer nobody failed: .*nobody\.py"):
        _run_both(ours, replace(ours, name="peer"))
    assert time.monotonic() - start < TURN_LIMIT_S / 3


class Wrapped(Exception):
    """A peer has told PyTorch's wrapper what to do."""


def asked_for(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How the peer calls the wrapper that shards a block."""
    peer, asked = _load_peer(name), {}

    def wrap(module: nn.Module, **options: Any) -> nn.Module:
        asked.update(options)
        raise Wrapped

    for wrapper in ("FullyShardedDataParallel", "fully_shard"):
        monkeypatch.setattr(peer, wrapper, wrap, raising=False)
    monkeypatch.setattr(peer, "init_device_mesh", lambda *sizes: None, raising=False)
    config = bench_config(layout, "tiny", 16)
    values = {key: value.detach() for key, value in Transformer(config.model, Mesh.solo()).spec_parameters().items()}
    with pytest.raises(Wrapped):
        peer.Peer(config, values, Mesh.solo(), torch.device("cpu"))
    return asked


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("reshard", "full"), [("", True), (",reshard=always", True), (",reshard=after_backward", False)])
def test_fsdp_frees_between_forward_and_backward_where_we_do(reshard: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = f"dp=2,zero=3{reshard}"
    strategy = asked_for("fsdp1", layout, monkeypatch)["sharding_strategy"]
    assert strategy.name == ("FULL_SHARD" if full else "SHARD_GRAD_OP")
    assert asked_for("fsdp2", layout, monkeypatch)["reshard_after_forward"] is full


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
