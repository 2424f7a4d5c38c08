"""From a run's `data` section to open datasets: train a tokenizer if none is given, tokenise what is text.

Safe to call from every rank at once: the first one that comes builds, the others wait and reuse.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwright.core.run_config import RunConfig, Source
from shardwright.errors import ConfigError, DataError
from shardwright.train.chat import ChatTemplate
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
    check_texts(texts)
    from_scratch = config.train.init_from is None
    tokenizer, folder = _given_tokenizer(config)
    if tokenizer is not None:
        check_vocabulary(tokenizer.vocab_size, config.model.vocab_size, from_scratch=from_scratch)
    with _writing(cache, "--set data.cache=FOLDER"):
        if any(source.path == SYNTHETIC for source in texts):
            _write_sentences(cache / "sentences.txt")
        if tokenizer is None and texts:
            tokenizer, folder = _trained_tokenizer(config, texts, cache, progress)
        train, valid, infos = [], [], []
        for source in config.data.sources:
            path, info = source.path, None
            if source in texts:
                assert tokenizer is not None
                path, info = _tokenised(config, source, tokenizer, folder, cache, progress)
            elif Path(path, "dataset.json").is_file():
                info = load_dataset_info(path)
                check_vocabulary(info.vocab_size, config.model.vocab_size, from_scratch=from_scratch)
                folder = folder or Path(path)
            train.append((path, source.weight))
            if source.valid_path or (info is not None and info.valid_tokens > 1):  # one token has no next one
                valid.append((source.valid_path or path, source.weight))
            if info is not None:
                infos.append(info)
    return PreparedData(tuple(train), tuple(valid), folder, tuple(infos))


def chat_template(source: Source, tokenizer_folder: Path | None, given: str | None) -> ChatTemplate | None:
    """What writes the conversations of ``source``; None for plain text. A DataError where there is no template."""
    return ChatTemplate.load(tokenizer_folder, given) if source.format == "chat" else None


def _tokenised(
    config: RunConfig, source: Source, tokenizer: Tokenizer, folder: Path | None, cache: Path, progress: Progress | None
) -> tuple[str, DatasetInfo]:
    """The dataset folder of one source of text, made now or earlier."""
    fraction = config.data.valid_fraction
    chat = chat_template(source, folder, config.data.chat_template)
    parts = [] if chat is None else [chat.source]
    out = cache / _key(source.path, source.field, str(fraction), tokenizer.sha256, *parts)
    paths = _paths(source, cache)
    info = tokenize(paths, out, tokenizer, field=source.field, valid_fraction=fraction, chat=chat, progress=progress)
    return str(out), info


def check_texts(texts: Sequence[Source]) -> None:
    """Read the first document of each source, so that most mistakes are found before anything is written."""
    for source in texts:
        if source.valid_path is not None:
            raise ConfigError(
                f"valid_path={source.valid_path!r} goes with an indexed dataset, but {source.path} is text; leave it "
                "out (data.valid_fraction holds text out), or run `shardwright tokenize` on both first"
            )
        if source.path != SYNTHETIC:
            next(_documents(find_files([source.path]), source), None)


@contextmanager
def _writing(folder: Path, option: str) -> Iterator[None]:
    """A failure to write below ``folder`` as a `DataError` that names the ``option`` to change."""
    try:
        yield
    except OSError as error:
        where, reason = error.filename or folder, error.strerror or str(error)
        raise DataError(f"cannot write {where}: {reason}; give another folder with {option}, or make room") from error


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
    """A folder of `tokenize`, or a Megatron pair by its prefix or by the name of either file."""
    path = Path(source.path)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    return (path / "dataset.json").is_file() or idx_path(prefix).is_file()


def _paths(source: Source, cache: Path) -> Sequence[str]:
    return [str(cache / "sentences.txt")] if source.path == SYNTHETIC else [source.path]


def _key(*parts: str) -> str:
    return "text-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _given_tokenizer(config: RunConfig) -> tuple[Tokenizer | None, Path | None]:
    """``data.tokenizer``, else that of the weights the run starts from, with its folder; (None, None) without either."""
    given = config.data.tokenizer
    if given is None and config.train.init_from and Path(config.train.init_from, "tokenizer.json").is_file():
        given = config.train.init_from
    if given is None:
        return None, None
    path = Path(given)
    return load_tokenizer(path), path if path.is_dir() else path.parent


def _trained_tokenizer(
    config: RunConfig, texts: Sequence[Source], cache: Path, progress: Progress | None
) -> tuple[Tokenizer, Path]:
    """A tokenizer of the model's vocabulary, trained on the text now or earlier. One that is too small is not kept:
    with more text there may be enough."""
    size = config.model.vocab_size
    names = json.dumps([[source.path, source.field] for source in texts])
    folder = cache / f"tokenizer-{size}-{hashlib.sha256(names.encode()).hexdigest()[:12]}"
    if not (folder / "tokenizer.json").is_file():
        sample = list(_sample(texts, cache))
        report = progress or (lambda done, total, what: None)
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache, report):
            if not (folder / "tokenizer.json").is_file():
                report(0, 0, "training the tokenizer")
                _train_aside(sample, folder, size, from_scratch=config.train.init_from is None)
    return load_tokenizer(folder), folder


def _train_aside(sample: Sequence[str], folder: Path, size: int, *, from_scratch: bool) -> None:
    aside = folder.with_name(f"{folder.name}.partial")
    try:
        trained = train_tokenizer(sample, size, aside)
        check_vocabulary(trained.vocab_size, size, from_scratch=from_scratch)
        trained.save(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sample(texts: Sequence[Source], cache: Path) -> Iterator[str]:
    """Documents of every source, spread over all its files, up to a limit of characters."""
    for source in texts:
        files = find_files(_paths(source, cache))
        random.Random(0).shuffle(files)
        left = TOKENIZER_SAMPLE_CHARS // len(texts)
        for document in _documents(files, source):
            if source.format == "chat":
                document = "\n".join(message["content"] for message in json.loads(document))
            yield document[:left]
            left -= len(document)
            if left <= 0:
                break


def _documents(files: Sequence[Path], source: Source) -> Iterator[str]:
    named = [Path(source.path)] if Path(source.path).is_file() else []
    return read_documents(files, source.field, TextCounts(), named=named, chat=source.format == "chat")


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
    *,
    chat: bool = False,
    template: str | None = None,
) -> DatasetInfo:
    """``shardwright tokenize``: text of ``sources`` to the dataset folder ``out``; trains a tokenizer if none is given.

    With ``chat`` each line holds a conversation, written by ``template`` (as ``data.chat_template``).
    """
    texts = [Source(path=source, field=field, format="chat" if chat else "text") for source in sources]
    found = None if tokenizer is None else load_tokenizer(tokenizer)
    check_texts(texts)
    with _writing(out, "--out FOLDER"):
        if found is None:
            if progress is not None:
                progress(0, 0, "training the tokenizer")
            tokenizer = out / "tokenizer"
            found = train_tokenizer(_sample(texts, out), vocab_size, tokenizer)
        assert tokenizer is not None
        written = chat_template(texts[0], tokenizer if tokenizer.is_dir() else tokenizer.parent, template)
        return tokenize(sources, out, found, field=field, valid_fraction=valid_fraction, chat=written, progress=progress)
