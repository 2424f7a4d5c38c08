"""The operations with hand-written backwards: true gradients, on autograd's way and through slots; attention; dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.model_config import ModelConfig
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError
from shardwright.model.loss import IGNORE, head_loss
from shardwright.model.transformer import Transformer
from shardwright.ops.attention import CausalAttend, ScoreDropout, ScoresAttend
from shardwright.ops.gradients import GradQueue, GradSlot, joined, set_slot
from shardwright.ops.kernels import dropout, dropout_key, swiglu
from shardwright.ops.linear import embedding, fused_linear, linear
from shardwright.ops.norm import layer_norm, rms_norm
from shardwright.ops.rope import apply_rope, inverse_frequencies, rotation, split_rope
from shardwright.train.data import MicroBatch
from shardwright.train.step import Trainer

T, D, F_DIM, V = 5, 6, 4, 7
TOKENS = torch.tensor([3, 0, 3, 6, 3])
TARGETS = torch.tensor([1, IGNORE, 6, 0, 1])


def turned(dtype: torch.dtype, size: int = 4) -> tuple[Tensor, Tensor]:
    angles = torch.arange(1, T * size // 2 + 1, dtype=torch.float64).view(T, 1, size // 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def neighbours(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same values one after another in one storage."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    sizes = [t.numel() for t in tensors]
    return [part.view(t.shape) for part, t in zip(flat.split(sizes), tensors, strict=True)]


@dataclass(frozen=True)
class Case:
    """``function(*inputs)`` with inputs of ``shapes``; those from ``first_parameter`` on are parameters."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    first_parameter: int = 1
    adjacent: bool = False

    def inputs(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        generator = torch.Generator().manual_seed(len(self.name))
        made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in self.shapes]
        if self.adjacent:
            made[self.first_parameter :] = neighbours(made[self.first_parameter :])
        return [tensor.requires_grad_() for tensor in made]

    def scalar(self, inputs: Sequence[Tensor], weights_dtype: torch.dtype = torch.float64) -> Tensor:
        """One number that depends on every output with a weight of its own."""
        outputs = self.function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = torch.zeros((), dtype=weights_dtype)
        for index, y in enumerate(outputs):
            weights = torch.linspace(-1, 1 + index, y.numel(), dtype=weights_dtype).view(y.shape)
            total = total + (y.to(weights_dtype) * weights).sum()
        return total


def three(with_bias: bool) -> Callable[..., Tensor]:
    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return fused_linear(x, parameters[:3], parameters[3:] if with_bias else ())

    return function


QKV = ((4, D), (2, D), (2, D))
QKV_BIAS = ((4,), (2,), (2,))
CASES = [
    Case("linear", linear, ((T, D), (3, D))),
    Case("linear with bias", linear, ((T, D), (3, D), (3,))),
    Case("fused, apart", three(False), ((T, D), *QKV)),
    Case("fused, neighbours", three(False), ((T, D), *QKV), adjacent=True),
    Case("fused with bias, apart", three(True), ((T, D), *QKV, *QKV_BIAS)),
    Case("fused with bias, neighbours", three(True), ((T, D), *QKV, *QKV_BIAS), adjacent=True),
    Case("embedding", lambda weight: embedding(TOKENS, weight), ((V, D),), first_parameter=0),
    Case("rms norm", lambda x, w: rms_norm(x, w, 1e-5), ((T, D), (D,))),
    Case("rms norm of heads", lambda x, w: rms_norm(x, w, 1e-5), ((T, 3, D), (D,))),
    Case("layer norm", lambda x, w, b: layer_norm(x, w, b, 1e-5), ((T, D), (D,), (D,))),
    Case("layer norm of heads", lambda x, w, b: layer_norm(x, w, b, 1e-5), ((T, 2, D), (D,), (D,))),
    Case("rope", lambda x: apply_rope(x, turned(x.dtype)), ((T, 3, 4),)),
    Case("split rope", lambda x: split_rope(x, turned(x.dtype), 2, 1), ((T, 4, 4),)),
    Case("swiglu", swiglu, ((T, 2 * F_DIM),)),
    Case("head loss", lambda x, w: head_loss(x, w, TARGETS), ((T, D), (V, D))),
]
WITH_PARAMETERS = [case for case in CASES if len(case.shapes) > case.first_parameter]


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def gradients(case: Case, inputs: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(case.scalar(inputs), inputs))


