"""Weights and checkpoints from one format to another: Hugging Face folders, our checkpoints, torch's distributed checkpoints.

A torch DCP folder (``torch.distributed.checkpoint``) made here holds ``model.NAME`` under the names of the family's files,
so that a model of `transformers` loads it with ``dcp.load({"model": model.state_dict()}, checkpoint_id=...)``,
``optimizer.KIND.NAME`` under our names, and beside them config.json, run.json and the tokenizer. One that a program of torch
has made may hold ``optimizer.state.NAME.KIND``, as ``get_optimizer_state_dict`` gives it, or the same under ``optim.``.
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import hf
from shardwright.checkpoint.io import CheckpointState, load_checkpoint, read_run, save_checkpoint
from shardwright.checkpoint.manifest import MANIFEST
from shardwright.checkpoint.save import RUN
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import TIED, parameter_specs
from shardwright.errors import CheckpointError, ConfigError

FORMATS = ("hf", "checkpoint", "dcp")
DCP_METADATA = ".metadata"
OPTIMIZERS = ("optimizer", "optim")
KINDS = ("exp_avg", "exp_avg_sq", "momentum", "master")
TORCH_KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}
"""What torch's AdamW and SGD keep of each parameter, beside ``step``, and what it is called here."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Conversion:
    """What was made: ``tensors`` of ``parameters`` elements in ``path``, with ``optimizer`` state of these kinds."""

    source: str
    target: str
    path: Path
    parameters: int
    optimizer: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "path": str(self.path),
            "parameters": self.parameters,
            "optimizer": list(self.optimizer),
        }


def format_of(folder: Path) -> str:
    """What a folder holds; raises `CheckpointError` if it is none of the three."""
    if (folder / DCP_METADATA).is_file():
        return "dcp"
    if (folder / MANIFEST).is_file():
        return "checkpoint"
    if (folder / "config.json").is_file():
        return "hf"
    raise CheckpointError(
        f"{folder} is neither a checkpoint ({MANIFEST}), nor a Hugging Face folder (config.json), nor a torch distributed "
        f"checkpoint ({DCP_METADATA}); give one of these"
    )


def convert(
    source: Path | str,
    target: Path | str,
    to: str = "hf",
    *,
    model: str | None = None,
    dtype: str | None = None,
) -> Conversion:
    """Read ``source`` (any of the three formats) and write ``target``, which must not exist or be empty.

    ``to`` "hf": the weights. "checkpoint": ``target/step-N``, to resume from or to take weights from. "dcp": all there is.
    Of a program of torch, N is its optimizer's count of steps, and as it tells no samples, a run begins with the first one.
    ``model`` names the model where the source does not (a DCP folder without a config.json), ``dtype`` converts the weights.
    """
    source, target = Path(source), Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; give a new folder")
    if to not in FORMATS:
        raise ConfigError(f"--to {to} is not known; use one of {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype} is not known; use one of {', '.join(DTYPES)}")
    kind = format_of(source)
    config = _config(source, model)
    state = _read(source, kind, config, need_optimizer=to != "hf")
    if dtype is not None:
        state = replace(state, weights={name: tensor.to(DTYPES[dtype]) for name, tensor in state.weights.items()})
    has_tokenizer = any((source / name).is_file() for name in hf.TOKENIZER_FILES)
    tokenizer = source if has_tokenizer else None
    path = target
    if to == "hf":
        hf.save_hf(target, config, state.weights, tokenizer_folder=tokenizer)
    elif to == "checkpoint":
        path = save_checkpoint(target, state, config, tokenizer_folder=tokenizer)
    else:
        _write_dcp(target, state, config, tokenizer)
    kinds = () if to == "hf" else tuple(state.optimizer)
    return Conversion(kind, to, path, sum(tensor.numel() for tensor in state.weights.values()), kinds)


def _config(source: Path, model: str | None) -> ModelConfig:
    if model is not None:
        return ModelConfig.load(model)
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} has no config.json, so its model is not known; name it with --model")
    return hf.read_config(source)


def _read(source: Path, kind: str, config: ModelConfig, need_optimizer: bool) -> CheckpointState:
    if kind == "hf":
        return CheckpointState(0, 0, hf.load_hf(source)[1])
    if kind == "dcp":
        return _read_dcp(source, config, need_optimizer)
    need_optimizer = need_optimizer and bool(read_run(source)["optimizer"])
    return load_checkpoint(source, parameter_specs(config), need_optimizer=need_optimizer)


# -- torch.distributed.checkpoint --------------------------------------------------------------------


