"""Save and load checkpoints: complete or invisible, in logical tensors that any layout can load.

::

    ROOT/step-N/
      config.json  model.safetensors  tokenizer.json ...   a Hugging Face folder
      state/KIND.safetensors                               one file per kind of optimizer state, by our names
      run.json                                             step, samples, kinds and whatever else the run needs
      manifest.json                                        size and SHA-256 of every file above, written last

One process writes. Others only read names that are complete (see `manifest`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint import hf
from shardwright.checkpoint.manifest import (
    PARTIAL,
    REPLACED,
    check_hashes,
    is_complete,
    leftovers,
    named_steps,
    step_of,
    sync_directory,
    write_manifest,
)
from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import Spec
from shardwright.errors import CheckpointError, ConfigError, ShardwrightError

RUN = "run.json"
STATE = "state"


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


# -- save ------------------------------------------------------------------------------------------


def save_checkpoint(
    root: Path | str,
    state: CheckpointState,
    config: ModelConfig,
    *,
    tokenizer_folder: Path | str | None = None,
    keep_last: int = 2,
    on_point: Callable[[str], None] | None = None,
) -> Path:
    """Write ``root/step-N``, which appears only when it is complete, then remove all but the last ``keep_last``.

    A checkpoint of the same step is replaced, what interrupted saves left is removed; checkpoints of higher steps are
    never touched. ``on_point`` is called with "weights_written", "state_written", "manifest_written" and "renamed".
    Raises `CheckpointError` if the disk is full or not writable: then nothing is left of the new checkpoint and the
    others are as before.
    """
    if keep_last < 1:
        raise ConfigError(f"keep_last={keep_last} must be at least 1; keep 2 to be able to go back one")
    root, reached = Path(root), on_point or (lambda name: None)
    final = root / f"step-{state.step}"
    partial = root / f"{final.name}{PARTIAL}"
    run = {"step": state.step, "samples": state.samples, "optimizer": list(state.optimizer), "extra": state.extra}
    run_text = json.dumps(run, indent=2) + "\n"
    try:
        for path in leftovers(root):
            shutil.rmtree(path, ignore_errors=True)
        partial.mkdir(parents=True)
        hf.write_files(partial, config, state.weights, tokenizer_folder=tokenizer_folder)
        reached("weights_written")
        _write_state(partial / STATE, state.optimizer)
        hf.write_text(partial / RUN, run_text)
        reached("state_written")
        write_manifest(partial)
        reached("manifest_written")
        _put_in_place(partial, final)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"step {state.step} could not be saved in {root}: {error.strerror or error}; the checkpoints there are as "
            "they were; make room, or give another run folder"
        ) from error
    except ShardwrightError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    reached("renamed")
    _rotate(root, state.step, keep_last)
    return final


def _write_state(folder: Path, optimizer: Mapping[str, Mapping[str, Tensor]]) -> None:
    folder.mkdir()
    for kind, tensors in optimizer.items():
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        hf.write_safetensors(folder / f"{kind}.safetensors", contiguous)


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename; at each moment the old or the new checkpoint of this step has a name that is looked for."""
    replaced = final.with_name(f"{final.name}{REPLACED}")
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        final.rename(replaced)
    partial.rename(final)
    sync_directory(final.parent)
    if replaced.exists():
        _remove(replaced)


def _rotate(root: Path, written: int, keep_last: int) -> None:
    """Remove older checkpoints, by number; neither the one just written, nor a higher one, nor a torn one (which is
    left for somebody to look at)."""
    older = [path for step, path in named_steps(root).items() if step < written and is_complete(path)]
    for path in older[: max(0, len(older) - (keep_last - 1))]:
        _remove(path)


def _remove(path: Path) -> None:
    """Take the name away first, so that an interrupted removal leaves no torn checkpoint. What cannot be removed now
    (a file held open on a network disk, say) is tried again at the next save."""
    aside = path.with_name(f"step-{step_of(path)}{PARTIAL}")
    with suppress(OSError):
        path.rename(aside)
        shutil.rmtree(aside)


# -- load ------------------------------------------------------------------------------------------


def load_checkpoint(path: Path | str, specs: Mapping[str, Spec], *, need_optimizer: bool = True) -> CheckpointState:
    """Read a checkpoint for the model of ``specs``, every byte checked against the manifest.

    Strict: names and shapes that do not match are listed. Without ``need_optimizer`` the optimizer's state is neither
    needed nor read. Raises `CheckpointError` that names the file at fault.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist; give a folder such as checkpoints/step-100")
    check_hashes(path, skip=() if need_optimizer else (STATE,))
    run = _read_run(path)
    expected = {name: spec.shape for name, spec in specs.items()}
    _, weights = hf.load_hf(path)
    hf.check_shapes(str(path), expected, hf.shapes(weights), "use the configuration that the checkpoint was made with")
    optimizer: dict[str, dict[str, Tensor]] = {}
    if need_optimizer:
        if not run["optimizer"]:
            raise CheckpointError(f"{path} holds no optimizer state; start a run from its weights (train.init_from)")
        optimizer = {kind: _read_kind(path, kind, expected) for kind in run["optimizer"]}
    return CheckpointState(run["step"], run["samples"], weights, optimizer, run["extra"])


def _read_run(path: Path) -> dict[str, Any]:
    try:
        run: dict[str, Any] = json.loads((path / RUN).read_bytes())
        return {key: run[key] for key in ("step", "samples", "optimizer", "extra")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / RUN} cannot be used ({type(error).__name__}: {error})") from None


def _read_kind(path: Path, kind: str, expected: hf.Shapes) -> dict[str, Tensor]:
    """One kind of optimizer state. Frozen parameters have none, so a name may be absent but not unknown."""
    file = path / STATE / f"{kind}.safetensors"
    tensors = hf.read_safetensors(file)
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
