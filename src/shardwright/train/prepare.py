"""From a run's `data` section to open datasets: train a tokenizer if none is given, tokenise what is text.

Safe to call from every rank at once: the first one that comes builds, the others wait and reuse.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.core.run_config import RunConfig, Source
from shardwright.errors import ConfigError
from shardwright.train.indexed import idx_path
from shardwright.train.text import (
    DatasetInfo,
    TextCounts,
    find_files,
    load_dataset_info,
    locked,
    read_documents,
    tokenize,
)
from shardwright.train.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

SYNTHETIC = "synthetic:sentences"
SYNTHETIC_SENTENCES = 4000
TOKENIZER_SAMPLE_CHARS = 12_000_000
"""A BPE vocabulary of usual size changes little beyond this much text."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class PreparedData:
    """Paths with weights for `open_blend`, and what the text was."""

    train: tuple[tuple[str, float], ...]
    valid: tuple[tuple[str, float], ...]
    tokenizer_folder: Path | None
    infos: tuple[DatasetInfo, ...]


def cache_folder(config: RunConfig) -> Path:
    """Where tokenised text is kept: ``data.cache``, or ``datasets`` beside the run folder."""
    return Path(config.data.cache) if config.data.cache else Path(config.train.run_dir).parent / "datasets"


def prepare_data(config: RunConfig, progress: Progress | None = None) -> PreparedData:
    """Tokenise what is text, reuse what is there; raises `DataError` or `ConfigError` before anything is trained."""
    cache = cache_folder(config)
    texts = [source for source in config.data.sources if not _is_dataset(source)]
    if any(source.path == SYNTHETIC for source in texts):
        _write_sentences(cache / "sentences.txt")
    tokenizer, folder = _tokenizer(config, texts, cache, progress)
    if tokenizer is not None:
        check_vocabulary(tokenizer.vocab_size, config.model.vocab_size, from_scratch=config.train.init_from is None)
    train, valid, infos = [], [], []
    for source in config.data.sources:
        if source in texts:
            assert tokenizer is not None
            out = cache / _key(source.path, source.field, str(config.data.valid_fraction), tokenizer.sha256)
            info = tokenize(
                _paths(source, cache),
                out,
                tokenizer,
                field=source.field,
                valid_fraction=config.data.valid_fraction,
                progress=progress,
            )
            infos.append(info)
            train.append((str(out), source.weight))
            valid.append((str(out), source.weight))
            continue
        train.append((source.path, source.weight))
        if source.valid_path or Path(source.path, "dataset.json").is_file():
            valid.append((source.valid_path or source.path, source.weight))
        if Path(source.path, "dataset.json").is_file():
            info = load_dataset_info(source.path)
            check_vocabulary(info.vocab_size, config.model.vocab_size, from_scratch=config.train.init_from is None)
            infos.append(info)
            folder = folder or Path(source.path)
    return PreparedData(tuple(train), tuple(valid), folder, tuple(infos))


def check_vocabulary(tokenizer_size: int, model_size: int, *, from_scratch: bool = True) -> None:
    """A model's vocabulary must hold every token; in a run from scratch, rows that no token uses are refused too."""
    if tokenizer_size > model_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer_size} tokens but model.vocab_size={model_size}; "
            f"set model.vocab_size={tokenizer_size} or use a smaller tokenizer"
        )
    if from_scratch and model_size > tokenizer_size:
        raise ConfigError(
            f"model.vocab_size={model_size} is larger than the tokenizer's {tokenizer_size} tokens; "
            f"set model.vocab_size={tokenizer_size}, or give a larger tokenizer or more text"
        )


def _is_dataset(source: Source) -> bool:
    return Path(source.path, "dataset.json").is_file() or idx_path(source.path).is_file()


def _paths(source: Source, cache: Path) -> Sequence[str]:
    return [str(cache / "sentences.txt")] if source.path == SYNTHETIC else [source.path]


def _key(*parts: str) -> str:
    return "text-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _tokenizer(
    config: RunConfig, texts: Sequence[Source], cache: Path, progress: Progress | None
) -> tuple[Tokenizer | None, Path | None]:
    """The tokenizer and its folder: the given one, else one trained on the text; (None, None) without any text."""
    given = config.data.tokenizer
    if given is None and config.train.init_from and Path(config.train.init_from, "tokenizer.json").is_file():
        given = config.train.init_from
    if given is not None:
        path = Path(given)
        return load_tokenizer(path), path if path.is_dir() else path.parent
    if not texts:
        return None, None
    names = json.dumps([[source.path, source.field] for source in texts])
    folder = cache / f"tokenizer-{config.model.vocab_size}-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    if not (folder / "tokenizer.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent, progress or (lambda done, total, what: None)):
            if not (folder / "tokenizer.json").is_file():
                if progress is not None:
                    progress(0, 0, "training the tokenizer")
                train_tokenizer(_sample(texts, cache), config.model.vocab_size, folder)
    return load_tokenizer(folder), folder


def _sample(texts: Sequence[Source], cache: Path) -> Iterator[str]:
    """Documents of every source, spread over all its files, up to a limit of characters."""
    for source in texts:
        files = list(find_files(_paths(source, cache)))
        random.Random(0).shuffle(files)
        named = [Path(source.path)] if Path(source.path).is_file() else []
        left = TOKENIZER_SAMPLE_CHARS // len(texts)
        for document in _documents(files, source, named):
            yield document[:left]
            left -= len(document)
            if left <= 0:
                break


def _documents(files: Sequence[Path], source: Source, named: Sequence[Path]) -> Iterable[str]:
    return read_documents(files, source.field, TextCounts(), named=named)


def _write_sentences(path: Path) -> None:
    """Simple English sentences from a small grammar, the same on every machine: one document a paragraph."""
    if path.is_file():
        return
    rng = random.Random(20)
    people, places = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn"], ["garden", "market", "harbour", "library", "mill"]
    things, kinds = ["apple", "book", "lamp", "boat", "stone", "kite"], ["red", "old", "small", "heavy", "quiet"]
    verbs = ["found", "carried", "sold", "painted", "lost", "mended"]

    def sentence() -> str:
        who, where, what = rng.choice(people), rng.choice(places), rng.choice(things)
        return f"{who} {rng.choice(verbs)} the {rng.choice(kinds)} {what} near the {where}."

    paragraphs = [" ".join(sentence() for _ in range(rng.randint(3, 9))) for _ in range(SYNTHETIC_SENTENCES // 5)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("\n\n".join(paragraphs), encoding="utf-8")
    partial.replace(path)


def tokenize_sources(
    sources: Sequence[str],
    out: Path,
    tokenizer: Path | None,
    vocab_size: int,
    field: str,
    valid_fraction: float,
    progress: Progress | None = None,
) -> DatasetInfo:
    """``shardwright tokenize``: text of ``sources`` to the dataset folder ``out``; trains a tokenizer if none is given."""
    if tokenizer is not None:
        found = load_tokenizer(tokenizer)
    else:
        texts = [Source(path=source, field=field) for source in sources]
        found = train_tokenizer(_sample(texts, out), vocab_size, out / "tokenizer")
    return tokenize(sources, out, found, field=field, valid_fraction=valid_fraction, progress=progress)
