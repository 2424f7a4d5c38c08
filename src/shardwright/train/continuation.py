"""Text from a checkpoint: the saved model with a cache, in one process."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.hf import load_hf
from shardwright.checkpoint.io import copy_weights
from shardwright.checkpoint.manifest import named_steps
from shardwright.comm.mesh import Mesh
from shardwright.errors import CheckpointError, ConfigError
from shardwright.model.generate import generate, generate_by_recomputing
from shardwright.model.transformer import Transformer
from shardwright.train.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Continuation:
    """What the model wrote. ``same_when_recomputed``: None when it was not asked for."""

    text: str
    tokens: list[int]
    tokens_per_second: float
    same_when_recomputed: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load_model(folder: Path) -> tuple[Transformer, Tokenizer]:
    """The model and the tokenizer of a checkpoint or a Hugging Face folder, on the CPU."""
    saved = named_steps(folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder)
    if saved and not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no model folder; give one of its checkpoints, such as {[*saved.values()][-1]}")
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; give the folder that holds config.json and model.safetensors")
    config, weights = load_hf(folder)
    model = Transformer(config, Mesh.solo(), next(iter(weights.values())).dtype)
    copy_weights(model.spec_parameters().items(), model.specs, weights, model.mesh.layout, model.mesh.coordinates)
    return model, load_tokenizer(folder)


def continue_text(
    folder: Path,
    prompt: str,
    max_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    compare: bool = False,
) -> Continuation:
    """Continue ``prompt``; with ``compare`` (greedy) also without a cache, every token from the whole text again."""
    model, tokenizer = load_model(folder)
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    needed, most = len(ids) + max_tokens - 1, model.config.max_positions  # the last new token is not read
    if needed > most:
        advice = f", or ask for at most {most - len(ids) + 1} tokens" if len(ids) <= most else ""
        raise ConfigError(
            f"{len(ids)} prompt tokens and {max_tokens} new ones need {needed} positions, but {model.config.name} has "
            f"{most}; shorten the prompt{advice}"
        )
    options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed, "eos_id": tokenizer.eos_id}
    start = time.perf_counter()
    tokens = list(generate(model, ids, max_tokens, **options))
    seconds = time.perf_counter() - start
    same = list(generate_by_recomputing(model, ids, max_tokens, **options)) == tokens if compare else None
    return Continuation(tokenizer.decode(tokens), tokens, len(tokens) / seconds, same)
