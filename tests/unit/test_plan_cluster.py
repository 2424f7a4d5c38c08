"""Clusters as TOML files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.core.cluster import RELATIVES, Cluster, LinkLevel, find_chip
from shardwright.core.layout import Layout
from shardwright.core.presets import preset
from shardwright.errors import ConfigError
from shardwright.plan.command import make_plan
from shardwright.plan.compute import Kernels
from shardwright.plan.stack import MEASURED, Stack, default_stack, stack_for
from shardwright.plan.step_time import Pricer

FILE = """
chip = "h100-80gb"
nodes = 2
gpus_per_node = 8
[[levels]]
name = "nvlink"
size = 8
gb_s = 450
latency_us = 4.5
efficiency = [[1e4, 0.1], [1e8, 0.8]]
[[levels]]
name = "ib"
size = 16
gb_s = 50.0
latency_us = 12
"""
CUSTOM = """
nodes = 1
gpus_per_node = 2
[chip]
name = "desk"
fp32_tflops = 0.05
memory_bytes = 8000000000
memory_gb_s = 20.0
[[levels]]
size = 2
gb_s = 1.5
latency_us = 30.0
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return str(path)


def test_a_file_gives_levels_with_curves(tmp_path: Path) -> None:
    cluster = Cluster.load(write(tmp_path, FILE))
    assert cluster.world_size == 16
    assert [(level.name, level.size, level.bandwidth) for level in cluster.levels] == [
        ("nvlink", 8, 450e9),
        ("ib", 16, 50e9),
    ]
    assert cluster.levels[0].latency == pytest.approx(4.5e-6)
    assert cluster.levels[0].efficiency_at(1e6) == pytest.approx(0.45)
    assert cluster.levels[1].efficiency_at(1e6) == 1


def test_a_file_may_say_how_fast_storage_is(tmp_path: Path) -> None:
    slow = Cluster.load(write(tmp_path, "storage_gb_s = 0.25\n" + FILE))
    assert slow.storage_bandwidth == 0.25e9
    assert Cluster.load(write(tmp_path, slow.to_toml())) == slow
    assert Cluster.load(write(tmp_path, FILE)).storage_bandwidth == 1e9
    with pytest.raises(ConfigError, match="storage_gb_s=0 must be above 0"):
        Cluster.load(write(tmp_path, "storage_gb_s = 0\n" + FILE))


def test_a_file_can_name_its_own_chip(tmp_path: Path) -> None:
    cluster = Cluster.load(write(tmp_path, CUSTOM))
    assert cluster.chip.peak("fp32") == 5e10
    assert cluster.chip.memory_bandwidth == 2e10
    with pytest.raises(ConfigError, match="no bf16 peak is known for desk"):
        cluster.chip.peak("bf16")


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("gb200:18x4", [("rack", 72, 900)]),
        ("gb200:36x4", [("rack", 72, 900), ("inter", 144, 50)]),
        ("gb200:2x4", [("rack", 8, 900)]),
        ("gb200:1x4", [("intra", 4, 900)]),
        ("gb200:2x72", [("intra", 72, 900), ("inter", 144, 50)]),
        ("gb200:4x64", [("intra", 64, 900), ("inter", 256, 50)]),  # a rack holds one such node
        ("h100:4x4", [("intra", 4, 450), ("inter", 16, 50)]),  # a board's links end at the node
        ("tpu-v5e:64x4", [("rack", 256, 200)]),
    ],
)
def test_a_rack_joins_nodes(text: str, levels: list[tuple[str, int, float]]) -> None:
    cluster = Cluster.parse(text)
    assert [(level.name, level.size, level.bandwidth / 1e9) for level in cluster.levels] == levels
    assert cluster.fast_size == levels[0][1]


def test_a_rack_is_as_fast_as_a_node() -> None:
    """The same 72 GPUs as 18 trays and as one node."""
    layout = Layout.parse("tp=8,dp=9,zero=1,precision=bf16,reduce_dtype=bf16,microbatches=4")
    trays, node = (Pricer(preset("llama-3.1-70b"), Cluster.parse(text), 8192) for text in ("gb200:18x4", "gb200:1x72"))
    assert trays.seconds(layout) == node.seconds(layout)
    assert trays.price(layout).communication[0].link == "rack"


@pytest.mark.parametrize("text", ["h100-80gb:8x8", "gb200:2x72", "gb200:36x4", "v100-32gb:1x8", "tpu-v5p:1x8"])
def test_what_is_written_is_read_back(tmp_path: Path, text: str) -> None:
    cluster = Cluster.parse(text)
    measured = tuple(replace(level, efficiency=((1e3, 0.25), (1e6, 0.75))) for level in cluster.levels)
    software = (("message", 3e-05), ("tiles", False), ("memory", 0.5))
    for one in (cluster, replace(cluster, levels=measured), replace(cluster, cores=2, software=software)):
        assert Cluster.load(write(tmp_path, one.to_toml())) == one


