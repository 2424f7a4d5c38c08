"""Where a part of a logical tensor lies in a file: runs of bytes, strided for column slices and transposed tensors.

What a rank holds is an interval of its slice's elements in row-major order (all of them, or what a ZeRO shard cuts out).
In the file the slice is rows and columns of a matrix, so an interval is at most a part of a row, whole rows and a part of
a row: three rectangles. A tensor of three dims is one matrix for each index of its first dim.

Bytes are hashed with CRC-32 as they are written, piece by piece, while a piece is in the processor's cache. That takes about
as long as the write into the page cache, SHA-256 three times as long even with the processor's own instructions (docs/log.md).
A hash is to notice bytes that changed by accident, not by somebody's will.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
HASH, OLD_HASH = "crc32", "sha256"
"""Of what is written now, and of what versions 1 and 2 of the manifest hold."""
_PIECE = 1 << 18
"""Bytes that are hashed and written at a time."""
_MOST_PIECES = 512
"""Of one write: the kernel takes 1024."""


@dataclass(frozen=True)
class Run:
    """``count`` ranges of ``size`` bytes, ``stride`` bytes from start to start."""

    offset: int
    size: int
    stride: int
    count: int

    @property
    def num_bytes(self) -> int:
        return self.size * self.count

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + (self.count - 1) * self.stride + self.size


@dataclass(frozen=True)
class Rows:
    """Rows ``[start, stop)`` of a parameter are rows ``first``, ``first + step``, ... of a matrix in a file."""

    start: int
    stop: int
    first: int
    step: int = 1


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in ``file``: element (r, c) of the file's matrix at ``offset`` bytes plus r * ``pitch`` + c
    elements, or, if ``transposed``, c * ``pitch`` + r. A vector is a matrix of one column.

    ``rows`` say which rows of the matrix the parameter's rows are (None: the same). ``lead``: only this index of the
    parameter's first dim, whose others make the matrix.
    """

    file: str
    offset: int
    pitch: int
    transposed: bool = False
    lead: int | None = None
    rows: tuple[Rows, ...] | None = None


@dataclass(frozen=True)
class Part:
    """One run and what goes there: elements ``[start, stop)`` of the slice in row-major order, taken as a matrix of
    ``rows`` rows and transposed if ``transposed``."""

    file: str
    run: Run
    start: int
    stop: int
    rows: int
    transposed: bool

    def take(self, interval: Tensor, first: int) -> Tensor:
        """Its elements in the order of the file, from ``interval``, which begins at element ``first``; may be a view."""
        flat = interval[self.start - first : self.stop - first]
        return flat.view(self.rows, -1).t() if self.transposed else flat


def parts(places: Sequence[Place], slices: Sequence[slice], start: int, stop: int, itemsize: int) -> Iterator[Part]:
    """Elements ``[start, stop)`` (row-major) of the slice ``slices`` of a parameter, as runs of its files."""
    for place in places:
        inner, before = slices, 0
        if place.lead is not None:
            if not slices[0].start <= place.lead < slices[0].stop:
                continue
            inner = slices[1:]
            before = (place.lead - slices[0].start) * _numel(inner)
        assert len(inner) in (1, 2), "a tensor of more dims has a place for each index of its first one"
        held = inner[0]
        columns = inner[1] if len(inner) == 2 else slice(0, 1)
        width = columns.stop - columns.start
        for rows in place.rows or (Rows(held.start, held.stop, held.start),):
            low, high = max(held.start, rows.start), min(held.stop, rows.stop)
            first = before + (low - held.start) * width
            begin, end = max(start, first), min(stop, before + (high - held.start) * width)
            if begin < end:
                row = rows.first + (low - rows.start) * rows.step
                yield from _matrix(place, row, rows.step, columns, (begin - first, end - first), itemsize, first)


def _numel(slices: Sequence[slice]) -> int:
    count = 1
    for part in slices:
        count *= part.stop - part.start
    return count


def _matrix(
    place: Place, row: int, step: int, columns: slice, interval: tuple[int, int], itemsize: int, shift: int
) -> Iterator[Part]:
    """``interval`` of some rows, of which the first is ``row`` in the file and the next ``row + step``; ``shift`` is where
    these rows begin in the slice."""
    start, stop = interval
    width = columns.stop - columns.start
    if not place.transposed and step == 1 and width == place.pitch:  # whole rows lie one after another
        size = (stop - start) * itemsize
        offset = place.offset + (row * place.pitch + start) * itemsize
        yield Part(place.file, Run(offset, size, size, 1), start + shift, stop + shift, 1, False)
        return
    assert step == 1 or not place.transposed
    for low, high, left, right in _rectangles(width, start, stop):
        first, second = row + low * step, columns.start + left
        lines, length = high - low, right - left
        if place.transposed:
            first, second, lines, length = second, first, length, lines
        offset = place.offset + (first * place.pitch + second) * itemsize
        run = Run(offset, length * itemsize, step * place.pitch * itemsize, lines)
        if lines == 1 or (length == place.pitch and step == 1):
            run = Run(offset, run.num_bytes, run.num_bytes, 1)
        begin = low * width + left + shift
        yield Part(place.file, run, begin, begin + lines * length, high - low, place.transposed)


