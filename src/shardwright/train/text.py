"""Text to tokens: find files, read documents, write an indexed dataset.

A document is a whole text file, one line of a ``.jsonl`` file or one row of a ``.parquet`` file. ``tokenize`` turns
documents into a folder::

    train.bin  train.idx   valid.bin  valid.idx    Megatron's indexed format, each document ends with the eos token
    tokenizer.json  tokenizer_config.json          the tokenizer that was used
    dataset.json                                   what is inside, written last: without it the folder is not complete
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import glob
import gzip
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import sysconfig
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import zstandard

from shardwright.errors import DataError
from shardwright.train.indexed import IndexedDataset, IndexedWriter
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

PYTHON_LIBRARY = "python:library"  # as a source: the .py files of the running Python's standard library
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIX = ".parquet"
PACKED_SUFFIXES = (".gz", ".zst")

Progress = Callable[[int, int, str], None]

_HEAD_BYTES = 1024
_BINARY_SHARE = 0.3  # of the first KB's characters that are not UTF-8; text in Latin-1 has a few per cent
_PIECE_CHARS = 1 << 14
_BATCH_CHARS = 1 << 22
_DATASET_FORMAT = 1
_DATASET_FILES = ("train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.json", "tokenizer_config.json")


# ---------------------------------------------------------------------------------------------------- finding files


def find_files(sources: Sequence[Path | str]) -> list[Path]:
    """Files of all sources, in the order of the sources, each once.

    A source is a file of any suffix, a folder (searched for the known suffixes, hidden folders and ``__pycache__``
    left out, sorted), a glob (``**`` crosses folders), or ``python:library``. A source that has no file is a DataError.
    """
    if not sources:
        raise DataError("no text given; name files, folders or patterns, for instance 'books/**/*.txt'")
    found: dict[Path, Path] = {}
    for source in sources:
        for path in _expand(str(source)):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _expand(source: str) -> list[Path]:
    if source == PYTHON_LIBRARY:
        return python_library_files()
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(_walk(path))
        if not files:
            known = " ".join((*TEXT_SUFFIXES, *JSON_SUFFIXES, PARQUET_SUFFIX))
            raise DataError(f"folder {path} has no {known} file; name others by a pattern, for instance '{path}/**/*'")
        return files
    if glob.has_magic(source):
        matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
        if not matches:
            raise DataError(f"pattern {source!r} matches no file; folders are crossed by '**' only")
        return matches
    raise DataError(f"no file or folder {source!r} (looked in {Path.cwd()}); give a path that exists or a pattern")


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and _suffix(path) in (*TEXT_SUFFIXES, *JSON_SUFFIXES, PARQUET_SUFFIX):
                yield path


def _suffix(path: Path) -> str:
    """The suffix that tells the kind of file, without a packing suffix: ``.jsonl`` of ``a.jsonl.gz``."""
    inner = path.with_suffix("") if path.suffix.lower() in PACKED_SUFFIXES else path
    return inner.suffix.lower()


def python_library_files() -> list[Path]:
    """Every ``.py`` file of the running Python's standard library, sorted; installed packages are left out."""
    library = Path(sysconfig.get_path("stdlib"))
    unwanted = {"site-packages", "dist-packages", "__pycache__"}
    return sorted(path for path in library.rglob("*.py") if not unwanted & set(path.relative_to(library).parts))


# ------------------------------------------------------------------------------------------------ reading documents


@dataclass
class TextCounts:
    """What :func:`read_documents` met so far."""

    files: int = 0  # looked at
    documents: int = 0  # given out
    skipped_binary: int = 0  # files found in a folder or by a pattern that are not text
    skipped_empty: int = 0  # files, lines or rows without text
    replaced: int = 0  # files with bytes that are not UTF-8, decoded with replacement characters
    source_bytes: int = 0  # read from disk, for a progress bar

    def __str__(self) -> str:
        return (
            f"{self.files} files: {self.documents} documents, {self.skipped_binary} binary files and "
            f"{self.skipped_empty} empty documents skipped, {self.replaced} files not UTF-8"
        )