# -- true gradients --------------------------------------------------------------------------------


@each([case for case in CASES if case.name != "head loss"])
def test_gradients_equal_finite_differences(case: Case) -> None:
    assert torch.autograd.gradcheck(case.function, case.inputs(), eps=1e-6, atol=1e-7, rtol=1e-6)


def test_the_gradient_of_the_head_loss_equals_finite_differences() -> None:
    """By hand: the logits become their own gradient, so one graph serves one backward only."""
    case = CASES[-1]
    inputs = case.inputs()
    for x, gradient in zip(inputs, gradients(case, inputs), strict=True):
        flat = x.detach().view(-1)
        for index in range(flat.numel()):
            ends = []
            for step in (1e-6, -2e-6):
                flat[index] += step
                ends.append(case.scalar(inputs).item())
            flat[index] += 1e-6
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(gradient.view(-1)[index].item(), rel=1e-6, abs=1e-7)


def test_values_equal_plain_pytorch() -> None:
    inputs = {case.name: [t.detach() for t in case.inputs()] for case in CASES}

    def same(name: str, expected: Callable[..., Tensor]) -> None:
        (case,) = (case for case in CASES if case.name == name)
        assert torch.allclose(case.function(*inputs[name]), expected(*inputs[name]), rtol=1e-12, atol=1e-12), name

    for where in ("apart", "neighbours"):
        same(f"fused, {where}", lambda x, *w: F.linear(x, torch.cat(w)))
        same(f"fused with bias, {where}", lambda x, *p: F.linear(x, torch.cat(p[:3]), torch.cat(p[3:])))
    same("linear with bias", F.linear)
    same("embedding", lambda w: w[TOKENS])
    same("rms norm of heads", lambda x, w: F.rms_norm(x, (D,), w, 1e-5))
    same("layer norm", lambda x, w, b: F.layer_norm(x, (D,), w, b, 1e-5))
    same("swiglu", lambda x: F.silu(x[:, :F_DIM]) * x[:, F_DIM:])
    same("head loss", lambda x, w: F.cross_entropy(x @ w.t(), TARGETS, ignore_index=IGNORE, reduction="sum"))
    half = torch.polar(torch.ones((T, 1, 2), dtype=torch.float64), torch.arange(1.0, T * 2 + 1).double().view(T, 1, 2))
    x = inputs["rope"][0]
    rotated = torch.view_as_real(torch.complex(x[..., :2], x[..., 2:]) * half)
    same("rope", lambda _: torch.cat(rotated.unbind(-1), -1))
    qkv = inputs["split rope"][0]
    for ours, expected in zip(split_rope(qkv, turned(qkv.dtype), 2, 1), qkv.split([2, 1, 1], 1), strict=True):
        kept = ours.shape[1] == 1 and torch.equal(ours, qkv[:, 3:])
        assert kept or torch.allclose(ours, apply_rope(expected, turned(qkv.dtype)))


def test_the_loss_of_equal_logits_is_the_logarithm_of_the_vocabulary() -> None:
    x, weight = torch.zeros(3, D, dtype=torch.float64), torch.ones(11, D, dtype=torch.float64)
    loss = head_loss(x, weight, torch.tensor([0, 10, IGNORE]))
    assert loss.item() / 2 == pytest.approx(2.397895, abs=1e-6)
    nothing = torch.full((3,), IGNORE)
    x = torch.randn(3, D, requires_grad=True)
    loss = head_loss(x, torch.randn(11, D), nothing)
    loss.backward()
    assert loss.item() == 0.0 and x.grad is not None and not x.grad.any()


