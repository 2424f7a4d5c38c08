"""Text to tokens: documents to an indexed dataset.

A document is a whole text file, one line of a ``.jsonl`` file or one row of a ``.parquet`` file, or the conversation in a
line. ``tokenize`` turns documents into a folder::

    train.bin  train.idx   valid.bin  valid.idx    Megatron's indexed format, each document ends with the eos token
    tokenizer.json  tokenizer_config.json          the tokenizer that was used
    train-answers.* valid-answers.*                of conversations: a 1 for each token of an answer, else a 0
    dataset.json                                   what is inside, written last: without it the folder is not complete
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.errors import DataError
from shardwright.train.chat import ChatTemplate, encode_conversation
from shardwright.train.indexed import IndexedDataset, IndexedWriter
from shardwright.train.read import (
    PACKED_SUFFIXES,
    PARQUET_SUFFIX,
    PYTHON_LIBRARY,
    TextCounts,
    find_files,
    python_library_files,
    read_documents,
)
from shardwright.train.tokenizer import Tokenizer, load_tokenizer, read_json, train_tokenizer, write_aside

__all__ = [
    "PYTHON_LIBRARY",
    "DatasetInfo",
    "TextCounts",
    "Tokenizer",
    "find_files",
    "load_dataset_info",
    "load_tokenizer",
    "locked",
    "python_library_files",
    "read_documents",
    "tokenize",
    "train_tokenizer",
]

Progress = Callable[[int, int, str], None]

_PIECE_CHARS = 1 << 14
_BATCH_CHARS = 1 << 22
_DATASET_FORMAT = 1
_DATASET_FILES = ("train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.json", "tokenizer_config.json")
_ANSWER_FILES = ("train-answers.bin", "train-answers.idx", "valid-answers.bin", "valid-answers.idx")


@dataclass(frozen=True)
class DatasetInfo:
    """What ``dataset.json`` says. Bytes are those of the documents' UTF-8 text, for bits per byte."""

    files: int
    documents: int
    skipped_binary: int
    skipped_empty: int
    replaced: int
    train_documents: int
    valid_documents: int
    train_tokens: int
    valid_tokens: int
    train_bytes: int
    valid_bytes: int
    vocab_size: int
    eos_id: int
    tokenizer_sha256: str
    fingerprint: str  # of the files (path, size, time), the tokenizer and the options

    @property
    def skipped(self) -> int:
        """Files and documents left out."""
        return self.skipped_binary + self.skipped_empty


def load_dataset_info(folder: Path | str) -> DatasetInfo:
    """Read ``dataset.json`` of a folder made by :func:`tokenize`; a DataError where it is missing or foreign."""
    path = Path(folder) / "dataset.json"
    if not path.is_file():
        raise DataError(f"{folder} is not a complete dataset: it has no dataset.json; run `shardwright tokenize` again")
    content = read_json(path)
    wanted = {field.name for field in fields(DatasetInfo)}
    if not wanted <= content.keys():
        missing = ", ".join(sorted(wanted - content.keys()))
        raise DataError(f"{path} lacks {missing}; run `shardwright tokenize` again")
    return DatasetInfo(**{name: content[name] for name in wanted})


def answers_prefix(prefix: Path) -> Path:
    """Where the answers in the dataset ``prefix`` are marked, if it holds conversations."""
    return prefix.with_name(f"{prefix.name}-answers")


def tokenize(
    sources: Sequence[Path | str],
    out: Path,
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    valid_fraction: float = 0.02,
    separator: str | None = None,
    chat: ChatTemplate | None = None,
    progress: Progress | None = None,
) -> DatasetInfo:
    """Make the dataset folder ``out`` from the text of ``sources``, or reuse it if it was made from the same.

    Whole documents go to validation, chosen by a hash of their content: neither the order of the files nor their place
    on disk matters, and a document that occurs twice is never on both sides. Of two documents or more, at least one is
    on each side; a single long document gives its end. ``progress`` is called with (bytes read, bytes in all, what).
    With ``chat`` documents are conversations, written by this template, and ``field`` holds the messages.
    Interrupted, it leaves nothing that looks complete; a second process with the same ``out`` waits and reuses.
    """
    if not 0 <= valid_fraction < 1:
        raise DataError(f"valid_fraction={valid_fraction} is not a share of the documents; use 0 to below 1")
    named = [Path(source).expanduser() for source in sources if Path(source).expanduser().is_file()]
    output = out.resolve()
    files = [path for path in find_files(sources) if output not in path.resolve().parents or path in named]
    template = [] if chat is None else [chat.source, dict(chat.special)]
    key = _fingerprint(files, [tokenizer.sha256, tokenizer.eos_id, field, valid_fraction, separator, *template])
    report = progress or (lambda done, total, what: None)
    info = _reusable(out, key)
    if info is not None:
        return info
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {out}: {error}; give another") from error
    with locked(out, report):
        info = _reusable(out, key)
        if info is not None:
            return info
        staging = out / ".partial"
        shutil.rmtree(staging, ignore_errors=True)
        try:
            counts = TextCounts()
            documents = read_documents(files, field, counts, named=named, separator=separator, chat=chat is not None)
            info = _build(documents, counts, files, staging, tokenizer, valid_fraction, report, chat)
            info = replace(info, fingerprint=key)
            _publish(staging, out, info)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return info


