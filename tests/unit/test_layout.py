"""`Layout`: its text form both ways, and every refusal with what was given, what is needed and what to try."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.axes import ORDERS
from shardwright.core.layout import CHOICES, RECOMPUTE, SCHEDULES, Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.presets import preset
from shardwright.errors import LayoutError

MODEL: dict[str, Any] = {
    "vocab_size": 64, "dim": 32, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2, "ffn_dim": 48,
}  # fmt: skip


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, cp, dp, pp = (draw(st.integers(1, 6)) for _ in range(4))
    ep = draw(st.sampled_from(divisors(tp * cp * dp)))
    edp = tp * cp * dp // ep
    replicate = draw(st.sampled_from([size for size in divisors(dp * cp) if edp % size == 0]))
    choices = {name: draw(st.sampled_from(values)) for name, values in CHOICES.items() if name != "sp"}
    positive = st.floats(min_value=1e-3, max_value=1e6)
    return Layout(
        tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, dp_replicate=replicate,
        zero=draw(st.integers(0, 3)),
        schedule=draw(st.one_of(st.sampled_from(SCHEDULES), st.just("file:rows/my schedule.json"))),
        microbatches=draw(st.integers(1, 512)),
        micro_batch=draw(st.integers(1, 16)),
        virtual=draw(st.integers(1, 4)) if pp > 1 else 1,
        sp=draw(st.sampled_from(["auto", "off", "on"] if tp > 1 else ["auto", "off"])),
        delayed_update=draw(st.booleans()),
        offload_fraction=draw(st.floats(0, 1)),
        bucket_mb=draw(positive),
        prefetch=draw(st.integers(0, 4)),
        tp_overlap=draw(st.integers(1, 4)),
        moe=draw(st.sampled_from(["dropless", "capacity:1.25"])),
        stages=draw(st.sampled_from(["", "8/8/7/7"])),
        recompute="-".join(draw(st.sampled_from(RECOMPUTE)) for _ in range(draw(st.sampled_from([1, pp])))),
        **choices,
    )  # fmt: skip


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_the_text_form_reads_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert Layout.of(dataclasses.asdict(layout)) == layout


def test_the_text_form_shows_what_differs_from_the_defaults() -> None:
    text = "tp=8,dp=4,pp=2,zero=1,microbatches=16"
    layout = Layout.parse("pp=2, tp=8 ,microbatches=16,dp=4,zero=1,schedule=1f1b,bucket_mb=25")
    assert str(layout) == text
    assert (layout.world_size, layout.sequence_parallel, layout.num_stages, layout.global_batch) == (64, True, 2, 64)
    assert (str(Layout()), Layout.parse("")) == ("dp=1", Layout())
    assert Layout.parse("tp=2,sp=off").sequence_parallel is False
    assert layout.with_(dp=2).world_size == 32


def test_toml_values_are_read_too() -> None:
    layout = Layout.of({"tp": 2, "sp": True, "delayed_update": False, "bucket_mb": 4})
    assert (layout.sp, layout.delayed_update, layout.bucket_mb) == ("on", False, 4.0)


# Each refusal: the text, and what its message must hold of what was given, what is needed and what to try.
REFUSALS = [
    ("tp=2,dp=3,ep=4", ["ep=4 must divide tp*cp*dp=6", "use ep=1, 2, 3 or 6"]),
    ("dp=5,ep=2", ["ep=2", "tp*cp*dp=5", "use ep=1 or 5"]),
    ("zeros=1", ["unknown key 'zeros'", "did you mean zero?"]),
    ("micro_batches=2", ["'micro_batches'", "did you mean microbatches?"]),
    ("quux=1", ["'quux'", "known keys: tp, cp, dp"]),
    ("dp", ["'dp' is not key=value", "dp=2"]),
    ("dp=", ["'dp=' is not key=value"]),
    ("dp=2,dp=4", ["dp is given twice"]),
    ("dp=two", ["dp=two must be a whole number"]),
    ("dp=1.5", ["dp=1.5 must be a whole number"]),
    ("bucket_mb=big", ["bucket_mb=big must be a number"]),
    ("dp=0", ["dp=0 must be at least 1", "leave it out"]),
    ("microbatches=-1", ["microbatches=-1 must be at least 1"]),
    ("prefetch=-1", ["prefetch=-1 must be at least 0"]),
    ("zero=4", ["zero=4", "use 0 (DDP), 1, 2 or 3"]),
    ("sp=on", ["sp=on needs tp > 1", "leave sp out"]),
    ("tp=2,sp=maybe", ["sp=maybe", "use one of auto, on, off"]),
    ("schedule=1f1", ["schedule=1f1 ", "did you mean 1f1b?"]),
    ("schedule=file:", ["schedule=file: needs a path"]),
    ("recompute=ful", ["recompute=ful ", "did you mean full?"]),
    ("pp=2,recompute=full-nome", ["recompute=nome ", "did you mean none?"]),
    ("pp=4,recompute=full-none", ["recompute=full-none gives 2 policies", "pp=4 pipeline ranks", "one for all"]),
    ("order=pp-tp", ["order=pp-tp", next(iter(ORDERS))]),
    ("virtual=2", ["virtual=2 needs pp > 1", "set pp"]),
    ("dp=6,dp_replicate=4", ["dp_replicate=4 must divide dp*cp=6", "use dp_replicate=1, 2, 3 or 6"]),
    ("bucket_mb=0", ["bucket_mb=0", "above 0"]),
    ("bucket_mb=nan", ["bucket_mb=nan", "above 0"]),
    ("bucket_mb=inf", ["bucket_mb=inf", "above 0"]),
    ("offload_fraction=1.5", ["offload_fraction=1.5", "between 0 and 1"]),
    ("delayed_update=yes", ["delayed_update=yes must be on or off"]),
    ("moe=dropped", ["moe=dropped", "use dropless or", "capacity:1.25"]),
    ("moe=capacity:0", ["moe=capacity:0", "above 0"]),
]


@pytest.mark.parametrize(("text", "parts"), REFUSALS, ids=[text for text, _ in REFUSALS])
def test_refusals_say_what_was_given_what_is_needed_and_what_to_try(text: str, parts: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "processes", "parts"),
    [
        ("dp=3", 2, ["layout dp=3 needs 3 processes", "2 were started", "start 3 or use dp=2"]),
        ("tp=2,dp=2", 8, ["needs 4 processes", "8 were started", "start 4 or use dp=4"]),
        ("tp=4", 2, ["needs 4 processes", "2 were started", "start 4 or lower a degree"]),
        ("tp=2,dp=2", 5, ["start 4 or lower a degree"]),
    ],
)
def test_a_world_of_another_size_is_refused(text: str, processes: int, parts: list[str]) -> None:
    layout = Layout.parse(text)
    layout.check_world(layout.world_size)
    with pytest.raises(LayoutError) as caught:
        layout.check_world(processes)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "changes", "parts"),
    [
        ("tp=3", {}, ["tp=3 must divide", "8 attention heads", "use tp=1, 2, 4 or 8"]),
        ("tp=2", {"num_heads": 6, "num_kv_heads": 3, "dim": 48}, ["tp=2", "3 KV heads", "use tp=1, 3 or 6"]),
        ("pp=5", {}, ["pp*virtual=5 stages", "the model has 4", "pp=4"]),
        ("pp=3,virtual=2", {}, ["pp*virtual=6 stages", "the model has 4"]),
        ("dp=2,ep=2", {}, ["ep=2 needs a model with experts", "leave ep out"]),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(text: str, changes: dict[str, Any], parts: list[str]) -> None:
    Layout().check_model(ModelConfig(**{**MODEL, **changes}))
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text).check_model(ModelConfig(**{**MODEL, **changes}))
    for part in parts:
        assert part in str(caught.value)


def test_experts_need_sequence_parallelism() -> None:
    moe = preset("tiny-moe")
    Layout.parse("tp=2,ep=2").check_model(moe)
    with pytest.raises(LayoutError, match=r"experts with tp > 1 need sequence parallelism; .*sp=on"):
        Layout.parse("tp=2,sp=off").check_model(moe)


def test_more_ranks_than_kv_heads_may_replicate_them() -> None:  # US-04
    Layout.parse("tp=4").check_model(ModelConfig(**MODEL))


@pytest.mark.parametrize(
    ("layout", "processes", "found"),
    [
        ("dp=4,microbatches=2,micro_batch=3", 2, "dp=2,microbatches=4,micro_batch=3"),
        ("dp=4,microbatches=1,micro_batch=3", 3, "dp=3,microbatches=2,micro_batch=2"),
        ("dp=2,tp=2,zero=3", 2, "tp=2,zero=3,microbatches=2"),
        ("dp=4,zero=1,dp_replicate=4", 2, "dp=2,zero=1,microbatches=2,dp_replicate=2"),
        ("dp=2,micro_batch=2", 4, "dp=4"),
    ],
)
def test_fewer_or_more_processes_keep_the_sequences_of_a_step(layout: str, processes: int, found: str) -> None:
    before = Layout.parse(layout)
    after = before.for_world(processes)
    assert str(after) == found
    assert (after.world_size, after.global_batch) == (processes, before.global_batch)


@pytest.mark.parametrize(
    ("layout", "processes", "words"),
    [
        ("dp=2,tp=2", 3, r"3 processes .* tp\*cp\*pp=2 .* start a multiple of 2"),
        ("tp=4", 2, "start a multiple of 4"),
        ("dp=4", 3, r"4 sequences of a step do not divide over dp=3; start processes for dp=1, 2 or 4"),
    ],
)
def test_processes_that_do_not_fit(layout: str, processes: int, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout.parse(layout).for_world(processes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,zero=2,reshard=always", "reshard=always does nothing with zero=2: it needs zero=3"),
        ("prefetch=5", "prefetch=5 does nothing with zero=0: it needs zero=3"),
        ("dp=2,zero=2,zero1_reduce=allreduce", "zero1_reduce=allreduce does nothing with zero=2: it needs zero=1"),
        ("dp=2,zero=3,bucket_mb=4", "bucket_mb=4 does nothing with zero=3: it needs zero below 3"),
        ("dp=2,offload_fraction=0.5", "offload_fraction=0.5 does nothing with offload=none: it needs offload=optimizer"),
    ],
)
def test_a_switch_that_would_do_nothing_is_refused_and_can_be_left_out(text: str, message: str) -> None:
    layout = Layout.parse(text)
    with pytest.raises(LayoutError, match=re.escape(message)):
        layout.check_switches()
    assert str(layout.without_idle()) == text.rsplit(",", 1)[0] if "," in text else "dp=1"
    layout.without_idle().check_switches()


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,zero=3,reshard=always,prefetch=0",
        "dp=2,zero=1,bucket_mb=1,zero1_reduce=allreduce",
        "offload=optimizer,offload_fraction=0.5",
    ],
)
def test_switches_that_do_something_stay(text: str) -> None:
    layout = Layout.parse(text)
    layout.check_switches()
    assert layout.without_idle() == layout