def _write_dcp(target: Path, state: CheckpointState, config: ModelConfig, tokenizer: Path | None) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    run = {"step": state.step, "samples": state.samples, "optimizer": list(state.optimizer), "extra": state.extra}
    weights = hf.to_hf_tensors(config, state.weights)
    dtype = next(iter(weights.values())).dtype
    if config.tied_head:  # the state dict of a model of `transformers` has it under both names
        weights["lm_head.weight"] = state.weights[TIED]
    try:
        target.mkdir(parents=True, exist_ok=True)
        with _alone():
            save({"model": weights, "optimizer": state.optimizer}, checkpoint_id=target, no_dist=True)
        hf.write_text(target / "config.json", hf.config_text(config, dtype))
        hf.write_text(target / RUN, json.dumps(run, indent=2) + "\n")
        hf.copy_tokenizer(tokenizer, target)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}; give another folder") from error


def _read_dcp(source: Path, config: ModelConfig, need_optimizer: bool) -> CheckpointState:
    """All tensors of the folder; weights under ``model.`` or without a prefix, by the names of the family's files."""
    state: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in _dcp_tensors(source, need_optimizer).items():
        section, _, rest = name.partition(".")
        if section not in OPTIMIZERS:
            weights[name] = tensor
        elif not rest.startswith("param_groups."):  # rates and the like are the run's
            state[rest] = tensor
    if weights and all(name.startswith("model.") for name in weights):
        inner = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        expected = {tensor.name for tensor in hf.hf_names(config)}
        weights = inner if expected & inner.keys() else weights
    run: dict[str, Any] = {"step": 0, "samples": 0, "extra": {}}
    if (source / RUN).is_file():
        run = read_run(source)
    if state and all(name.startswith("state.") for name in state):
        optimizer, steps = _torch_optimizer(source, config, state)
        run |= {"step": run["step"] or steps, "extra": {**run["extra"], "optimizer_steps": steps}}
    else:
        optimizer = _own_optimizer(source, config, state)
    return CheckpointState(run["step"], run["samples"], hf.from_hf_tensors(config, weights), optimizer, run["extra"])


def _torch_optimizer(
    source: Path, config: ModelConfig, state: Mapping[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]], int]:
    """``state.NAME.KIND`` of a torch optimizer: its state by our names, and how many steps it has done."""
    kinds: dict[str, dict[str, Tensor]] = {}
    for path, tensor in state.items():
        name, _, kind = path.removeprefix("state.").rpartition(".")
        if name.isdecimal():
            raise CheckpointError(
                f"{source} names optimizer state by number ({path}), which names no parameter; save what "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives, or convert the weights alone (--to hf)"
            )
        kinds.setdefault(kind, {})[name] = tensor
    counts = kinds.pop("step", {})
    _check_kinds(source, kinds, TORCH_KINDS)
    steps = {int(count): name for name, count in counts.items() if count.numel() == 1}
    uncounted = kinds.get("exp_avg", {}).keys() - counts.keys()
    if len(steps) > 1 or uncounted:
        told = [f"{count} steps of {name}" for count, name in steps.items()]
        told += [f"none of {name}" for name in sorted(uncounted)[:1]]
        raise CheckpointError(
            f"{source}: the optimizer counts {', '.join(told)}; one number for all parameters is needed: leave out what is not "
            "trained in every step, or convert the weights alone (--to hf)"
        )
    found = {TORCH_KINDS[kind]: hf.state_from_hf(config, named, f"{source}: {kind}") for kind, named in kinds.items()}
    return found, next(iter(steps), 0)


def _own_optimizer(source: Path, config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """``KIND.NAME`` under our names, as `_write_dcp` leaves it."""
    expected = {name: spec.shape for name, spec in parameter_specs(config).items()}
    kinds: dict[str, dict[str, Tensor]] = {}
    for path, tensor in state.items():
        kind, _, name = path.partition(".")
        kinds.setdefault(kind, {})[name] = tensor
    _check_kinds(source, kinds, KINDS)
    for kind, named in kinds.items():
        given = {name: shape for name, shape in expected.items() if name in named}
        hf.check_shapes(f"{source}: {kind}", given, hf.shapes(named), "use the model that the checkpoint was made with")
    return kinds


def _check_kinds(source: Path, kinds: Mapping[str, Mapping[str, Tensor]], known: Iterable[str]) -> None:
    for kind, named in kinds.items():
        if kind not in known:
            raise CheckpointError(
                f"{source} holds optimizer state {kind!r} (of {next(iter(named))}), which no optimizer here has; known: "
                f"{', '.join(known)}; convert the weights alone (--to hf)"
            )


@contextmanager
def _alone() -> Iterator[None]:
    """One process is what is meant; torch would warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ", category=UserWarning)
        yield


def _dcp_tensors(source: Path, need_optimizer: bool) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        metadata = FileSystemReader(source).read_metadata()
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and (need_optimizer or name.partition(".")[0] not in OPTIMIZERS)
        }
        with _alone():
            load(tensors, checkpoint_id=source, no_dist=True)
    except (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError, CheckpointException) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{source} cannot be read as a torch distributed checkpoint ({first}); save it again") from None
    return tensors