def test_a_long_loss_is_the_sum_of_its_pieces() -> None:
    """More rows than one piece of the cache holds, and logits large enough to overflow without the maximum taken off."""
    torch.manual_seed(0)
    x, weight = torch.randn(700, 8) * 40, torch.randn(2000, 8) * 3
    targets = torch.randint(2000, (700,))
    expected = F.cross_entropy((x @ weight.t()).double(), targets, reduction="sum")
    assert head_loss(x, weight, targets).item() == pytest.approx(expected.item(), rel=1e-5)


# -- through slots ---------------------------------------------------------------------------------


def with_slots(
    case: Case, dtype: torch.dtype = torch.float64, *, slots_adjacent: bool = True
) -> tuple[list[Tensor], list[GradSlot], GradQueue]:
    """Inputs whose parameters write into slots (fp32, or fp64 for fp64) full of old values."""
    inputs, queue = case.inputs(dtype), GradQueue()
    parameters = inputs[case.first_parameter :]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    views = [torch.full(p.shape, 7.0, dtype=wide) for p in parameters]
    slots = [GradSlot(view, queue) for view in (neighbours(views) if slots_adjacent else views)]
    for parameter, slot in zip(parameters, slots, strict=True):
        set_slot(parameter, slot)
    return inputs, slots, queue


@each(WITH_PARAMETERS)
@pytest.mark.parametrize("slots_adjacent", [True, False], ids=["flat", "apart"])
def test_slots_take_what_autograd_would_and_accumulate(case: Case, slots_adjacent: bool) -> None:
    expected = gradients(case, case.inputs())
    inputs, slots, _ = with_slots(case, slots_adjacent=slots_adjacent)
    for times in (1, 2):
        case.scalar(inputs).backward()
        for slot, gradient in zip(slots, expected[case.first_parameter :], strict=True):
            assert slot.written and torch.allclose(slot.view, times * gradient, rtol=1e-12, atol=1e-12)
        for x, gradient in zip(inputs[: case.first_parameter], expected, strict=False):
            assert x.grad is not None and torch.allclose(x.grad, times * gradient, rtol=1e-12, atol=1e-12)
        assert all(parameter.grad is None for parameter in inputs[case.first_parameter :])


@each(WITH_PARAMETERS)
def test_deferred_weights_are_written_when_their_turn_comes(case: Case) -> None:
    expected = gradients(case, case.inputs())[case.first_parameter :]
    inputs, slots, queue = with_slots(case)
    queue.defer = True
    waiting = []
    for _ in range(2):
        case.scalar(inputs).backward()
        waiting += queue.take()
    matrices = [slot for slot, p in zip(slots, inputs[case.first_parameter :], strict=True) if p.dim() == 2]
    if case.name != "embedding":  # an index_add, as cheap as keeping its input: written at once
        assert bool(waiting) == bool(matrices)
        assert all(bool((slot.view == 7.0).all()) for slot in matrices)  # nothing of them is written yet
    assert queue.take() == []
    with torch.no_grad():
        for write in reversed(waiting):  # in any order
            write()
    for slot, gradient in zip(slots, expected, strict=True):
        assert torch.allclose(slot.view, 2 * gradient, rtol=1e-12, atol=1e-12)


@each(WITH_PARAMETERS)
def test_bf16_is_close_to_fp32_and_accumulates_in_fp32(case: Case) -> None:
    narrow, slots, _ = with_slots(case, torch.bfloat16)
    wide = [t.detach().float().requires_grad_() for t in narrow]
    case.scalar(narrow, torch.float32).backward()
    expected = torch.autograd.grad(case.scalar(wide, torch.float32), wide)
    found = [x.grad.float() for x in narrow[: case.first_parameter] if x.grad is not None] + [s.view for s in slots]
    assert all(slot.view.dtype == torch.float32 for slot in slots)
    for ours, reference in zip(found, expected, strict=True):
        assert (ours - reference).abs().max() <= 0.04 * reference.abs().max()


