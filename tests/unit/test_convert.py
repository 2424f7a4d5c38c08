"""Conversions to and from Hugging Face folders and torch's distributed checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from shardwright.checkpoint.convert import convert, format_of
from shardwright.checkpoint.hf import load_hf
from shardwright.checkpoint.io import CheckpointState, load_checkpoint, save_checkpoint
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # from torch's own save and load, here
SHAPE: dict[str, Any] = {"vocab_size": 24, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 24}
CONFIG = ModelConfig(tied_head=True, **SHAPE)
SPECS = parameter_specs(CONFIG)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, CheckpointState]:
    torch.manual_seed(0)
    kinds = {kind: {name: torch.randn(spec.shape) for name, spec in SPECS.items()} for kind in ("exp_avg", "exp_avg_sq")}
    weights = {name: torch.randn(spec.shape) for name, spec in SPECS.items()}
    state = CheckpointState(7, 28, weights, kinds, {"optimizer_steps": 7})
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    return save_checkpoint(tmp_path / "run", state, CONFIG, tokenizer_folder=tmp_path / "tokenizer"), state


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_to_dcp_and_back_nothing_is_lost(checkpoint: tuple[Path, CheckpointState], tmp_path: Path) -> None:
    path, state = checkpoint
    made = convert(path, tmp_path / "dcp", "dcp")
    assert (made.source, made.target, made.optimizer) == ("checkpoint", "dcp", ("exp_avg", "exp_avg_sq"))
    assert format_of(tmp_path / "dcp") == "dcp" and (tmp_path / "dcp" / "tokenizer.json").is_file()
    back = convert(tmp_path / "dcp", tmp_path / "back", "checkpoint")
    assert back.path == tmp_path / "back" / "step-7"
    found = load_checkpoint(back.path, SPECS)
    assert (found.step, found.samples, found.extra) == (7, 28, state.extra)
    assert equal(found.weights, state.weights)
    assert all(equal(found.optimizer[kind], state.optimizer[kind]) for kind in state.optimizer)


def test_torch_loads_the_dcp_folder_into_a_model_of_transformers(
    checkpoint: tuple[Path, CheckpointState], tmp_path: Path
) -> None:
    path, state = checkpoint
    convert(path, tmp_path / "dcp", "dcp")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    tensors = model.state_dict()
    dcp_load({"model": tensors}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(tensors["model.embed_tokens.weight"], state.weights["embedding.token.weight"])
    assert torch.equal(tensors["model.layers.1.mlp.up_proj.weight"], state.weights["blocks.1.mlp.up.weight"])


@pytest.mark.parametrize("wrapped", [True, False])
def test_from_what_torch_has_saved(wrapped: bool, checkpoint: tuple[Path, CheckpointState], tmp_path: Path) -> None:
    path, state = checkpoint
    tensors = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
    dcp_save({"model": tensors} if wrapped else tensors, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(ConfigError, match=r"no config\.json.*--model"):
        convert(tmp_path / "theirs", tmp_path / "out")
    convert(tmp_path / "theirs", tmp_path / "out", model=str(path))
    assert equal(load_hf(tmp_path / "out")[1], state.weights)


def test_to_a_model_folder_of_another_dtype(checkpoint: tuple[Path, CheckpointState], tmp_path: Path) -> None:
    path, state = checkpoint
    made = convert(path, tmp_path / "bf16", dtype="bf16")
    assert made.optimizer == () and made.parameters == sum(spec.numel for spec in SPECS.values())
    config, weights = load_hf(tmp_path / "bf16")
    assert config.model_copy(update={"name": CONFIG.name}) == CONFIG
    assert equal(weights, {name: tensor.bfloat16() for name, tensor in state.weights.items()})
    assert (tmp_path / "bf16" / "tokenizer.json").is_file()
    assert convert(tmp_path / "bf16", tmp_path / "again", "checkpoint").path.name == "step-0"


def test_mistakes_are_named(checkpoint: tuple[Path, CheckpointState], tmp_path: Path) -> None:
    path, _ = checkpoint
    with pytest.raises(CheckpointError, match=r"neither a checkpoint .* nor a torch distributed checkpoint"):
        convert(tmp_path / "tokenizer", tmp_path / "out")
    with pytest.raises(ConfigError, match="not empty"):
        convert(path, tmp_path / "tokenizer")
    with pytest.raises(ConfigError, match="--to gguf"):
        convert(path, tmp_path / "out", "gguf")
    with pytest.raises(ConfigError, match="dtype=int4"):
        convert(path, tmp_path / "out", dtype="int4")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / ".metadata").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="cannot be read as a torch distributed checkpoint"):
        convert(tmp_path / "torn", tmp_path / "out", model=str(path))
    assert not (tmp_path / "out").exists()
