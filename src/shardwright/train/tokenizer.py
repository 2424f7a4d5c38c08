"""Tokenizers: train byte-level BPE, load a ``tokenizer.json``, encode and decode.

The backend is the ``tokenizers`` library, so every Hugging Face fast tokenizer loads as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from shardwright.errors import DataError

END_OF_TEXT = "<|endoftext|>"
EOS_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<｜end▁of▁sentence｜>", "[EOS]")
BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "<｜begin▁of▁sentence｜>", "[BOS]")


@dataclass(frozen=True)
class Tokenizer:
    """A ``tokenizers`` tokenizer with its special ids. Nothing is added to a text that is encoded."""

    backend: tokenizers.Tokenizer
    eos_id: int
    bos_id: int | None
    vocab_size: int  # highest id + 1
    sha256: str  # of the whole description

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, in parallel over the cores."""
        return [encoded.ids for encoded in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids, without the special tokens unless asked for."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, as :func:`load_tokenizer` and transformers read."""
        folder.mkdir(parents=True, exist_ok=True)
        names = {"eos_token": self.eos_id, "bos_token": self.bos_id}
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {name: self.backend.id_to_token(index) for name, index in names.items() if index is not None}
        write_aside(folder / "tokenizer_config.json", json.dumps(config, indent=2))
        write_aside(folder / "tokenizer.json", self.backend.to_str())


def _wrap(backend: tokenizers.Tokenizer, eos_id: int, bos_id: int | None) -> Tokenizer:
    backend.no_truncation()  # a description may say to cut at 512 tokens
    backend.no_padding()
    digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
    return Tokenizer(backend, eos_id, bos_id, max(backend.get_vocab().values()) + 1, digest)


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> Tokenizer:
    """Train byte-level BPE with ``<|endoftext|>`` as id 0 and save it; ``path`` is a folder or its ``tokenizer.json``.

    A small text may give fewer than ``vocab_size`` tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size <= len(alphabet):
        raise DataError(f"vocab_size={vocab_size} is too small: {len(alphabet)} bytes and {END_OF_TEXT} come first")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(iter(texts), trainer)
    tokenizer = _wrap(backend, eos_id=0, bos_id=None)
    tokenizer.save(path.parent if path.name == "tokenizer.json" else path)
    return tokenizer


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Load a ``tokenizer.json``, or the one in a folder. The special tokens come from ``tokenizer_config.json`` beside
    it, else from the usual names."""
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"no tokenizer at {path}; give a tokenizer.json or a folder with one")
    description = read_json(file)
    if not isinstance(description.get("model"), dict) or "vocab" not in description["model"]:
        raise DataError(f"{file} is not a tokenizer: it has no model with a vocabulary; give a tokenizer.json")
    backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    beside = file.with_name("tokenizer_config.json")
    config = read_json(beside) if beside.is_file() else {}
    eos_id = _special_id(backend, config.get("eos_token"), EOS_NAMES)
    if eos_id is None:
        raise DataError(f"{file} has no end-of-text token; name its eos_token in {beside}, or add one of {EOS_NAMES}")
    return _wrap(backend, eos_id, _special_id(backend, config.get("bos_token"), BOS_NAMES))


def _special_id(backend: tokenizers.Tokenizer, configured: Any, usual: tuple[str, ...]) -> int | None:
    name = configured.get("content") if isinstance(configured, dict) else configured
    ids = (backend.token_to_id(candidate) for candidate in ([name] if isinstance(name, str) else usual))
    return next((index for index in ids if index is not None), None)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}; it must be a JSON file") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a JSON {type(value).__name__}, needed is an object")
    return value


def write_aside(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