def _fingerprint(files: Sequence[Path], options: list[Any]) -> str:
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([_DATASET_FORMAT, stats, options]).encode()).hexdigest()


def _reusable(out: Path, fingerprint: str) -> DatasetInfo | None:
    """What ``out`` holds, if it is complete and made from the same input."""
    try:
        info = load_dataset_info(out)
        tokens = {split: IndexedDataset(out / split).num_tokens for split in ("train", "valid")}
    except DataError:
        return None
    same = info.fingerprint == fingerprint and tokens == {"train": info.train_tokens, "valid": info.valid_tokens}
    return info if same else None


@contextlib.contextmanager
def locked(out: Path, report: Progress) -> Iterator[None]:
    """One process at a time; others wait. The lock ends with its process."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(0, 1, "waiting for another process that writes this dataset")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _publish(staging: Path, out: Path, info: DatasetInfo) -> None:
    (out / "dataset.json").unlink(missing_ok=True)
    for name in _ANSWER_FILES:
        if (staging / name).exists():
            (staging / name).replace(out / name)
        else:
            (out / name).unlink(missing_ok=True)
    for name in _DATASET_FILES:
        (staging / name).replace(out / name)
    write_aside(out / "dataset.json", json.dumps(asdict(info), indent=2) + "\n")


def _pieces(documents: Iterable[str], limit: int = _PIECE_CHARS) -> Iterator[tuple[str, bool]]:
    """Each document as pieces of about ``limit`` characters, and whether a piece ends its document.

    Cuts lie after a line break between two signs, or before a space between two letters: there a byte-level tokenizer
    starts a new word anyway, so the tokens are those of the whole. A document without such a place stays whole.
    """
    boundary = re.compile(r"(?<=\S\n)(?=\S)|(?<=[A-Za-z])(?= [A-Za-z])")
    for document in documents:
        start = 0
        while len(document) - start > limit + limit // 2:
            match = boundary.search(document, start + limit)
            if match is None:
                break
            yield document[start : match.start()], False
            start = match.start()
        yield document[start:], True


def _batches(pieces: Iterable[tuple[str, bool]], limit: int = _BATCH_CHARS) -> Iterator[list[tuple[str, bool]]]:
    """Pieces in groups of about ``limit`` characters: enough work for every core, little memory."""
    batch: list[tuple[str, bool]] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece[0])
        if chars >= limit:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


class _Encoder:
    """Pieces of documents to token ids; of conversations also which tokens are answers, and the text's own size."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate | None) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self.limit = _PIECE_CHARS if chat is None and _may_cut(tokenizer) else _BATCH_CHARS

    def pieces(self, documents: Iterable[str]) -> Iterable[tuple[str, bool]]:
        """Conversations stay whole."""
        return _pieces(documents, self.limit) if self._chat is None else ((document, True) for document in documents)

    def __call__(self, batch: Sequence[tuple[str, bool]]) -> Iterator[tuple[list[int], list[int] | None, int]]:
        """(ids, answers or None, bytes of text) of each piece."""
        tokenizer, chat = self._tokenizer, self._chat
        if chat is None:
            for (text, last), ids in zip(batch, tokenizer.encode_batch([text for text, _ in batch]), strict=True):
                yield [*ids, tokenizer.eos_id] if last else ids, None, len(text.encode())
            return
        for text, _ in batch:
            conversation = chat.conversation(json.loads(text))
            yield *encode_conversation(tokenizer, conversation), len(conversation.text.encode(errors="replace"))


class _Writer:
    """One dataset, with the answers beside it where they are given."""

    def __init__(self, prefix: Path, vocab_size: int, answers: bool) -> None:
        self._stack = contextlib.ExitStack()
        self._writers = [IndexedWriter(prefix, vocab_size)]
        if answers:
            self._writers.append(IndexedWriter(answers_prefix(prefix), 2))

    def __enter__(self) -> _Writer:
        for writer in self._writers:
            self._stack.enter_context(writer)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def add_sequence(self, *ids: Any) -> None:
        """Of each writer, in their order."""
        for writer, sequence in zip(self._writers, ids, strict=True):
            writer.add_sequence(sequence)

    def end_document(self) -> None:
        """Close the document in progress."""
        for writer in self._writers:
            writer.end_document()


