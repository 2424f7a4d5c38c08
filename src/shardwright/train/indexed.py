"""Megatron-LM's indexed token format: ``PREFIX.idx`` and ``PREFIX.bin``.

``.idx``, little-endian and without padding, S sequences in D documents::

    bytes 9        b"MMIDIDX\\0\\0"
    uint64         version, 1
    uint8          dtype code (1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16)
    uint64         S
    uint64         D + 1
    int32  [S]     tokens of each sequence
    int64  [S]     byte position of each sequence in .bin
    int64  [D+1]   number of the first sequence of each document, then S

``.bin`` holds the tokens and nothing else. A document is one or more sequences; most files have one per document.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import numpy.typing as npt

from shardwright.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
UINT16_VOCAB_LIMIT = 65500


def bin_path(prefix: Path | str) -> Path:
    """``PREFIX.bin``; the prefix may itself contain dots."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    """``PREFIX.idx``; the prefix may itself contain dots."""
    return Path(f"{prefix}.idx")


def dtype_code(vocab_size: int) -> int:
    """Code of the token type for a vocabulary: uint16 below 65,500 entries, else int32."""
    return 8 if vocab_size < UINT16_VOCAB_LIMIT else 4


class IndexedWriter:
    """Writes one dataset; nothing carries the final names before :meth:`finalize`.

    Used as a context manager, it finalizes on success and removes what it wrote when an exception passes.
    """

    def __init__(self, prefix: Path | str, vocab_size: int) -> None:
        if vocab_size < 1:
            raise DataError(f"vocabulary size {vocab_size} is not positive; give the tokenizer's size")
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self._code = dtype_code(vocab_size)
        self._dtype = np.dtype(DTYPES[self._code])
        self._sizes = array("i")
        self._documents = array("q", [0])
        self._bin_aside = Path(f"{bin_path(prefix)}.partial")
        self._idx_aside = Path(f"{idx_path(prefix)}.partial")
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._bin_aside.open("wb")

    def add_document(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Append one document that is a single sequence; an id outside the vocabulary is a DataError."""
        self.add_sequence(ids)
        self.end_document()

    def add_sequence(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Append one sequence to the document in progress."""
        tokens = np.asarray(ids, dtype=np.int64)
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size):
            raise DataError(
                f"token ids {int(tokens.min())} to {int(tokens.max())} do not fit a vocabulary of {self.vocab_size}; "
                "use the tokenizer that made them"
            )
        self._bin.write(tokens.astype(self._dtype).tobytes())
        self._sizes.append(tokens.size)

    def end_document(self) -> None:
        """Close the document in progress."""
        self._documents.append(len(self._sizes))

    def finalize(self) -> None:
        """Flush to disk and give both files their names, ``.idx`` last: a dataset without it is not complete."""
        assert self._documents[-1] == len(self._sizes), "a document was not ended"
        _sync_and_close(self._bin)
        sizes = np.frombuffer(self._sizes, dtype=np.int32)
        pointers = np.zeros(len(sizes), dtype=np.int64)
        np.cumsum(sizes[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self._dtype.itemsize
        with self._idx_aside.open("wb") as idx:
            idx.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(self._documents)))
            idx.write(sizes.astype("<i4").tobytes())
            idx.write(pointers.astype("<i8").tobytes())
            idx.write(np.frombuffer(self._documents, dtype=np.int64).astype("<i8").tobytes())
            idx.flush()
            os.fsync(idx.fileno())
        idx_path(self.prefix).unlink(missing_ok=True)
        self._bin_aside.replace(bin_path(self.prefix))
        self._idx_aside.replace(idx_path(self.prefix))

    def abort(self) -> None:
        """Remove what was written so far."""
        self._bin.close()
        self._bin_aside.unlink(missing_ok=True)
        self._idx_aside.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()


def _sync_and_close(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


class IndexedDataset:
    """A dataset on disk, read through memory maps; ``len`` is the number of documents."""

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = Path(prefix)
        if self.prefix.suffix in (".bin", ".idx"):
            self.prefix = self.prefix.with_suffix("")
        for path in (idx_path(self.prefix), bin_path(self.prefix)):
            if not path.is_file():
                raise DataError(
                    f"{path} does not exist; an indexed dataset is a pair PREFIX.bin and PREFIX.idx, "
                    "made by `shardwright tokenize` or by Megatron-LM"
                )
        self._read_index(idx_path(self.prefix))
        self._map_tokens(bin_path(self.prefix))

    def _read_index(self, path: Path) -> None:
        raw = _map(path)
        if len(raw) < HEADER.size:
            raise DataError(
                f"{path} has {len(raw)} bytes, its header alone needs {HEADER.size}; make the dataset again"
            )
        magic, version, code, num_sequences, num_indices = HEADER.unpack(raw[: HEADER.size].tobytes())
        if magic != MAGIC or version != VERSION:
            raise DataError(
                f"{path} is not an indexed dataset: it starts with {magic!r}, version {version}; needed are "
                f"{MAGIC!r}, version {VERSION}"
            )
        if code not in DTYPES or DTYPES[code][1] == "f":
            known = ", ".join(f"{number} ({np.dtype(name).name})" for number, name in DTYPES.items() if name[1] != "f")
            raise DataError(f"{path} has dtype code {code}, which is not a token type; known are {known}")
        need = HEADER.size + 12 * num_sequences + 8 * num_indices
        # Multimodal files add one byte of mode for each sequence; text needs none of them.
        if len(raw) not in (need, need + num_sequences):
            raise DataError(
                f"{path} has {len(raw)} bytes, but {num_sequences} sequences and {num_indices} document indices "
                f"need {need}: it is truncated or damaged; copy it or make it again"
            )
        body = raw[HEADER.size : need]
        self.dtype = np.dtype(DTYPES[code])
        self.sequence_sizes: npt.NDArray[np.int32] = np.frombuffer(body, "<i4", num_sequences)
        self._pointers: npt.NDArray[np.int64] = np.frombuffer(body, "<i8", num_sequences, 4 * num_sequences)
        self.document_index: npt.NDArray[np.int64] = np.frombuffer(body, "<i8", num_indices, 12 * num_sequences)
        index = self.document_index
        if num_indices == 0 or index[0] != 0 or index[-1] != num_sequences or bool((np.diff(index) < 0).any()):
            raise DataError(
                f"{path} is damaged: its document index must rise from 0 to {num_sequences}; make the dataset again"
            )

    def _map_tokens(self, path: Path) -> None:
        raw = _map(path)
        if len(self.sequence_sizes) and (int(self.sequence_sizes.min()) < 0 or int(self._pointers.min()) < 0):
            raise DataError(f"{idx_path(self.prefix)} is damaged: it has negative sizes; make the dataset again")
        ends = self._pointers + self.sequence_sizes.astype(np.int64) * self.dtype.itemsize
        need = int(ends.max()) if len(ends) else 0
        if len(raw) < need:
            raise DataError(
                f"{path} has {len(raw)} bytes, its index needs {need}: it is truncated; copy it or make it again"
            )
        self._raw = raw
        self._offsets = np.zeros(len(ends) + 1, dtype=np.int64)
        np.cumsum(self.sequence_sizes, dtype=np.int64, out=self._offsets[1:])
        self._in_order = bool((self._pointers == self._offsets[:-1] * self.dtype.itemsize).all())
        self.document_offsets: npt.NDArray[np.int64] = self._offsets[self.document_index]

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents together."""
        return int(self._offsets[-1])

    def __len__(self) -> int:
        return len(self.document_index) - 1

    def document(self, index: int) -> npt.NDArray[np.integer]:
        """Tokens of document ``index``, all its sequences joined, in the file's own dtype."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.tokens(int(self.document_offsets[index]), int(self.document_offsets[index + 1]))

    def tokens(self, start: int, stop: int) -> npt.NDArray[np.integer]:
        """Tokens ``start`` to ``stop`` (exclusive) of all documents in a row; the range may cross documents."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.num_tokens}")
        if self._in_order:
            return self._slice(start * self.dtype.itemsize, stop - start)
        sequence = int(np.searchsorted(self._offsets, start, side="right")) - 1
        parts: list[npt.NDArray[np.integer]] = [np.empty(0, self.dtype)]
        while start < stop:
            begin, end = int(self._offsets[sequence]), min(int(self._offsets[sequence + 1]), stop)
            parts.append(
                self._slice(int(self._pointers[sequence]) + (start - begin) * self.dtype.itemsize, end - start)
            )
            start, sequence = end, sequence + 1
        return np.concatenate(parts)

    def sequences(self, first: int, stop: int) -> npt.NDArray[np.integer]:
        """Tokens of sequences ``first`` to ``stop`` (exclusive), joined."""
        return self.tokens(int(self._offsets[first]), int(self._offsets[stop]))

    def _slice(self, byte: int, count: int) -> npt.NDArray[np.integer]:
        return np.frombuffer(self._raw, self.dtype, count, byte) if count else np.empty(0, self.dtype)


def _map(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file as a read-only memory map (an empty file cannot be mapped: an empty array)."""
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")
