"""`bench comm`'s steps on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright import bench_steps
from shardwright.bench_steps import ALONE, MODEL, together
from shardwright.core.cluster import Chip, Cluster, LinkLevel
from shardwright.plan.stack import stack_for

CORE = Chip("cpu-core", None, None, None, None, 1.2e11, 8 << 30, 1e10, 1e10, None, 2, "a test")


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_on_real_ranks_give_constants(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_steps, "MODEL", {**MODEL, "vocab_size": 64, "dim": 32, "ffn_dim": 64})
    monkeypatch.setattr(bench_steps, "available_cores", lambda: 2)
    one = Cluster(CORE, 1, ranks, (LinkLevel("host", ranks, 1e10, 1e-5),))
    cluster, steps = bench_steps.with_software(one, rounds=1)
    assert [step.layout for step in steps] == [*ALONE, *together(ranks)]
    assert all(step.measured > 0 and step.fitted > 0 for step in steps)
    assert cluster.cores == (2 if ranks == 4 else 0)
    assert cluster.chip.fp32 not in (None, CORE.fp32) and cluster.chip.memory_bandwidth != CORE.memory_bandwidth
    path = tmp_path / "cluster.toml"
    path.write_text(cluster.to_toml())
    assert stack_for(Cluster.load(str(path))) == stack_for(cluster)