def _build(
    documents: Iterable[str],
    counts: TextCounts,
    files: Sequence[Path],
    staging: Path,
    tokenizer: Tokenizer,
    valid_fraction: float,
    report: Progress,
    chat: ChatTemplate | None,
) -> DatasetInfo:
    """Encode everything into one staged dataset with a sequence per piece, then copy it out into the two splits."""
    total = sum(path.stat().st_size for path in files)
    plain = not any(path.suffix.lower() in (*PACKED_SUFFIXES, PARQUET_SUFFIX) for path in files)
    done, encode = 0, _Encoder(tokenizer, chat)
    piece_bytes, scores = array("q"), array("d")
    digest = hashlib.blake2b(digest_size=8)
    with _Writer(staging / "all", tokenizer.vocab_size, chat is not None) as writer:
        for batch in _batches(encode.pieces(documents)):
            for (text, last), (ids, answers, size) in zip(batch, encode(batch), strict=True):
                raw = text.encode()
                piece_bytes.append(size)
                done += len(raw)
                digest.update(raw)
                writer.add_sequence(*((ids,) if answers is None else (ids, answers)))
                if last:
                    writer.end_document()
                    scores.append(int.from_bytes(digest.digest()) / 2**64)
                    digest = hashlib.blake2b(digest_size=8)
            # Within a large file the text that was encoded says more than where the reader is.
            report(min(max(counts.source_bytes, done if plain else 0), total), total, f"{counts.documents} documents")
    sizes = _split(staging, np.array(scores), valid_fraction, piece_bytes, tokenizer.vocab_size, chat is not None)
    tokenizer.save(staging)
    train, valid = IndexedDataset(staging / "train"), IndexedDataset(staging / "valid")
    report(total, total, f"{counts.documents} documents")
    return DatasetInfo(
        files=counts.files,
        documents=counts.documents,
        skipped_binary=counts.skipped_binary,
        skipped_empty=counts.skipped_empty,
        replaced=counts.replaced,
        train_documents=len(train),
        valid_documents=len(valid),
        train_tokens=train.num_tokens,
        valid_tokens=valid.num_tokens,
        train_bytes=sizes[False],
        valid_bytes=sizes[True],
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer_sha256=tokenizer.sha256,
        fingerprint="",
    )


def _split(
    staging: Path,
    scores: npt.NDArray[np.float64],
    valid_fraction: float,
    piece_bytes: Sequence[int],
    vocab_size: int,
    answers: bool,
) -> list[int]:
    """The staged dataset as ``train`` and ``valid``; the bytes of their texts."""
    prefix = staging / "all"
    staged = [IndexedDataset(prefix), *([IndexedDataset(answers_prefix(prefix))] if answers else [])]
    parts, held_out = _choose(staged[0], scores, valid_fraction)
    sizes = [0, 0]
    for name, wanted in (("train", False), ("valid", True)):
        with _Writer(staging / name, vocab_size, answers) as writer:
            for (first, stop), held in zip(pairwise(parts), held_out, strict=True):
                if held == wanted:
                    writer.add_sequence(*(one.sequences(first, stop) for one in staged))
                    writer.end_document()
                    sizes[wanted] += sum(piece_bytes[first:stop])
    return sizes


def _may_cut(tokenizer: Tokenizer) -> bool:
    """Whether pieces of a text give the tokens of the whole; not so where every text gets a prefix of its own."""
    pieces = ["a", " b;\n", "cd", " e\n", "(f)"]
    return tokenizer.encode("".join(pieces)) == [index for piece in pieces for index in tokenizer.encode(piece)]


def _choose(
    staged: IndexedDataset, scores: npt.NDArray[np.float64], fraction: float
) -> tuple[list[int], npt.NDArray[np.bool_]]:
    """Cut the staged sequences into the documents of the two splits.

    Returns where they start (sequence numbers, with the end) and for each whether it is held out. Whole documents by
    their score in [0, 1); of a single document of several sequences, the last ones.
    """
    bounds = [int(first) for first in staged.document_index]
    held = scores < fraction
    if len(held) > 1 and fraction > 0:
        if not held.any():
            held[scores.argmin()] = True
        elif held.all():
            held[scores.argmax()] = False
    elif len(held) == 1:
        held[:] = False
        if fraction > 0 and bounds[1] > 1:
            cut = bounds[1] - max(1, round(bounds[1] * fraction))
            return [0, max(1, cut), bounds[1]], np.array([False, True])
    return bounds, held
