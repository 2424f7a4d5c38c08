"""What `bench comm` makes of its measurements, and what it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shardwright import bench_comm, cli
from shardwright.bench_comm import Fit, Point, link_cluster
from shardwright.bench_steps import Step
from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.errors import ConfigError
from shardwright.launch import RankEnv
from shardwright.plan.network import Network
from shardwright.plan.stack import Stack

MEASURED = {1 << 10: 2e-5, 1 << 12: 2.2e-5, 1 << 16: 8e-5, 1 << 20: 4e-4, 1 << 23: 6e-3}
"""Seconds of an all-reduce by bytes: the middle sizes fit a cache."""


def found(ranks: int) -> dict[str, Any]:
    points = [
        Point("all_reduce", "shm", size, 2 * (ranks - 1) * size // ranks, seconds, None) for size, seconds in MEASURED.items()
    ]
    return {
        "points": [asdict(point) for point in points], "device": "cpu", "matmul_flops": 1e11, "copy_bytes_per_second": 1e10
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_cluster_file_has_the_measured_curve(ranks: int, tmp_path: Path) -> None:
    """The planner's all-reduce takes what was measured, at every size of which the bytes decide."""
    measured = found(ranks)
    line = bench_comm.fit([Point(**point) for point in measured["points"]], "all_reduce", "shm")
    made = link_cluster(measured, [line, Fit("all_reduce", "gloo", 1e-4, 1e6)], ranks)
    path = tmp_path / "cluster.toml"
    path.write_text(made.to_toml())
    cluster = Cluster.load(str(path))
    (level,) = cluster.levels
    assert level.efficiency == made.levels[0].efficiency
    assert level.bandwidth == pytest.approx(made.levels[0].bandwidth)
    assert [size for size, _ in level.efficiency] == [size / ranks for size in MEASURED if size >= 1 << 16]
    assert max(share for _, share in level.efficiency) == 1
    network = Network(cluster, Stack(intra=1.0, latency=1.0))
    span = network.span(Layout(dp=ranks).grid, "dp")
    for size, seconds in MEASURED.items():
        if size == 1 << 10 or size >= 1 << 16:
            tree = ranks > 2 and size == 1 << 16  # it sends whole messages, and larger ones get a larger share
            assert network.seconds("all_reduce", size, span) == pytest.approx(seconds, rel=0.25 if tree else 0.1)


@pytest.mark.parametrize("name", ["foo", "nccl", "shm  own"])
def test_transports_that_are_not_here_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["shardwright", "bench", "comm", "--transport", name])
    assert cli.main() == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: --transport {name} is not here; use one of gloo, gloo composed, shm, shm own\n")


def test_several_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_comm, "torchrun_env", lambda: RankEnv(0, 4, 0, 2, "env://", num_nodes=2))
    with pytest.raises(ConfigError, match="the links of one node, and 2 were started"):
        bench_comm.bench_comm(4, 1 << 20)


@pytest.mark.parametrize("steps", [True, False])
def test_the_softwares_constants_are_in_the_cluster_file(steps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        asdict(Point(verb, "shm", size, size, seconds, None))
        for verb in bench_comm.VERBS
        for size, seconds in MEASURED.items()
    ]
    measured = found(2) | {"points": points, "transports": ["shm"]}
    monkeypatch.setattr(bench_comm, "launch", lambda *_, **__: [measured])
    rows = [Step("tp=2", 0.1, 0.11)]
    monkeypatch.setattr(bench_comm, "with_software", lambda one: (replace(one, software=(("message", 3e-4),)), rows))
    result = bench_comm.bench_comm(2, 1 << 20, (), steps)
    path = tmp_path / "cluster.toml"
    path.write_text(result["cluster"])
    assert Cluster.load(str(path)).software == ((("message", 3e-4),) if steps else ())
    assert result["steps"] == ([{"layout": "tp=2", "measured": 0.1, "fitted": 0.11}] if steps else [])


@pytest.mark.parametrize("rank", [0, 1])
def test_only_one_rank_speaks_and_writes(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = found(2) | {"transports": ["shm"], "ranks": 2, "fits": [], "cluster": "nodes = 1\n"}
    monkeypatch.setattr(cli, "torchrun_env", lambda: RankEnv(rank, 2, rank, 2, "env://"))
    monkeypatch.setattr(bench_comm, "bench_comm", lambda *_: result)
    monkeypatch.setattr(sys, "argv", ["shardwright", "bench", "comm", "--json", "--out", str(tmp_path / "comm")])
    assert cli.main() == 0
    out, _ = capsys.readouterr()
    assert (tmp_path / "comm").exists() == (rank == 0)
    assert (json.loads(out) == result) if rank == 0 else out == ""
