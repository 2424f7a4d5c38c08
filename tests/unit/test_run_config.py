"""`RunConfig`: TOML, ``--set``, layout overrides, and messages that name the key, the value and what to write."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError, LayoutError, ModelConfigError

TEXT = """
model = "tiny"
layout = "tp=2,dp=4,zero=1"

[data]
sources = "a.txt"

[optim]
lr = 1e-3
"""
TABLE: dict[str, Any] = tomllib.loads(TEXT)


def refused(table: dict[str, Any], *sets: str, layout: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.of(table, sets, layout)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    config = RunConfig.load(path)
    assert (config.model.name, config.model.vocab_size, config.optim.lr, config.train.steps) == ("tiny", 256, 1e-3, 100)
    assert config.layout == Layout(tp=2, dp=4, zero=1)
    assert [source.path for source in config.data.sources] == ["a.txt"]
    changed = RunConfig.load(path, ["train.steps=7"], "zero=2")
    assert (changed.train.steps, changed.layout) == (7, Layout(tp=2, dp=4, zero=2))


def test_the_shipped_examples_are_right() -> None:
    for name in ("tiny", "demo"):
        config = RunConfig.load(Path(__file__).parents[2] / "examples" / f"{name}.toml")
        assert config.model.num_parameters() < 2e6 or name == "demo"


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"model = ", ["is not TOML", "see examples/tiny.toml"]),
        (b"[data]\nx = 1\nx = 2", ["is not TOML"]),
        (b"\xff\xfe\x00", ["is not TOML"]),
        (b"", ["model is missing; add it (see examples/tiny.toml)"]),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, content: bytes, parts: list[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(path)
    for part in parts:
        assert part in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run file .*nowhere.toml does not exist; give a TOML file such as"):
        RunConfig.load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        RunConfig.load(tmp_path)


# -- unknown keys and wrong values -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"modle": 1}, ["unknown key modle", "did you mean 'model'?"]),
        ({"train": {"step": 3}}, ["unknown key train.step;", "did you mean 'steps'"]),
        ({"optim": {"learning_rate": 1}}, ["unknown key optim.learning_rate", "known: name, lr,"]),
        ({"data": {"sources": ["a"], "seqlen": 8}}, ["unknown key data.seqlen", "'seq_len'"]),
        ({"data": {"sources": [{"path": "a", "wieght": 2}]}}, ["unknown key data.sources.0.wieght", "'weight'"]),
        ({"data": {"sources": []}}, ["data.sources=[]", "at least 1 item"]),
        ({"data": {}}, ["data.sources is missing; add it"]),
        ({"optim": {"lr": 0}}, ["optim.lr=0", "greater than 0"]),
        ({"optim": {"lr": float("inf")}}, ["optim.lr=inf", "finite"]),
        ({"optim": {"name": "adam"}}, ["optim.name='adam'", "'adamw' or 'sgd'"]),
        ({"optim": {"betas": [0.9, 1.5]}}, ["optim.betas.1=1.5", "less than 1"]),
        ({"train": {"steps": "many"}}, ["train.steps='many'", "integer"]),
        ({"train": {"on_nonfinite": "ignore"}}, ["train.on_nonfinite='ignore'", "'stop', 'skip' or 'back'"]),
        ({"model": "tinny"}, ["'tinny' is neither a preset nor a file", "'tiny'"]),
        ({"model": {"preset": "tiny", "dims": 64}}, ["unknown field 'dims'", "'dim'"]),
        ({"layout": "dpp=2"}, ["unknown key 'dpp'"]),
        ({"layout": 3}, ["layout=3"]),
        ({"layout": {"zeros": 3}}, ["unknown key 'zeros'", "did you mean zero?"]),
    ],
    ids=str,
)
def test_wrong_keys_and_values_are_named_with_what_to_write(change: dict[str, Any], parts: list[str]) -> None:
    message = refused({**TABLE, **change})
    for part in parts:
        assert part in message


def test_values_that_contradict_each_other_are_refused() -> None:
    message = refused(TABLE, "optim.warmup_steps=11", "train.steps=10")
    assert "optim.warmup_steps=11 is more than train.steps=10; warm up for fewer steps" in message
    RunConfig.of(TABLE, ["optim.warmup_steps=10", "train.steps=10"])
    learned = ["model.position=learned", "model.max_positions=64"]
    message = refused(TABLE, *learned, "data.seq_len=65")
    assert "data.seq_len=65 is longer than the model's 64 learned positions" in message
    RunConfig.of(TABLE, [*learned, "data.seq_len=64"])
    with pytest.raises(LayoutError, match="tp=3 must divide the model's 4 attention heads"):
        RunConfig.of(TABLE, layout="tp=3")
    with pytest.raises(ModelConfigError, match="num_kv_heads=3 must divide num_heads=4"):
        RunConfig.of(TABLE, ["model.num_kv_heads=3"])


# -- changes from the command line -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ("optim.lr=2e-3", lambda c: c.optim.lr == 2e-3),
        ("train.compile=true", lambda c: c.train.compile is True),
        ("optim.betas=[0.8, 0.9]", lambda c: c.optim.betas == (0.8, 0.9)),
        ("train.run_dir=runs/two words", lambda c: c.train.run_dir == "runs/two words"),
        ('train.run_dir="quoted"', lambda c: c.train.run_dir == "quoted"),
        ("train.freeze=['head.']", lambda c: c.train.freeze == ("head.",)),
        (" train.steps = 5", lambda c: c.train.steps == 5),  # spaces do not matter
        ("data.sources=b.txt", lambda c: [s.path for s in c.data.sources] == ["b.txt"]),
        ("data.sources=['b.txt', 'c.txt']", lambda c: [s.path for s in c.data.sources] == ["b.txt", "c.txt"]),
        ("data.sources=[{path = 'b', weight = 2}]", lambda c: c.data.sources[0].weight == 2.0),
        ("model=demo", lambda c: c.model.vocab_size == 4096),
        ("model.vocab_size=300", lambda c: (c.model.vocab_size, c.model.dim) == (300, 64)),
        ("layout=dp=8", lambda c: c.layout == Layout(dp=8)),
        ("layout.dp=1", lambda c: c.layout == Layout(tp=2, zero=1)),
        ("layout.sp=off", lambda c: c.layout == Layout(tp=2, dp=4, zero=1, sp="off")),
    ],
    ids=str,
)
def test_set_changes_one_value(change: str, read: Any) -> None:
    assert read(RunConfig.of(TABLE, [change])), change


def test_later_changes_win_and_the_table_is_left_alone() -> None:
    config = RunConfig.of(TABLE, ["optim.lr=1", "optim.lr=2", "layout.dp=1", "layout.dp=2"], layout="zero=3")
    assert (config.optim.lr, config.layout) == (2.0, Layout(tp=2, dp=2, zero=3))
    assert tomllib.loads(TEXT) == TABLE


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("lr", ["--set 'lr' is not section.key=value", "optim.lr=1e-3"]),
        ("=3", ["--set '=3' is not section.key=value"]),
        ("optin.lr=3", ["unknown key optin", "did you mean 'optim'"]),
        ("optim.lrr=3", ["unknown key optim.lrr", "'lr'"]),
        ("optim.lr=", ["optim.lr=''"]),
        ("layout.dpp=3", ["unknown key 'dpp'"]),
    ],
)
def test_a_change_that_fits_nowhere_is_refused(change: str, parts: list[str]) -> None:
    message = refused(TABLE, change)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("base", "given", "merged"),
    [
        ("dp=4", "microbatches=2", Layout(dp=4, microbatches=2)),
        ("dp=4,zero=1", "dp=1", Layout(zero=1)),
        ("tp=2,sp=off", "sp=on", Layout(tp=2, sp="on")),  # the change alone would be refused: sp=on needs tp > 1
        ("dp=4", "dp_replicate=2", Layout(dp=4, dp_replicate=2)),
        ({"dp": 4}, "dp=2", Layout(dp=2)),
        (Layout(dp=4, zero=1), "zero=0", Layout(dp=4)),
        (None, "dp=2", Layout(dp=2)),
    ],
)
def test_a_layout_override_changes_only_what_it_names(base: Any, given: str, merged: Layout) -> None:
    table = {key: value for key, value in TABLE.items() if key != "layout"} | ({} if base is None else {"layout": base})
    assert RunConfig.of(table, layout=given).layout == merged


def test_a_wrong_layout_override_is_refused() -> None:
    assert "'dp' is not key=value" in refused(TABLE, layout="dp")
    assert "dp is given twice" in refused(TABLE, layout="dp=1,dp=2")
    assert "unknown key 'zeros'" in refused(TABLE, layout="zeros=1")
    assert "layout=7 is neither text nor a table" in refused({**TABLE, "layout": 7}, layout="dp=2")


# -- and back --------------------------------------------------------------------------------------


@given(
    steps=st.integers(1, 10**6),
    lr=st.floats(1e-9, 10.0),
    bucket_mb=st.floats(1e-3, 1e3),
    weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3),
    model=st.sampled_from(["tiny", "llama-3.1-8b", "gpt2-124m", "qwen3-0.6b", "tiny-moe", "deepseek-v3"]),
)
@settings(max_examples=30, deadline=None)
def test_a_run_written_as_a_table_reads_back_equal(
    steps: int, lr: float, bucket_mb: float, weights: list[float], model: str
) -> None:
    config = RunConfig.of(
        {
            "model": model,
            "data": {"sources": [{"path": f"s{i}", "weight": weight} for i, weight in enumerate(weights)]},
            "optim": {"lr": lr, "name": "sgd"},
            "train": {"steps": steps, "freeze": ["head."], "peak_tflops": 1.5},
            "layout": Layout(tp=2, dp=3, bucket_mb=bucket_mb),
        }
    )
    table = config.to_table()
    assert RunConfig.of(table) == config
    assert isinstance(table["layout"], str) and table["data"]["sources"][0]["path"] == "s0"
