"""Schedules, the optimizers over flat ranges against torch.optim, clipping, and that small updates do not vanish."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.comm.mesh import Mesh
from shardwright.core.buckets import Member, plan_buckets
from shardwright.core.run_config import OptimConfig
from shardwright.errors import CheckpointError
from shardwright.ops.gradients import GradQueue, GradSlot
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.hooks import AllReduce
from shardwright.train.optim import FlatOptimizer, clip, global_norm, learning_rate

AXES = ("cp", "dp")
SHAPES = {"first.weight": (3, 5), "first.bias": (5,), "empty.weight": (0, 5), "last.weight": (7,)}
DECAYED = {"first.weight", "empty.weight", "last.weight"}
STEPS = 4


def make_parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in SHAPES.items()
    }


def make_buckets(parameters: dict[str, nn.Parameter], bucket_mb: float = 25.0) -> GradientBuckets:
    members = [Member(name, tuple(p.shape), (name,), name in DECAYED, AXES) for name, p in parameters.items()]
    return GradientBuckets(plan_buckets(members, list(parameters), bucket_mb), parameters, Mesh.solo(), AllReduce())


def gradient(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def set_gradients(buckets: GradientBuckets, step: int) -> None:
    for name, view in buckets.named("gradients").items():
        view.copy_(gradient(name, step))


def one_value(dtype: torch.dtype) -> tuple[dict[str, nn.Parameter], GradientBuckets]:
    """A single weight of 1.0 that does not decay."""
    parameters = {"w": nn.Parameter(torch.ones(1, dtype=dtype))}
    plans = plan_buckets([Member("w", (1,), ("w",), False, AXES)], ["w"], 25.0)
    return parameters, GradientBuckets(plans, parameters, Mesh.solo(), AllReduce())


# ------------------------------------------------------------------------------------------------- schedules


def rates(steps: int, **options: object) -> list[float]:
    config = OptimConfig(lr=1.0, **options)  # type: ignore[arg-type]
    return [learning_rate(config, step, steps) for step in range(steps + 1)]


def test_warm_up_reaches_the_rate_after_its_steps_and_never_starts_at_zero() -> None:
    assert rates(10, schedule="constant", warmup_steps=4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_is_half_way_after_half_of_the_optimizer_steps() -> None:
    decay = rates(100, schedule="linear", min_lr_ratio=0.0)
    assert decay[0] == 1.0 and decay[50] == 0.5 and decay[100] == 0.0  # LN-13: the bug is at zero after 25
    assert rates(100, schedule="linear", min_lr_ratio=0.1)[100] == pytest.approx(0.1)


def test_cosine_falls_to_its_minimum_and_is_half_way_in_the_middle() -> None:
    decay = rates(100, schedule="cosine", min_lr_ratio=0.2, warmup_steps=20)
    assert decay[19] == 1.0 and decay[20] == 1.0
    assert decay[60] == pytest.approx(0.6) and decay[100] == pytest.approx(0.2)
    assert decay[20:] == sorted(decay[20:], reverse=True)


def test_wsd_stays_and_falls_in_the_last_share_of_the_steps() -> None:
    decay = rates(100, schedule="wsd", min_lr_ratio=0.0, decay_fraction=0.2)
    assert decay[:81] == [1.0] * 81
    assert decay[90] == pytest.approx(0.5) and decay[100] == pytest.approx(0.0)


def test_a_run_that_only_warms_up_is_possible() -> None:
    assert rates(4, schedule="cosine", warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


# ------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("bucket_mb", [25.0, 40 / 2**20])
def test_adamw_equals_torchs_in_fp64_with_decay_on_decayed_parameters_only(bucket_mb: float) -> None:
    ours, theirs = make_parameters(torch.float64), make_parameters(torch.float64)
    buckets = make_buckets(ours, bucket_mb)
    config = OptimConfig(name="adamw", betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    optimizer = FlatOptimizer(config, buckets.buckets)
    groups = [
        {"params": [p for name, p in theirs.items() if name in DECAYED], "weight_decay": 0.3},
        {"params": [p for name, p in theirs.items() if name not in DECAYED], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    for step in range(STEPS):
        lr = 0.1 / (step + 1)
        set_gradients(buckets, step)
        optimizer.step(lr)
        for name, parameter in theirs.items():
            parameter.grad = gradient(name, step)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-12, atol=1e-12)


def test_sgd_keeps_decay_out_of_its_momentum() -> None:
    parameters = {name: nn.Parameter(torch.tensor([1.0])) for name in ("decays", "stays")}
    members = [Member(name, (1,), (name,), name == "decays", AXES) for name in parameters]
    buckets = GradientBuckets(plan_buckets(members, list(parameters), 25.0), parameters, Mesh.solo(), AllReduce())
    optimizer = FlatOptimizer(OptimConfig(name="sgd", momentum=0.5, weight_decay=0.2), buckets.buckets)
    for value in (1.0, 0.0):
        for view in buckets.named("gradients").values():
            view.fill_(value)
        optimizer.step(lr=0.1)
    # velocities 1 and 0.5; without decay 1 - 0.1 - 0.05; with it (1 * 0.98 - 0.1) * 0.98 - 0.05
    assert parameters["stays"].item() == pytest.approx(0.85)
    assert parameters["decays"].item() == pytest.approx(0.8124)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_small_updates_of_bf16_parameters_do_not_vanish(name: str) -> None:
    """ZF-07: 100 updates of 0.001 move 1.0 to 0.9 in fp32 and not at all in bf16."""
    parameters, buckets = one_value(torch.bfloat16)
    config = OptimConfig(name=name, momentum=0.0, betas=(0.0, 0.0), weight_decay=0.0)  # type: ignore[arg-type]
    optimizer = FlatOptimizer(config, buckets.buckets)
    for _ in range(100):
        buckets.buckets[0].gradients.fill_(1.0)
        optimizer.step(lr=0.001)
    assert buckets.buckets[0].pieces[0].master.item() == pytest.approx(0.9, abs=1e-5)
    assert parameters["w"].item() == pytest.approx(0.9, abs=2**-9)
    assert {flat.dtype for flats in optimizer.state.values() for flat in flats} == {torch.float32}
    assert buckets.buckets[0].gradients.dtype == buckets.buckets[0].pieces[0].master.dtype == torch.float32

    lost = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(100):
        lost -= 0.001
    assert lost.item() == 1.0


@pytest.mark.parametrize("direct", [True, False])
def test_gradients_of_bf16_parameters_are_summed_in_fp32(direct: bool) -> None:
    """ZF-06: 0.001 added to 1.0 a thousand times gives 2.0; a bf16 sum stays at 1.0."""
    small = torch.tensor([0.001], dtype=torch.bfloat16)
    expected = 1.0 + 1000 * small.double().item()
    if direct:
        view = torch.empty(1)
        slot = GradSlot(view, GradQueue())
        slot.add(torch.ones(1, dtype=torch.bfloat16))
        for _ in range(1000):
            slot.add(small)
    else:
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        plans = plan_buckets([Member("w", (1,), ("w",), True, AXES)], ["w"], 25.0)
        buckets = GradientBuckets(plans, {"w": parameter}, Mesh.solo(), AllReduce(), direct=False)
        view = buckets.buckets[0].gradients
        parameter.sum().backward()
        for _ in range(1000):
            (parameter * small).sum().backward()
    assert view.item() == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------------------------- norm and clipping


def test_the_norm_counts_every_bucket_once_and_clipping_scales_all_by_one_factor() -> None:
    parameters = {"a": nn.Parameter(torch.zeros(1)), "b": nn.Parameter(torch.zeros(2))}
    members = [Member(name, tuple(p.shape), (name,), True, AXES) for name, p in parameters.items()]
    buckets = GradientBuckets(plan_buckets(members, ["a", "b"], 4 / 2**20), parameters, Mesh.solo(), AllReduce())
    assert len(buckets.buckets) == 2
    views = buckets.named("gradients")
    views["a"].fill_(3.0)
    views["b"].copy_(torch.tensor([4.0, 0.0]))
    norm = global_norm(buckets, Mesh.solo()).item()
    assert norm == 5.0
    assert clip(buckets, norm, 10.0) == clip(buckets, norm, 0.0) == 1.0 and views["a"].item() == 3.0
    assert clip(buckets, norm, 1.0) == pytest.approx(0.2)
    assert views["a"].item() == pytest.approx(0.6) and views["b"].tolist() == pytest.approx([0.8, 0.0])


def test_the_norm_of_a_model_without_trainable_parameters_is_zero() -> None:
    assert global_norm(GradientBuckets([], {}, Mesh.solo(), AllReduce()), Mesh.solo()).item() == 0.0


# ------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_by_name_moves_to_another_plan_of_buckets(name: str, dtype: torch.dtype) -> None:
    config = OptimConfig(name=name)  # type: ignore[arg-type]
    parameters, others = make_parameters(dtype), make_parameters(dtype)
    buckets, other_buckets = make_buckets(parameters), make_buckets(others, bucket_mb=40 / 2**20)
    optimizer = FlatOptimizer(config, buckets.buckets)
    for step in range(2):
        set_gradients(buckets, step)
        optimizer.step(0.1)
    saved = {
        kind: {key: view.clone() for key, view in views.items()} for kind, views in optimizer.named_state().items()
    }
    assert all(views.keys() == SHAPES.keys() for views in saved.values())
    assert ("master" in saved) == (dtype == torch.bfloat16)
    assert all(saved[kind]["first.weight"].count_nonzero() for kind in saved)

    resumed = FlatOptimizer(config, other_buckets.buckets)
    resumed.load(saved, optimizer.step_count)
    for key, parameter in others.items():
        with torch.no_grad():
            parameter.copy_(parameters[key])
    for step in (2, 3):
        for run, optimizer_ in ((buckets, optimizer), (other_buckets, resumed)):
            set_gradients(run, step)
            optimizer_.step(0.1)
    assert all(torch.equal(parameter, others[key]) for key, parameter in parameters.items())


def test_state_of_another_optimizer_or_of_other_parameters_is_refused() -> None:
    buckets = make_buckets(make_parameters())
    adamw = FlatOptimizer(OptimConfig(name="adamw"), buckets.buckets)
    sgd = FlatOptimizer(OptimConfig(name="sgd"), buckets.buckets)
    with pytest.raises(CheckpointError, match=r"\['exp_avg', 'exp_avg_sq'\] but sgd needs \['momentum'\]"):
        sgd.load(adamw.named_state(), 1)
    state = sgd.named_state()
    state["momentum"].pop("first.bias")
    with pytest.raises(CheckpointError, match=r"momentum .* \['first.bias'\]"):
        sgd.load(state, 1)


def test_memory_counts_the_moments_in_fp32() -> None:
    num_elements = sum(parameter.numel() for parameter in make_parameters().values())
    for dtype in (torch.float32, torch.bfloat16):
        buckets = make_buckets(make_parameters(dtype))
        assert FlatOptimizer(OptimConfig(name="adamw"), buckets.buckets).memory() == 2 * 4 * num_elements
        assert FlatOptimizer(OptimConfig(name="sgd"), buckets.buckets).memory() == 4 * num_elements
