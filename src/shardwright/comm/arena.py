"""Memory that the ranks of one host share: each rank owns one arena, and every other rank of the host maps it.

An arena is a sparse file without a name (``memfd_create``), as long as all that it may ever hold. Peers open it through
``/proc/<pid>/fd``. Where that is forbidden it is a temporary file, unlinked as soon as all peers have mapped it. Either
way the kernel frees it with the last process, however that ends. Space is reserved with ``posix_fallocate`` before it is
touched, because a page that does not fit is a SIGBUS and no error.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.errors import RankError

PAGE = mmap.PAGESIZE
KEEP_BYTES = 256 << 20
"""Free blocks up to this many bytes keep their pages for the next use; above, the pages go back to the system."""
MAX_VIEWS = 4096
_MOST_ADDRESSES = 1 << 46  # for the arenas of all ranks together; a process has 2**47


@dataclass(frozen=True)
class ArenaHandle:
    """How a peer finds an arena: the file ``path``, which must be the one that ``device`` and ``inode`` name."""

    path: str
    device: int
    inode: int
    size: int


class Mapping:
    """The arena of any rank, mapped. ``words`` are its int64, ``address`` is where it begins in this process."""

    def __init__(self, file: int, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(file, size)
        self.memory.madvise(mmap.MADV_DONTDUMP)  # a core dump would hold the arenas once per rank
        self.words = memoryview(self.memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._typed: dict[torch.dtype, Tensor] = {}
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @classmethod
    def of_peer(cls, handle: ArenaHandle) -> Mapping:
        """Map the arena of another process; OSError where that is not allowed or the file is another one."""
        file = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(file)
            if (found.st_dev, found.st_ino) != (handle.device, handle.inode):
                raise OSError(f"{handle.path} is another file than the one announced")
            return cls(file, handle.size)
        finally:
            os.close(file)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The flat tensor of ``numel`` elements at byte ``offset``, a multiple of the element size."""
        key = (offset, numel, dtype)
        found = self._views.get(key)
        if found is None:
            typed = self._typed.get(dtype)
            if typed is None:
                typed = self._typed[dtype] = torch.frombuffer(self.memory, dtype=dtype)
            first = offset // typed.element_size()
            found = typed[first : first + numel]
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[key] = found
        return found


class Arena(Mapping):
    """This rank's own arena, with its allocator: blocks of a few sizes, a list of free blocks for each size."""

    def __init__(self, file: int, size: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file).atexit = False
        super().__init__(file, size)
        self._owner = os.getpid()
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._reserved: dict[int, int] = {}  # offset of a block -> bytes of it that have pages
        self._kept = 0

    def handle(self, path: str | None = None) -> ArenaHandle:
        """How peers find this arena: by ``path``, else through /proc."""
        found = os.fstat(self._file)
        return ArenaHandle(path or f"/proc/{os.getpid()}/fd/{self._file}", found.st_dev, found.st_ino, self.size)

    # -- blocks ----------------------------------------------------------------------------------------

    def take(self, num_bytes: int) -> int:
        """The offset of a block of at least ``num_bytes``, with pages; a multiple of the page size."""
        block = block_size(num_bytes)
        free = self._free.get(block)
        if free:
            offset = free.pop()
            self._kept -= self._reserved[offset]
        else:
            offset = self._end
            if offset + block > self.size:
                raise RankError(
                    f"the shared memory of this rank is full: {self._end} of {self.size} bytes; use comm=gloo"
                )
            self._end += block
        if self._reserved.setdefault(offset, 0) < num_bytes:
            self._reserve(offset, num_bytes)
        return offset

    def give(self, offset: int, num_bytes: int) -> None:
        """Give a block of ``take(num_bytes)`` back."""
        held = self._reserved[offset]
        if self._kept + held > KEEP_BYTES:
            self.memory.madvise(mmap.MADV_REMOVE, offset, _pages(held))
            held = self._reserved[offset] = 0
        self._kept += held
        self._free.setdefault(block_size(num_bytes), []).append(offset)

    def _reserve(self, offset: int, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self._file, offset, _pages(num_bytes))
        except OSError as error:
            raise RankError(
                f"no room for {num_bytes} bytes of shared memory: {error.strerror}; free memory (or enlarge /dev/shm, if "
                "it is full), use smaller buckets or comm=gloo"
            ) from error
        self._reserved[offset] = num_bytes

    # -- tensors ---------------------------------------------------------------------------------------

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat tensor in the arena; its block is given back when no tensor uses it any more."""
        if size == 0:
            return torch.empty(0, dtype=dtype)
        num_bytes = size * dtype.itemsize
        offset = self.take(num_bytes)
        window = memoryview(self.memory)[offset : offset + num_bytes]
        weakref.finalize(window, self._drop, offset, num_bytes).atexit = False
        return torch.frombuffer(window, dtype=dtype)

    def _drop(self, offset: int, num_bytes: int) -> None:
        if os.getpid() == self._owner:  # a forked child must not free what its parent uses
            self.give(offset, num_bytes)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where a contiguous tensor lies in the arena, or None if it does not."""
        offset = tensor.data_ptr() - self.address
        return offset if 0 <= offset < self.size else None


@functools.lru_cache(4096)
def block_size(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages and to one of eight sizes per power of two."""
    step = max(PAGE, 1 << max(0, num_bytes.bit_length() - 4))
    return max(step, -(-num_bytes // step) * step)


def memory_arena(num_ranks: int) -> Arena:
    """An arena without a name, for one of ``num_ranks`` ranks of this host."""
    return _sized(os.memfd_create("shardwright", os.MFD_CLOEXEC), num_ranks)


def file_arena(num_ranks: int) -> tuple[Arena, str]:
    """An arena in a temporary file and its path, in /dev/shm if possible; the caller unlinks it."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None
    file, path = tempfile.mkstemp(prefix="shardwright-", dir=folder)
    try:
        return _sized(file, num_ranks), path
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _sized(file: int, num_ranks: int) -> Arena:
    """The arena in an empty file, made as long as the machine's memory will ever allow."""
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    size = min(4 * total, _MOST_ADDRESSES // num_ranks) // PAGE * PAGE
    try:
        os.ftruncate(file, size)
    except OSError:
        os.close(file)
        raise
    return Arena(file, size)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
