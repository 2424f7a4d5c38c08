"""Who holds which tokens under context parallelism, and which rectangles of attention follow from it. No torch.

Notation: T tokens of the padded micro-batch, c ranks of cp, t = T/c tokens of a rank, documents d (the segments packed in
T). A *split* gives every rank t tokens, as ranges in ascending order; a rank's rows are its ranges one after another. Since
rows ascend, the part of a document on one rank is one run of rows, causal in itself, and what another rank holds before a
range of it is a prefix of that rank's run: a full rectangle. So causal attention inside documents needs no mask, whatever
the split.

Zigzag (chunks i and 2c-1-i of 2c): Llama 3 (Grattafiori et al. 2024, section 3.3.2); the ring: Liu et al. 2023, Brandon et
al. 2023 for the balance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

Range = tuple[int, int]
"""First, and one past the last."""

GOOD_BALANCE = 1.05
"""Of two splits whose balance differs by less than this factor, the one with fewer cuts is better."""


@dataclass(frozen=True)
class TokenSplit:
    """``ranges[rank]``: the global tokens of each rank, ascending and disjoint, as many for each rank."""

    name: str
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def size(self) -> int:
        return len(self.ranges)

    @property
    def num_ranges(self) -> int:
        return sum(len(ranges) for ranges in self.ranges)


@dataclass(frozen=True)
class Piece:
    """Query rows ``q`` of a rank meet key rows ``kv`` of a block: all of them, or (``causal``) those up to their own."""

    q: Range
    kv: Range
    causal: bool

    @property
    def pairs(self) -> int:
        """Scores that count."""
        rows, columns = self.q[1] - self.q[0], self.kv[1] - self.kv[0]
        return rows * (rows + 1) // 2 if self.causal else rows * columns


@dataclass(frozen=True)
class _Run:
    """The tokens of one document on one rank: places inside the document, and the first row on the rank."""

    places: tuple[Range, ...]
    row: int

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.places)

    def before(self, place: int) -> int:
        """Rows that lie before ``place`` in the document."""
        return sum(min(stop, place) - start for start, stop in self.places if start < place)


@dataclass(frozen=True)
class Segments:
    """Documents of ``lengths`` tokens under ``split``. The last ``padding`` tokens, documents of their own, attend to nothing.

    Step s of ``split.size`` steps is what a rank computes with the keys and values of rank ``rank - s`` on the ring.

    >>> segments = Segments((4, 12), zigzag(16, 2))
    >>> segments.pieces(0, 1)  # rows 4 to 8 of rank 0 (tokens 12 to 16) see all that rank 1 has of the second document
    (Piece(q=(4, 8), kv=(0, 8), causal=False),)
    >>> segments.work
    (52, 36)
    """

    lengths: tuple[int, ...]
    split: TokenSplit
    padding: int = 0

    def pieces(self, rank: int, step: int) -> tuple[Piece, ...]:
        """The rectangles of ``rank`` in ring step ``step``, in its own rows and those of the block's rank."""
        mine, other = self._runs[rank], self._runs[(rank - step) % self.split.size]
        if step == 0:
            spans = [(run.row, run.row + run.num_rows) for run in mine.values()]
            return tuple(Piece(span, span, causal=True) for span in spans)
        return tuple(piece for document in mine if document in other for piece in _full(mine[document], other[document]))

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Scores that each rank computes in all steps."""
        pairs = [0] * self.split.size
        for rank, runs in enumerate(self._runs):
            for run in runs.values():
                pairs[rank] += sum(_causal_pairs(*places) for places in run.places)
        return tuple(pairs)

    @property
    def balance(self) -> float:
        """Work of the busiest rank over the mean; 1 is even."""
        total = sum(self.work)
        return max(self.work) * self.split.size / total if total else 1.0

    @property
    def critical_work(self) -> int:
        """Scores on the longest path when each ring step waits for its busiest rank."""
        ranks = range(self.split.size)
        return sum(max(sum(piece.pairs for piece in self.pieces(rank, step)) for rank in ranks) for step in ranks)

    @cached_property
    def _runs(self) -> list[dict[int, _Run]]:
        """For each rank: document -> its run."""
        ends = list(accumulate(self.lengths))
        real = ends[-1] - self.padding if ends else 0
        found: list[dict[int, _Run]] = []
        for ranges in self.split.ranges:
            places: dict[int, list[Range]] = {}
            rows: dict[int, int] = {}
            row, document = 0, 0
            for start, stop in ranges:
                while start < min(stop, real):
                    while ends[document] <= start:
                        document += 1
                    first, end = ends[document] - self.lengths[document], min(stop, ends[document])
                    places.setdefault(document, []).append((start - first, end - first))
                    rows.setdefault(document, row)
                    row, start = row + end - start, end
                row += max(0, stop - start)
            found.append({key: _Run(tuple(value), rows[key]) for key, value in places.items()})
        return found


def _causal_pairs(start: int, stop: int) -> int:
    """Scores of the places ``start`` to ``stop`` of a document, each with all up to itself."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def _full(mine: _Run, other: _Run) -> Iterator[Piece]:
    """The staircase of one document's rectangles; rows that see the same prefix are taken together."""
    row, begin, seen = mine.row, mine.row, 0
    for start, stop in mine.places:
        prefix = other.before(start)
        if prefix != seen:
            if seen:
                yield Piece((begin, row), (other.row, other.row + seen), causal=False)
            begin, seen = row, prefix
        row += stop - start
    if seen:
        yield Piece((begin, row), (other.row, other.row + seen), causal=False)


