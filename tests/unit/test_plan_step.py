"""Kernels, the pipeline's clock and a whole step's time."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from shardwright.core.cluster import Cluster, find_chip
from shardwright.core.layout import Layout
from shardwright.core.presets import preset
from shardwright.errors import ConfigError, LayoutError, ModelConfigError
from shardwright.plan.compute import Kernels, Shape, layer_cost, layer_kind
from shardwright.plan.pipeline import StageTimes, makespan
from shardwright.plan.stack import Stack
from shardwright.plan.step_time import Pricer

CHIP = find_chip("h100")
IDEAL = Stack(gemm_bf16=1.0, gemm_fp8=1.0, attention=1.0, memory=1.0, launch=0.0)


def mixed(text: str) -> Layout:
    return Layout.parse(text + ",precision=bf16,reduce_dtype=bf16")


# -- kernels ---------------------------------------------------------------------------------------


def test_large_products_are_bound_by_arithmetic_and_small_ones_by_memory() -> None:
    kernels = Kernels(replace(CHIP, num_sms=0), IDEAL, "bf16")
    assert kernels.gemm_seconds(8192, 8192, 8192) == pytest.approx(2 * 8192**3 / 989e12)
    decode = kernels.gemm_seconds(1, 8192, 8192)
    assert decode == pytest.approx(2 * (8192 * 8193 + 8192) / 3.35e12, rel=1e-3)
    assert Kernels(CHIP, replace(IDEAL, launch=5e-6), "bf16").gemm_seconds(1, 64, 64) > 5e-6


def test_part_waves_and_part_tiles_cost() -> None:
    kernels = Kernels(CHIP, IDEAL, "bf16")
    whole = kernels.gemm_seconds(256 * 12, 128 * 11, 65536)  # 132 tiles: one wave of 132 SMs
    more = kernels.gemm_seconds(256 * 12, 128 * 12, 65536)  # 144 tiles: a second wave of 12
    assert more > 1.3 * whole
    assert kernels.gemm_seconds(128 * 11 * 12 + 1, 256, 65536) > kernels.gemm_seconds(128 * 11 * 12, 256, 65536)


def test_fp8_doubles_the_rate_of_products_only() -> None:
    sixteen, eight = (Kernels(CHIP, IDEAL, precision) for precision in ("bf16", "fp8"))
    assert sixteen.gemm_seconds(8192, 8192, 8192) == pytest.approx(2 * eight.gemm_seconds(8192, 8192, 8192))
    for kernels in (sixteen, eight):
        kernels.fused_attention(4096, 4096, 32, 256, causal=True)
    assert sixteen.cost.attention_forward == eight.cost.attention_forward
    with pytest.raises(ConfigError, match="no fp8 peak is known for A100"):
        Kernels(find_chip("a100-80gb"), IDEAL, "fp8").gemm_seconds(8, 8, 8)


def test_odd_heads_do_not_reach_the_tensor_cores() -> None:
    chip = find_chip("a100-80gb")

    def seconds(width: int, precision: str = "bf16") -> float:
        kernels = Kernels(replace(chip, num_sms=0), IDEAL, precision)
        kernels.unfused_attention(64, 2048, 2048, 1, 2 * width)
        return kernels.cost.attention_forward

    assert seconds(108) == pytest.approx(seconds(1080) / 10 * 312 / 19.5, rel=0.02)
    assert seconds(112) < seconds(108) / 5
    assert seconds(112, "fp32") > seconds(108, "fp32")


def test_flops_of_a_layer_are_the_models() -> None:
    model = preset("llama-3.1-8b")
    cost = layer_cost(model, layer_kind(model, 0), Shape.of(Layout(), 8192), Kernels(CHIP, IDEAL, "bf16"))
    per_token = model.flops_per_token(8192, backward=False) - 2 * model.dim * model.vocab_size
    assert cost.flops_forward == pytest.approx(8192 * per_token / model.num_layers)


def test_splitting_divides_work() -> None:
    model = preset("llama-3.1-70b")

    def layer(text: str) -> float:
        shape = Shape.of(mixed(text), 8192)
        return layer_cost(model, layer_kind(model, 0), shape, Kernels(CHIP, IDEAL, "bf16")).flops_forward

    assert layer("tp=8") == pytest.approx(layer("tp=1") / 8)
    assert layer("cp=4") == pytest.approx(layer("tp=1") / 4)


# -- the pipeline ----------------------------------------------------------------------------------


def even(layout: Layout, link: float = 0.0) -> StageTimes:
    stages = layout.num_stages
    return StageTimes((1.0,) * stages, (1.0,) * stages, (1.0,) * stages, link)


def test_bubbles_of_the_worked_examples(shared: Path) -> None:
    for case in json.loads((shared / "vectors" / "worked_examples.json").read_text())["bubble_fraction"]:
        name = case["schedule"].replace("_1f1b", "")
        virtual = case.get("virtual", 1)
        layout = Layout(pp=case["stages"], microbatches=case["microbatches"], virtual=virtual, schedule=name)
        times, exact = even(layout), "closed form" not in case.get("note", "")
        work = case["microbatches"] * 3 * layout.num_stages / case["stages"]
        fraction = 1 - work / makespan(layout, times, exact=exact)
        if name != "interleaved" or exact:
            assert fraction == pytest.approx(float(Fraction(case["value"])), abs=0.01 if name == "zb_v" else 1e-9)


@pytest.mark.parametrize(
    "text",
    [
        "pp=4,microbatches=64",
        "pp=4,microbatches=61",
        "pp=3,microbatches=90,schedule=gpipe",
        "pp=4,microbatches=64,schedule=interleaved,virtual=3",
        "pp=4,microbatches=64,schedule=zb_h1",
        "pp=4,microbatches=64,schedule=zb_v",
        "pp=4,microbatches=64,schedule=dualpipe_v",
    ],
)
@pytest.mark.parametrize("slow", [0, 2, -1])
def test_many_micro_batches_continue_the_steady_state(text: str, slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.parse(text)
    times = even(layout, link=0.05)
    forward = list(times.forward)
    forward[slow] = 1.6
    times = replace(times, forward=tuple(forward))
    continued = makespan(layout, times)
    monkeypatch.setattr("shardwright.plan.pipeline.ROUNDS", {})
    monkeypatch.setattr("shardwright.plan.pipeline.OTHER_ROUNDS", 100)
    assert continued == pytest.approx(makespan(layout, times), rel=2e-3)


@pytest.mark.parametrize("text", ["pp=4,microbatches=16", "pp=4,microbatches=16,schedule=interleaved,virtual=2"])
def test_the_closed_form_is_the_clock_for_even_stages(text: str) -> None:
    layout = Layout.parse(text)
    assert makespan(layout, even(layout), exact=False) == pytest.approx(makespan(layout, even(layout)))


# -- a step ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pricer() -> Pricer:
    return Pricer(preset("llama-3.1-70b"), Cluster.parse("h100:8x8"), 8192, Stack())


def test_parts_add_up(pricer: Pricer) -> None:
    plan = pricer.price(mixed("tp=8,pp=2,dp=4,zero=1,microbatches=16"))
    step = plan.step
    parts = step.compute_seconds + step.bubble_seconds + step.exposed_communication_seconds + step.optimizer_seconds
    assert parts + step.other_seconds == pytest.approx(step.seconds, rel=1e-6)
    tokens = plan.layout.global_batch * 8192
    assert step.tokens_per_second_per_gpu == pytest.approx(tokens / step.seconds / 64)
    assert step.mfu == pytest.approx(pricer.model.flops_per_token(8192) * tokens / (step.seconds * 64 * 989e12))
    assert step.mfu < step.mfu_full_attention < 1
    assert plan.pipeline.bubble_fraction == pytest.approx(1 / 17, abs=0.01)
    assert plan.pipeline.in_flight == (2, 1)
    assert plan.memory[0].stage == 0


@pytest.mark.parametrize(
    "text", ["tp=8,pp=8,microbatches=16", "tp=8,pp=8,schedule=zb_v,microbatches=16", "tp=8,pp=3,microbatches=2"]
)
def test_the_peak_is_that_of_the_fullest_rank(pricer: Pricer, text: str) -> None:
    layout = mixed(text)
    assert pricer.peak_bytes(layout) == pricer.margin.device_bytes(pricer.stage_memory(layout)[0].total)


def test_exposed_seconds_are_those_of_the_messages(pricer: Pricer) -> None:
    plan = pricer.price(mixed("tp=4,cp=2,pp=2,dp=4,zero=1,microbatches=16"))
    assert all(0 <= entry.exposed_seconds <= entry.seconds * (1 + 1e-9) for entry in plan.communication)
    listed = sum(entry.exposed_seconds for entry in plan.communication)
    assert listed == pytest.approx(
        plan.step.exposed_communication_seconds, rel=0.02
    )  # a receive waits but sends nothing


def test_recomputation_costs_a_forward_and_counts_in_hfu_only(pricer: Pricer) -> None:
    plain, full = (pricer.price(mixed(f"tp=8,dp=8,zero=1,recompute={kind}")).step for kind in ("none", "full"))
    assert 1.2 < full.compute_seconds / plain.compute_seconds < 1.4
    assert full.hfu / full.mfu > 1.25 * plain.hfu / plain.mfu


def test_slower_links_cost_where_they_are_used(pricer: Pricer) -> None:
    slow = Pricer(pricer.model, Cluster.parse("h100:8x8"), 8192, Stack(intra=0.3))
    layout = mixed("tp=8,dp=8,zero=1")
    assert slow.price(layout).step.seconds > 1.1 * pricer.price(layout).step.seconds
    overlapped = pricer.price(layout.with_(tp_overlap=4)).step
    assert overlapped.exposed_communication_seconds < pricer.price(layout).step.exposed_communication_seconds * 0.7


def test_the_host_bounds_small_work() -> None:
    fast, slow = (
        Pricer(preset("demo"), Cluster.parse("h100:1x1"), 128, Stack(host=host)).price(mixed("microbatches=4")).step
        for host in (0.0, 5e-5)
    )
    assert slow.seconds > 5 * fast.seconds


@pytest.mark.parametrize(
    ("text", "shards"), [("zero=1", 1), ("zero=2,accumulate=reduce", 8), ("zero=3,accumulate=reduce", 8), ("zero=3", 1)]
)
def test_gradients_of_later_micro_batches_are_added_to_a_sum(pricer: Pricer, text: str, shards: int) -> None:
    def seconds(microbatches: int, moved: float) -> float:
        some = pricer.with_stack(replace(pricer.stack, accumulate=moved))
        keys = text if microbatches > 1 else text.replace(",accumulate=reduce", "")
        return some.price(mixed(f"tp=8,dp=8,{keys},microbatches={microbatches}")).step.compute_seconds

    assert seconds(1, 6.0) == seconds(1, 0.0)
    trained = pricer.table.of_rank(pricer.units_of_ranks(Layout())[0], 8, 1).total
    sums = 3 * trained / shards * 6.0 / (CHIP.memory_bandwidth * pricer.stack.memory)
    assert seconds(4, 6.0) - seconds(4, 0.0) == pytest.approx(sums, rel=1e-6)


def test_sums_of_experts_are_those_of_their_own_shards() -> None:
    model, layout = preset("qwen3-30b-a3b"), mixed("dp=8,ep=4,zero=2,accumulate=reduce,microbatches=4")
    steps = [
        Pricer(model, Cluster.parse("h100:1x8"), 4096, Stack(accumulate=moved)).price(layout).step.compute_seconds
        for moved in (6.0, 0.0)
    ]
    pricer = Pricer(model, Cluster.parse("h100:1x8"), 4096)
    held = pricer.table.of_rank(pricer.units_of_ranks(layout)[0], 1, 4)
    sums = 3 * (held.dense / 8 + held.experts / 2) * 6.0 / (CHIP.memory_bandwidth * Stack().memory)
    assert steps[0] - steps[1] == pytest.approx(sums, rel=1e-6)


def test_offload_takes_time(pricer: Pricer) -> None:
    here, there = (pricer.price(mixed(f"tp=8,dp=8,zero=1,offload={kind}")) for kind in ("none", "optimizer"))
    assert there.step.optimizer_seconds > 10 * here.step.optimizer_seconds
    assert there.memory[0].optimizer == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=128", "needs 128 GPUs, the cluster has 64"),
        ("tp=3", "must divide the model's 64 attention heads"),
        ("cp=3,dp=3", "cp=3 must divide the sequence of 8192"),
        ("ep=2,dp=2", "needs a model with experts"),
        ("dp=2,zero=2,reshard=always", "reshard=always does nothing with zero=2"),
        ("pp=41,schedule=zb_v,microbatches=82", "82 stages need as many layers"),
    ],
)
def test_impossible_layouts_are_refused(pricer: Pricer, text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        pricer.price(mixed(text))


def test_impossible_inputs_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="seq=0 must be at least 1"):
        Pricer(preset("tiny"), Cluster.parse("h100:1x1"), 0)
    moe = Pricer(preset("mixtral-8x7b"), Cluster.parse("h100:2x8"), 4096)
    with pytest.raises(LayoutError, match="ep=16 must divide the model's 8 experts"):
        moe.price(mixed("dp=16,ep=16"))


def test_a_checkpoint_is_priced() -> None:
    """Working parameters, masters and two moments, written once by all nodes; training waits for the copy alone."""
    model, layout = preset("llama-3.1-70b"), mixed("tp=8,dp=8,zero=1")
    cluster = replace(Cluster.parse("h100:8x8"), storage_bandwidth=2e9)
    saved = Pricer(model, cluster, 8192, Stack(host_bandwidth=20e9)).price(layout).checkpoint
    assert saved is not None
    assert saved.bytes == model.num_parameters() * (2 + 12)
    assert saved.write_seconds == pytest.approx(saved.bytes / (8 * 2e9))
    assert saved.blocked_seconds == pytest.approx(saved.bytes / 64 / 20e9)
    assert saved.blocked_share == pytest.approx(saved.blocked_seconds / saved.interval_seconds)
    often = replace(saved, interval_seconds=saved.write_seconds)
    assert often.blocked_share == pytest.approx(2 * saved.blocked_seconds / saved.write_seconds)  # the rest is late


def test_mfu_by_three_conventions() -> None:
    step = Pricer(preset("llama-3.1-8b"), Cluster.parse("h100:1x8"), 8192, Stack()).price(mixed("dp=8,zero=3")).step
    model = preset("llama-3.1-8b")
    for mfu, options in (
        (step.mfu_full_attention, {"convention": "full"}),
        (step.mfu_with_embedding, {"embedding": True}),
    ):
        assert mfu / step.mfu == pytest.approx(model.flops_per_token(8192, **options) / model.flops_per_token(8192))
