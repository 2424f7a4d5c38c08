"""Megatron's indexed format: the bytes, reading back, and what damaged files say."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import DataError
from shardwright.train.indexed import IndexedDataset, IndexedWriter


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 100) -> IndexedDataset:
    with IndexedWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def by_hand(
    prefix: Path,
    sizes: list[int],
    index: list[int],
    tokens: bytes,
    code: int = 8,
    width: int = 2,
    pointers: list[int] | None = None,
    tail: bytes = b"",
) -> None:
    """Write a pair with struct alone, from the description of the format."""
    if pointers is None:
        pointers = [width * sum(sizes[:place]) for place in range(len(sizes))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(index))
    body = struct.pack(f"<{len(sizes)}i{len(pointers)}q{len(index)}q", *sizes, *pointers, *index)
    Path(f"{prefix}.idx").write_bytes(head + body + tail)
    Path(f"{prefix}.bin").write_bytes(tokens)


def test_writer_makes_exactly_the_bytes_of_the_format(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2, 3], [4, 5]])
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<5H", 1, 2, 3, 4, 5)
    by_hand(tmp_path / "hand", [3, 2], [0, 1, 2], b"")
    raw = (tmp_path / "d.idx").read_bytes()
    assert raw == (tmp_path / "hand.idx").read_bytes()
    assert len(raw) == 9 + 8 + 1 + 8 + 8 + 2 * 4 + 2 * 8 + 3 * 8


@pytest.mark.parametrize(("vocab_size", "code", "width"), [(65499, 8, 2), (65500, 4, 4)])
def test_token_type_follows_the_vocabulary(tmp_path: Path, vocab_size: int, code: int, width: int) -> None:
    data = write(tmp_path / "d", [[vocab_size - 1, 0]], vocab_size)
    assert (tmp_path / "d.idx").read_bytes()[17] == code
    assert (tmp_path / "d.bin").stat().st_size == 2 * width
    assert data.document(0).tolist() == [vocab_size - 1, 0]


@pytest.mark.parametrize(
    ("code", "letter", "values"),
    [(1, "B", [0, 255]), (2, "b", [-1, 127]), (3, "h", [-300, 300]), (4, "i", [70000, 1]), (5, "q", [2**40, 1])],
)
def test_every_integer_type_is_read(tmp_path: Path, code: int, letter: str, values: list[int]) -> None:
    by_hand(tmp_path / "d", [2], [0, 1], struct.pack(f"<2{letter}", *values), code, struct.calcsize(letter))
    assert IndexedDataset(tmp_path / "d").document(0).tolist() == values


def test_documents_of_several_sequences_and_empty_ones(tmp_path: Path) -> None:
    by_hand(tmp_path / "d", [2, 1, 3, 1], [0, 2, 2, 3, 4], struct.pack("<7H", *range(10, 17)))
    data = IndexedDataset(tmp_path / "d")
    assert [data.document(place).tolist() for place in range(len(data))] == [[10, 11, 12], [], [13, 14, 15], [16]]
    assert data.document_offsets.tolist() == [0, 3, 3, 6, 7]
    assert data.num_tokens == 7
    assert data.tokens(2, 6).tolist() == [12, 13, 14, 15]
    assert data.sequences(1, 3).tolist() == [12, 13, 14, 15]


def test_sequences_that_lie_in_another_order_in_the_bin(tmp_path: Path) -> None:
    by_hand(tmp_path / "d", [2, 3], [0, 1, 2], struct.pack("<5H", 3, 4, 5, 1, 2), pointers=[6, 0])
    data = IndexedDataset(tmp_path / "d")
    assert data.tokens(0, 5).tolist() == [1, 2, 3, 4, 5]
    assert data.tokens(1, 3).tolist() == [2, 3]
    assert data.document(1).tolist() == [3, 4, 5]
    assert data.tokens(5, 5).tolist() == []


def test_multimodal_modes_after_the_index_are_passed_over(tmp_path: Path) -> None:
    by_hand(tmp_path / "d", [2, 1], [0, 1, 2], struct.pack("<3H", 7, 8, 9), tail=b"\0\1")
    assert IndexedDataset(tmp_path / "d").tokens(0, 3).tolist() == [7, 8, 9]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 299), min_size=0, max_size=6), max_size=6), st.data())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], draw: st.DataObject) -> None:
    data = write(tmp_path_factory.mktemp("round") / "a.b", documents, 300)
    stream = [token for document in documents for token in document]
    assert [data.document(place).tolist() for place in range(len(data))] == documents
    assert data.num_tokens == len(stream)
    start = draw.draw(st.integers(0, len(stream)))
    stop = draw.draw(st.integers(start, len(stream)))
    assert data.tokens(start, stop).tolist() == stream[start:stop]


def test_a_prefix_may_hold_dots_or_be_given_as_one_of_its_files(tmp_path: Path) -> None:
    write(tmp_path / "data.v1", [[1, 2]])
    for name in ("data.v1", "data.v1.bin", "data.v1.idx"):
        assert IndexedDataset(tmp_path / name).num_tokens == 2


def test_out_of_range_is_an_index_error(tmp_path: Path) -> None:
    data = write(tmp_path / "d", [[1, 2]])
    with pytest.raises(IndexError):
        data.document(1)
    with pytest.raises(IndexError):
        data.tokens(0, 3)


def test_nothing_has_its_name_before_finalize_and_abort_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2]])
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "d", 100) as writer:
        writer.add_document([3, 4, 5])
        assert IndexedDataset(tmp_path / "d").tokens(0, 2).tolist() == [1, 2]
        raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]
    assert write(tmp_path / "d", [[6]]).tokens(0, 1).tolist() == [6]


def test_a_kill_between_the_two_files_leaves_no_pair_of_two_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "d", [[1, 2]])
    writer = IndexedWriter(tmp_path / "d", 100)
    writer.add_document([3, 4, 5])
    replace = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        writer.finalize()
    assert "d.idx does not exist" in refused(tmp_path / "d")


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "d", 10)
    for wrong in ([3, 10], [-1, 3]):
        with pytest.raises(DataError, match="do not fit a vocabulary of 10"):
            writer.add_document(np.array(wrong))
    writer.abort()
    with pytest.raises(DataError, match="vocabulary size 0"):
        IndexedWriter(tmp_path / "d", 0)


def refused(prefix: Path) -> str:
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "none.idx does not exist" in refused(tmp_path / "none")
    write(tmp_path / "d", [[1, 2]])
    (tmp_path / "d.bin").unlink()
    assert "d.bin does not exist" in refused(tmp_path / "d")


def test_an_index_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2], [3]])
    whole = (tmp_path / "d.idx").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "d.idx").write_bytes(whole[:size])
        message = refused(tmp_path / "d")
        assert "d.idx" in message and f"{size} bytes" in message
    (tmp_path / "d.idx").write_bytes(whole + b"12345")
    assert "truncated or damaged" in refused(tmp_path / "d")


def test_a_cut_bin_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "d", [[1, 2], [3]])
    for size in (0, 5):
        (tmp_path / "d.bin").write_bytes(b"\0" * size)
        assert f"d.bin has {size} bytes, its index needs 6" in refused(tmp_path / "d")


@pytest.mark.parametrize(
    ("place", "byte", "expected"),
    [
        (0, b"X", "is not an indexed dataset"),
        (9, b"\2", "version 2"),
        (17, b"\x09", "dtype code 9"),
        (17, b"\7", "dtype code 7, which is not a token type"),  # float32
        (34, b"\xff\xff\xff\xff", "negative sizes"),  # sizes[0] = -1
        (58, b"\5", "document index must rise from 0 to 2"),  # document_index[0] = 5
        (66, b"\5", "document index must rise from 0 to 2"),  # document_index[1] = 5 > document_index[2]
    ],
)
def test_a_damaged_index_says_what_is_wrong(tmp_path: Path, place: int, byte: bytes, expected: str) -> None:
    write(tmp_path / "d", [[1, 2], [3]])
    raw = bytearray((tmp_path / "d.idx").read_bytes())
    raw[place : place + len(byte)] = byte
    (tmp_path / "d.idx").write_bytes(raw)
    assert expected in refused(tmp_path / "d")


def test_an_empty_dataset_is_valid(tmp_path: Path) -> None:
    data = write(tmp_path / "d", [])
    assert (len(data), data.num_tokens, data.tokens(0, 0).tolist()) == (0, 0, [])
