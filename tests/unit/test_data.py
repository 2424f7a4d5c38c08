"""Samples by number: windows, epochs, blends, slices of the global batch, evaluation, prefetching."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import DataError
from shardwright.train.data import (
    Blend,
    EvalSampler,
    MicroBatch,
    Prefetcher,
    TrainSampler,
    collate,
    open_blend,
)
from shardwright.train.indexed import IndexedDataset, IndexedWriter
from shardwright.train.text import tokenize
from shardwright.train.tokenizer import train_tokenizer
from shardwright.train.windows import IGNORE, Window, WindowDataset, mix, shuffled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexed")


def indexed(folder: Path, documents: Sequence[Sequence[int]]) -> IndexedDataset:
    prefix = folder / f"d{len(list(folder.iterdir()))}"
    with IndexedWriter(prefix, 1 << 20) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def stream(folder: Path, size: int, seq_len: int, seed: int = 0, first: int = 0) -> WindowDataset:
    """One document of the tokens ``first``, ``first + 1``, ..."""
    return WindowDataset(indexed(folder, [range(first, first + size)]), seq_len, seed)


def blend_of(dataset: WindowDataset) -> Blend:
    return Blend([(dataset, 1.0)])


# ----------------------------------------------------------------------------------------------------------- order


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_shuffled_is_a_permutation(size: int, key: int) -> None:
    assert sorted(shuffled(place, size, key) for place in range(size)) == list(range(size))


def test_shuffled_depends_on_the_key_and_looks_random() -> None:
    orders = [[shuffled(place, 1000, mix(0, epoch)) for place in range(1000)] for epoch in range(20)]
    assert len({tuple(order) for order in orders}) == 20
    for order in orders:
        fixed = sum(place == value for place, value in enumerate(order))
        correlation = float(np.corrcoef(order, range(1000))[0, 1])
        assert fixed < 8 and abs(correlation) < 0.15
    # Each of the 3! orders of three windows comes up about equally often.
    counts = Counter(tuple(shuffled(place, 3, mix(7, epoch)) for place in range(3)) for epoch in range(600))
    assert len(counts) == 6 and min(counts.values()) > 60


def test_the_order_never_changes_between_versions() -> None:
    # A resumed run depends on these values; a change here would break the continuation of every old run.
    assert [shuffled(place, 10, mix(3, 1)) for place in range(10)] == [2, 7, 1, 0, 6, 3, 5, 9, 8, 4]
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 from seed 0


# --------------------------------------------------------------------------------------------------------- windows


def test_targets_are_shifted_before_anything_is_cut(folder: Path) -> None:
    """LN-07: tokens 1..8 have 7 targets, however they are cut."""
    data = indexed(folder, [range(1, 9)])
    whole = WindowDataset(data, 8).cut(0)
    assert whole.targets.tolist() == [2, 3, 4, 5, 6, 7, 8, IGNORE]
    halves = np.split(whole.targets, 2)  # two contiguous context-parallel ranks
    assert [int((half != IGNORE).sum()) for half in halves] == [4, 3] and halves[0][-1] == 5
    for seq_len in range(1, 10):
        dataset = WindowDataset(data, seq_len)
        windows = [dataset.cut(place) for place in range(dataset.num_eval_windows)]
        targets = [int(target) for window in windows for target in window.targets if target != IGNORE]
        assert targets == [2, 3, 4, 5, 6, 7, 8]


def test_segments_positions_and_targets_at_document_ends(folder: Path) -> None:
    """CP-04: positions restart, and the segments that attention must respect are given beside them."""
    a, b, c, eos, d, e = 1, 2, 3, 0, 4, 5
    data = indexed(folder, [[a, b, c, eos], [d, e]])
    window = WindowDataset(data, 6).cut(0)
    assert window.tokens.tolist() == [a, b, c, eos, d, e]
    assert window.targets.tolist() == [b, c, eos, IGNORE, e, IGNORE]
    assert window.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert window.lengths == (4, 2)
    crossing = WindowDataset(data, 6, cross_documents=True).cut(0)
    assert crossing.targets.tolist() == [b, c, eos, d, e, IGNORE]
    assert (crossing.positions.tolist(), crossing.lengths) == ([0, 1, 2, 3, 4, 5], (6,))


def test_a_window_that_begins_or_ends_at_a_document_end(folder: Path) -> None:
    data = indexed(folder, [[1, 2, 3, 4], [5, 6], [7, 8]])
    first, second = (WindowDataset(data, 4).cut(place) for place in range(2))
    assert (first.targets.tolist(), first.lengths) == ([2, 3, 4, IGNORE], (4,))
    assert (second.targets.tolist(), second.lengths) == ([6, IGNORE, 8, IGNORE], (2, 2))
    inside = WindowDataset(data, 3).cut(1)
    assert (inside.tokens.tolist(), inside.targets.tolist()) == ([4, 5, 6], [IGNORE, 6, IGNORE])
    assert (inside.lengths, inside.positions.tolist()) == ((1, 2), [0, 0, 1])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 12), st.booleans())
def test_every_window_agrees_with_the_stream(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seq_len: int, cross: bool
) -> None:
    total = sum(sizes)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    documents = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    data = indexed(tmp_path_factory.mktemp("property"), documents)
    if total < 2:
        with pytest.raises(DataError, match="at least 2 are needed"):
            WindowDataset(data, seq_len)
        return
    dataset = WindowDataset(data, seq_len, cross_documents=cross)
    owner = [place for place, size in enumerate(sizes) for _ in range(size)]
    seen: list[int] = []
    for place in range(dataset.num_eval_windows):
        window = dataset.cut(place)
        tokens = window.tokens.tolist()
        seen += tokens
        assert sum(window.lengths) == len(tokens) == len(window.targets) == len(window.positions)
        assert all(length > 0 for length in window.lengths)
        segments = [segment for segment, length in enumerate(window.lengths) for _ in range(length)]
        for here, token in enumerate(tokens):
            same = token + 1 < total and (cross or owner[token + 1] == owner[token])
            assert window.targets[here] == (token + 1 if same else IGNORE)
            restart = here == 0 or not (cross or owner[token] == owner[token - 1])
            assert window.positions[here] == (0 if restart else window.positions[here - 1] + 1)
            assert here == 0 or (segments[here] != segments[here - 1]) == restart
    assert seen in (list(range(total)), list(range(total - 1)))


def test_training_drops_the_short_last_window_and_evaluation_keeps_it(folder: Path) -> None:
    dataset = stream(folder, 11, 4)
    assert (dataset.num_windows, dataset.num_eval_windows) == (2, 3)
    assert sorted(int(dataset.window(place).tokens[0]) for place in range(2)) == [0, 4]
    assert dataset.cut(2).tokens.tolist() == [8, 9, 10]
    with pytest.raises(IndexError):
        dataset.cut(3)
    # 9 tokens in windows of 4: the last token is a target only.
    assert stream(folder, 9, 4).num_eval_windows == 2
    assert stream(folder, 9, 4).cut(1).targets.tolist() == [5, 6, 7, 8]


def test_less_than_one_window_is_a_short_window_and_less_than_two_tokens_an_error(folder: Path) -> None:
    dataset = stream(folder, 3, 8)
    assert (dataset.num_windows, dataset.num_eval_windows) == (1, 1)
    assert dataset.window(5).tokens.tolist() == [0, 1, 2]
    assert dataset.window(5).targets.tolist() == [1, 2, IGNORE]
    with pytest.raises(DataError, match="has 1 tokens, at least 2 are needed"):
        stream(folder, 1, 8)
    with pytest.raises(DataError, match="seq_len=0"):
        stream(folder, 9, 0)


def test_a_token_outside_the_models_vocabulary_is_named(folder: Path) -> None:
    dataset = WindowDataset(indexed(folder, [[1, 2, 9, 3]]), 4, vocab_size=9)
    with pytest.raises(DataError, match=r"holds token 9, the model's vocabulary is 9"):
        dataset.window(0)
    assert WindowDataset(dataset.indexed, 4, vocab_size=10).window(0).tokens.tolist() == [1, 2, 9, 3]


# ---------------------------------------------------------------------------------------------------------- blends


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1.0, 1.0), (3, 1), (0.999, 0.001), (1 / 3, 0.2)])
def test_two_sources_keep_their_shares_in_every_prefix(folder: Path, weights: tuple[float, float]) -> None:
    blend = Blend([(stream(folder, 40, 4), weight) for weight in weights])
    counts = [0, 0]
    for sample in range(2000):
        source, index = blend.locate(sample)
        assert index == counts[source]  # each source in its own order, nothing left out or repeated
        counts[source] += 1
        for place in range(2):
            assert abs(counts[place] - weights[place] / sum(weights) * (sample + 1)) <= 1.0
    assert sum(blend.weights) == pytest.approx(1.0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0.05, 0.1, 0.25, 0.3, 1.0, 2.5, 7.0]), min_size=1, max_size=5))
def test_a_blend_is_the_merge_by_due_time(tmp_path_factory: pytest.TempPathFactory, weights: list[float]) -> None:
    dataset = stream(tmp_path_factory.mktemp("merge"), 40, 4)
    blend = Blend([(dataset, weight) for weight in weights])
    twenty = [round(20 * weight) for weight in weights]  # integers, so that due times compare exactly
    due = sorted(((2 * k + 1) * 2520 * 5 // part, s, k) for s, part in enumerate(twenty) for k in range(200))
    limit = min(199 * sum(twenty) // part for part in twenty) // 2
    exact = all((2520 * 5) % part == 0 for part in twenty)
    assert exact
    assert [blend.locate(sample) for sample in range(limit)] == [(s, k) for _, s, k in due[:limit]]


def test_far_samples_are_found_directly(folder: Path) -> None:
    blend = Blend([(stream(folder, 40, 4), weight) for weight in (0.6, 0.3, 0.1)])
    begin = time.perf_counter()
    found = [blend.locate(sample) for sample in range(10**12, 10**12 + 10)]
    assert time.perf_counter() - begin < 1.0
    assert Counter(source for source, _ in found) == {0: 6, 1: 3, 2: 1}
    assert {source: index // 10**11 for source, index in found} == {0: 6, 1: 3, 2: 1}


def test_a_blend_reads_the_window_it_locates(folder: Path) -> None:
    sources = [stream(folder, 40, 4, seed=1), stream(folder, 40, 4, seed=2, first=1000)]
    blend = Blend([(sources[0], 2.0), (sources[1], 1.0)])
    tokens = [blend.window(sample).tokens.tolist() for sample in range(60)]
    assert sum(window[0] >= 1000 for window in tokens) == 20
    assert [window for window in tokens if window[0] < 1000][:10] == [
        sources[0].window(index).tokens.tolist() for index in range(10)
    ]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_wrong_weights_are_refused(folder: Path, weight: float) -> None:
    with pytest.raises(DataError, match="is not a positive number"):
        Blend([(stream(folder, 40, 4), weight)])


def test_no_sources_or_different_lengths_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="no data sources"):
        Blend([])
    with pytest.raises(DataError, match=r"sequence lengths \[4, 8\]"):
        Blend([(stream(folder, 40, 4), 1), (stream(folder, 40, 8), 1)])


# -------------------------------------------------------------------------------------------------------- training


def ids_of(blend: Blend, step: int, dp: int, micro_batch: int, accumulate: int) -> list[int]:
    samplers = [TrainSampler(blend, micro_batch, accumulate, dp, rank) for rank in range(dp)]
    return [s for sampler in samplers for micro in range(accumulate) for s in sampler.sample_ids(step, micro)]


def test_any_layout_takes_the_same_global_batch(folder: Path) -> None:
    blend = blend_of(stream(folder, 400, 4))
    for step in (0, 3):
        for dp, micro_batch, accumulate in [(1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 4, 1), (6, 1, 2), (12, 1, 1)]:
            assert sorted(ids_of(blend, step, dp, micro_batch, accumulate)) == list(range(12 * step, 12 * step + 12))


def test_a_micro_batch_over_all_ranks_is_contiguous(folder: Path) -> None:
    blend = blend_of(stream(folder, 400, 4))
    samplers = [TrainSampler(blend, 2, 3, 2, rank) for rank in range(2)]
    assert [list(sampler.sample_ids(1, 1)) for sampler in samplers] == [[16, 17], [18, 19]]


def first_tokens(batches: Sequence[MicroBatch], seq_len: int) -> list[int]:
    return [int(token) for batch in batches for token in batch.tokens[::seq_len]]


def test_resume_inside_the_second_epoch_continues_its_order(folder: Path) -> None:
    """CK-12: 10 samples, batch 2, 3 epochs, resume after step 7 of 15."""
    dataset = stream(folder, 41, 4)
    assert dataset.num_windows == 10
    run = TrainSampler(blend_of(dataset), 2, 1, 1, 0)
    steps = [first_tokens(run.batches(step), 4) for step in range(15)]
    epochs = [[token for step in steps[5 * epoch : 5 * epoch + 5] for token in step] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(0, 40, 4)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    resumed = TrainSampler(blend_of(dataset), 2, 1, 1, 0, start_step=7, start_sample=run.first_sample(7))
    assert [first_tokens(resumed.batches(step), 4) for step in range(7, 15)] == steps[7:]


def test_the_position_is_counted_in_samples(folder: Path) -> None:
    """CK-21: 5 steps of batch 4, resumed with batch 8: the next sample is 20."""
    blend = blend_of(stream(folder, 400, 4))
    consumed = TrainSampler(blend, 4, 1, 1, 0).first_sample(5)
    resumed = [TrainSampler(blend, 2, 2, 2, rank, start_step=5, start_sample=consumed) for rank in range(2)]
    ids = [sample for sampler in resumed for micro in range(2) for sample in sampler.sample_ids(5, micro)]
    assert sorted(ids) == list(range(20, 28))
    assert resumed[0].first_sample(6) == 28
    with pytest.raises(DataError, match="step 4 is before the first step 5"):
        resumed[0].first_sample(4)


def test_a_micro_batch_packs_its_windows(folder: Path) -> None:
    dataset = WindowDataset(indexed(folder, [[1, 2, 3], [4, 5, 6, 7, 8]]), 4)
    batch = collate([dataset.cut(0), dataset.cut(1)], [7, 3], 4)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert batch.targets.tolist() == [2, 3, IGNORE, 5, 6, 7, 8, IGNORE]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.token_index.tolist() == [28, 29, 30, 31, 12, 13, 14, 15]
    assert (batch.lengths, batch.num_valid, batch.samples) == ((3, 1, 4), 6, (7, 3))
    assert {t.dtype for t in (batch.tokens, batch.targets, batch.positions, batch.token_index)} == {torch.int64}
    moved = batch.to("meta")
    assert moved.tokens.device.type == "meta" and moved.lengths == batch.lengths and batch.tokens.device.type == "cpu"


def test_token_index_names_a_token_in_every_layout(folder: Path) -> None:
    blend = blend_of(stream(folder, 400, 4))

    def names(dp: int, micro_batch: int, accumulate: int) -> dict[int, int]:
        samplers = [TrainSampler(blend, micro_batch, accumulate, dp, rank) for rank in range(dp)]
        batches = [batch for sampler in samplers for batch in sampler.batches(2)]
        return {int(i): int(t) for batch in batches for i, t in zip(batch.token_index, batch.tokens, strict=True)}

    assert names(1, 8, 1) == names(2, 2, 2) == names(4, 1, 2)
    assert sorted(names(1, 8, 1)) == list(range(64, 96))


def test_a_micro_batch_of_ignored_targets_is_representable(folder: Path) -> None:
    """LN-04: documents of one token have no target, nor has a rank without samples."""
    dataset = WindowDataset(indexed(folder, [[token] for token in range(8)]), 4)
    batch = collate([dataset.window(0)], [0], 4)
    assert (batch.num_valid, batch.lengths, set(batch.targets.tolist())) == (0, (1, 1, 1, 1), {IGNORE})
    empty = collate([], [], 4)
    assert (empty.tokens.tolist(), empty.targets.tolist(), empty.positions.tolist()) == ([0], [IGNORE], [0])
    assert (empty.num_valid, empty.lengths, empty.samples) == (0, (1,), ())


@pytest.mark.parametrize(
    ("values", "expected"),
    [((0, 1, 1, 0), "micro_batch=0"), ((1, 0, 1, 0), "accumulate=0"), ((1, 1, 0, 0), "dp=0"), ((1, 1, 2, 2), "rank 2")],
)
def test_wrong_batch_shapes_are_refused(folder: Path, values: tuple[int, int, int, int], expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        TrainSampler(blend_of(stream(folder, 40, 4)), *values)


# ------------------------------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize(("dp", "micro_batch"), [(4, 1), (1, 4), (3, 2), (4, 3), (16, 1)])
def test_evaluation_counts_every_sample_once(folder: Path, dp: int, micro_batch: int) -> None:
    """LN-12, LH-02: 10 samples, DP=4, batch 1: exactly 10 in the metric, and as many batches on every rank."""
    dataset = stream(folder, 39, 4)
    assert dataset.num_eval_windows == 10
    samplers = [EvalSampler([dataset], micro_batch, dp, rank) for rank in range(dp)]
    batches = [list(sampler) for sampler in samplers]
    assert {len(rank) for rank in batches} == {len(samplers[0])} == {-(-10 // (dp * micro_batch))}
    samples = [sample for rank in batches for batch in rank for sample in batch.samples]
    assert sorted(samples) == list(range(10))
    assert sum(batch.num_valid for rank in batches for batch in rank) == 38
    targets = [int(t) for rank in batches for batch in rank for t in batch.targets if t != IGNORE]
    assert sorted(targets) == list(range(1, 39))
    assert all(len(batch.tokens) >= 1 for rank in batches for batch in rank)


def test_evaluation_over_several_datasets_and_on_a_part(folder: Path) -> None:
    datasets = [stream(folder, 10, 4), stream(folder, 7, 4, first=100)]
    everything = [batch for rank in range(2) for batch in EvalSampler(datasets, 2, 2, rank)]
    assert sum(batch.num_valid for batch in everything) == 9 + 6
    assert sorted(s for batch in everything for s in batch.samples) == list(range(5))
    long = stream(folder, 401, 4)
    part = EvalSampler([long], 2, 1, 0, max_windows=10)
    assert [s for batch in part for s in batch.samples] == list(range(0, 100, 10))
    assert EvalSampler([long], 2, 1, 0, max_windows=1000).num_samples == 100
    with pytest.raises(DataError, match="max_windows=0"):
        EvalSampler([long], 2, 1, 0, max_windows=0)
    with pytest.raises(DataError, match="no datasets"):
        EvalSampler([], 2, 1, 0)


# ------------------------------------------------------------------------------------------------------ prefetching


def dummy(step: int) -> list[MicroBatch]:
    tokens = np.array([step], dtype=np.int64)
    return [collate([Window(tokens, tokens, tokens * 0, (1,))], [step], 1)]


def test_a_slow_reader_is_hidden_behind_the_step() -> None:
    def slow(step: int) -> list[MicroBatch]:
        time.sleep(0.03)
        return dummy(step)

    waits = []
    with Prefetcher(slow, start_step=5) as prefetcher:
        for step in range(5, 15):
            batches, seconds = prefetcher.next()
            waits.append(seconds)
            assert batches[0].samples == (step,)
            time.sleep(0.05)
    assert sum(waits[1:]) < 0.5 * 9 * 0.03  # without prefetching it is at least 0.27 s


def test_the_wait_for_a_reader_is_measured() -> None:
    release = threading.Event()
    with Prefetcher(lambda step: dummy(step) if release.wait(60) else [], start_step=0) as prefetcher:
        threading.Timer(0.2, release.set).start()
        assert 0.02 < prefetcher.next()[1] < 20


def test_several_workers_keep_the_order_of_steps() -> None:
    both = threading.Barrier(2)

    def make(step: int) -> list[MicroBatch]:
        both.wait(20)  # only passes when two workers run at once
        time.sleep(0.02 * (step % 2 == 0))
        return dummy(step)

    with Prefetcher(make, start_step=0, depth=4, workers=2) as prefetcher:
        assert [prefetcher.next()[0][0].samples[0] for _ in range(7)] == list(range(7))


def test_no_more_than_depth_steps_are_made_ahead() -> None:
    made: list[int] = []
    with Prefetcher(lambda step: made.append(step) or dummy(step), start_step=0, depth=3) as prefetcher:
        prefetcher.next()
        deadline = time.monotonic() + 20
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert made == [0, 1, 2, 3]


def test_a_readers_exception_surfaces_at_next() -> None:
    def make(step: int) -> list[MicroBatch]:
        if step == 2:
            raise DataError("the disk is gone")
        return dummy(step)

    with Prefetcher(make, start_step=0) as prefetcher:
        assert [prefetcher.next()[0][0].samples[0] for _ in range(2)] == [0, 1]
        with pytest.raises(DataError, match="the disk is gone"):
            prefetcher.next()


def test_close_does_not_wait_for_a_stuck_reader() -> None:
    release = threading.Event()

    def stuck(step: int) -> list[MicroBatch]:
        release.wait(60)
        return dummy(step)

    prefetcher = Prefetcher(stuck, start_step=0, workers=2)
    begin = time.perf_counter()
    prefetcher.close()
    prefetcher.close()
    assert time.perf_counter() - begin < 5
    release.set()


def test_wrong_prefetch_settings_are_refused() -> None:
    with pytest.raises(DataError, match="depth 0"):
        Prefetcher(dummy, 0, depth=0)


# --------------------------------------------------------------------------------------------------------- opening


def test_open_blend_takes_folders_and_megatron_prefixes(folder: Path, tmp_path: Path) -> None:
    texts = [f"document {number} about rank {number * number}" for number in range(20)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    tokenizer = train_tokenizer(texts, 270, tmp_path / "tokenizer")
    info = tokenize([tmp_path / "*.txt"], tmp_path / "out", tokenizer, valid_fraction=0.3)
    prefix = indexed(folder, [range(50)]).prefix
    train = open_blend([(tmp_path / "out", 3), (prefix, 1)], "train", 8, seed=1)
    assert [dataset.indexed.num_tokens for dataset in train.datasets] == [info.train_tokens, 50]
    assert train.weights == (0.75, 0.25) and train.datasets[0].seed != train.datasets[1].seed
    valid = open_blend([(tmp_path / "out", 1)], "valid", 8, seed=1)
    sampler = EvalSampler(valid.datasets, 4, 1, 0)
    assert sum(batch.num_valid for batch in sampler) == info.valid_tokens - info.valid_documents
    small = open_blend([(tmp_path / "out", 1)], "train", 8, seed=1, vocab_size=30)
    with pytest.raises(DataError, match="the model's vocabulary is 30"):
        [small.window(sample) for sample in range(10)]


def test_open_blend_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no dataset at .*absent: neither a folder"):
        open_blend([(tmp_path / "absent", 1)], "train", 8, seed=0)
    with pytest.raises(DataError, match=r"is not a complete dataset: it has no dataset\.json"):
        open_blend([(tmp_path, 1)], "train", 8, seed=0)
    (tmp_path / "a.txt").write_text("one short document only")
    tokenize([tmp_path / "a.txt"], tmp_path / "out", train_tokenizer(["x"], 258, tmp_path / "tokenizer"))
    with pytest.raises(DataError, match="has no validation part"):
        open_blend([(tmp_path / "out", 1)], "valid", 8, seed=0)
