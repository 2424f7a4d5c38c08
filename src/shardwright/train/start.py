"""Before a run: what a command may ask for, what is checked while nothing is written yet, and the data made ready."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwright.checkpoint.hf import hf_names
from shardwright.checkpoint.manifest import check_fresh, check_sizes, latest_checkpoint, named_steps
from shardwright.checkpoint.remote import RemoteStore, check_store
from shardwright.comm.base import Comm
from shardwright.core.run_config import RunConfig
from shardwright.errors import CheckpointError, ConfigError
from shardwright.launch import torchrun_env
from shardwright.train.data import Blend, open_blend
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.train.supported import check_supported


@dataclass(frozen=True)
class RunOptions:
    """What a command adds to a run's config. ``resume``: ``auto``, ``none`` or the path of a checkpoint.

    ``check_replicas``: after each step, that ranks hold alike what they must (`placement`).
    """

    resume: str = "none"
    profile: bool = False
    check_replicas: bool = False


def prepare_run(
    config: RunConfig, options: RunOptions, progress: Callable[[int, int, str], None] | None = None
) -> PreparedData:
    """All checks that need no rank, and the tokenised data; raises before anything is written to the run folder."""
    check_start(config)
    hf_names(config.model)  # a model that its family's format cannot hold would fail only at the first save
    config.model.to_hf()
    check_run_dir(Path(config.train.run_dir), options.resume, config.train.checkpoint_url)
    data = prepare_data(config, progress)
    open_split(config, data, "train")
    if data.valid:
        open_split(config, data, "valid")
    return data


def check_start(config: RunConfig) -> None:
    """Refuse a layout that cannot be trained yet, or that needs another number of ranks than torchrun has started."""
    check_supported(config)
    env = torchrun_env()
    if env is not None:
        config.layout.check_world(env.world_size)


def check_run_dir(run_dir: Path, resume: str, url: str | None = None) -> None:
    """Refuse what would mix two runs in one folder or store, a torn checkpoint, and a folder that cannot be written."""
    root = run_dir / "checkpoints"
    store = None if url is None else RemoteStore(url)
    if store is not None and resume != "auto":
        check_store(store, Path(resume) if Path(resume).resolve().parent == root.resolve() else None)
    if resume == "auto":
        named = named_steps(root)
        if named and store is None and latest_checkpoint(root, lambda text: None) is None:
            raise CheckpointError(
                f"{root} has no complete checkpoint to continue from ({', '.join(path.name for path in named.values())} "
                "lack data); move them away to start again, or give a new run folder"
            )
    elif resume == "none":
        check_fresh(root)
    elif Path(resume).is_dir():
        check_sizes(Path(resume))
        check_fresh(root, resume)
    else:
        raise CheckpointError(f"--resume {resume}: no such checkpoint; give a folder step-N, auto or none")
    parent = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ConfigError(f"train.run_dir={run_dir} cannot be made: {parent} is no folder to write in; give another")


def open_split(config: RunConfig, data: PreparedData, split: Literal["train", "valid"]) -> Blend:
    """The run's sources of one split as one blend; raises `DataError` where one is missing, torn or too short."""
    return open_blend(
        data.train if split == "train" else data.valid,
        split,
        config.data.seq_len,
        config.train.seed,
        cross_documents=config.data.cross_documents,
        vocab_size=config.model.vocab_size,
    )


def check_same_config(config: RunConfig, world: Comm) -> None:
    """Refuse to start when a rank was given another config; names the field and both values."""
    mine = _flat(config.to_table())
    every = world.gather_objects(mine)
    for rank, other in enumerate(every):
        for key in sorted(every[0].keys() | other.keys()):
            if every[0].get(key) != other.get(key):
                raise ConfigError(
                    f"rank {rank} was started with {key}={other.get(key)!r} but rank 0 with {key}={every[0].get(key)!r}; "
                    "start all ranks with the same run file and flags"
                )


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