def read_documents(
    files: Iterable[Path],
    field: str = "text",
    counts: TextCounts | None = None,
    *,
    named: Collection[Path] = (),
    separator: str | None = None,
) -> Iterator[str]:
    """Documents of ``files`` one by one; each is non-empty and can be encoded as UTF-8.

    ``field`` holds the text of a JSON line or a Parquet row. ``named`` are files that the user gave by name: a binary
    one among them is a DataError, any other is skipped and counted. ``separator`` cuts text files into documents (for
    instance ``<|endoftext|>``). No document in all files is a DataError.
    """
    counts = TextCounts() if counts is None else counts
    by_name = {path.resolve() for path in named}
    for path in files:
        counts.files += 1
        begin = counts.source_bytes
        try:
            size = path.stat().st_size
            if _suffix(path) == PARQUET_SUFFIX:
                texts = _read_parquet(path, field)
            else:
                texts = _read_file(path, field, counts, path.resolve() in by_name, separator)
            for text in texts:
                if text and not text.isspace():
                    counts.documents += 1
                    yield _encodable(text)
                else:
                    counts.skipped_empty += 1
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise DataError(f"cannot read {path}: {error}; repair the file or leave it out") from error
        counts.source_bytes = begin + size
    if counts.documents == 0:
        raise DataError(f"nothing to read in {counts}; give files that contain text")


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], io.BufferedReader]]:
    """The file on disk, and its unpacked bytes."""
    with path.open("rb") as disk:
        if path.suffix.lower() == ".gz":
            yield disk, io.BufferedReader(gzip.GzipFile(fileobj=disk))
        elif path.suffix.lower() == ".zst":
            unpacker = zstandard.ZstdDecompressor().stream_reader(disk, read_across_frames=True)
            yield disk, io.BufferedReader(unpacker)
        else:
            yield disk, disk


def _read_file(path: Path, field: str, counts: TextCounts, by_name: bool, separator: str | None) -> Iterator[str]:
    begin = counts.source_bytes
    with _open(path) as (disk, stream):
        if _is_binary(stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]):
            if by_name:
                raise DataError(f"{path} is not text (or not UTF-8); give a text, .jsonl or .parquet file")
            counts.skipped_binary += 1
            return
        if _suffix(path) not in JSON_SUFFIXES:
            text, whole = _decode(stream.read())
            counts.replaced += not whole
            yield from text.split(separator) if separator else [text]
            return
        replaced, number = False, 0
        for number, line in enumerate(stream, 1):
            text, whole = _decode(line)
            replaced = replaced or not whole
            if text.strip():
                counts.source_bytes = begin + disk.tell()
                yield _json_text(text, f"{path}:{number}", field)
        counts.replaced += replaced
        counts.skipped_empty += number == 0


def _is_binary(head: bytes) -> bool:
    if b"\0" in head:
        return True
    # Incremental, so that a character cut at the end of the head is not counted as wrong.
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(head)
    return text.count("\ufffd") > _BINARY_SHARE * len(text)


def _decode(raw: bytes) -> tuple[str, bool]:
    """The text, and whether all of it was UTF-8. A byte order mark is dropped."""
    try:
        return raw.decode("utf-8-sig"), True
    except UnicodeDecodeError:
        return raw.decode("utf-8-sig", errors="replace"), False


