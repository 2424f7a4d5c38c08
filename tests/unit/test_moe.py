"""Layers with experts in one process: routing, grouped products, capacity, balance. Group MO of the pitfalls by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.checkpoint.hf import load_hf, save_hf
from shardwright.comm.mesh import Mesh
from shardwright.core.model_config import ModelConfig
from shardwright.core.run_config import RouterConfig, RunConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import LayoutError
from shardwright.model.balance import Balance, auxiliary_loss
from shardwright.model.context import Context
from shardwright.model.init import full_value
from shardwright.model.transformer import Transformer
from shardwright.ops import grouped
from shardwright.ops.attention import CausalAttend
from shardwright.ops.capacity import Limit, limit_choices
from shardwright.ops.gradients import GradQueue, GradSlot, set_slot
from shardwright.ops.grouped import grouped_linear
from shardwright.ops.routing import RowGroups
from shardwright.schedule.make import gpipe
from shardwright.train.data import IGNORE, MicroBatch, Window, collate
from shardwright.train.step import StepResult, Trainer

SEQ = 16
SHAPE: dict[str, Any] = {"family": "deepseek_v3", "vocab_size": 48, "dim": 16, "num_layers": 2, "num_heads": 2, "ffn_dim": 24}
LATENT = {"kv_lora_rank": 8, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_dim": 12}


def model_config(num_layers: int = 2, **moe: Any) -> ModelConfig:
    return ModelConfig(**{**SHAPE, "num_layers": num_layers, "moe": {**EXPERTS, **moe}})


# -- one layer against a plain one ---------------------------------------------------------------------


def plain_moe(weights: dict[str, Tensor], x: Tensor, config: ModelConfig) -> Tensor:
    """The layer written out: every expert on every token, weighed by what the router gave."""
    moe = config.moe
    assert moe is not None
    logits = x @ weights["router.weight"].t()
    scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
    choice = scores + weights.get("router.correction", torch.zeros(moe.num_experts))
    rows = []
    for token in range(len(x)):
        groups = choice[token].view(moe.groups, -1)
        worth = [group.sort().values[-2:].sum() if moe.bias_correction else group.max() for group in groups]
        best = sorted(range(moe.groups), key=lambda g: -worth[g])[: moe.top_groups]
        size = moe.num_experts // moe.groups
        allowed = [expert for expert in range(moe.num_experts) if expert // size in best]
        chosen = sorted(allowed, key=lambda e: -choice[token, e])[: moe.top_k]
        total = scores[token, chosen].sum() if moe.normalise_top_k else 1.0
        y = torch.zeros_like(x[token])
        for expert in chosen:
            gate, up = (weights["experts.up.weight"][expert] @ x[token]).chunk(2)
            out = weights["experts.down.weight"][expert] @ (F.silu(gate) * up)
            y = y + scores[token, expert] / total * moe.routed_scale * out
        rows.append(y)
    y = torch.stack(rows)
    if moe.shared_dim:
        gate, up = x @ weights["shared.gate.weight"].t(), x @ weights["shared.up.weight"].t()
        shared = (F.silu(gate) * up) @ weights["shared.down.weight"].t()
        y = y + (shared * (x @ weights["shared_gate.weight"].t()).sigmoid() if moe.shared_gate else shared)
    return y


KINDS: dict[str, dict[str, Any]] = {
    "softmax, normalised": {"normalise_top_k": True},
    "softmax": {"normalise_top_k": False, "top_k": 1},
    "group-limited": {"normalise_top_k": False, "groups": 4, "top_groups": 2, "top_k": 3, "routed_scale": 2.0},
    "sigmoid, bias, node-limited": {
        "score": "sigmoid", "bias_correction": True, "groups": 4, "top_groups": 2, "top_k": 4, "routed_scale": 2.5,
    },
    "shared": {"num_shared_experts": 2},
    "shared, gated": {"num_shared_experts": 1, "shared_dim": 20, "shared_gate": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_equals_a_plain_one(kind: str) -> None:
    config = model_config(1, **KINDS[kind])
    model = Transformer(config, Mesh.solo(), torch.float64)
    layer = model.blocks["0"].get_submodule("moe")
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}
    for name, parameter in layer.named_parameters():
        parameter.data.normal_(0, 0.4, generator=generator)
        weights[name] = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    x = torch.randn(24, 16, dtype=torch.float64, generator=generator)
    mine, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    context = model.context(torch.zeros(24, dtype=torch.int64), torch.arange(24), CausalAttend([24]))
    y, expected = layer(mine, context), plain_moe(weights, plain, config)
    assert torch.allclose(y, expected, atol=1e-12)
    seed = torch.randn(y.shape, dtype=y.dtype, generator=generator)
    y.backward(seed)
    expected.backward(seed)
    assert mine.grad is not None and plain.grad is not None and torch.allclose(mine.grad, plain.grad, atol=1e-11)
    for name, parameter in layer.named_parameters():
        reference = weights[name].grad
        if parameter.requires_grad:
            reference = torch.zeros_like(parameter) if reference is None else reference
            assert parameter.grad is not None and torch.allclose(parameter.grad, reference, atol=1e-11), name
            assert reference.any() or "router" not in name, f"{name}: a router without gradient"


# -- grouped products ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3, 0, 4, 1), (0, 0, 0, 8), (0, 0, 0, 0)])
def test_experts_without_rows_get_written_zeros(sizes: tuple[int, ...]) -> None:  # MO-07
    num_rows = sum(sizes)
    rows = torch.randn(num_rows, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(4, 6, 5, dtype=torch.float64))
    groups = RowGroups(torch.tensor(sizes), num_rows)
    pieces = [piece @ w.t() for piece, w in zip(rows.split(sizes), weight, strict=True)]
    expected = torch.cat(pieces)
    seed = torch.randn(num_rows, 6, dtype=torch.float64)
    d_rows, d_weight = torch.autograd.grad(expected, (rows, weight), seed)
    assert torch.allclose(grouped_linear(rows, weight, groups), expected)
    grouped_linear(rows, weight, groups).backward(seed)
    assert weight.grad is not None and rows.grad is not None
    assert torch.allclose(weight.grad, d_weight) and torch.allclose(rows.grad, d_rows)

    queue = GradQueue()  # in place, deferred, twice
    slot = GradSlot(torch.full_like(weight, torch.nan), queue)
    set_slot(weight, slot)
    queue.defer = True
    for _ in range(2):
        grouped_linear(rows, weight, groups).backward(seed)
    writes = queue.take()
    assert len(writes) == 2 and slot.view.isnan().all() and not slot.written
    for write in writes:
        write()
    assert slot.written and torch.allclose(slot.view, 2 * d_weight)


@pytest.mark.parametrize("sizes", [(3, 0, 8, 1), (0, 12, 0, 0)])
def test_one_kernel_for_all_experts_computes_the_same(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, through the same function where the CPU has it."""
    seen = []
    for fast in (False, True):
        monkeypatch.setattr(grouped, "has_grouped_gemm", lambda *_, fast=fast: fast)
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 8, 16, generator=generator).bfloat16())
        rows = torch.randn(12, 16, generator=generator).bfloat16().requires_grad_()
        slot = GradSlot(torch.full(weight.shape, torch.nan), GradQueue())
        set_slot(weight, slot)
        out = grouped_linear(rows, weight, RowGroups(torch.tensor(sizes), 12))
        out.backward(torch.randn(12, 8, generator=generator).bfloat16())
        assert rows.grad is not None
        seen.append((out.detach(), rows.grad, slot.view))
    for loop, kernel in zip(*seen, strict=True):
        assert torch.allclose(loop.float(), kernel.float(), rtol=1e-2, atol=1e-2)


