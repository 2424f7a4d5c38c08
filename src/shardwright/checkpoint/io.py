"""Checkpoints as full tensors in one process, and the layout of a checkpoint's folder. `save` is what ranks save with.

::

    ROOT/step-N/
      config.json  model.safetensors  tokenizer.json ...   a Hugging Face folder (several files and an index if it is large)
      state/KIND.safetensors                               one file per kind of optimizer state, by our names
      run.json                                             step, samples, kinds and whatever else the run needs
      manifest.json                                        size and hash of every range of every file above, written last
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import hf
from shardwright.checkpoint.manifest import check_hashes
from shardwright.checkpoint.save import RUN, STATE, Group, Piece, Saver, Snapshot
from shardwright.comm.base import Comm
from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import Spec
from shardwright.errors import CheckpointError


@dataclass
class CheckpointState:
    """All that a run needs to go on: full logical tensors by our names, on the CPU after loading.

    ``step`` optimizer steps were done on ``samples`` samples. ``optimizer`` maps a kind (``exp_avg``, ``master``, ...)
    to tensors of the trained parameters. ``extra`` is anything that JSON can hold.
    """

    step: int
    samples: int
    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(root: Path | str, state: CheckpointState, config: ModelConfig, **options: Any) -> Path:
    """Write ``root/step-N``, which appears only when it is complete, then remove older ones; ``options`` are `Saver`'s.

    A checkpoint of the same step is replaced, what interrupted saves left is removed; checkpoints of higher steps are
    never touched. Raises `CheckpointError` if the disk is full or not writable: then nothing is left of the new
    checkpoint and the others are as before.
    """
    optimizer = {kind: whole(tensors) for kind, tensors in state.optimizer.items()}
    with Saver(root, config, **options) as saver:
        return saver.save(Snapshot(state.step, state.samples, whole(state.weights), optimizer, state.extra))


def whole(tensors: Mapping[str, Tensor]) -> Group:
    """Full tensors that one process writes alone."""
    pieces = [
        Piece(name, tuple(slice(0, size) for size in tensor.shape), 0, tensor.contiguous().view(-1))
        for name, tensor in tensors.items()
    ]
    return Group(hf.shapes(tensors), {name: tensor.dtype for name, tensor in tensors.items()}, pieces)


def load_checkpoint(
    path: Path | str,
    specs: Mapping[str, Spec],
    *,
    model: ModelConfig | None = None,
    need_optimizer: bool = True,
    check: bool = True,
) -> CheckpointState:
    """Read a checkpoint for the model of ``specs``, every byte checked against the manifest (unless ``check`` is false).

    Strict: names and shapes that do not match are listed, and with ``model`` every field in which the saved model is another,
    as shapes do not tell all (heads, rotary base, ...). Without ``need_optimizer`` the optimizer's state is neither
    needed nor read. The tensors are mapped from the files: what is not used is not read. Raises `CheckpointError` that
    names the file at fault.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist; give a folder such as checkpoints/step-100")
    if check:
        check_hashes(path, skip=() if need_optimizer else (STATE,))
    run = read_run(path)
    expected = {name: spec.shape for name, spec in specs.items()}
    if model is not None and (changes := model.changes_from(hf.read_config(path))):
        raise CheckpointError(
            f"{path} was saved from another model: {'; '.join(changes)}; take these fields back to resume, or give "
            "a new run folder"
        )
    _, weights = hf.load_hf(path)
    hf.check_shapes(str(path), expected, hf.shapes(weights), "use the configuration that the checkpoint was made with")
    optimizer: dict[str, dict[str, Tensor]] = {}
    if need_optimizer:
        if not run["optimizer"]:
            raise CheckpointError(f"{path} holds no optimizer state; start a run from its weights (train.init_from)")
        optimizer = {kind: read_kind(path, kind, expected) for kind in run["optimizer"]}
    return CheckpointState(run["step"], run["samples"], weights, optimizer, run["extra"])


def verify_checkpoint(path: Path, world: Comm) -> str | None:
    """Check every byte, each rank its share; what is wrong, the same on all ranks, or None."""
    found = None
    try:
        check_hashes(path, share=(world.rank, world.size))
    except CheckpointError as error:
        found = str(error)
    return next((message for message in world.gather_objects(found) if message is not None), None)


def read_run(path: Path) -> dict[str, Any]:
    try:
        run: dict[str, Any] = json.loads((path / RUN).read_bytes())
        return {key: run[key] for key in ("step", "samples", "optimizer", "extra")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / RUN} cannot be used ({type(error).__name__}: {error})") from None


def read_kind(path: Path, kind: str, expected: hf.Shapes) -> dict[str, Tensor]:
    """One kind of optimizer state. Frozen parameters have none, so a name may be absent but not unknown."""
    file = path / STATE / f"{kind}.safetensors"
    files = [file] if file.is_file() else sorted(file.parent.glob(f"{kind}-?????-of-?????.safetensors"))
    tensors = {name: tensor for part in files or [file] for name, tensor in hf.read_safetensors(part).items()}
    named = {name: shape for name, shape in expected.items() if name in tensors}
    hf.check_shapes(str(file), named, hf.shapes(tensors), "use the configuration that the checkpoint was made with")
    if not tensors:
        raise CheckpointError(f"{file} is empty; start a new run from the weights of {path} (train.init_from)")
    return tensors


@torch.no_grad()
def copy_weights(
    parameters: Iterable[tuple[str, Tensor]],
    specs: Mapping[str, Spec],
    weights: Mapping[str, Tensor],
    layout: Layout,
    coordinates: Mapping[str, int],
) -> None:
    """Fill each local parameter (by name) with its slice of the full weights, in the parameter's own dtype."""
    for name, parameter in parameters:
        parameter.copy_(weights[name][specs[name].slices(layout, coordinates)])