def test_without_levels_the_chips_own_links_count(tmp_path: Path) -> None:
    text = 'chip = "a100-80gb"\nnodes = 2\ngpus_per_node = 8\n'
    assert Cluster.load(write(tmp_path, text)) == Cluster.parse("a100-80gb:2x8")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('chip = "h100-80gb"', "", "chip is missing"),
        ("nodes = 2", "nodes = 0", "0 nodes with 8 GPUs each"),
        ("nodes = 2", "nodes = 2.5", "nodes=2.5 must be a whole number"),
        ("nodes = 2", "node = 2", "unknown key 'node'; did you mean 'nodes'"),
        ("size = 16", "size = 12", "must grow and the last must hold all 16"),
        ("gb_s = 50.0", "gb_s = 0", "gb_s=0 must be above 0"),
        ("gb_s = 50.0", "gbs = 50.0", "unknown key 'gbs'; did you mean 'gb_s'"),
        ("[1e8, 0.8]", "[1e8, 1.8]", "rising bytes and shares in"),
        ("nodes = 2", "nodes = = 2", "is not TOML"),
        ("nodes = 2", "nodes = 2\n[chip.x]", "is not TOML|must be|missing"),
        ("nodes = 2", "nodes = 2\ncores = -1", "cores=-1 must be at least 1"),
        ("nodes = 2", "nodes = 2\nsoftware = 3", "software must be a table"),
        ("nodes = 2", "nodes = 2\nsoftware.message = 'long'", "software.message='long' must be a number"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster.load(write(tmp_path, FILE.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("massage = 3e-4", "unknown constant 'massage'; did you mean 'message'"),
        ("message = true", "message=True must be a number"),
        ("flash = 1", "flash=1 must be true or false"),
        ("memory = 0.0", "memory=0.0 must be finite and above 0"),
        ("part_node = 0.0", "part_node=0.0 must be finite and above 0"),
        ("message = -1e-3", "message=-0.001 must be finite and at least 0"),
        ("message = nan", "message=nan must be finite and at least 0"),
        ("step_seconds = inf", "step_seconds=inf must be finite and at least 0"),
    ],
)
def test_wrong_constants_are_refused(tmp_path: Path, line: str, message: str) -> None:
    cluster = Cluster.load(write(tmp_path, f"{FILE}\n[software]\n{line}\n"))
    with pytest.raises(ConfigError, match=message):
        stack_for(cluster)


def test_a_files_constants_are_the_planners(tmp_path: Path) -> None:
    """They take the place of the chip's defaults, and the plan says so."""
    path = write(tmp_path, f"{FILE}\n[software]\nmessage = 1.0\n")
    cluster = Cluster.load(path)
    assert stack_for(cluster) == Stack(name=MEASURED, message=1.0)
    assert stack_for(replace(cluster, software=())) == default_stack(cluster.chip)
    planned = make_plan("llama-3.1-8b", path, "tp=2,dp=8", 4096, 16, 1)
    assert planned.plan.step.seconds > 32 * 8, "two gathers and two scatters a layer, forward and backward, a second each"
    assert any("those of the cluster file" in line for line in planned.plan.assumptions)


def test_ranks_share_the_cores_of_a_node(tmp_path: Path) -> None:
    alone = replace(Cluster.load(write(tmp_path, CUSTOM)), cores=0)
    alone = replace(alone, gpus_per_node=4, levels=(LinkLevel("host", 4, 1e9, 1e-5),))
    shared = replace(alone, cores=2)
    model = preset("tiny", num_layers=4)

    def slower(text: str, *, exact: bool = True) -> float:
        layout = Layout.parse(text)
        one, other = (Pricer(model, cluster, 64, Stack()) for cluster in (alone, shared))
        return other.seconds(layout) / one.seconds(layout) if exact else other.quick(layout) / one.quick(layout)

    assert slower("dp=2") == slower("tp=2") == 1
    assert slower("dp=4,zero=1,microbatches=2") == pytest.approx(2)
    levels = (LinkLevel("host", 2, 1e9, 1e-5), LinkLevel("wire", 4, 1e9, 1e-5))
    alone, shared = (replace(one, nodes=2, gpus_per_node=2, levels=levels) for one in (alone, shared))
    assert slower("dp=4,zero=1,microbatches=2") == 1, "two ranks on each of two nodes"
    alone, shared = (replace(one, nodes=1, gpus_per_node=4, levels=levels) for one in (alone, shared))
    assert slower("pp=2,dp=2,microbatches=8") < 2
    assert slower("pp=4") == 1, "one stage works at a time"
    middle = slower("pp=4,microbatches=4")
    assert 1 < middle < slower("pp=4,microbatches=16") < 2
    assert slower("pp=4,microbatches=4", exact=False) < middle, "the closed form knows the mean number of busy ranks only"


def test_a_cpu_has_no_tiles_to_fill() -> None:
    chip = replace(find_chip("h100-80gb"), num_sms=0)
    seconds = {
        (tiles, width): Kernels(chip, Stack(tiles=tiles, launch=0.0), "bf16").gemm_seconds(4096, width, 8192)
        for tiles in (True, False)
        for width in (320, 384)
    }
    assert seconds[True, 320] > 0.95 * seconds[True, 384]
    assert seconds[False, 320] == pytest.approx(320 / 384 * seconds[False, 384])


def test_a_chip_needs_its_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chip\.memory_gb_s is missing"):
        Cluster.load(write(tmp_path, CUSTOM.replace("memory_gb_s = 20.0\n", "")))
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        Cluster.load(str(tmp_path / "none.toml"))


def test_relatives_say_that_nothing_confirms_them() -> None:
    for chip in RELATIVES.values():
        assert find_chip(chip.name) is chip
        assert "bf16" in chip.unconfirmed
    assert find_chip("b200").num_sms == 148
    assert find_chip("b200").peak("fp4") == 9e15
    assert "fp4" in find_chip("b200").unconfirmed
