"""Flight record: the last verbs of each rank in a file that outlives it, and what the files of all ranks say of a hang.

Every verb of a `Mesh` is written when it begins and when it ends, through mapped memory: no system call, and the kernel
keeps what was written when the process is killed. Verbs of one axis are numbered, and messages of one pair, so the same
number is the same verb on every rank. A record is of one run: an older file of the same rank is replaced.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from shardwright.core.axes import RankGrid

VERBS = 256
"""Verbs that a file holds; older ones are written over."""
_HEADER = 1024
_PLACE = 160
"""Bytes for the words that say what the rank is at, at the end of the header."""
_SLOT = struct.Struct("<qqddqi180s")
"""Count of the verb on this rank (from 1), number on its axis, begin, end (0: not yet), bytes, the peer of a message, words."""
_WAITING = _HEADER - _PLACE - 8


@dataclass(frozen=True)
class Entry:
    """One verb. ``peer`` is the world rank of a message's other end, -1 for all of an axis. Times are seconds since 1970."""

    count: int
    axis: str
    verb: str
    name: str
    phase: str
    number: int
    begin: float
    end: float
    num_bytes: int
    peer: int

    @property
    def call(self) -> str:
        """What was called, without which one it is."""
        size = f" ({self.num_bytes} bytes)" if self.num_bytes else ""
        return f"{self.verb} of {self.name!r}{size}"

    def __str__(self) -> str:
        to = f" with rank {self.peer}" if self.peer >= 0 else ""
        return f"{self.call}{to}, number {self.number} over {self.axis} in {self.phase}"


@dataclass(frozen=True)
class Record:
    """One rank's file. ``waiting``: the verb that it stands still for."""

    rank: int
    grid: RankGrid
    place: str
    entries: tuple[Entry, ...]
    waiting: Entry | None

    def group(self, axis: str) -> tuple[int, ...]:
        """The ranks that this one meets over an axis."""
        if axis not in self._groups:
            self._groups[axis] = next(ranks for ranks in self.grid.axis_groups(axis) if self.rank in ranks)
        return self._groups[axis]

    @cached_property
    def _groups(self) -> dict[str, tuple[int, ...]]:
        return {}

    def same(self, entry: Entry, rank: int) -> Entry | None:
        """The verb that meets ``entry`` of rank ``rank``: of the same axis (or pair) and number."""
        if entry.peer < 0:
            return self.numbered(entry.axis, entry.number)
        verb = {"send": "recv", "recv": "send"}.get(entry.verb, "")
        return self._by_number.get((entry.axis, entry.number, rank, verb))

    def numbered(self, axis: str, number: int) -> Entry | None:
        """The verb of that number on an axis, messages aside."""
        return self._by_number.get((axis, number, -1, ""))

    @cached_property
    def _by_number(self) -> dict[tuple[str, int, int, str], Entry]:
        return {(one.axis, one.number, one.peer, one.verb if one.peer >= 0 else ""): one for one in self.entries}


class FlightRecorder:
    """Writes one rank's file. ``grid`` says which ranks meet over each axis. Raises OSError."""

    def __init__(self, folder: Path, rank: int, grid: RankGrid) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = file_of(folder, rank)
        path.unlink(missing_ok=True)
        with path.open("x+b") as file:
            file.truncate(_HEADER + VERBS * _SLOT.size)
            self._memory = mmap.mmap(file.fileno(), 0)
        header = json.dumps({"rank": rank, "grid": asdict(grid)}).encode()  # lists of ranks would grow with the run
        self._memory[: len(header)] = header
        self._count = 0
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._words: dict[tuple[str, str, str, str], bytes] = {}

    def begin(self, axis: str, verb: str, name: str, phase: str, num_bytes: int, peer: int = -1) -> int:
        """A verb begins; its count."""
        self._count += 1
        key = (axis, verb if peer >= 0 else "", peer)
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        words = self._words.get((axis, verb, name, phase))
        if words is None:
            words = self._words[axis, verb, name, phase] = "\0".join((axis, verb, phase, name)).encode()[:180]
        slot = _HEADER + self._count % VERBS * _SLOT.size
        _SLOT.pack_into(self._memory, slot, self._count, number, time.time(), 0.0, num_bytes, peer, words)
        return self._count

    def wait(self, count: int) -> None:
        """The rank stands still for a verb (0: for none)."""
        struct.pack_into("<q", self._memory, _WAITING, count)

    def end(self, count: int) -> None:
        """A verb is done, and the rank goes on."""
        if self._count - count < VERBS:
            struct.pack_into("<d", self._memory, _HEADER + count % VERBS * _SLOT.size + 24, time.time())
        self.wait(0)

    def at(self, place: str) -> None:
        """What the rank is at, in words."""
        self._memory[_HEADER - _PLACE : _HEADER] = place.encode()[:_PLACE].ljust(_PLACE, b"\0")

    def close(self) -> None:
        """Let the memory go; the file stays."""
        self._memory.close()


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank's record is."""
    return folder / f"rank-{rank}.flight"


