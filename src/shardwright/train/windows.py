"""From an indexed dataset to windows: the token stream cut, or whole conversations packed, each window one sample.

``S`` is the tokens of a window (``seq_len``). Every dataset is addressed by a number; nothing here has a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwright.errors import DataError
from shardwright.train.indexed import IndexedDataset

IGNORE = -100  # the target of a token that has no next token to predict

_WORD = (1 << 64) - 1
_FEISTEL_ROUNDS = 6
_LOOKED_AT = 1000

Int64Array = npt.NDArray[np.int64]


def mix(*values: int) -> int:
    """A 64-bit hash of integers, the same on every machine and version (splitmix64 steps)."""
    state = 0
    for value in values:
        state = (state ^ (value & _WORD)) + 0x9E3779B97F4A7C15 & _WORD
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state


def shuffled(index: int, size: int, key: int) -> int:
    """Where ``index`` goes in the permutation of ``range(size)`` that ``key`` names.

    A Feistel network over the next power of four, walked until it lands inside: no table, so that an epoch of a
    billion windows costs no memory, and no dependence on a random generator's version.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for turn in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (mix(key, turn, right) & low)
        index = left << half | right
        if index < size:
            return index


@dataclass(frozen=True, eq=False)
class Window:
    """One sample. ``targets[i]`` is the token after ``tokens[i]`` in the stream, or ``IGNORE`` where there is none.

    ``lengths`` are the document segments (their sum is S): attention must stay inside one. ``positions`` restart at
    each segment, which alone isolates nothing.
    """

    tokens: Int64Array  # (S,)
    targets: Int64Array  # (S,)
    positions: Int64Array  # (S,)
    lengths: tuple[int, ...]


class WindowDataset:
    """The token stream of one dataset, cut in windows.

    A last window that is not full is dropped in training and kept in evaluation; a dataset shorter than one window is
    one short window. With ``cross_documents`` the stream counts as one document. ``vocab_size`` makes a token outside
    the model's vocabulary a DataError instead of a wrong lookup.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        seq_len: int,
        seed: int = 0,
        *,
        cross_documents: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        if seq_len < 1:
            raise DataError(f"seq_len={seq_len} is not positive; give the tokens of one sequence, for instance 256")
        if indexed.num_tokens < 2:
            raise DataError(
                f"{indexed.prefix} has {indexed.num_tokens} tokens, at least 2 are needed to predict one; "
                "give more text or another split"
            )
        self.indexed = indexed
        self.seq_len = seq_len
        self.seed = seed
        self.cross_documents = cross_documents
        self.vocab_size = vocab_size
        # The last token of the stream has no target, so it never gets a window of its own.
        self.num_eval_windows = -(-(indexed.num_tokens - 1) // seq_len)
        self.num_windows = max(1, min(indexed.num_tokens // seq_len, self.num_eval_windows))

    def window(self, index: int) -> Window:
        """Training sample ``index`` >= 0: epoch ``index // num_windows`` in that epoch's own order."""
        epoch, place = divmod(index, self.num_windows)
        return self.cut(shuffled(place, self.num_windows, mix(self.seed, epoch)))

    def cut(self, place: int) -> Window:
        """Window ``place`` of the stream, unshuffled; ``0 <= place < num_eval_windows``, the last may be short."""
        if not 0 <= place < self.num_eval_windows:
            raise IndexError(f"window {place} of {self.num_eval_windows}")
        start = place * self.seq_len
        stop = min(start + self.seq_len, self.indexed.num_tokens)
        # One token more than the window: the shift to targets is made on the stream, before anything is cut.
        stream = self.indexed.tokens(start, min(stop + 1, self.indexed.num_tokens)).astype(np.int64)
        self._check_vocabulary(stream)
        size = stop - start
        targets = np.full(size, IGNORE, dtype=np.int64)
        targets[: len(stream) - 1] = stream[1:]
        ends = self._document_ends(start, stop)
        targets[ends - 1] = IGNORE
        begins = np.concatenate([[0], ends[ends < size]])
        lengths = np.diff(begins, append=size)
        positions = np.arange(size, dtype=np.int64) - np.repeat(begins, lengths)
        return Window(stream[:size], targets, positions, tuple(int(length) for length in lengths))

    def _document_ends(self, start: int, stop: int) -> Int64Array:
        """Where documents end in tokens ``start`` to ``stop``, counted from ``start``: each in 1 .. stop - start."""
        if self.cross_documents:
            return np.empty(0, dtype=np.int64)
        offsets = self.indexed.document_offsets
        first, last = np.searchsorted(offsets, [start, stop], side="right")
        return np.unique(offsets[first:last]) - start

    def _check_vocabulary(self, tokens: Int64Array) -> None:
        if self.vocab_size is None:
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"{self.indexed.prefix} holds token {high if low >= 0 else low}, the model's vocabulary is "
                f"{self.vocab_size}; set vocab_size to the tokenizer's or tokenize the text again"
            )