@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize("frozen", [1, 2, 3])
def test_frozen_weights_of_a_fused_layer_get_nothing(frozen: int, slots: bool) -> None:
    (case,) = (case for case in CASES if case.name == "fused with bias, neighbours")
    expected = gradients(case, case.inputs())
    inputs, written, _ = with_slots(case) if slots else (case.inputs(), [], None)
    for index in (frozen, frozen + 3):
        inputs[index].requires_grad_(False)
        set_slot(inputs[index], None)
    case.scalar(inputs).backward()
    for index, x in enumerate(inputs):
        if index in (frozen, frozen + 3):
            assert x.grad is None and (not slots or bool((written[index - 1].view == 7.0).all()))
        else:
            found = written[index - 1].view if slots and index else x.grad
            assert found is not None and torch.allclose(found, expected[index], rtol=1e-12, atol=1e-12)


def test_one_slot_written_before_its_neighbours() -> None:
    """The first of three weights has a gradient from elsewhere already: only it accumulates."""
    (case,) = (case for case in CASES if case.name == "fused, neighbours")
    expected = gradients(case, case.inputs())[1:]
    inputs, slots, _ = with_slots(case)
    slots[0].add(torch.ones_like(slots[0].view))
    case.scalar(inputs).backward()
    assert torch.allclose(slots[0].view, expected[0] + 1)
    assert torch.allclose(slots[1].view, expected[1]) and torch.allclose(slots[2].view, expected[2])


@each(CASES)
def test_a_second_derivative_is_refused(case: Case) -> None:
    inputs = case.inputs()
    with pytest.raises(ConfigError, match="create_graph=True is not supported"):
        torch.autograd.grad(case.scalar(inputs), inputs, create_graph=True)


def test_joined_views_are_neighbours_only() -> None:
    first, second = neighbours([torch.ones(2, 3), torch.zeros(1, 3)])
    whole = joined([first, second])
    assert whole is not None and whole.shape == (3, 3) and whole.data_ptr() == first.data_ptr()
    assert joined([second, first]) is None
    assert joined([first, torch.zeros(1, 3)]) is None
    assert joined([torch.ones(2, 3).t(), second.t()]) is None
    assert joined([first, second.view(3, 1)]) is None
    assert joined([second]) is second


# -- attention -------------------------------------------------------------------------------------