def _encodable(text: str) -> str:
    """JSON can hold half of a surrogate pair, which no UTF-8 text can."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()


def _json_text(line: str, where: str, field: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); one JSON object a line is needed") from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: a JSON {type(record).__name__}, needed is one object a line with the field {field!r}"
        )
    if field not in record:
        raise DataError(f"{where}: no field {field!r}, only {', '.join(map(repr, record))}; name the text's field")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is a {type(text).__name__}, needed is text")
    return text


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow; install it with: pip install 'shardwright[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise DataError(
                    f"{path}: no column {field!r}, only {', '.join(map(repr, names))}; name the text's column"
                )
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str | None):
                        raise DataError(f"{path}: column {field!r} holds {type(text).__name__}, needed is text")
                    yield text or ""
    except ValueError as error:  # what pyarrow raises for a damaged file is one
        raise DataError(f"cannot read {path}: {error}; repair the file or leave it out") from error


# -------------------------------------------------------------------------------------------------- indexed datasets


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


def tokenize(
    sources: Sequence[Path | str],
    out: Path,
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    valid_fraction: float = 0.02,
    separator: str | None = None,
    progress: Progress | None = None,
) -> DatasetInfo:
    """Make the dataset folder ``out`` from the text of ``sources``, or reuse it if it was made from the same.

    Whole documents go to validation, chosen by a hash of their content: neither the order of the files nor their place
    on disk matters, and a document that occurs twice is never on both sides. Of two documents or more, at least one is
    on each side; a single long document gives its end. ``progress`` is called with (bytes read, bytes in all, what).
    Interrupted, it leaves nothing that looks complete; a second process with the same ``out`` waits and reuses.
    """
    if not 0 <= valid_fraction < 1:
        raise DataError(f"valid_fraction={valid_fraction} is not a share of the documents; use 0 to below 1")
    named = [Path(source).expanduser() for source in sources if Path(source).expanduser().is_file()]
    output = out.resolve()
    files = [path for path in find_files(sources) if output not in path.resolve().parents or path in named]
    key = _fingerprint(files, [tokenizer.sha256, tokenizer.eos_id, field, valid_fraction, separator])
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
            documents = read_documents(files, field, counts, named=named, separator=separator)
            info = _build(documents, counts, files, staging, tokenizer, valid_fraction, report)
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


def _build(
    documents: Iterable[str],
    counts: TextCounts,
    files: Sequence[Path],
    staging: Path,
    tokenizer: Tokenizer,
    valid_fraction: float,
    report: Progress,
) -> DatasetInfo:
    """Encode everything into one staged dataset with a sequence per piece, then copy it out into the two splits."""
    total = sum(path.stat().st_size for path in files)
    plain = not any(path.suffix.lower() in (*PACKED_SUFFIXES, PARQUET_SUFFIX) for path in files)
    done = 0
    piece_bytes, scores = array("q"), array("d")
    digest = hashlib.blake2b(digest_size=8)
    pieces = _pieces(documents, _PIECE_CHARS if _may_cut(tokenizer) else _BATCH_CHARS)
    with IndexedWriter(staging / "all", tokenizer.vocab_size) as writer:
        for batch in _batches(pieces):
            for (text, last), ids in zip(batch, tokenizer.encode_batch([text for text, _ in batch]), strict=True):
                raw = text.encode()
                piece_bytes.append(len(raw))
                done += len(raw)
                digest.update(raw)
                writer.add_sequence([*ids, tokenizer.eos_id] if last else ids)
                if last:
                    writer.end_document()
                    scores.append(int.from_bytes(digest.digest()) / 2**64)
                    digest = hashlib.blake2b(digest_size=8)
            # Within a large file the text that was encoded says more than where the reader is.
            report(min(max(counts.source_bytes, done if plain else 0), total), total, f"{counts.documents} documents")
    staged = IndexedDataset(staging / "all")
    parts, held_out = _choose(staged, np.array(scores), valid_fraction)
    sizes = [0, 0]
    for name, wanted in (("train", False), ("valid", True)):
        with IndexedWriter(staging / name, tokenizer.vocab_size) as writer:
            for (first, stop), held in zip(pairwise(parts), held_out, strict=True):
                if held == wanted:
                    writer.add_document(staged.sequences(first, stop))
                    sizes[wanted] += sum(piece_bytes[first:stop])
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
