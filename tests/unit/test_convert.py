"""Conversions to and from Hugging Face folders and torch's distributed checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from shardwright.checkpoint.convert import convert, format_of
from shardwright.checkpoint.hf import config_text, from_hf_tensors, load_hf
from shardwright.checkpoint.io import CheckpointState, load_checkpoint, save_checkpoint
from shardwright.comm.mesh import Mesh
from shardwright.core.model_config import ModelConfig
from shardwright.core.run_config import RunConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import CheckpointError, ConfigError
from shardwright.train.checkpoints import RunCheckpoints
from shardwright.train.data import MicroBatch, collate
from shardwright.train.step import Trainer
from shardwright.train.windows import Window

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


# ------------------------------------------------------------------------------------------ a torch optimizer


def batches(step: int) -> MicroBatch:
    """Two sequences of 12 tokens that depend on the step."""
    texts = torch.randint(0, 24, (2, 13), generator=torch.Generator().manual_seed(step)).numpy()
    return collate([Window(text[:-1], text[1:], np.arange(12), (12,)) for text in texts], range(2), 12)


def torch_steps(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = batches(step)
        logits = model(input_ids=batch.tokens.view(2, 12)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved_by_torch(folder: Path, config: ModelConfig, *, flat: bool, section: str = "optimizer") -> tuple[Any, Any]:
    """A model of `transformers` with AdamW after three steps, and its state as torch's own tools save it."""
    torch.manual_seed(1)
    hf_config = transformers.AutoConfig.for_model(**config.to_hf())
    model = transformers.AutoModelForCausalLM.from_config(hf_config)
    norms = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    torch_steps(model, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp_save({"model": model.state_dict(), section: state}, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(config_text(config, torch.float32))
    return model, optimizer


GPT2 = {
    "family": "gpt2", "num_kv_heads": 4, "norm": "layernorm", "activation": "gelu_tanh", "position": "learned",
    "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied_head": True, "max_positions": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "flat", "section"),
    [({"tied_head": True}, False, "optimizer"), ({}, True, "optim"), (GPT2, False, "optimizer")],
    ids=["tied", "flattened", "joined and transposed"],
)
def test_a_run_of_torch_goes_on_here(changes: dict[str, Any], flat: bool, section: str, tmp_path: Path) -> None:
    """CK-07: moments and their counter come along, so the next steps are those that torch itself would do."""
    config = ModelConfig(**SHAPE | changes)
    model, optimizer = saved_by_torch(tmp_path / "theirs", config, flat=flat, section=section)
    made = convert(tmp_path / "theirs", tmp_path / "ours", "checkpoint")
    assert (made.path.name, made.optimizer) == ("step-3", ("exp_avg", "exp_avg_sq"))
    optim = {"lr": 0.01, "schedule": "constant", "clip": 0.0, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    table = {"model": config, "data": {"sources": "unused", "seq_len": 12}, "optim": optim, "train": {"run_dir": str(tmp_path)}}
    run = RunConfig.of(table, (), "micro_batch=2")
    mesh = Mesh.solo()
    mesh.layout = run.layout
    trainer = Trainer(run, mesh)
    restored = RunCheckpoints(run, trainer, None, print).restore(str(made.path))
    assert restored is not None and (restored.step, restored.samples) == (3, 0)
    losses = [trainer.step([batches(step)], step).loss for step in range(3, 6)]
    assert losses == pytest.approx(torch_steps(model, optimizer, range(3, 6)), rel=1e-5)
    theirs = from_hf_tensors(config, model.state_dict())
    for name, parameter in trainer.named_parameters().items():
        assert torch.allclose(parameter, theirs[name], atol=1e-4, rtol=1e-3), name


def test_optimizer_state_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    tensors = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**CONFIG.to_hf())
    ).state_dict()
    norm, moment = "model.norm.weight", torch.zeros(16)
    known = {"exp_avg": moment, "exp_avg_sq": moment, "step": torch.tensor(3.0)}
    cases: list[tuple[Any, str]] = [
        ({"state": {norm: known | {"max_exp_avg_sq": moment}}}, r"state 'max_exp_avg_sq' \(of model\.norm\.weight\), which no"),
        ({"state": {"model.norn.weight": known}}, r"exp_avg does not match the model: 1 unexpected: model\.norn\.weight"),
        ({"state": {norm: known | {"exp_avg": torch.zeros(8)}}}, r"exp_avg .* of another shape: model\.norm\.weight \(8,\)"),
        ({"state": {0: known}}, r"by number \(state\.0\.\w+\).*\.get_optimizer_state_dict gives"),
        ({"state": {norm: {"exp_avg": moment}}}, r"counts none of model\.norm\.weight"),
        (
            {"state": {norm: known, "model.embed_tokens.weight": {"step": torch.tensor(2.0)}}},
            r"3 steps of model\.norm\.weight, 2 steps of|2 steps of .*, 3 steps of model\.norm\.weight",
        ),
        ({"momentom": {"head.norm.weight": moment}}, r"state 'momentom' \(of head\.norm\.weight\)"),
        ({"exp_avg": {norm: moment}}, r"exp_avg does not match the model: 1 unexpected: model\.norm\.weight"),
    ]
    for number, (state, message) in enumerate(cases):
        folder = tmp_path / str(number)
        dcp_save({"model": tensors, "optimizer": state}, checkpoint_id=folder, no_dist=True)
        (folder / "config.json").write_text(config_text(CONFIG, torch.float32))
        with pytest.raises(CheckpointError, match=message):
            convert(folder, tmp_path / "out", "checkpoint")
        assert not (tmp_path / "out").exists()
        convert(folder, folder / "weights")  # which need no optimizer


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