class ConversationDataset(WindowDataset):
    """Whole conversations packed into windows, in their order (next fit); only tokens of answers are predicted.

    ``answers`` has a 1 for each token of an answer and a 0 for every other, in the same documents. What is longer than a
    window loses its end. What a window has left is padding: a segment of its own without targets.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        answers: IndexedDataset,
        seq_len: int,
        seed: int = 0,
        *,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(indexed, seq_len, seed, vocab_size=vocab_size)
        if not np.array_equal(indexed.document_offsets, answers.document_offsets):
            raise DataError(f"{answers.prefix} marks other documents than {indexed.prefix} has; tokenize the text again")
        self.answers = answers
        sizes = np.minimum(np.diff(indexed.document_offsets), seq_len)
        self.num_cut = int(np.count_nonzero(np.diff(indexed.document_offsets) > seq_len))
        if self.num_cut and not any(map(self._answered, range(min(len(indexed), _LOOKED_AT)))):
            raise DataError(
                f"no conversation of {indexed.prefix} comes to an answer within seq_len={seq_len} tokens; use a longer seq_len"
            )
        self._bounds = _next_fit(sizes, seq_len)
        self.num_windows = self.num_eval_windows = len(self._bounds) - 1

    def _answered(self, document: int) -> bool:
        """Whether a conversation has a token to predict before it is cut."""
        return bool(self.answers.document(document)[1 : self.seq_len + 1].any())

    def cut(self, place: int) -> Window:
        """Window ``place``, unshuffled, always of ``seq_len`` tokens."""
        if not 0 <= place < self.num_windows:
            raise IndexError(f"window {place} of {self.num_windows}")
        tokens = np.zeros(self.seq_len, dtype=np.int64)
        targets = np.full(self.seq_len, IGNORE, dtype=np.int64)
        positions = np.zeros(self.seq_len, dtype=np.int64)
        lengths, end = list[int](), 0
        for document in range(self._bounds[place], self._bounds[place + 1]):
            stream = self.indexed.document(document)[: self.seq_len + 1].astype(np.int64)
            counts = self.answers.document(document)[: self.seq_len + 1] > 0
            size = min(len(stream), self.seq_len)
            if size:
                part = slice(end, end + size)
                tokens[part], positions[part] = stream[:size], np.arange(size)
                targets[end : end + len(stream) - 1] = np.where(counts[1:], stream[1:], IGNORE)
                lengths, end = [*lengths, size], end + size
        self._check_vocabulary(tokens)
        if end < self.seq_len:
            lengths.append(self.seq_len - end)
            positions[end:] = np.arange(self.seq_len - end)
        return Window(tokens, targets, positions, tuple(lengths))


def _next_fit(sizes: Int64Array, room: int) -> list[int]:
    """Where windows begin: each takes documents in their order as long as they fit; ends with their number."""
    filled = np.concatenate([[0], np.cumsum(sizes)])
    bounds = [0]
    while bounds[-1] < len(sizes):
        bounds.append(int(np.searchsorted(filled, filled[bounds[-1]] + room, side="right")) - 1)
    return bounds