# -- splits --------------------------------------------------------------------------------------------------


def contiguous(num_tokens: int, size: int) -> TokenSplit:
    """Rank i has the i-th of ``size`` equal parts; ``size`` divides ``num_tokens``."""
    each = num_tokens // size
    return TokenSplit("contiguous", tuple(((rank * each, (rank + 1) * each),) for rank in range(size)))


def zigzag(num_tokens: int, size: int) -> TokenSplit:
    """Rank i has the chunks i and 2c-1-i of 2c: one early and one late, so that one long document is even work.

    >>> zigzag(8, 2).ranges
    (((0, 2), (6, 8)), ((2, 6),))
    """
    each = num_tokens // (2 * size)
    pairs = [((rank, rank + 1), (2 * size - 1 - rank, 2 * size - rank)) for rank in range(size)]
    ranges = [[(start * each, stop * each) for start, stop in pair] for pair in pairs]
    return TokenSplit("zigzag", tuple(_joined(rank) for rank in ranges))


def by_work(lengths: Sequence[int], size: int, whole_below: int) -> TokenSplit:
    """Documents of at least ``whole_below`` tokens are zigzagged one by one; shorter ones stay whole on the rank with least
    work that has room. What a rank then has too much goes to those that have too little.
    """
    room = [sum(lengths) // size] * size
    work = [0] * size
    held: list[list[Range]] = [[] for _ in range(size)]
    begins = [0, *accumulate(lengths)]

    def give(rank: int, begin: int, start: int, stop: int) -> None:
        if stop > start:
            held[rank].append((begin + start, begin + stop))
            room[rank] -= stop - start
            work[rank] += _causal_pairs(start, stop)

    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length, begin = lengths[document], begins[document]
        if length >= max(whole_below, 2 * size):
            cuts = [part * length // (2 * size) for part in range(2 * size + 1)]
            for part, (start, stop) in enumerate(pairwise(cuts)):
                give(min(part, 2 * size - 1 - part), begin, start, stop)
        else:
            fits = [rank for rank in range(size) if room[rank] >= length]
            best = min(fits, key=lambda rank: work[rank]) if fits else max(range(size), key=lambda rank: room[rank])
            give(best, begin, 0, length)
    _level(held, room)
    return TokenSplit("by work", tuple(_joined(sorted(ranges)) for ranges in held))


def _level(held: list[list[Range]], room: list[int]) -> None:
    """Move the ends of what ranks got last from those with too many tokens to those with too few."""
    moved: list[Range] = []
    for rank, ranges in enumerate(held):
        while room[rank] < 0:
            start, stop = ranges.pop()
            cut = max(start, stop + room[rank])
            moved.append((cut, stop))
            room[rank] += stop - cut
            if cut > start:
                ranges.append((start, cut))
    for rank, ranges in enumerate(held):
        while room[rank] > 0:
            start, stop = moved.pop()
            cut = min(stop, start + room[rank])
            ranges.append((start, cut))
            room[rank] -= cut - start
            if cut < stop:
                moved.append((cut, stop))


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Ascending ranges with neighbours made one."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def choose_split(lengths: Sequence[int], size: int, padding: int = 0) -> TokenSplit:
    """The split of these documents with the fewest cuts whose balance is within `GOOD_BALANCE` of the best that was tried.

    Tried in order of cuts: contiguous, zigzag, and by work with ever shorter documents cut. ``2 * size`` divides the tokens.
    """
    total = sum(lengths)
    tried: list[tuple[float, TokenSplit]] = []
    for split in _candidates(lengths, total, size):
        balance = Segments(tuple(lengths), split, padding).balance
        tried.append((balance, split))
        if balance <= GOOD_BALANCE:
            break
    best = min(balance for balance, _ in tried)
    good = [split for balance, split in tried if balance <= best * GOOD_BALANCE]
    return min(good, key=lambda split: split.num_ranges)


def _candidates(lengths: Sequence[int], total: int, size: int) -> Iterator[TokenSplit]:
    yield contiguous(total, size)
    yield zigzag(total, size)
    for parts in (size, 2 * size, 4 * size):
        yield by_work(lengths, size, total // parts)
    yield by_work(lengths, size, 0)
