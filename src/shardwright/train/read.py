"""Find text files and read documents from them: plain text, JSON lines, Parquet; packed with gzip or Zstandard."""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import importlib
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import zstandard

from shardwright.errors import DataError
from shardwright.train.chat import read_messages

PYTHON_LIBRARY = "python:library"  # as a source: the .py files of the running Python's standard library
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIX = ".parquet"
PACKED_SUFFIXES = (".gz", ".zst")

_HEAD_BYTES = 1024
_BINARY_SHARE = 0.3  # of the first KB's characters that are not UTF-8; text in Latin-1 has a few per cent


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
    chat: bool = False,
) -> Iterator[str]:
    """Documents of ``files`` one by one; each is non-empty and can be encoded as UTF-8.

    ``field`` holds the text of a JSON line or a Parquet row. ``named`` are files that the user gave by name: a binary
    one among them is a DataError, any other is skipped and counted. ``separator`` cuts text files into documents (for
    instance ``<|endoftext|>``). With ``chat`` a document is the JSON of a list of messages, and ``field`` holds the list.
    No document in all files is a DataError.
    """
    counts = TextCounts() if counts is None else counts
    by_name = {path.resolve() for path in named}
    for path in files:
        counts.files += 1
        begin = counts.source_bytes
        try:
            size = path.stat().st_size
            if chat and _suffix(path) not in JSON_SUFFIXES:
                raise DataError(f"{path} holds no conversations: needed is one JSON object a line, in a {JSON_SUFFIXES[0]} file")
            if _suffix(path) == PARQUET_SUFFIX:
                texts = _read_parquet(path, field)
            else:
                texts = _read_file(path, field, counts, path.resolve() in by_name, separator, chat)
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


def _read_file(
    path: Path, field: str, counts: TextCounts, by_name: bool, separator: str | None, chat: bool
) -> Iterator[str]:
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
                where = f"{path}:{number}"
                yield json.dumps(read_messages(text, where, field)) if chat else _json_text(text, where, field)
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
