"""The board of one rank for one communicator: what it tells the other ranks of the axis, as int64 in its arena.

Only the owner writes. Counters come first: *announced* (verbs whose record and first piece are there), *step* (pieces of
large verbs), *executed* (verbs for which this rank no longer reads its peers), and for each peer the messages *posted* to
it and *consumed* from it. Then a ring of verb records and a ring of message records per peer. A record is written before
the counter that shows it, and is not written again before all readers have counted on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from shardwright.comm.arena import Mapping

ANNOUNCED, STEP, EXECUTED = 0, 8, 16  # a cache line each
_LAST, _ENTERED = 1, 2  # the first word of the last record written, and when that was, in ns
_PEERS = 24
VERBS = 256
"""Verbs of one communicator that may be in flight."""
MAILS = 32
"""Messages from one rank to another that may be in flight."""
_NAME_WORDS = 12
MAX_NAMES = 4096

CHECK, FIRST, SECOND, EXTRA, NAME_LENGTH, NAME = 0, 1, 2, 3, 4, 5
_TABLE = NAME + _NAME_WORDS
_MAIL_WORDS = _TABLE
VERB_NAMES = (
    "barrier",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "gather_objects",
    "send",
)
OP_NAMES = ("", "sum", "avg", "max")
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


_VERB_CODES = {name: code for code, name in enumerate(VERB_NAMES)}
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def encode(verb: str, option: int, dtype: torch.dtype, count: int) -> int:
    """What must be the same on all ranks, in one word. ``option``: the operation, or the root of a broadcast."""
    return _VERB_CODES[verb] | option << 4 | _DTYPE_CODES[dtype] << 16 | count << 24


def decode(check: int) -> str:
    """The call in words."""
    verb, option, count = VERB_NAMES[check & 15], check >> 4 & 0xFFF, check >> 24
    what = f"{count} {str(DTYPES[check >> 16 & 0xFF]).removeprefix('torch.')}"
    match verb:
        case "barrier" | "gather_objects":
            return verb
        case "broadcast":
            return f"broadcast from {option} of {what}"
        case "all_to_all":
            return f"all_to_all with rows of {what}"
        case "all_reduce" | "reduce_scatter":
            return f"{verb} ({OP_NAMES[option]}) of {what}"
    return f"{verb} of {what}"


class Board:
    """The board at ``offset`` of a rank's arena, for an axis of ``size`` ranks."""

    def __init__(self, mapping: Mapping, offset: int, size: int) -> None:
        first = offset // 8
        self.mapping, self.size = mapping, size
        self.words = mapping.words[first : first + num_words(size)]
        self._bytes = memoryview(mapping.memory)[offset : offset + num_words(size) * 8]
        self._verbs = _first_record(size)
        self._names: dict[str, bytes] = {}
        self._mails = self._verbs + VERBS * _verb_words(size)

    def verb(self, number: int) -> int:
        """The first word of the record of a verb."""
        return self._verbs + number % VERBS * _verb_words(self.size)

    def mail(self, peer: int, number: int) -> int:
        """The first word of the record of a message to ``peer``."""
        return self._mails + (peer * MAILS + number % MAILS) * _MAIL_WORDS

    def table(self, record: int) -> Sequence[int]:
        """The words in a verb's record that tell where each peer's data begins, and where the last one's ends."""
        return self.words[record + _TABLE : record + _TABLE + self.size + 1]

    def clear(self) -> None:
        """Make a new board of what was other memory."""
        self._bytes[:] = bytes(len(self._bytes))

    def write(
        self, record: int, check: int, name: str, location: int, extra: int = 0, table: Sequence[int] = ()
    ) -> None:
        """Fill a record; the caller counts afterwards."""
        words = self.words
        words[record + CHECK] = check
        words[record + FIRST] = location
        words[record + EXTRA] = extra
        data = self._names.get(name)
        if data is None:
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            data = self._names[name] = name.encode()[: _NAME_WORDS * 8]
        begin = (record + NAME) * 8
        self._bytes[begin : begin + len(data)] = data
        words[record + NAME_LENGTH] = len(data)
        words[_LAST] = record
        words[_ENTERED] = time.monotonic_ns()
        for peer, value in enumerate(table):
            words[record + _TABLE + peer] = value

    def describe(self, record: int) -> str:
        """The call in a record, for messages."""
        begin = (record + NAME) * 8
        name = bytes(self._bytes[begin : begin + self.words[record + NAME_LENGTH]]).decode(errors="replace")
        return f"{decode(self.words[record + CHECK])} for {name!r}"

    def last(self) -> str:
        """The last call, for messages."""
        if not self.words[_LAST]:
            return "has called nothing yet"
        seconds = (time.monotonic_ns() - self.words[_ENTERED]) / 1e9
        return f"called {self.describe(self.words[_LAST])} {seconds:.1f} s ago and nothing since"


def posted(peer: int) -> int:
    """The counter of messages posted to ``peer``."""
    return _PEERS + peer


def consumed(peer: int, size: int) -> int:
    """The counter of messages consumed from ``peer``."""
    return _PEERS + size + peer


def num_words(size: int) -> int:
    """Words of a board for an axis of ``size`` ranks."""
    return _first_record(size) + VERBS * _verb_words(size) + size * MAILS * _MAIL_WORDS


def _first_record(size: int) -> int:
    return _PEERS + 2 * size


def _verb_words(size: int) -> int:
    return _TABLE + size + 1
