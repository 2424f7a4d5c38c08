"""Gradients of layouts as files, beside those of one process; and that a wrong one is seen in the files alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ranks.kit import run_ranks
from ranks.runs import make_config, write_documents
from shardwright.checkpoint.manifest import named_steps
from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import CheckpointError, ConfigError
from shardwright.launch import RankEnv
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.verify.gradient_files import check_folder, read_gradients, write_reference
from shardwright.verify.parity import compare_files, trace_steps, train_sampler, verify, whole_batches
from shardwright.verify.reference import reference_run

MODEL = {
    "vocab_size": 320, "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
    "tied_head": True,
}  # fmt: skip
FROZEN = "blocks.1.mlp"
STEPS = 2
LAYOUTS = {
    "replicas": "dp=2,micro_batch=2",
    "shards of columns": "dp=2,tp=2,zero=3,micro_batch=2",
    "stages with a tied weight": "dp=1,pp=2,schedule=zb_v,microbatches=4",
    "reduced everywhere, updated in shards": "dp=4,zero=1,zero1_reduce=allreduce",
    "tokens in parts, on the host": "dp=1,cp=2,zero=2,offload=optimizer,micro_batch=4",
}
"""All of four sequences a step, so that one run of one process is the reference of each."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreparedData]:
    folder = tmp_path_factory.mktemp("gradients")
    write_documents(folder)
    return folder, prepare_data(config_of(folder, "dp=1"))


def config_of(folder: Path, layout: str) -> RunConfig:
    return make_config(str(folder), MODEL, f"{layout},precision=fp64", [f"train.freeze=['{FROZEN}']", "optim.clip=0.01"])


def write_all(env: RankEnv, data: PreparedData, configs: list[RunConfig], folders: list[Path]) -> None:
    for config, folder in zip(configs, folders, strict=True):
        trace_steps(Mesh.distributed(config.layout, env.rank), config, data, STEPS, folder=folder)


@pytest.fixture(scope="module")
def written(data: tuple[Path, PreparedData]) -> dict[str, Path]:
    """A folder for each layout; one launch for each number of ranks."""
    folder, prepared = data
    configs = {label: config_of(folder, layout) for label, layout in LAYOUTS.items()}
    for world in sorted({config.layout.world_size for config in configs.values()}):
        labels = [label for label, config in configs.items() if config.layout.world_size == world]
        folders = [folder / label for label in labels]
        run_ranks(write_all, world, prepared, [configs[label] for label in labels], folders, time_limit=100.0)
    first = configs["replicas"]
    assert {config.layout.global_batch for config in configs.values()} == {first.layout.global_batch}
    reference = reference_run(first, whole_batches(train_sampler(first, prepared, 0)), STEPS)
    for label, config in configs.items():
        write_reference(folder / label, config, reference.gradients)
    return {label: folder / label for label in LAYOUTS}


@pytest.mark.parametrize("label", LAYOUTS)
def test_the_files_of_a_layout_hold_what_one_process_computes(
    label: str, written: dict[str, Path], data: tuple[Path, PreparedData]
) -> None:
    config = config_of(data[0], LAYOUTS[label])
    found = compare_files(config, written[label], STEPS, 1e-9)
    assert found.passed, found
    specs = parameter_specs(config.model)
    trained = {name for name, spec in specs.items() if not name.startswith(FROZEN) and not spec.buffer}
    for name in ("layout", "reference"):
        assert list(named_steps(written[label] / name)) == [0, 1]
        files = load_file(written[label] / name / "step-1" / "state" / "gradients.safetensors")
        assert files.keys() == trained
        assert all(tensor.shape == specs[key].shape for key, tensor in files.items())
        norm = torch.cat([tensor.flatten() for tensor in files.values()]).norm()
        assert norm > 10 * config.optim.clip  # before clipping


def test_a_wrong_gradient_and_a_changed_file_are_seen(
    written: dict[str, Path], data: tuple[Path, PreparedData]
) -> None:
    config, folder = config_of(data[0], LAYOUTS["replicas"]), data[0] / "wrong"
    right = [read_gradients(written["replicas"] / "layout", config, step) for step in range(STEPS)]
    name = "blocks.2.attention.q.weight"
    write_reference(folder, config, [right[0], right[1] | {name: 2 * right[1][name]}])
    (folder / "reference").rename(folder / "layout")
    write_reference(folder, config, right)
    found = compare_files(config, folder, STEPS, 1e-9)
    assert not found.passed and found.worst == f"step 1 {name}" and found.max_rel_diff == pytest.approx(1.0)
    file = folder / "layout" / "step-0" / "state" / "gradients.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="corrupt"):
        compare_files(config, folder, STEPS, 1e-9)
    with pytest.raises(ConfigError, match=r"wrong holds gradients already; remove them, or give another folder"):
        check_folder(folder)
    check_folder(data[0] / "nothing")


def test_verify_writes_and_compares_them(data: tuple[Path, PreparedData]) -> None:
    config = config_of(data[0], LAYOUTS["replicas"])
    result = verify(config, steps=1, folder=data[0] / "verified")
    assert result.passed and result.to_json()["gradient_files"]["max_rel_diff"] <= 1e-9
    result = verify(config, steps=1, folder=data[0] / "broken", mutation="average-gradients")
    assert result.gradient_files is not None and not result.gradient_files.passed
