"""The search, and the command around it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright import cli
from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.plan import GIB
from shardwright.core.presets import preset
from shardwright.errors import ConfigError, LayoutError
from shardwright.plan.command import load_model, make_plan, plan_layout
from shardwright.plan.exhaustive import exhaustive
from shardwright.plan.explain import in_words
from shardwright.plan.neighbours import neighbours, price_with_neighbours
from shardwright.plan.report import html_report, write_report
from shardwright.plan.search import default_global_batch, search
from shardwright.plan.step_time import Pricer

KEYS = {
    "model", "cluster", "layout", "fits", "memory", "communication", "pipeline", "step", "assumptions", "dropped_terms",
    "candidates", "rejected",
}  # fmt: skip


def test_a_page_holds_everything(tmp_path: Path) -> None:
    made = make_plan("llama-3.1-8b", "h100-80gb:2x8", None, 8192, 32, 3)
    layout = make_plan("llama-3.1-8b", "h100-80gb:2x8", "tp=2,pp=4,dp=2,schedule=zb_h1,microbatches=8", 8192, 16, 3)
    page, other = (html_report(planned.plan, planned.pricer) for planned in (made, layout))
    for text in (page, other):
        assert not re.search(r"(src|href)=|<script|<link|@import|url\(", text)  # self-contained
        assert text.count("<svg") == text.count("</svg>") >= 3
        for line in ("Memory per pipeline stage", "The step", "Traffic per link", "Assumed", "Left out"):
            assert line in text
    assert "The search" in page
    assert "The pipeline" in other
    assert "weight gradient" in other
    write_report(tmp_path / "plan.html", made.plan, made.pricer)
    assert (tmp_path / "plan.html").read_text() == page
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path / "no" / "plan.html", made.plan, made.pricer)


def test_the_search_is_near_the_exhaustive_best() -> None:
    model, cluster = preset("llama-3.1-8b"), Cluster.parse("h100-80gb:2x2")
    best = exhaustive(Pricer(model, cluster, 4096), 8)
    assert search(model, cluster, 4096, 8).step.seconds <= 1.02 * best.step.seconds


def test_other_schedules_are_tried() -> None:
    """A pipeline with few micro-batches: a schedule with a smaller bubble beats the best of 1F1B by far, and ZB-V, which holds
    more until its W, does not fit."""
    model, cluster = preset("llama-3.1-405b"), Cluster.parse("h100-80gb:32x8")
    plan = search(model, cluster, 8192, 64)
    assert plan.fits and plan.layout.schedule == "dualpipe_v"
    least = Layout.parse("tp=8,cp=2,dp=2,pp=8,zero=1,microbatches=32,reduce_dtype=bf16,precision=bf16")
    pricer = Pricer(model, cluster, 8192)
    assert plan.step.seconds * 1.15 <= pricer.seconds(least.with_(schedule="1f1b"))
    assert pricer.peak_bytes(least.with_(schedule="zb_v")) > cluster.chip.memory_bytes > pricer.peak_bytes(least)


@pytest.mark.parametrize(
    ("changes", "batch"),
    [({"num_layers": 6, "num_kv_heads": 1, "num_heads": 5, "head_dim": 128}, 4), ({"num_layers": 9, "vocab_size": 1024}, 6)],
)
def test_the_exhaustive_list_is_its_own(changes: dict[str, Any], batch: int) -> None:
    """Within 2 % of every schedule, switch and sharding where a pipeline is what fits."""
    model = ModelConfig(**{**preset("llama-3.1-70b").model_dump(exclude_unset=True), **changes, "name": "few layers"})
    cluster = Cluster.parse("h100-80gb:2x2")
    links = tuple(replace(level, bandwidth=level.bandwidth / 40) for level in cluster.levels)
    cluster = replace(cluster, levels=links)
    best = exhaustive(Pricer(model, cluster, 4096), batch)
    assert best.layout.pp > 1
    assert best.layout.schedule not in ("1f1b", "interleaved")
    assert search(model, cluster, 4096, batch).step.seconds <= 1.02 * best.step.seconds


def test_where_the_best_departs_from_the_sizing_sequence() -> None:
    model, cluster = preset("llama-3.1-8b"), Cluster.parse("h100-80gb:1x8")
    plan = search(model, cluster, 4096, 16)
    usual = plan.sequence
    assert usual is not None
    assert usual.layout is not None
    assert (usual.layout.tp, usual.layout.pp, usual.layout.cp) == (8, 1, 1)
    pricer = Pricer(model, cluster, 4096)
    assert usual.seconds == pricer.seconds(usual.layout)
    (line,) = [line for line in in_words(plan, pricer) if "sizing sequence" in line]
    assert "departs from it in tp=1" in line
    assert f"{usual.seconds:.4g} s a step" in line


def test_only_what_training_takes_is_answered() -> None:
    """A ring over cp has no sliding windows, so a long sequence of such a model is cut over other axes."""
    windows = ModelConfig(**{**preset("llama-3.1-8b").model_dump(exclude_unset=True), "sliding_window": 4096})
    cluster = Cluster.parse("h100-80gb:1x8")
    assert all(c.layout is None or c.layout.cp == 1 for c in search(windows, cluster, 32768, 8, top=50).candidates)
    with pytest.raises(LayoutError, match="no sliding windows"):
        price_with_neighbours(Pricer(windows, cluster, 32768), Layout.parse("cp=8"))


def test_near_misses_say_what_would_make_them_fit() -> None:
    plan = search(preset("llama-3.1-70b"), Cluster.parse("h100-80gb:4x8"), 8192, 64)
    near = [candidate.reason for candidate in plan.rejected if candidate.layout is not None]
    assert near
    assert any("; fits with " in reason for reason in near)


def test_70b_on_1024_gpus() -> None:
    plan = search(preset("llama-3.1-70b"), Cluster.parse("h100:128x8"), 8192, 1024)
    assert plan.fits
    assert plan.layout.world_size == 1024
    assert plan.layout.global_batch == 1024
    assert 0.3 < plan.step.mfu < 0.7
    assert [candidate.seconds for candidate in plan.candidates] == sorted(c.seconds or 0 for c in plan.candidates)
    assert plan.candidates[0].layout == plan.layout
    lacking = [candidate for candidate in plan.rejected if candidate.layout is not None]
    assert lacking
    assert all((candidate.memory_bytes or 0) > 80 * GIB for candidate in lacking)
    assert any("fast domain" in candidate.reason for candidate in plan.rejected)


def test_the_answer_is_the_best_of_an_exhaustive_list() -> None:
    """Within 2 % of pricing every layout of a small grid by the schedule's rows."""
    model, cluster, seq, batch = preset("llama-3.1-8b"), Cluster.parse("h100:1x8"), 4096, 16
    found = search(model, cluster, seq, batch)
    pricer = Pricer(model, cluster, seq)
    best = min(
        plan.step.seconds
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8)
        for virtual in (1, 2)
        for zero in (1, 3)
        for recompute in ("none", "full")
        if tp * pp <= 8 and not (virtual > 1 and (pp == 1 or (batch * tp * pp // 8) % pp))
        for plan in [
            pricer.price(
                Layout(
                    tp=tp, pp=pp, dp=8 // (tp * pp), virtual=virtual, zero=zero, recompute=recompute,
                    schedule="interleaved" if virtual > 1 else "1f1b", microbatches=batch * tp * pp // 8,
                    precision="bf16", reduce_dtype="bf16",
                )
            )
        ]
        if plan.fits
    )  # fmt: skip
    assert found.step.seconds <= 1.02 * best


def test_experts_and_small_machines() -> None:
    plan = search(preset("mixtral-8x7b"), Cluster.parse("h100:2x8"), 4096, 32)
    assert plan.fits
    assert plan.layout.zero > 0
    small = search(preset("tiny"), Cluster.parse("h100:1x1"), 128, 4)
    assert small.layout.world_size == 1
    assert small.communication == ()


def test_what_does_not_fit_says_how_much_is_lacking() -> None:
    plan = search(preset("llama-3.1-70b"), Cluster.parse("h100:1x8"), 8192, 64)
    assert not plan.fits
    assert plan.candidates == ()
    assert "GiB too much" in plan.rejected[0].reason
    with pytest.raises(ConfigError, match="no layout of tiny uses all 64 GPUs with a global batch of 1"):
        search(preset("tiny"), Cluster.parse("h100:8x8"), 128, 1)
    with pytest.raises(ConfigError, match="must be at least 1"):
        search(preset("tiny"), Cluster.parse("h100:1x1"), 128, 0)


def test_neighbours_of_a_layout_that_does_not_fit() -> None:
    layout = Layout.parse("dp=8,microbatches=2,precision=bf16,reduce_dtype=bf16")
    plan = price_with_neighbours(Pricer(preset("llama-3.1-8b"), Cluster.parse("h100:1x8"), 8192), layout)
    assert not plan.fits
    assert plan.candidates
    assert all((candidate.memory_bytes or 0) < 80 * GIB for candidate in plan.candidates)
    assert all(candidate.reason for candidate in plan.rejected)
    assert {near.world_size for near in neighbours(layout)} == {8}


def test_default_batch_is_a_multiple_of_the_gpus() -> None:
    assert default_global_batch(Cluster.parse("h100:8x8"), 8192) == 512
    assert default_global_batch(Cluster.parse("h100:72x8"), 8192) == 576


# -- the command -----------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["shardwright", "plan", *words])
    code = cli.main()
    out, err = capsys.readouterr()
    return code, out, err


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = "tp=8,pp=2,dp=4,zero=1,schedule=1f1b,microbatches=16"
    code, out, _ = run(capsys, monkeypatch, "llama-3.1-70b", "--cluster", "h100-80gb:8x8", "--layout", layout, "--json")
    plan = json.loads(out)
    assert code == 0
    assert set(plan) >= KEYS
    assert plan["fits"] is True
    heaviest, lighter = plan["memory"]
    assert heaviest["total"] > lighter["total"]
    parts = sum(heaviest[name] for name in ("parameters", "gradients", "optimizer", "activations", "buffers"))
    assert parts == heaviest["total"] < heaviest["capacity"] == 80 * GIB
    assert set(plan["communication"][0]) == {
        "axis", "verb", "tensor", "phase", "bytes_per_gpu", "count", "link", "seconds", "exposed_seconds"
    }  # fmt: skip
    assert plan["pipeline"]["in_flight"] == [2, 1]
    assert Layout.parse(plan["layout"]).precision == "bf16"
    assert any("bf16" in line for line in plan["assumptions"])


def test_exit_code_and_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "llama-3.1-70b", "--cluster", "h100:1x8", "--layout", "tp=8")
    assert code == 1
    assert "does not fit" in out
    assert "it lacks" in " ".join(out.split())
    code, out, _ = run(capsys, monkeypatch, "tiny", "--cluster", "h100:1x2", "--top", "2", "--global-batch", "8")
    assert code == 0
    assert "Candidates" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing", "--cluster", "h100:1x8"), "neither a preset nor a file"),
        (("tiny", "--cluster", "h100:0x8"), "both must be at least 1"),
        (("tiny", "--cluster", "z9:1x8"), "no chip 'z9'"),
        (("tiny", "--cluster", "h100:1x8", "--layout", "tp=3,dp=2"), "tp=3 must divide"),
        (("tiny", "--cluster", "h100:1x8", "--layout", "dp=8", "--global-batch", "12"), "must divide the global batch"),
        (("tiny",), "Missing option '--cluster'|missing option"),
        (("tiny", "--cluster", "h100:1x8", "--precision", "fp2"), "precision=fp2 is not known; use one of fp64, fp32, bf16"),
        (("tiny", "--cluster", "h100:1x8", "--layout", "dp=8,precision=fp8", "--precision", "bf16"), "contradicts precision=fp8"),
        (("tiny", "--cluster", "h100:1x8", "--max-tpot-ms", "5"), "--max-tpot-ms 5.0 is of a serving plan; add --for serve"),
        (("tiny", "--cluster", "h100:1x8", "--objective", "latency"), "--objective latency is of a serving plan"),
        (("tiny", "--cluster", "h100:1x8", "--concurrency", "4"), "--concurrency 4 is of a serving plan"),
        (("tiny", "--cluster", "h100:1x8", "--for", "serve", "--seq", "64"), "--seq 64 is of a training plan; leave it out"),
        (("tiny", "--cluster", "h100:1x8", "--for", "serve", "--global-batch", "8"), "--global-batch 8 is of a training plan"),
        (("tiny", "--cluster", "h100:1x8", "--for", "serve", "--report", "x.html"), "--report x.html is of a training plan"),
    ],
)
def test_mistakes_get_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, *words)
    assert code == 2
    assert out == ""
    assert re.search(message, err)
    assert len(err.strip().splitlines()) == 1


def test_what_a_layout_leaves_out() -> None:
    cluster = Cluster.parse("h100:1x8")
    layout = plan_layout("dp=4,micro_batch=2", cluster, 64)
    assert (layout.microbatches, layout.precision, layout.reduce_dtype) == (8, "bf16", "bf16")
    assert plan_layout("precision=fp32", cluster, None).reduce_dtype == "fp32"
    assert plan_layout("reduce_dtype=fp32", cluster, None).reduce_dtype == "fp32"
    with pytest.raises(LayoutError, match=r"=8 is not the global batch of 16"):
        plan_layout("dp=4,microbatches=2", cluster, 16)


def test_models_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "tiny"\nnum_layers = 3\n')
    assert load_model(str(file)).num_layers == 3
    assert make_plan(str(file), "h100:1x1", "dp=1", 64, None, 5).plan.model.num_layers == 3
    file.write_text("[train]\nsteps = 1\n")
    with pytest.raises(ConfigError, match=r"has no table \[model\]"):
        load_model(str(file))
    with pytest.raises(ConfigError, match="cannot read"):
        load_model(str(tmp_path / "none.toml"))
