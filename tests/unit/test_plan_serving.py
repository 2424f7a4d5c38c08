"""Serving plans: memory and capacity, steps as rooflines, what users see, targets, and errors on measured runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright import cli
from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.presets import preset
from shardwright.errors import ConfigError, LayoutError
from shardwright.plan.accuracy import assess
from shardwright.plan.command import make_serving_plan
from shardwright.plan.rows import Refused
from shardwright.plan.serve_explain import serving_in_words
from shardwright.plan.serve_search import Target, least_group
from shardwright.plan.serving import Load, ServingPricer, fewest_gpus, touched_share
from shardwright.plan.serving_rows import ServingCase, read_runs, saturated
from shardwright.plan.stack import Stack, stack_of

H100 = Cluster.parse("h100-80gb:1x8")
IDEAL = Stack(
    gemm_bf16=1.0, gemm_fp8=1.0, memory=1.0, kv=1.0, attention=1.0, launch=0.0, fused=0.0, latency=0.0, intra=1.0
)
LOAD = Load(1024, 1024, 16)


def pricer(model: str, cluster: Cluster = H100, stack: Stack = IDEAL) -> ServingPricer:
    return ServingPricer(preset(model), cluster, stack)


# -- memory ----------------------------------------------------------------------------------------


def test_weights_are_read_off_the_parameters() -> None:
    model = preset("llama-3.1-70b")
    whole = pricer("llama-3.1-70b").weight_bytes(Layout(precision="bf16"))
    assert whole == 2 * model.num_parameters()
    eighth = pricer("llama-3.1-70b").weight_bytes(Layout(tp=8, precision="bf16"))
    assert eighth == pytest.approx(whole / 8, rel=3e-4)  # norms are on every rank
    tables = 2 * model.vocab_size * model.dim
    assert pricer("llama-3.1-70b").weight_bytes(Layout(precision="fp8")) == pytest.approx(whole / 2 + tables, rel=1e-3)
    stages = pricer("llama-3.1-70b").weight_bytes(Layout(pp=4, precision="bf16"))
    assert whole / 4 < stages < whole / 4 + 2 * tables  # the stage with the head is the heaviest


def test_experts_are_split_by_ep_or_in_slices() -> None:
    some = pricer("mixtral-8x7b")
    spread = some.weight_bytes(Layout(tp=8, ep=8, precision="bf16"))
    sliced = some.weight_bytes(Layout(tp=8, precision="bf16"))
    assert spread == sliced == pytest.approx(2 * preset("mixtral-8x7b").num_parameters() / 8, rel=0.01)


def test_cache_of_a_token() -> None:
    grouped = pricer("llama-3.1-70b")
    assert grouped.kv_bytes_per_token(Layout()) == preset("llama-3.1-70b").kv_bytes_per_token() == 327680
    assert grouped.kv_bytes_per_token(Layout(tp=8)) == 327680 / 8
    wide = pricer("llama-3.1-70b", Cluster.parse("gb200:1x16"))
    assert wide.kv_bytes_per_token(Layout(tp=16)) == 327680 / 8  # 8 KV heads: two ranks hold the same one
    latent = pricer("deepseek-v3")
    assert latent.kv_bytes_per_token(Layout()) == latent.kv_bytes_per_token(Layout(tp=8)) == 61 * 576 * 2
    assert latent.kv_bytes_per_token(Layout(), 1.0) == 61 * 576


def test_capacity_is_what_weights_leave() -> None:
    some = pricer("llama-3.1-8b", Cluster.parse("h100-80gb:1x1"))
    memory = some.memory(Layout(precision="bf16"), LOAD)
    usable = 0.9 * H100.chip.memory_bytes
    assert memory.weights + memory.workspace + memory.cache == pytest.approx(usable)
    assert memory.tokens == int(memory.cache / 131072)
    assert memory.sequences == pytest.approx(memory.tokens / 2048, abs=1)
    replicas = pricer("llama-3.1-8b").memory(Layout(dp=8, precision="bf16"), LOAD)
    assert replicas.sequences == 8 * memory.sequences
    sliding = pricer("gpt-oss-120b", Cluster.parse("h200:1x8"))
    long = Load(8192, 1024, 1)
    held = sliding.memory(Layout(tp=8, precision="fp4"), long)
    assert held.sequences > 1.9 * held.tokens / long.length  # half of the layers keep 128 tokens


def test_fewest_gpus() -> None:
    assert fewest_gpus(preset("deepseek-v2"), H100, "bf16") == 7  # 472 GB on 72 GiB each
    assert fewest_gpus(preset("llama-3.1-8b"), H100, "bf16") == 1


# -- steps -----------------------------------------------------------------------------------------


def test_decode_reads_weights_and_cache() -> None:
    some = pricer("llama-3.1-8b", Cluster.parse("h100-80gb:1x1"))
    layout = Layout(precision="bf16")
    model = preset("llama-3.1-8b")
    one = some.decode_seconds(layout, 1, 4096)
    num_bytes = 2 * model.matmul_parameters() + 131072 * 4096
    assert one == pytest.approx(num_bytes / 3.35e12, rel=0.01)
    more = some.decode_seconds(layout, 64, 4096)
    assert more - one == pytest.approx(63 * 131072 * 4096 / 3.35e12, rel=0.15)


def test_prefill_is_bound_by_arithmetic() -> None:
    model = preset("llama-3.1-8b")
    seconds = pricer("llama-3.1-8b").prefill_seconds(Layout(precision="bf16"), 8192)
    flops = model.flops_per_token(8192, backward=False) * 8192 - 2 * model.vocab_size * model.dim * 8191
    assert seconds == pytest.approx(flops / 989e12, rel=0.1)


def test_few_tokens_touch_few_experts() -> None:
    assert touched_share(128, 8, 1.0, 0.0) == pytest.approx(8 / 128)
    assert touched_share(128, 8, 1000.0, 0.0) == pytest.approx(1.0)
    assert touched_share(128, 8, 32.0, 1.2) < 0.75 * touched_share(128, 8, 32.0, 0.0)
    slow = pricer("gpt-oss-120b").decode_seconds(Layout(precision="bf16"), 1, 64)
    fast = pricer("gpt-oss-120b").decode_seconds(Layout(precision="fp4"), 1, 64)
    assert fast < slow


def test_what_a_user_sees() -> None:
    some = pricer("llama-3.1-70b", stack=stack_of("vllm-hopper"))
    alone = some.price(Layout(tp=8, precision="fp8"), replace(LOAD, concurrency=1)).times
    assert alone.tpot_seconds == pytest.approx(alone.decode_seconds)
    assert alone.ttft_seconds == pytest.approx(
        some.stack.request_seconds + alone.prefill_seconds + alone.decode_seconds
    )
    many = some.price(Layout(tp=8, precision="fp8"), replace(LOAD, concurrency=64)).times
    assert many.tpot_seconds > many.decode_seconds > alone.decode_seconds
    assert many.output_tokens_per_second > 10 * alone.output_tokens_per_second
    crowded = some.price(Layout(tp=8, precision="fp8"), replace(LOAD, concurrency=5000)).times
    assert crowded.running < 5000
    assert crowded.queue_seconds > 0
    assert crowded.ttft_seconds > crowded.queue_seconds


def test_pipelines_hold_more_and_answer_no_faster() -> None:
    some = pricer("llama-3.1-70b", stack=stack_of("vllm-hopper"))
    deep, wide = (some.price(Layout(precision="fp8", **degrees), LOAD) for degrees in ({"pp": 8}, {"tp": 8}))
    assert deep.times.tpot_seconds > wide.times.tpot_seconds
    assert deep.memory.kv_bytes_per_token == pytest.approx(wide.memory.kv_bytes_per_token)
    entries = {entry.axis: entry for entry in some.messages(Layout(tp=8, precision="fp8"), 16)}
    assert entries["tp"].count == 160
    assert entries["tp"].bytes == 160 * 2 * 7 * 16 * 8192 // 8 * 2


# -- the search ------------------------------------------------------------------------------------


def test_targets_choose_among_groups() -> None:
    fast = make_serving_plan("llama-3.1-70b", "h100-80gb:1x8", None, LOAD, Target("latency"), "fp8", 5)
    assert fast.price.layout.tp == 8
    assert [p.times.tpot_seconds for p in fast.candidates] == sorted(p.times.tpot_seconds for p in fast.candidates)
    much = make_serving_plan(
        "llama-3.1-8b", "h100-80gb:1x8", None, replace(LOAD, concurrency=512), Target("throughput"), "fp8", 5
    )
    assert much.price.layout.dp > 1
    limited = make_serving_plan(
        "llama-3.1-70b", "h100-80gb:1x8", None, LOAD, Target("throughput", tpot=0.012), "fp8", 5
    )
    assert limited.fits
    assert limited.price.times.tpot_seconds <= 0.012
    assert any("TPOT" in candidate.reason for candidate in limited.rejected)
    assert limited.least is not None
    assert limited.to_json()["serving"]["least_group"]["gpus"] == limited.least.layout.world_size <= 8
    assert any(f"within the target are {limited.least.layout.world_size} (" in line for line in serving_in_words(limited))
    least = least_group(pricer("llama-3.1-70b", stack=stack_of("vllm-hopper")), LOAD, Target(tpot=0.03), "fp8")
    assert least is not None
    assert least.layout.world_size < 8


def test_experts_need_room() -> None:
    plan = make_serving_plan("deepseek-v3", "h200:1x8", None, LOAD, Target("latency"), "fp8", 3)
    assert plan.price.layout.ep > 1 or plan.price.layout.tp == 8
    assert plan.price.tokens_per_expert == pytest.approx(16 * 8 / 256)
    assert any("no room" in candidate.reason for candidate in plan.rejected)


@pytest.mark.parametrize("key", ["recompute=full", "micro_batch=2", "offload=optimizer", "zero=1", "cp=2"])
def test_impossible_keys_of_a_serving_layout_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"tp, pp, dp and ep only, and a precision; leave {key} out"):
        make_serving_plan("llama-3.1-8b", "h100-80gb:1x8", f"tp=2,{key}", LOAD, Target(), None, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("deepseek-v3", "h100-80gb:1x4", None, LOAD, Target(), None, 1), r"the weights alone need \d+ GPUs"),
        (
            ("llama-3.1-8b", "h100-80gb:1x1", None, Load(200000, 10, 1), Target(), None, 1),
            "more than the 131072 positions",
        ),
        (("llama-3.1-8b", "h100-80gb:1x1", "cp=2", LOAD, Target(), None, 1), "tp, pp, dp and ep only"),
        (("llama-3.1-8b", "h100-80gb:1x1", "tp=2", LOAD, Target(), None, 1), "needs 2 GPUs"),
        (("llama-3.1-8b", "h100-80gb:1x1", None, LOAD, Target(), "int3", 1), "precision=int3 is not known"),
    ],
)
def test_impossible_plans_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=message) as caught:
        make_serving_plan(*arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_impossible_loads_and_targets() -> None:
    with pytest.raises(ConfigError, match="concurrency=0 must be at least 1"):
        Load(1, 1, 0)
    with pytest.raises(ConfigError, match="objective=speed is not known"):
        Target("speed")
    with pytest.raises(ConfigError, match="must be above 0"):
        Target(tpot=-1.0)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["plan", "llama-3.1-8b", "--cluster", "h100-80gb:1x2", "--for", "serve", "--concurrency", "4"]
    monkeypatch.setattr("sys.argv", ["shardwright", *arguments, "--json"])
    assert cli.main() == 0
    found = json.loads(capsys.readouterr().out)
    expected = {"model", "cluster", "layout", "fits", "memory", "communication", "pipeline", "step", "assumptions"}
    assert expected | {"dropped_terms", "candidates", "rejected", "serving"} <= set(found)
    assert found["serving"]["ttft_seconds"] > found["serving"]["tpot_seconds"] > 0
    monkeypatch.setattr("sys.argv", ["shardwright", *arguments, "--max-tpot-ms", "0.1"])
    assert cli.main() == 1
    assert "does not meet the target" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["shardwright", *arguments[:4], "--for", "play"])
    assert cli.main() == 2
    assert capsys.readouterr().err.startswith("error: --for play is not known")


# -- measured runs ---------------------------------------------------------------------------------


def test_bars_on_measured_runs(shared: Path) -> None:
    """TPOT within 12 % and TTFT within 25 % in the median: vLLM, dense models, H100 and H200, few requests."""
    found = read_runs(shared / "planner" / "serving_latency.csv")
    assert all(case.reason for case in found if isinstance(case, Refused))
    cases = [case for case in found if isinstance(case, ServingCase) and case.group == "serving vllm dense hopper"]
    figures = assess(cases)["groups"]["serving vllm dense hopper"]
    low = figures["low_concurrency"]
    assert low["rows"] > 40
    assert low["tpot"]["median"] <= low["tpot"]["mape"] <= 12
    assert low["ttft"]["median"] <= 25
    assert low["tpot"]["straw_man"]["mape"] > low["tpot"]["mape"]
    assert figures["saturated"] > 0


def test_full_caches_are_seen_in_measured_runs(shared: Path) -> None:
    found = read_runs(shared / "planner" / "serving_latency.csv")
    cases = [case for case in found if isinstance(case, ServingCase) and case.group == "serving vllm dense hopper"]
    waiting = [case for case in cases if case.ttft > 10]
    assert waiting
    assert all(saturated(case, case.price(stack_of(case.stack))) for case in waiting)
