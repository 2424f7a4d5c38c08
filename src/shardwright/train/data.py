"""From an indexed dataset to the micro-batches of a step, each sample addressed by one number.

Token stream -> windows of ``seq_len`` -> a seeded order per epoch -> a weighted blend of sources -> samples 0, 1, ...
Step s takes samples ``first_sample + [0, global_batch)``, whatever the data-parallel size, so a run that resumes with
another layout or batch size continues at the very next sample. Nothing here has state that a checkpoint must hold
beyond the number of samples consumed.

Shapes: ``S`` tokens of a window (``seq_len``), ``T`` tokens of a micro-batch (its windows, packed one after another).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from shardwright.errors import DataError
from shardwright.train.indexed import IndexedDataset, idx_path
from shardwright.train.text import load_dataset_info

IGNORE = -100  # the target of a token that has no next token to predict

_WORD = (1 << 64) - 1
_FEISTEL_ROUNDS = 6

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


class Blend:
    """Several sources merged by weight into one endless list of samples.

    Sample k of a source with normalised weight w is due at time (k + 1/2) / w, and samples are ordered by that time
    (ties: the earlier source). So the first N samples never depend on how many follow, and with two sources each has
    its share of every prefix within one sample. The arithmetic is exact: weights count as the decimals they print as.
    """

    def __init__(self, sources: Sequence[tuple[WindowDataset, float]]) -> None:
        if not sources:
            raise DataError("no data sources; give at least one dataset")
        if len({dataset.seq_len for dataset, _ in sources}) > 1:
            raise DataError(f"sources have sequence lengths {[dataset.seq_len for dataset, _ in sources]}; use one")
        for dataset, weight in sources:
            if not (math.isfinite(weight) and weight > 0):
                raise DataError(
                    f"weight {weight} of {dataset.indexed.prefix} is not a positive number; weights are shares of the "
                    "samples, for instance 0.7 and 0.3; leave out a source that is not wanted"
                )
        self.datasets = tuple(dataset for dataset, _ in sources)
        self.seq_len = self.datasets[0].seq_len
        exact = [Fraction(str(weight)) for _, weight in sources]
        common = math.lcm(*(weight.denominator for weight in exact))
        parts = [int(weight * common) for weight in exact]
        divisor = math.gcd(*parts)
        self._parts = tuple(part // divisor for part in parts)
        self._total = sum(self._parts)

    @property
    def weights(self) -> tuple[float, ...]:
        """Normalised: they sum to 1."""
        return tuple(part / self._total for part in self._parts)

    def locate(self, sample: int) -> tuple[int, int]:
        """Source of global sample ``sample`` >= 0, and the sample's number within that source."""
        for source, part in enumerate(self._parts):
            index = sample * part // self._total
            rank = self._rank(source, index)
            while rank > sample and index > 0:
                index -= 1
                rank = self._rank(source, index)
            while rank < sample:
                index += 1
                rank = self._rank(source, index)
            if rank == sample:
                return source, index
        raise AssertionError(f"sample {sample} belongs to no source")

    def _rank(self, source: int, index: int) -> int:
        """Place in the merged order of sample ``index`` of ``source``: how many samples are due before it."""
        due = 2 * index + 1  # over 2 * part; sample j of another source is due at (2 j + 1) / (2 * other part)
        before = index
        for other, part in enumerate(self._parts):
            if other == source:
                continue
            # Count the j >= 0 with (2 j + 1) * own part < due * part, or equal where the other source goes first.
            limit = due * part + (1 if other < source else 0)
            before += -((self._parts[source] - limit) // (2 * self._parts[source]))
        return before

    def window(self, sample: int) -> Window:
        """The window of global sample ``sample``."""
        source, index = self.locate(sample)
        return self.datasets[source].window(index)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Windows packed one after another, on the host until :meth:`to`.

    A rank or micro-batch without samples is one token without a target (``num_valid`` 0, no ``samples``), so that the
    model runs and every rank takes part in every collective.
    """

    tokens: torch.Tensor  # (T,) int64
    targets: torch.Tensor  # (T,) int64, IGNORE where there is none
    positions: torch.Tensor  # (T,) int64, restart at each document segment
    token_index: torch.Tensor  # (T,) int64, sample * seq_len + place: the same number in every layout; -1: padding
    lengths: tuple[int, ...]  # document segments, sum T
    num_valid: int  # targets that count, known on the host
    samples: tuple[int, ...]
    padding: int = 0  # tokens at the end that are no data: the last segment

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on ``device``; from pinned memory the copies do not block the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """The same in page-locked memory (needs CUDA)."""
        return self._map(torch.Tensor.pin_memory)

    def padded(self, multiple: int) -> MicroBatch:
        """With as many tokens as a multiple of ``multiple``: the padding is a segment of its own and never counts."""
        extra = -len(self.tokens) % multiple
        if extra == 0:
            return self

        def grown(tensor: torch.Tensor, value: int) -> torch.Tensor:
            return torch.cat([tensor, tensor.new_full((extra,), value)])

        return dataclasses.replace(
            self,
            tokens=grown(self.tokens, 0),
            targets=grown(self.targets, IGNORE),
            positions=grown(self.positions, 0),
            token_index=grown(self.token_index, -1),
            lengths=(*self.lengths, extra),
            padding=extra,
        )

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        return dataclasses.replace(
            self,
            tokens=change(self.tokens),
            targets=change(self.targets),
            positions=change(self.positions),
            token_index=change(self.token_index),
        )


def collate(windows: Sequence[Window], sample_ids: Sequence[int], seq_len: int) -> MicroBatch:
    """Pack windows of at most ``seq_len`` tokens; none at all gives the one-token micro-batch without targets."""
    assert len(windows) == len(sample_ids)
    if not windows:
        zero = torch.zeros(1, dtype=torch.int64)
        return MicroBatch(zero, torch.full_like(zero, IGNORE), zero.clone(), zero.clone(), (1,), 0, ())
    targets = np.concatenate([window.targets for window in windows])
    index = [
        np.arange(len(window.tokens), dtype=np.int64) + sample * seq_len
        for window, sample in zip(windows, sample_ids, strict=True)
    ]
    return MicroBatch(
        tokens=torch.from_numpy(np.concatenate([window.tokens for window in windows])),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(np.concatenate([window.positions for window in windows])),
        token_index=torch.from_numpy(np.concatenate(index)),
        lengths=tuple(length for window in windows for length in window.lengths),
        num_valid=int(np.count_nonzero(targets != IGNORE)),
        samples=tuple(sample_ids),
    )


def _check_batch(micro_batch: int, accumulate: int, dp: int, rank: int) -> None:
    for name, value in (("micro_batch", micro_batch), ("accumulate", accumulate), ("dp", dp)):
        if value < 1:
            raise DataError(f"{name}={value} is not positive; use 1 or more")
    if not 0 <= rank < dp:
        raise DataError(f"data-parallel rank {rank} is outside 0 to {dp - 1}")


@dataclass(frozen=True)
class TrainSampler:
    """Which samples a data-parallel rank takes in a step.

    Step s takes ``start_sample + (s - start_step) * global_batch`` and the ``global_batch`` samples from there. A
    resumed run sets ``start_step`` and ``start_sample`` to what was consumed, counted in samples, so its batch size
    and data-parallel size may differ from before.
    """

    blend: Blend
    micro_batch: int  # sequences
    accumulate: int  # micro-batches of a step on each rank
    dp: int
    rank: int  # 0 .. dp - 1
    start_step: int = 0
    start_sample: int = 0

    def __post_init__(self) -> None:
        _check_batch(self.micro_batch, self.accumulate, self.dp, self.rank)

    @property
    def global_batch(self) -> int:
        """Sequences of one step over all ranks."""
        return self.dp * self.micro_batch * self.accumulate

    def first_sample(self, step: int) -> int:
        """Samples consumed before ``step`` >= ``start_step``; a checkpoint after step s has ``first_sample(s + 1)``."""
        if step < self.start_step:
            raise DataError(f"step {step} is before the first step {self.start_step} of this run")
        return self.start_sample + (step - self.start_step) * self.global_batch

    def sample_ids(self, step: int, micro: int) -> range:
        """Samples of micro-batch ``micro`` on this rank; micro-batch by micro-batch, the ranks lie side by side."""
        assert 0 <= micro < self.accumulate
        first = self.first_sample(step) + (micro * self.dp + self.rank) * self.micro_batch
        return range(first, first + self.micro_batch)

    def batches(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of ``step``, in the order they are run."""
        return [
            collate([self.blend.window(sample) for sample in ids], ids, self.blend.seq_len)
            for ids in (self.sample_ids(step, micro) for micro in range(self.accumulate))
        ]


@dataclass(frozen=True)
class EvalSampler:
    """Every window of every dataset once, the short last ones too, without shuffling.

    All ranks have the same number of batches; where samples run out a rank gets a micro-batch without targets, never a
    repeated sample. ``max_windows`` takes that many, spread evenly.
    """

    datasets: Sequence[WindowDataset]
    micro_batch: int
    dp: int
    rank: int
    max_windows: int | None = None

    def __post_init__(self) -> None:
        _check_batch(self.micro_batch, 1, self.dp, self.rank)
        if not self.datasets:
            raise DataError("no datasets to evaluate on; give at least one")
        if self.max_windows is not None and self.max_windows < 1:
            raise DataError(f"max_windows={self.max_windows} is not positive; use 1 or more, or leave it out for all")

    @property
    def num_windows(self) -> int:
        """Windows of all datasets together."""
        return sum(dataset.num_eval_windows for dataset in self.datasets)

    @property
    def num_samples(self) -> int:
        """Windows that are evaluated."""
        return self.num_windows if self.max_windows is None else min(self.max_windows, self.num_windows)

    def __len__(self) -> int:
        """Batches, the same on every rank."""
        return -(-self.num_samples // (self.micro_batch * self.dp))

    def batch(self, index: int) -> MicroBatch:
        """This rank's batch ``index``; its ``samples`` are window numbers over all datasets in a row."""
        first = (index * self.dp + self.rank) * self.micro_batch
        places = range(min(first, self.num_samples), min(first + self.micro_batch, self.num_samples))
        samples = [place * self.num_windows // self.num_samples for place in places]
        return collate([self._window(sample) for sample in samples], samples, self.datasets[0].seq_len)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self.batch(index) for index in range(len(self)))

    def _window(self, sample: int) -> Window:
        for dataset in self.datasets:
            if sample < dataset.num_eval_windows:
                return dataset.cut(sample)
            sample -= dataset.num_eval_windows
        raise AssertionError("window beyond the last dataset")


class Prefetcher:
    """Makes the batches of coming steps in background threads, in step order.

    ``make`` must be safe to call from several threads when ``workers`` > 1. ``depth`` is how many steps are in
    preparation or ready beside the one in use.
    """

    def __init__(
        self,
        make: Callable[[int], list[MicroBatch]],
        start_step: int,
        depth: int = 2,
        workers: int = 1,
        pin: bool = False,
    ) -> None:
        if depth < 1 or workers < 1:
            raise DataError(f"prefetch depth {depth} and workers {workers} must both be at least 1")
        self._make = make
        self._pin = pin
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="prefetch")
        self._next_step = start_step
        self._pending: deque[Future[list[MicroBatch]]] = deque()
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        self._pending.append(self._pool.submit(self._prepare, self._next_step))
        self._next_step += 1

    def _prepare(self, step: int) -> list[MicroBatch]:
        batches = self._make(step)
        return [batch.pin_memory() for batch in batches] if self._pin else batches

    def next(self) -> tuple[list[MicroBatch], float]:
        """The next step's micro-batches and the seconds waited for them; a worker's exception is raised here."""
        future = self._pending.popleft()
        self._submit()
        begin = time.perf_counter()
        batches = future.result()
        return batches, time.perf_counter() - begin

    def close(self) -> None:
        """Drop what is pending. Does not wait for a step that a worker is in the middle of."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_blend(
    paths_with_weights: Sequence[tuple[Path | str, float]],
    split: Literal["train", "valid"],
    seq_len: int,
    seed: int,
    *,
    cross_documents: bool = False,
    vocab_size: int | None = None,
) -> Blend:
    """Open datasets as one blend. A path is a folder made by ``tokenize``, of which ``split`` is taken, or the prefix
    of a Megatron pair, which is taken as it is: list a separate prefix for validation."""
    return Blend(
        [
            (
                WindowDataset(
                    _open_split(Path(path), split),
                    seq_len,
                    mix(seed, place) if place else seed,
                    cross_documents=cross_documents,
                    vocab_size=vocab_size,
                ),
                weight,
            )
            for place, (path, weight) in enumerate(paths_with_weights)
        ]
    )


def _open_split(path: Path, split: str) -> IndexedDataset:
    if path.is_dir():
        info = load_dataset_info(path)
        if split == "valid" and info.valid_tokens == 0:
            raise DataError(
                f"{path} has no validation part (of {info.documents} documents); tokenize with a larger valid_fraction "
                "or more text, or evaluate on another dataset"
            )
        return IndexedDataset(path / split)
    if not path.exists() and not idx_path(path).exists():
        raise DataError(
            f"no dataset at {path}: neither a folder made by `shardwright tokenize` nor a Megatron pair {path}.bin/.idx"
        )
    return IndexedDataset(path)