def read_flight(path: Path) -> Record:
    """One rank's record, also of a rank that is alive. Raises OSError, or ValueError for another file."""
    data = path.read_bytes()
    header = json.loads(data[:_WAITING].rstrip(b"\0"))
    entries = sorted(_entries(data), key=lambda entry: entry.count)
    (count,) = struct.unpack_from("<q", data, _WAITING)
    waiting = next((entry for entry in entries if entry.count == count), None)
    place = data[_HEADER - _PLACE : _HEADER].rstrip(b"\0").decode(errors="replace")
    return Record(header["rank"], RankGrid(**header["grid"]), place, tuple(entries), waiting)


def _entries(data: bytes) -> Iterator[Entry]:
    for slot in range(VERBS):
        count, number, begin, end, num_bytes, peer, words = _SLOT.unpack_from(data, _HEADER + slot * _SLOT.size)
        parts = words.rstrip(b"\0").decode(errors="replace").split("\0")
        if count and len(parts) == 4:
            axis, verb, phase, name = parts
            yield Entry(count, axis, verb, name, phase, number, begin, end, num_bytes, peer)


# -- what they say of a hang -------------------------------------------------------------------------


REPORTERS = 64
"""Ranks that report in a large run: each reads the records of all."""
REPORT = "what the ranks have called last:"
"""Stands before a report in an error."""


@dataclass(frozen=True)
class HangReport:
    """Lines for people. ``differ``: ranks that call different things in the same place; ``late``: who has not come to what
    others wait for, or has left no record; ``states``: what every rank waits for or did last."""

    differ: list[str]
    late: list[str]
    states: list[str]

    @property
    def lines(self) -> list[str]:
        return [*self.differ, *self.late, *self.states]

    def __str__(self) -> str:
        return "\n".join((REPORT, *self.lines))


