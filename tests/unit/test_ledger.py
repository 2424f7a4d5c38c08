"""`Ledger`: ring formulas against a simulated ring, sums, differences and the JSON that scripts read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.ledger import PHASES, BucketTiming, Ledger, ring_bytes


class Ring:
    """N ranks in a circle that pass pieces to the right; counts what each sends, and does the arithmetic."""

    def __init__(self, buffers: list[list[float]]) -> None:
        size = len(buffers)
        self.size, self.piece = size, -(-len(buffers[0]) // size)
        padded = [buffer + [0.0] * (self.piece * size - len(buffer)) for buffer in buffers]
        self.pieces = [[b[i * self.piece : (i + 1) * self.piece] for i in range(size)] for b in padded]
        self.sent = [0] * size

    def _shift(self, piece_of: Callable[[int], int], add: bool) -> None:
        moving = [list(self.pieces[rank][piece_of(rank)]) for rank in range(self.size)]
        for rank in range(self.size):
            self.sent[rank] += self.piece
            target, index = (rank + 1) % self.size, piece_of(rank)
            old = self.pieces[target][index]
            summed = [a + b for a, b in zip(old, moving[rank], strict=True)]
            self.pieces[target][index] = summed if add else moving[rank]

    def reduce_scatter(self) -> None:
        """Afterwards rank r holds the sum of piece r + 1."""
        for turn in range(self.size - 1):
            self._shift(lambda rank, turn=turn: (rank - turn) % self.size, add=True)

    def all_gather(self) -> None:
        """Rank r starts with piece r + 1; afterwards all hold all."""
        for turn in range(self.size - 1):
            self._shift(lambda rank, turn=turn: (rank + 1 - turn) % self.size, add=False)


@given(st.integers(2, 7), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_ring_formulas_equal_a_simulated_ring(num_ranks: int, num_elements: int) -> None:
    buffers = [[float(rank * 100 + i) for i in range(num_elements)] for rank in range(num_ranks)]
    total = [sum(column) for column in zip(*buffers, strict=True)]
    ring = Ring(buffers)
    ring.reduce_scatter()
    scattered = list(ring.sent)
    ring.all_gather()
    for rank in range(num_ranks):
        assert [x for piece in ring.pieces[rank] for x in piece][:num_elements] == total
    assert set(scattered) == {ring_bytes("reduce_scatter", num_elements, 1, num_ranks)}
    assert {n - m for n, m in zip(ring.sent, scattered, strict=True)} == {
        ring_bytes("all_gather", num_elements, 1, num_ranks)
    }
    assert set(ring.sent) == {ring_bytes("all_reduce", num_elements, 1, num_ranks)}
    assert ring_bytes("all_reduce", num_elements, 4, num_ranks) == 4 * ring.sent[0]


@given(st.integers(2, 7), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_broadcast_is_what_a_pipelined_ring_sends_on_average(num_ranks: int, num_elements: int) -> None:
    """Piece by piece along the line from the root: all ranks but the last send the whole buffer."""
    padded = -(-num_elements // num_ranks) * num_ranks
    assert ring_bytes("broadcast", num_elements, 2, num_ranks) * num_ranks == (num_ranks - 1) * padded * 2


def test_other_verbs_and_one_rank() -> None:
    assert ring_bytes("send", 10, 4, 2) == 40
    assert ring_bytes("recv", 10, 4, 2) == ring_bytes("barrier", 10, 4, 2) == 0
    assert all(ring_bytes(verb, 10, 4, 1) == 0 for verb in ("all_reduce", "send", "broadcast"))
    with pytest.raises(ValueError, match="no ring formula for 'gossip'"):
        ring_bytes("gossip", 10, 4, 2)


def two_entries() -> Ledger:
    ledger = Ledger()
    ledger.add("reduce", "all_reduce", "dp_cp", "gradients.0", 100, seconds=0.5, exposed_seconds=0.25)
    ledger.add("F", "send", "pp", "activations.0", 8)
    return ledger


def test_equal_messages_are_summed() -> None:
    ledger = two_entries()
    entry = ledger.add("reduce", "all_reduce", "dp_cp", "gradients.0", 100, count=2, seconds=0.5)
    assert (entry.bytes, entry.count, entry.seconds, entry.exposed_seconds) == (200, 3, 1.0, 0.25)
    assert (len(ledger.entries), ledger.total_bytes, ledger.exposed_seconds) == (2, 208, 0.25)


def test_merging_sums_entries_and_keeps_the_largest_memory() -> None:
    first, second = two_entries(), two_entries()
    first.memory, second.memory = {"parameters": 10, "buffers": 3}, {"parameters": 12}
    first.buckets = [BucketTiming("gradients.0", 100, 0.1, 0.2, 0.5, 0.3)]
    second.buckets = [BucketTiming("gradients.0", 100, 0.1, 0.2, 0.4, 0.1)]
    second.add("eval", "all_reduce", "dp_cp", "eval", 7)
    merged = Ledger.merged([first, second])
    assert {entry.key[3]: (entry.bytes, entry.count) for entry in merged.entries.values()} == {
        "gradients.0": (200, 2), "activations.0": (16, 2), "eval": (7, 1),
    }  # fmt: skip
    assert (merged.memory, merged.exposed_seconds) == ({"parameters": 12, "buffers": 3}, 0.5)
    assert merged.exposed_tail == pytest.approx(0.4)
    assert (first.total_bytes, second.total_bytes) == (108, 115)  # the parts are left alone


def test_differences_name_the_message_and_both_numbers() -> None:
    mine, other = two_entries(), two_entries()
    assert mine.differences(other) == []
    other.add("reduce", "all_reduce", "dp_cp", "gradients.0", 4)
    mine.add("F", "send", "pp", "activations.0", 0)  # the same bytes in more calls
    mine.add("data", "all_reduce", "dp_cp", "tokens", 16)
    assert mine.differences(other) == [
        "F send pp activations.0: 8 B in 2 calls against 8 B in 1 calls",
        "data all_reduce dp_cp tokens: 16 B in 1 calls against 0 B in 0 calls",
        "reduce all_reduce dp_cp gradients.0: 100 B in 1 calls against 104 B in 2 calls",
    ]
    assert len(other.differences(mine)) == 3


def test_json_has_the_names_that_scripts_rely_on() -> None:
    ledger = two_entries()
    ledger.memory["parameters"] = 5
    ledger.buckets.append(BucketTiming("gradients.0", 100, 0.1, 0.2, 0.5, 0.3))
    shown = ledger.to_json()
    first, second = shown["communication"]
    assert set(first) == {
        "axis", "verb", "tensor", "phase", "bytes_per_gpu", "count", "link", "seconds", "exposed_seconds",
    }  # fmt: skip
    assert (first["phase"], second["phase"]) == ("F", "reduce")  # in the order of the step
    assert second["bytes_per_gpu"] == 100
    assert (shown["memory"], shown["total_bytes"], shown["exposed_tail_seconds"]) == ({"parameters": 5}, 108, 0.3)
    assert shown["buckets"][0]["launch"] == 0.2


def test_entries_are_sorted_by_phase_then_by_size() -> None:
    ledger = Ledger()
    for phase in reversed(PHASES):
        ledger.add(phase, "send", "pp", "small", 1)
        ledger.add(phase, "send", "pp", "large", 9)
    ledger.add("unheard-of", "send", "pp", "small", 1)
    entries = ledger.sorted_entries()
    assert [entry.phase for entry in entries[::2]] == [*PHASES, "unheard-of"]
    assert [entry.tensor for entry in entries[:4]] == ["large", "small", "large", "small"]
