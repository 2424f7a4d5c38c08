"""From an indexed dataset to the micro-batches of a step, each sample addressed by one number.

Windows of ``seq_len`` tokens (`windows`) -> a seeded order per epoch -> a weighted blend of sources -> samples 0, 1, ...
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
import torch

from shardwright.core.segments import Range
from shardwright.errors import DataError
from shardwright.train.indexed import IndexedDataset, idx_path
from shardwright.train.text import answers_prefix, load_dataset_info
from shardwright.train.windows import IGNORE as IGNORE
from shardwright.train.windows import ConversationDataset, Window, WindowDataset, mix


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

    def cut(self, ranges: Sequence[Range]) -> MicroBatch:
        """The tokens in ``ranges`` (first, one past the last), one range after another; what is said of the whole stays."""
        return self._map(lambda tensor: torch.cat([tensor[start:stop] for start, stop in ranges]))

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
            (_open_windows(Path(path), split, seq_len, mix(seed, place) if place else seed, cross_documents, vocab_size), weight)
            for place, (path, weight) in enumerate(paths_with_weights)
        ]
    )


def _open_windows(
    path: Path, split: str, seq_len: int, seed: int, cross_documents: bool, vocab_size: int | None
) -> WindowDataset:
    """Text as a stream that is cut; conversations, whose answers are marked beside, packed whole."""
    indexed = _open_split(path, split)
    answers = answers_prefix(indexed.prefix)
    if not idx_path(answers).exists():
        return WindowDataset(indexed, seq_len, seed, cross_documents=cross_documents, vocab_size=vocab_size)
    if cross_documents:
        raise DataError(f"{path} holds conversations, which attention must not cross; set data.cross_documents=false")
    return ConversationDataset(indexed, IndexedDataset(answers), seq_len, seed, vocab_size=vocab_size)


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