def reports(rank: int, num_ranks: int) -> bool:
    """Whether a rank that raises reports what all have called."""
    return rank % -(-num_ranks // REPORTERS) == 0


def report_file(folder: Path, rank: int) -> Path:
    """Where a rank that raises writes what the records said then."""
    return folder / f"report-{rank}.txt"


def clear_flight(folder: Path, rank: int) -> None:
    """Remove what a rank of an earlier run left, which would be taken for what this one wrote."""
    for path in (file_of(folder, rank), report_file(folder, rank), *([folder / "report.txt"] if rank == 0 else ())):
        path.unlink(missing_ok=True)


def hang_report(folder: Path, num_ranks: int, now: float | None = None, since: float = 0.0) -> HangReport:
    """What the records of all ranks say: which ranks disagree and how, then what every rank waits for or did last.

    Files that were last changed before ``since`` (seconds since 1970) are an earlier run's and left out.
    """
    now = time.time() if now is None else now
    records: dict[int, Record] = {}
    lines = []
    for rank in range(num_ranks):
        try:
            if file_of(folder, rank).stat().st_ctime < since:
                raise ValueError("the one that is there is of an earlier run")
            records[rank] = read_flight(file_of(folder, rank))
        except (OSError, ValueError, KeyError, TypeError) as error:
            lines.append(f"rank {rank} has left no record ({error})")
    differ = [*_different_calls(records), *_different_messages(records)]
    late = dict.fromkeys(_late(records))
    return HangReport(differ, [*late, *lines], [_state(record, now) for record in records.values()])


def _different_calls(records: Mapping[int, Record]) -> Iterator[str]:
    """For each group the first verb, of those that some rank has not ended, that is not the same on all who have come to it.

    The wrong one may be a rank that has gone on, and a rank that is lost may not have waited: so who waits is not asked."""
    open_: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for record in records.values():
        numbers: dict[str, set[int]] = {}
        for entry in record.entries:
            if not entry.end and entry.peer < 0:
                numbers.setdefault(entry.axis, set()).add(entry.number)
        for axis, some in numbers.items():
            open_.setdefault((axis, record.group(axis)), set()).update(some)
    for (axis, ranks), waited in open_.items():
        for number in sorted(waited):
            calls: dict[str, list[int]] = {}
            for rank in ranks:
                found = records[rank].numbered(axis, number) if rank in records else None
                if found is not None:
                    calls.setdefault(found.call, []).append(rank)
            if len(calls) > 1:
                (call, most), *others = sorted(calls.items(), key=lambda item: -len(item[1]))
                for other, fewer in others:
                    first, second = sorted(((most, call), (fewer, other)))
                    counts = f"; {len(first[0])} ranks have called the one, {len(second[0])} the other" if len(ranks) > 2 else ""
                    what = f"number {number} over {axis}"
                    yield _differ(records, what, (first[0][0], first[1]), (second[0][0], second[1])) + counts
                break


def _different_messages(records: Mapping[int, Record]) -> Iterator[str]:
    """For each pair and direction the first message, of those that are not received yet, that is sent as another one."""
    for record in records.values():
        wrong = set()
        for mine in record.entries:
            other = records.get(mine.peer)
            if mine.end or mine.verb != "recv" or other is None or (mine.axis, mine.peer) in wrong:
                continue
            theirs = other.same(mine, record.rank)
            if theirs is not None and (theirs.name, theirs.num_bytes) != (mine.name, mine.num_bytes):
                wrong.add((mine.axis, mine.peer))
                what = f"message {mine.number} from rank {mine.peer} to rank {record.rank} over {mine.axis}"
                yield _differ(records, what, (mine.peer, theirs.call), (record.rank, mine.call))


def _differ(records: Mapping[int, Record], what: str, first: tuple[int, str], second: tuple[int, str]) -> str:
    parts = [f"{call} on rank {rank} (at {records[rank].place or 'no place'})" for rank, call in (first, second)]
    return f"ranks {first[0]} and {second[0]} differ: {what} is {parts[0]} but {parts[1]}"


def _late(records: Mapping[int, Record]) -> Iterator[str]:
    """Who has not come to what others wait for; a verb of a whole group is looked at once."""
    seen = set()
    for record in records.values():
        mine = record.waiting
        if mine is None:
            continue
        peers = (mine.peer,) if mine.peer >= 0 else record.group(mine.axis)
        if mine.peer < 0:
            if (mine.axis, mine.number, peers) in seen:
                continue
            seen.add((mine.axis, mine.number, peers))
        for peer in peers:
            other = records.get(peer)
            if other is not None and other.same(mine, record.rank) is None:
                yield f"rank {peer} has not come to {mine}; {_doing(other)}"


def _doing(record: Record) -> str:
    if record.waiting is not None:
        return f"it waits in {record.waiting}"
    return f"it is at {record.place}" if record.place else "it is in no verb"


def _state(record: Record, now: float) -> str:
    place = f", at {record.place}" if record.place else ""
    if record.waiting is not None:
        return f"rank {record.rank} has waited {now - record.waiting.begin:.1f} s for {record.waiting}{place}"
    done = [entry for entry in record.entries if entry.end]
    last = f"; its last verb was {done[-1]}, done {now - done[-1].end:.1f} s ago" if done else ""
    return f"rank {record.rank} waits for nobody{place}{last}"