def dense_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None) -> Tensor:
    """Softmax over a full T x T matrix with a mask, head by head."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(q.shape[0])
    distance = place.unsqueeze(1) - place
    mask = (document.unsqueeze(1) == document) & (distance >= 0)
    if window is not None:
        mask &= distance < window
    group = q.shape[1] // k.shape[1]
    out = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].t() / q.shape[2] ** 0.5
        out.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, head // group])
    return torch.stack(out, 1)


def random_heads(num_tokens: int, num_heads: int, num_kv_heads: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, heads, 8) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("lengths", [(12,), (4, 4, 4), (1, 5, 6), (3, 3, 1, 5), (2, 4, 4, 2)], ids=str)
def test_attention_equals_a_masked_softmax(
    lengths: tuple[int, ...], heads: tuple[int, int], window: int | None
) -> None:
    for kind in (CausalAttend, ScoresAttend):
        ours, reference = random_heads(12, *heads), random_heads(12, *heads)
        out = kind(lengths, [None, window]).heads(*ours, layer=1)
        expected = dense_attention(*reference, lengths, window)
        assert torch.allclose(out, expected, rtol=1e-9, atol=1e-12)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        for a, b in zip(
            torch.autograd.grad((out * weights).sum(), ours), torch.autograd.grad((expected * weights).sum(), reference),
            strict=True,
        ):  # fmt: skip
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lengths", [(6, 6), (4, 8), (7, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_do_not_see_each_other(lengths: tuple[int, int], dtype: torch.dtype) -> None:  # CP-04
    attend = CausalAttend(lengths)
    q, k, v = (t.detach().to(dtype) for t in random_heads(12, 4, 2))
    before = attend.heads(q, k, v, 0)
    for tensor in (q, k, v):
        tensor[0] += 1.0
    after = attend.heads(q, k, v, 0)
    cut = lengths[0]
    assert torch.equal(before[cut:], after[cut:])
    assert all(not torch.equal(before[row], after[row]) for row in range(cut))


SMALL: dict[str, Any] = {
    "vocab_size": 13, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 24, "max_positions": 16,
}  # fmt: skip


def test_logits_of_another_document_do_not_change_at_all() -> None:  # CP-04: A B C EOS | D E, change A
    model = Transformer(ModelConfig(**SMALL), Mesh.solo()).initialise(0)
    tokens, positions = torch.tensor([3, 4, 5, 2, 6, 7]), torch.tensor([0, 1, 2, 3, 0, 1])
    changed = torch.tensor([9, 4, 5, 2, 6, 7])
    with torch.no_grad():
        before, after = (model(t, positions, CausalAttend((4, 2))) for t in (tokens, changed))
    assert (before[4:] - after[4:]).abs().max() == 0.0
    assert (before[:4] != after[:4]).any(1).all()


# -- rotary positions ------------------------------------------------------------------------------

ROPE_SCALINGS = {
    "default": None,
    "linear": {"kind": "linear", "factor": 4.0},
    "llama3": {"kind": "llama3", "factor": 8.0, "original_max_positions": 64},
    "llama3 with other bounds": {
        "kind": "llama3", "factor": 3.0, "original_max_positions": 32, "low_freq_factor": 2.0, "high_freq_factor": 5.0,
    },
    "yarn": {"kind": "yarn", "factor": 4.0, "original_max_positions": 64},
    "yarn, not truncated": {"kind": "yarn", "factor": 32.0, "original_max_positions": 64, "truncate": False},
    "yarn with mscale": {
        "kind": "yarn", "factor": 40.0, "original_max_positions": 64, "mscale": 1.0, "mscale_all_dim": 0.7,
    },
    "yarn with a factor": {"kind": "yarn", "factor": 4.0, "original_max_positions": 64, "attention_factor": 1.3},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPE_SCALINGS)
def test_scaled_frequencies_equal_transformers(name: str) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    config = ModelConfig(**{**SMALL, "head_dim": 32, "rope_scaling": ROPE_SCALINGS[name], "rope_theta": 5e4})
    theirs = LlamaConfig(**{key: value for key, value in config.to_hf().items() if key != "architectures"})
    frequencies, factor = inverse_frequencies(config)
    kind = "default" if config.rope_scaling is None else config.rope_scaling.kind
    if kind == "default":
        expected, expected_factor = 5e4 ** (-torch.arange(0, 32, 2).double() / 32), 1.0
    else:
        expected, expected_factor = rope_utils.ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    assert frequencies.dtype == torch.float64
    assert torch.allclose(frequencies, expected.double(), rtol=2e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-9)
    cos, sin = rotation(config, torch.tensor([0, 3, 1000]), torch.float64)
    angles = torch.tensor([0.0, 3.0, 1000.0]).double().unsqueeze(1) * frequencies
    assert torch.allclose(cos.squeeze(1), angles.cos() * factor)
    assert torch.allclose(sin.squeeze(1), angles.sin() * factor)


# -- dropout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_dropout_drops_its_share_and_scales_the_rest(rate: float) -> None:
    x = torch.ones(400, 300)
    y = dropout(x, rate, torch.arange(400) + 10**12, dropout_key(1, 2, 3, 0))
    kept = y != 0
    assert torch.equal(y[kept], torch.full_like(y[kept], 1 / (1 - rate)))
    n = x.numel()
    tolerance = 5 * (rate * (1 - rate) / n) ** 0.5  # five standard deviations
    assert kept.double().mean().item() == pytest.approx(1 - rate, abs=tolerance)
    agreement = rate**2 + (1 - rate) ** 2  # of two independent masks
    shifted = [(kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), (kept[2:], kept[:-2])]
    for a, b in shifted:
        assert (a == b).double().mean().item() == pytest.approx(agreement, abs=5 * (agreement / n) ** 0.5)


def test_dropout_of_nothing_is_the_input_itself() -> None:
    x = torch.randn(3, 4)
    assert dropout(x, 0.0, torch.arange(3), 5) is x


def test_masks_depend_on_seed_step_layer_and_site_only() -> None:
    x, index = torch.ones(64, 32), torch.arange(64)

    def mask(*place: int) -> Tensor:
        return dropout(x, 0.5, index, dropout_key(*place)) != 0

    first = mask(1, 2, 3, 0)
    assert torch.equal(first, mask(1, 2, 3, 0))
    for other in [(0, 2, 3, 0), (1, 3, 3, 0), (1, 2, 4, 0), (1, 2, 3, 1), (2, 1, 3, 0), (1, 3, 2, 0), (1, 2, -1, 0)]:
        assert 0.4 < (mask(*other) == first).double().mean() < 0.6, other
    assert all(0 <= dropout_key(seed, 0, -1, 0) < 2**62 for seed in (0, 2**63))


def test_masks_do_not_depend_on_how_tokens_and_features_are_split() -> None:  # RN-01, RN-02
    torch.manual_seed(0)
    x, index, key = torch.randn(12, 10), torch.randperm(1000)[:12], dropout_key(0, 1, 2, 3)
    whole = dropout(x, 0.4, index, key)
    for cut in (1, 5, 11):
        rows = [dropout(x[part], 0.4, index[part], key) for part in (slice(0, cut), slice(cut, 12))]
        assert torch.equal(torch.cat(rows), whole)
    columns = [dropout(x[:, part], 0.4, index, key, part.start) for part in (slice(0, 3), slice(3, 10))]
    assert torch.equal(torch.cat(columns, 1), whole)
    halves = dropout(torch.ones(8, 16), 0.5, torch.arange(8), key).chunk(2)
    assert not torch.equal(*halves)  # ranks with different tokens drop different patterns


def test_dropped_scores_do_not_depend_on_how_heads_and_documents_are_split() -> None:  # RN-01
    ones, index, keys = torch.ones(3, 4, 8, 8), torch.arange(24) + 100, [5, dropout_key(0, 1, 2, 3)]
    whole = ScoreDropout(0.25, index, keys)(ones, 0, 1)
    assert whole.unique().tolist() == pytest.approx([0.0, 1 / 0.75]) and 0.15 < (whole == 0).double().mean() < 0.35
    assert torch.equal(ScoreDropout(0.25, index, keys, first_head=2)(ones[:, 2:], 0, 1), whole[:, 2:])
    assert torch.equal(ScoreDropout(0.25, index, keys)(ones[1:], 8, 1), whole[1:])
    assert torch.equal(ScoreDropout(0.25, index[8:], keys)(ones[1:], 0, 1), whole[1:])
    for other in (whole[:, :1], whole[:1], ScoreDropout(0.25, index, keys)(ones, 0, 0)):
        assert not torch.equal(other.expand_as(whole), whole)


def test_recomputation_replays_dropout() -> None:  # RN-04
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(13, (12,), generator=generator)
    targets = torch.where(torch.arange(12) % 5 == 4, IGNORE, tokens.roll(-1))
    positions = torch.cat([torch.arange(7), torch.arange(5)])
    batch = MicroBatch(tokens, targets, positions, torch.arange(100, 112), (7, 5), int((targets != IGNORE).sum()), (8,))

    def five_steps(recompute: str, rate: float = 0.1) -> list[Tensor]:
        config = RunConfig.of(
            {
                "model": {**SMALL, "dropout": rate},
                "data": {"sources": "unused"},
                "optim": {"lr": 1e-2},
                "layout": f"microbatches=2,recompute={recompute}",
            }
        )
        trainer, seen = Trainer(config, Mesh.solo()), []
        trainer.on_gradients = lambda t: seen.append(torch.cat([b.gradients.clone() for b in t.buckets.buckets]))
        losses = [trainer.step([batch, batch], step).loss for step in range(5)]
        return [*seen, torch.tensor(losses)]

    plain = five_steps("none")
    for recompute in ("full", "selective"):
        for ours, expected in zip(five_steps(recompute), plain, strict=True):
            assert torch.equal(ours, expected)
    assert not torch.equal(plain[0], five_steps("none", rate=0.0)[0])
