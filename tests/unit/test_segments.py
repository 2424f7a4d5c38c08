"""Splits of packed tokens over cp, and the rectangles of attention that follow: against every pair counted one by one."""

from __future__ import annotations

import random
from itertools import product

import pytest

from shardwright.core.segments import Segments, TokenSplit, by_work, choose_split, contiguous, zigzag


def rows_of(split: TokenSplit) -> list[list[int]]:
    """The global tokens of each rank, in the order of its rows."""
    return [[token for start, stop in ranges for token in range(start, stop)] for ranges in split.ranges]


def check(segments: Segments) -> None:
    """Every token on one rank, as many on each; each pair of a document that counts in one piece of one step."""
    documents = [index for index, length in enumerate(segments.lengths) for _ in range(length)]
    real, rows, size = len(documents) - segments.padding, rows_of(segments.split), segments.split.size
    assert sorted(token for rank in rows for token in rank) == list(range(len(documents)))
    assert {len(rank) for rank in rows} == {len(documents) // size}
    for rank, step in product(range(size), range(size)):
        mine, block = rows[rank], rows[(rank - step) % size]
        pieces = segments.pieces(rank, step)
        pairs = [
            (row, key)
            for piece in pieces
            for row, key in product(range(*piece.q), range(*piece.kv))
            if not piece.causal or key - piece.kv[0] <= row - piece.q[0]
        ]
        assert len(pairs) == len(set(pairs)) == sum(piece.pairs for piece in pieces)
        assert set(pairs) == {
            (row, key)
            for row, key in product(range(len(mine)), range(len(block)))
            if block[key] <= mine[row] < real and documents[mine[row]] == documents[block[key]]
        }
    assert segments.work == tuple(
        sum(piece.pairs for step in range(size) for piece in segments.pieces(rank, step)) for rank in range(size)
    )


def test_every_pair_that_counts_is_in_one_piece() -> None:
    rng = random.Random(0)
    for _ in range(60):
        size = rng.choice((1, 2, 3, 4))
        lengths = [rng.randint(1, 14) for _ in range(rng.randint(1, 6))]
        padding = -sum(lengths) % (2 * size)
        lengths += [padding] if padding else []
        total = sum(lengths)
        splits = [contiguous(total, size), zigzag(total, size), by_work(lengths, size, 0), by_work(lengths, size, 8)]
        for split in (*splits, choose_split(lengths, size, padding)):
            check(Segments(tuple(lengths), split, padding))


def test_one_document_zigzagged_is_one_rectangle_a_step() -> None:
    segments = Segments((64,), zigzag(64, 4))
    for rank in range(4):
        pieces = [segments.pieces(rank, step) for step in range(4)]
        assert [len(step) for step in pieces] == [1, 1, 1, 1]
        assert [step[0].causal for step in pieces] == [True, False, False, False]
        assert [step[0].pairs for step in pieces] == [16 * 17 // 2, 128, 128, 128]
    assert segments.balance == 1.0


def test_zigzag_shortens_the_longest_path() -> None:
    """Issue 4.5: at least 1.6 times at 4 ranks; in the limit 3.5 / 2."""
    paths = [Segments((8192,), split(8192, 4)).critical_work for split in (contiguous, zigzag)]
    assert paths[0] / paths[1] == pytest.approx(1.75, rel=1e-3)


def test_documents_of_4_and_12_on_two_ranks() -> None:  # CP-10
    def work(split: TokenSplit) -> tuple[int, ...]:
        return Segments((4, 12), split).work

    assert work(contiguous(16, 2)) == (20, 68)
    assert work(by_work((4, 12), 2, 0)) == (44, 44)
    assert Segments((4, 12), choose_split((4, 12), 2)).balance <= 1.1


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_chosen_split_is_even_where_zigzag_is_not(size: int) -> None:
    rng = random.Random(size)
    for _ in range(10):
        lengths = [min(4000, int(rng.paretovariate(0.7) * 30)) for _ in range(60)]
        padding = -sum(lengths) % (2 * size)
        lengths += [padding] if padding else []
        chosen = Segments(tuple(lengths), choose_split(lengths, size, padding), padding)
        plain = Segments(tuple(lengths), zigzag(sum(lengths), size), padding)
        assert chosen.balance <= min(1.1, 1.05 * plain.balance), (lengths, chosen.split.name)


def test_a_long_document_is_zigzagged_and_equal_ones_are_not_cut() -> None:
    assert choose_split((4096,), 4).name == "zigzag"
    assert choose_split((512,) * 8, 4).name == "contiguous"


def test_nothing_but_padding_has_no_work() -> None:
    segments = Segments((1, 7), zigzag(8, 2), padding=7)
    assert segments.work == (1, 0)
    assert [len(segments.pieces(rank, step)) for rank, step in product(range(2), range(2))] == [1, 0, 0, 0]
    assert Segments((8,), zigzag(8, 2), padding=8).balance == 1.0
