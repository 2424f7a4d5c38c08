"""One tensor made of the parts of several ranks: their pages, mapped one after another, so that a gather copies nothing.

Each rank's part lies in its arena, at the place in a page that it has in the whole. Pages that belong to one rank alone are
mapped from its arena; a page in which one part ends and the next begins is this process's own, and its few bytes are copied
whenever the whole is gathered. What a peer writes to its part is seen at once: who reads the whole must know that no peer
writes.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.comm.arena import PAGE, Mapping

LEAST_BYTES = 2 * PAGE
"""Parts from this size on have a page of their own wherever they begin."""
_MAYMOVE_FIXED = 3  # MREMAP_MAYMOVE | MREMAP_FIXED
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Border:
    """Bytes ``begin`` to ``end`` of the whole, of the part of ``member``, that are copied."""

    member: int
    begin: int
    end: int


class Window:
    """The parts of all ranks of an axis, ``num_bytes`` each; ``places`` are where they begin: (arena, offset).

    Raises OSError where the system does not map pages twice.
    """

    def __init__(self, num_bytes: int, places: Sequence[tuple[Mapping, int]]) -> None:
        self.num_bytes = num_bytes
        self.borders: list[Border] = []
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, -(-num_bytes * len(places) // PAGE) * PAGE, flags=flags)
        self.memory.madvise(mmap.MADV_DONTDUMP)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for member, (mapping, offset) in enumerate(places):
            begin, end = member * num_bytes, (member + 1) * num_bytes
            assert (offset - begin) % PAGE == 0, f"part {member} lies at {offset % PAGE} in its page, not at {begin % PAGE}"
            first, last = -(-begin // PAGE) * PAGE, end // PAGE * PAGE
            if last > first:
                self._map(mapping.address + offset + first - begin, first, last - first)
            pieces = [(begin, first), (last, end)] if last > first else [(begin, end)]
            self.borders += [Border(member, low, high) for low, high in pieces if high > low]

    def _map(self, source: int, begin: int, size: int) -> None:
        """Show the pages at ``source`` at ``begin`` too: an old size of 0 makes a second mapping of shared pages."""
        remap = ctypes.CDLL(None, use_errno=True).mremap
        remap.restype = ctypes.c_void_p
        size_t, pointer = ctypes.c_size_t, ctypes.c_void_p
        remap.argtypes = [pointer, size_t, size_t, ctypes.c_int, pointer]
        if remap(source, 0, size, _MAYMOVE_FIXED, self.address + begin) == _FAILED:
            raise OSError(ctypes.get_errno(), "a peer's pages could not be mapped again")