def _rectangles(width: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, end row, first column, end column) of elements ``[start, stop)`` of rows of ``width``."""
    (top, left), (bottom, right) = divmod(start, width), divmod(stop, width)
    if top == bottom:
        yield top, top + 1, left, right
        return
    if left:
        yield top, top + 1, left, width
        top += 1
    if bottom > top:
        yield top, bottom, 0, width
    if right:
        yield bottom, bottom + 1, 0, right


# -- files -----------------------------------------------------------------------------------------


HashedRun = tuple[Run, str]
"""Bytes of one file and their hash (hexadecimal)."""


def write_runs(descriptor: int, content: Sequence[tuple[Run, Bytes]]) -> list[HashedRun]:
    """Write each ``content`` to the places of its run; the runs with their hashes, neighbours joined. Raises OSError.

    Ranges that follow one another in the file, and in ``content``, are written together and hashed as one.
    """
    written = []
    for run, arrays in _joined(content):
        value = _write_range(descriptor, run.offset, arrays) if run.count == 1 else _write_lines(descriptor, run, arrays[0])
        written.append((run, f"{value:08x}"))
    return written


def _joined(content: Sequence[tuple[Run, Bytes]]) -> Iterator[tuple[Run, list[Bytes]]]:
    """Single ranges that follow one another as one; strided ones as they are."""
    at = 0
    while at < len(content):
        run, array = content[at]
        arrays = [array]
        at += 1
        while at < len(content) and run.count == content[at][0].count == 1 and run.end == content[at][0].offset:
            size = run.size + content[at][0].size
            run = Run(run.offset, size, size, 1)
            arrays.append(content[at][1])
            at += 1
        assert run.num_bytes == sum(array.nbytes for array in arrays)
        yield run, arrays


def _write_range(descriptor: int, offset: int, arrays: Sequence[Bytes]) -> int:
    """Write ``arrays`` one behind the other from ``offset`` on; their CRC-32."""
    value, waiting, size = 0, list[memoryview](), 0
    for array in arrays:
        for start in range(0, array.nbytes, _PIECE):
            piece = array[start : start + _PIECE].data
            value = zlib.crc32(piece, value)
            waiting.append(piece)
            size += piece.nbytes
            if size >= _PIECE or len(waiting) == _MOST_PIECES:
                _write(descriptor, waiting, size, offset)
                waiting, size, offset = [], 0, offset + size
    _write(descriptor, waiting, size, offset)
    return value


def _write_lines(descriptor: int, run: Run, array: Bytes) -> int:
    for line in range(run.count):
        piece = array[line * run.size : (line + 1) * run.size].data
        _write(descriptor, [piece], run.size, run.offset + line * run.stride)
    return zlib.crc32(array.data)


def _write(descriptor: int, pieces: Sequence[memoryview], size: int, offset: int) -> None:
    done = os.pwritev(descriptor, pieces, offset) if size else 0
    while done < size:  # cut off by a signal or a limit
        rest = b"".join(pieces)[done:]
        done += os.pwritev(descriptor, [rest], offset + done)


def hash_bytes(content: bytes | memoryview, algorithm: str = HASH) -> str:
    """The hash of ``content``; ``algorithm`` is `HASH` or `OLD_HASH`."""
    if algorithm == HASH:
        return f"{zlib.crc32(content):08x}"
    return hashlib.new(algorithm, content).hexdigest()


def hash_run(content: Bytes, run: Run, algorithm: str = HASH) -> str:
    """The hash of what ``content``, a whole file, has in the places of ``run``."""
    if run.count == 1:
        return hash_bytes(content[run.offset : run.end].data, algorithm)
    lines = np.lib.stride_tricks.as_strided(content[run.offset :], (run.count, run.size), (run.stride, 1))
    return hash_bytes(np.ascontiguousarray(lines).reshape(-1).data, algorithm)


def map_file(path: Path) -> Bytes:
    """The bytes of a file, read when they are used."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def uncovered(runs: Sequence[Run], size: int) -> str | None:
    """None where ``runs`` hold every byte of a file of ``size`` bytes exactly once, else what is wrong."""
    starts = np.concatenate([run.offset + run.stride * np.arange(run.count, dtype=np.int64) for run in runs])
    sizes = np.repeat([run.size for run in runs], [run.count for run in runs])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + sizes)[order]
    wanted = np.concatenate([[0], ends])
    found = np.concatenate([starts, [size]])
    wrong = np.flatnonzero(wanted != found)
    if not wrong.size:
        return None
    at, next_ = int(wanted[wrong[0]]), int(found[wrong[0]])
    return f"bytes {at} to {next_} are written by nobody" if next_ > at else f"bytes {next_} to {at} are written twice"