def test_no_work_is_done_on_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of a layer are as large as the rows that were routed, whatever the spread."""
    weight, multiply, done = torch.randn(4, 6, 5), torch.mm, []

    def counted(a: Tensor, b: Tensor, **how: Any) -> Tensor:
        done.append(a.shape[0] * a.shape[1] * b.shape[1])
        return multiply(a, b, **how)

    monkeypatch.setattr(torch, "mm", counted)
    for sizes in ((10, 0, 0, 0), (3, 3, 2, 2)):
        done.clear()
        grouped_linear(torch.randn(10, 5), weight, RowGroups(torch.tensor(sizes), 10))
        assert sum(done) == 10 * 6 * 5 and len(done) == sum(size > 0 for size in sizes)


# -- precision -----------------------------------------------------------------------------------------


def test_close_scores_are_told_apart_in_bf16(tmp_path: Any) -> None:  # MO-11
    config = model_config(1, num_experts=2, top_k=1, normalise_top_k=False, score="sigmoid", bias_correction=True)
    config = ModelConfig(**config.model_dump(exclude={"head_dim", "mla"}), mla=LATENT)
    model = Transformer(config, Mesh.solo(), torch.bfloat16).initialise(0)
    router = model.blocks["0"].get_submodule("moe.router")
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, :2] = torch.tensor([1.0, 2.0**-10])
    weight = router.get_parameter("weight")
    weight.data.zero_()
    weight.data[:, 0], weight.data[1, 1] = 1.0, 1.0  # logits 1 and 1 + 2^-10, the same number in bf16
    assert torch.equal(*(x @ weight.detach().t())[0])
    context = model.context(torch.zeros(1, dtype=torch.int64), torch.arange(1), CausalAttend([1]))
    assert router(x, context).expert_ids.tolist() == [[1]]
    assert router.get_parameter("correction").dtype == torch.float32

    bias = torch.tensor([1.0, 1.0 + 2.0**-20])
    weights = {name: full_value(spec, 0) for name, spec in parameter_specs(config).items()}
    weights["blocks.0.moe.router.correction"] = bias
    save_hf(tmp_path, config, weights, dtype=torch.bfloat16)
    loaded = load_hf(tmp_path)[1]
    assert torch.equal(loaded["blocks.0.moe.router.correction"], bias)
    assert loaded["blocks.0.moe.router.weight"].dtype == torch.bfloat16


# -- steps ---------------------------------------------------------------------------------------------


def run_config(layout: str, router: dict[str, Any] | None = None, num_layers: int = 2, **moe: Any) -> RunConfig:
    return RunConfig.of(
        {
            "model": {**SHAPE, "num_layers": num_layers, "moe": {**EXPERTS, "aux_coefficient": 0.01, **moe}},
            "data": {"sources": "unused", "seq_len": SEQ},
            "optim": {"name": "sgd", "lr": 0.1, "clip": 0, "weight_decay": 0, "momentum": 0},
            "train": {"steps": 10},
            "router": router or {},
            "layout": f"precision=fp64,{layout}",
        }
    )


def micro_batches(num: int, size: int, *, same: bool = False, targets: bool = True) -> list[MicroBatch]:
    """``num`` micro-batches of ``size`` random sequences, or of one and the same."""
    random = np.random.default_rng(0)
    texts = [random.integers(0, 48, SEQ + 1) for _ in range(num * size)]
    windows = [
        Window(t[:-1], t[1:] if targets else np.full(SEQ, IGNORE), np.arange(SEQ), (SEQ,))
        for t in (texts[:1] * len(texts) if same else texts)
    ]
    parts = [range(first, first + size) for first in range(0, num * size, size)]
    return [collate([windows[i] for i in part], part, SEQ) for part in parts]


class Step(NamedTuple):
    result: StepResult
    balance: Balance
    gradients: dict[str, Tensor]
    trainer: Trainer


def one_step(config: RunConfig, batches: Sequence[MicroBatch], *, all_forwards_first: bool = False, pad_to: int = 1) -> Step:
    mesh = Mesh.solo()
    mesh.layout = config.layout
    trainer = Trainer(config, mesh)
    if all_forwards_first:
        trainer.executor.schedule = gpipe(1, len(batches))
    make_context = trainer.context
    trainer.context = lambda batch, step: make_context(batch.padded(pad_to), step)  # type: ignore[method-assign]
    gradients: dict[str, Tensor] = {}

    def keep(trainer: Trainer) -> None:
        gradients.update({name: view.clone() for name, view in trainer.buckets.named("gradients").items()})

    trainer.on_gradients = keep
    result = trainer.step(batches, 0)
    assert result.balance is not None
    return Step(result, result.balance, gradients, trainer)


def differ(a: dict[str, Tensor], b: dict[str, Tensor], only: str = "") -> float:
    pairs = [(a[name], b[name]) for name in a if only in name]
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)) for x, y in pairs)


@pytest.mark.parametrize("balance", ["microbatch", "sequence", "global"])
def test_weight_of_the_auxiliary_loss_does_not_depend_on_accumulation(balance: str) -> None:  # MO-02, MO-04
    router = {"balance": balance}
    whole, split = (
        one_step(
            run_config(f"microbatches={num},micro_batch={4 // num}", router),
            micro_batches(num, 4 // num, same=True, targets=False),
        )
        for num in (1, 4)
    )
    assert differ(whole.gradients, split.gradients, "router") < 1e-9
    assert whole.gradients["blocks.0.moe.router.weight"].abs().max() > 1e-7
    assert split.balance.aux_loss == pytest.approx(whole.balance.aux_loss, rel=1e-9)
    assert whole.result.loss == 0.0  # the loss of the text is reported apart


def routed_of(model: Transformer, batch: MicroBatch, **router: Any) -> list[Any]:
    context: Context = model.context(
        batch.tokens, batch.positions, CausalAttend(batch.lengths), router=RouterConfig(**router), routed=[]
    )
    model.run(context)
    assert context.routed is not None
    return context.routed


def test_auxiliary_loss_by_hand() -> None:  # MO-02
    config = run_config("dp=1", {"z_loss": 0.5})
    (batch,) = micro_batches(1, 2, targets=False)
    seen = one_step(config, [batch])
    model = Transformer(config.model, Mesh.solo(), torch.float64).initialise(0)
    x, expected = batch.tokens, 0.0
    context = model.context(batch.tokens, batch.positions, CausalAttend(batch.lengths))
    for unit in model.units().values():
        if hasattr(unit, "moe"):
            middle = x + unit.attention(unit.attention_norm(x), context)
            logits = unit.mlp_norm(middle) @ unit.moe.router.weight.t()
            scores = logits.softmax(-1)
            f = torch.zeros(8, dtype=torch.float64)
            for expert in scores.topk(2).indices.flatten():
                f[expert] += 1 / (2 * len(scores))
            expected = expected + 0.01 * 8 * (f * scores.mean(0)).sum() + 0.5 * logits.logsumexp(-1).square().mean()
        x = unit(x, context)
    assert isinstance(expected, Tensor)
    assert seen.balance.aux_loss == pytest.approx(expected.item(), rel=1e-9)
    expected.backward()
    for name, parameter in model.spec_parameters().items():
        if parameter.grad is not None and "head" not in name:
            assert torch.allclose(seen.gradients[name], parameter.grad, atol=1e-12), name
    again = auxiliary_loss(routed_of(model, batch, z_loss=0.5), config.model, config.router, len(batch.tokens))
    assert again.item() == pytest.approx(expected.item(), rel=1e-9)


def test_uniform_routing_costs_the_coefficient() -> None:
    model = Transformer(run_config("dp=1").model, Mesh.solo(), torch.float64).initialise(0)
    (batch,) = micro_batches(1, 1)
    (one, _) = routed_of(model, batch)
    one.counts, one.score_sums = torch.full((1, 8), 4), torch.full((1, 8), SEQ / 8, dtype=torch.float64)
    assert auxiliary_loss([one], model.config, RouterConfig(), SEQ).item() == pytest.approx(0.01)


def test_balance_per_sequence_is_invariant_and_over_the_batch_exact_if_all_forwards_come_first() -> None:
    for balance, first in (("sequence", False), ("global", True)):
        router = {"balance": balance, "z_loss": 1e-3, "jitter": 0.05}
        whole = one_step(run_config("micro_batch=4", router), micro_batches(1, 4)).gradients
        for layout in ("microbatches=4", "microbatches=4,recompute=full"):
            split = one_step(run_config(layout, router), micro_batches(4, 1), all_forwards_first=first)
            assert differ(split.gradients, whole) < 1e-9, (balance, layout)
    other = one_step(run_config("microbatches=4", {"balance": "microbatch"}), micro_batches(4, 1))
    assert differ(other.gradients, whole) > 1e-3  # micro-batches are balanced one by one unless asked otherwise


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_choices_are_counted_once(recompute: str) -> None:  # MO-01, MO-12
    layers = {"num_layers": 3, "dense_layers": (1,), "bias_correction": True}
    seen = one_step(run_config(f"microbatches=2,recompute={recompute}", **layers), micro_batches(2, 1))
    balance = seen.balance
    assert balance.layers == (0, 2) and [sum(row) for row in balance.counts] == [2 * SEQ * 2] * 2
    for layer, counts in zip(balance.layers, balance.counts, strict=True):
        bias = seen.trainer.parameters[f"blocks.{layer}.moe.router.correction"]
        mean = sum(counts) / len(counts)
        assert bias.tolist() == pytest.approx([0.001 * np.sign(mean - count) for count in counts])
        assert bias.any()
    plain = one_step(run_config("microbatches=2", **layers), micro_batches(2, 1)).balance
    assert balance.aux_loss == pytest.approx(plain.aux_loss, rel=1e-9) and balance.counts == plain.counts


def test_a_step_that_is_skipped_moves_no_bias() -> None:
    config = run_config("dp=1", bias_correction=True)
    config = config.model_copy(update={"train": config.train.model_copy(update={"on_nonfinite": "skip"})})
    trainer = Trainer(config, Mesh.solo())
    trainer.parameters["head.weight"].data.fill_(torch.inf)
    result = trainer.step(micro_batches(1, 1), 0)
    assert result.skipped and not trainer.parameters["blocks.0.moe.router.correction"].any()


# -- capacity ------------------------------------------------------------------------------------------


def queue(tokens: list[int], scores: Tensor, limit: Limit) -> list[int]:
    return sorted(tokens, key=lambda token: -float(scores[token])) if limit.by_score else tokens


def greedy(ids: Tensor, scores: Tensor, sequence: Tensor, limit: Limit) -> list[list[int]]:
    """Token by token, expert by expert, as a person would do it. ids (T, k)."""
    num_experts, top_k = scores.shape[1], ids.shape[1]
    given = [[num_experts] * top_k for _ in ids]
    for number in range(int(sequence.max()) + 1):
        tokens = [t for t in range(len(ids)) if sequence[t] == number]
        room = [-(-len(tokens) * top_k * limit.factor // num_experts)] * num_experts
        for expert in range(num_experts):
            for token in queue([t for t in tokens if expert in ids[t].tolist()], scores[:, expert], limit):
                if room[expert] > 0:
                    room[expert] -= 1
                    given[token][ids[token].tolist().index(expert)] = expert
        if not limit.reroute:
            continue
        order = {t: sorted(range(num_experts), key=lambda e: -float(scores[t, e])) for t in tokens}
        for rank in range(top_k, num_experts):
            wanting = [t for t in tokens if num_experts in given[t]]
            for expert in range(num_experts):
                for token in queue([t for t in wanting if order[t][rank] == expert], scores[:, expert], limit):
                    if room[expert] > 0:
                        room[expert] -= 1
                        given[token][given[token].index(num_experts)] = expert
    return given


@pytest.mark.parametrize("limit", [Limit(1.0), Limit(0.7, by_score=True), Limit(1.0, True), Limit(0.8, True, True)], ids=str)
def test_who_finds_room(limit: Limit) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = (torch.randn(50, 6, generator=generator) + torch.tensor([2.0, 0, 0, 0, 0, -2])).softmax(-1)
    ids = scores.topk(2).indices
    sequence = torch.tensor([0] * 20 + [1] * 17 + [2] * 13)
    expected = greedy(ids, scores, sequence, limit)
    place = torch.arange(50)
    assert limit_choices(ids, scores, sequence, place, 3, 6, limit).tolist() == expected
    dropped = sum(row.count(6) for row in expected)
    assert dropped > 0 or limit.reroute
    shuffled = torch.randperm(50, generator=generator)  # tokens of several ranks come in another order, with padding
    nowhere = torch.full((3,), -1)
    ids, scores, sequence, place = (
        torch.cat([values[shuffled], padding])
        for values, padding in ((ids, ids[:3]), (scores, scores[:3]), (sequence, nowhere), (place, nowhere))
    )
    found = limit_choices(ids, scores, sequence, place, 3, 6, limit)
    assert [found[i].tolist() for i in torch.argsort(shuffled)] == expected
    assert (found[50:] == 6).all()


@pytest.mark.parametrize("layout", ["moe=capacity:0.6", "moe=capacity:0.6:reroute", "moe=capacity:1e-9"])
@pytest.mark.parametrize("drop_by", ["position", "probability"])
def test_capacity_counts_per_sequence_whatever_the_accumulation(layout: str, drop_by: str) -> None:
    router = {"balance": "sequence", "drop_by": drop_by}
    whole, split = (
        one_step(run_config(f"{layout},{how}", router), micro_batches(num, size))
        for how, num, size in (("micro_batch=4", 1, 4), ("microbatches=4,recompute=full", 4, 1))
    )
    assert (whole.balance.dropped, whole.balance.rerouted) == (split.balance.dropped, split.balance.rerouted)
    assert whole.balance.counts == split.balance.counts  # what routers chose, before anything was dropped
    assert whole.result.loss == pytest.approx(split.result.loss, rel=1e-12)
    assert differ(whole.gradients, split.gradients) < 1e-9
    moe = run_config(layout).model.moe
    assert moe is not None
    room = moe.capacity(SEQ, float(layout.split(":")[1])) * moe.num_experts
    assert all(4 * SEQ * 2 - dropped <= 4 * room for dropped in whole.balance.dropped)
    assert sum(whole.balance.dropped) > 0
    assert (sum(whole.balance.rerouted) > 0) == layout.endswith("reroute")


def test_padding_is_routed_nowhere() -> None:
    config = run_config("dp=1", {"z_loss": 1e-3})
    batches = micro_batches(1, 1)
    plain, padded = one_step(config, batches), one_step(config, batches, pad_to=20)
    assert padded.balance.counts == plain.balance.counts and padded.balance.dropped == [0, 0]
    assert padded.balance.aux_loss == pytest.approx(plain.balance.aux_loss, rel=1e-9)
    assert differ(padded.gradients, plain.gradients) < 1e-9


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "moe", "message"),
    [
        ("dp=1", {"top_k": 1}, "top_k=1 with moe.normalise_top_k=true .* no gradient; set normalise_top_k=false, or top_k=2"),
        ("moe=capacity:1.25:keep", {}, "moe=capacity:1.25:keep is not known; use dropless .* capacity:1.25:reroute"),
        ("moe=capacity:1.25:", {}, "is not known"),
    ],
)
def test_what_is_refused(layout: str, moe: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Trainer(run_config(layout, **moe), Mesh.solo())


def test_experts_are_neither_compiled_nor_limited_where_there_are_none() -> None:
    config = run_config("dp=1")
    compiled = config.model_copy(update={"train": config.train.model_copy(update={"compile": True})})
    with pytest.raises(LayoutError, match="compile=true with experts"):
        Trainer(compiled, Mesh.solo())
    dense = RunConfig.of({"model": "tiny", "data": {"sources": "x"}, "layout": "moe=capacity:1.25"})
    with pytest.raises(LayoutError, match="needs a model with experts; tiny has none"):
        Trainer(dense, Mesh.solo())
