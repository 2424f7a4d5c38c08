"""Attention in blocks: the kernels, the merge, and all ranks of cp in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.comm.base import Work
from shardwright.comm.dry import DryComm
from shardwright.comm.mesh import Mesh
from shardwright.comm.solo import SoloComm
from shardwright.core.layout import Layout
from shardwright.core.presets import preset
from shardwright.core.run_config import RunConfig
from shardwright.core.segments import Segments, TokenSplit, by_work, contiguous, zigzag
from shardwright.errors import LayoutError
from shardwright.ops import flash
from shardwright.ops.flash import block_backward, block_forward, merge
from shardwright.parallel import context
from shardwright.parallel.context import ContextAttend, ring_attention, ring_tokens
from shardwright.train.data import IGNORE, MicroBatch
from shardwright.train.supported import check_supported


class Together(SoloComm):
    """A rank whose peers' keys and values are there already; keeps the gradients that it would send them."""

    def __init__(self, rank: int, size: int, blocks: Tensor) -> None:
        super().__init__("cp")
        self.rank, self.ranks, self.blocks, self.sent = rank, tuple(range(size)), blocks, blocks

    def all_gather(self, tensor: Tensor, *, name: str) -> Tensor:
        assert torch.equal(tensor[0], self.blocks[self.rank])
        return self.blocks

    def reduce_scatter(self, tensor: Tensor, op: object = "sum", *, name: str) -> Tensor:
        self.sent = tensor
        return tensor[self.rank : self.rank + 1]


def index(split: TokenSplit) -> Tensor:
    """The global tokens of all ranks' rows (c, t)."""
    return torch.tensor([[i for start, stop in ranges for i in range(start, stop)] for ranges in split.ranges])


def attend(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, segments: Segments) -> tuple[Tensor, ...]:
    """Output and gradients of q, k, v over all T tokens, in their order, from every rank's part. Gradients are wide."""
    rows = index(segments.split)
    blocks = torch.stack([torch.stack((k[own], v[own])) for own in rows])
    out, dq = torch.zeros_like(q), torch.zeros_like(q)
    dk, dv = (torch.zeros(k.shape, dtype=flash.wide_dtype(k.dtype)) for _ in range(2))
    for rank, own in enumerate(rows):
        comm = Together(rank, len(rows), blocks)
        local = [x[own].clone().requires_grad_() for x in (q, k, v)]
        part = ContextAttend(comm, segments, "allgather").heads(*local, 0)
        part.backward(d_out[own])
        assert local[0].grad is not None
        out[own], dq[own] = part.detach(), local[0].grad
        for block, tokens in enumerate(rows):
            dk[tokens] += comm.sent[block, 0]
            dv[tokens] += comm.sent[block, 1]
    return out, dq, dk, dv


def whole(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """The same in fp64 with one mask."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (documents.unsqueeze(1) == documents) & torch.ones(len(q), len(q), dtype=torch.bool).tril()
    local = [x.detach().double().requires_grad_() for x in (q, k, v)]
    heads = [x.transpose(0, 1) for x in local]
    out = F.scaled_dot_product_attention(*heads, mask, enable_gqa=True).transpose(0, 1)
    out.backward(d_out.double())
    gradients = [x.grad for x in local]
    assert all(gradient is not None for gradient in gradients)
    return out.detach(), *gradients  # type: ignore[return-value]


def inputs(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    shapes = [(tokens, count, size) for count in (heads, kv_heads, kv_heads, heads)]
    q, k, v, d_out = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return q, k, v, d_out


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


SPLITS = {
    "contiguous": contiguous(48, 4),
    "zigzag": zigzag(48, 4),
    "by work": by_work((5, 30, 1, 12), 4, 0),
    "whole documents": by_work((5, 30, 1, 12), 4, 48),
    "three": zigzag(48, 3),
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_output_and_gradients_of_all_ranks_are_those_of_one(name: str, heads: int, kv_heads: int) -> None:  # CP-06
    lengths = (5, 30, 1, 12)
    values = inputs(48, heads, kv_heads, 8, torch.float64)
    got = attend(*values, Segments(lengths, SPLITS[name]))
    for mine, other in zip(got, whole(*values, lengths), strict=True):
        assert relative(mine, other) < 1e-14


def test_a_changed_token_moves_its_own_document_only() -> None:  # CP-01, CP-04
    segments = Segments((8, 8), zigzag(16, 2))
    q, k, v, d_out = inputs(16, 2, 2, 4, torch.float32)
    before = attend(q, k, v, d_out, segments)[0]
    k[0], v[0] = k[0] + 1, v[0] + 1
    moved = (attend(q, k, v, d_out, segments)[0] != before).flatten(1).any(1)
    assert moved.tolist() == [True] * 8 + [False] * 8


def test_bf16_errors_do_not_grow_with_the_ring() -> None:  # CP-05
    values = inputs(256, 4, 2, 16, torch.bfloat16)
    exact = whole(*values, (256,))
    errors = {}
    for size in (1, 2, 4, 8):
        got = attend(*values, Segments((256,), zigzag(256, size)))
        errors[size] = [relative(mine.to(torch.bfloat16), other) for mine, other in zip(got, exact, strict=True)]
    assert all(0 < many <= 2 * one < 0.02 for one, many in zip(errors[1], errors[8], strict=True)), errors


def test_padding_attends_to_nothing_and_gives_zeros() -> None:  # US-06: 6 tokens on 4 ranks
    q, k, v, d_out = inputs(8, 2, 1, 4, torch.float64)
    d_out[6:] = 0
    got = attend(q, k, v, d_out, Segments((6, 2), zigzag(8, 4), padding=2))
    want = whole(q, k, v, d_out, (6, 2))
    for mine, other in zip(got, want, strict=True):
        assert relative(mine[:6], other[:6]) < 1e-14
        assert not mine[6:].any()


def test_what_is_saved_falls_with_the_ranks_and_no_score_matrix_is_kept() -> None:
    tokens, sizes = 512, {}
    values = inputs(tokens, 4, 2, 8, torch.float32)
    for size in (1, 2, 4, 8):
        segments = Segments((tokens,), zigzag(tokens, size))
        own = index(segments.split)[0]
        blocks = torch.stack([torch.stack([x[rows] for x in values[1:3]]) for rows in index(segments.split)])
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x.nbytes) or x, lambda x: x):
            local = [x[own].requires_grad_() for x in values[:3]]
            ContextAttend(Together(0, size, blocks), segments, "allgather").heads(*local, 0)
        sizes[size] = sum(saved)
    assert sizes[1] == tokens * (4 * 8 + 2 * 2 * 8 + 4 * 8 + 4) * 4  # q, k and v, the output, the log-sum-exp
    assert [sizes[1] // size for size in sizes] == list(sizes.values())


def test_positions_and_tokens_are_cut_alike() -> None:  # CP-03, CP-08
    numbers = torch.arange(7)
    batch = MicroBatch(numbers, numbers + 1, numbers, numbers, (7,), 7, (0,)).padded(4)
    parts = [batch.cut(ranges) for ranges in zigzag(8, 2).ranges]
    assert [part.positions.tolist() for part in parts] == [[0, 1, 6, 0], [2, 3, 4, 5]]
    assert [part.targets.tolist() for part in parts] == [[1, 2, 7, IGNORE], [3, 4, 5, 6]]
    assert batch.lengths == (7, 1) and batch.padding == 1 and batch.num_valid == 7


def test_one_rank_needs_no_special_case() -> None:
    q, k, v, d_out = inputs(8, 4, 2, 4, torch.float64)
    mesh = Mesh.solo()
    assert ring_tokens(8, mesh) == ((0, 8),)
    for kind in ("ring", "allgather", "ulysses"):
        local = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ring_attention(*local, mesh, (3, 5), kind)
        out.backward(d_out)
        want = whole(q, k, v, d_out, (3, 5))
        for mine, other in zip((out.detach(), *(x.grad for x in local)), want, strict=True):
            assert mine is not None and relative(mine, other) < 1e-14


# ------------------------------------------------------------------------------------------ the order of the messages


class Told(DryComm):
    """Writes down what is started and what is waited for."""

    def __init__(self, log: list[str]) -> None:
        super().__init__("cp", 1, (0, 1, 2))
        self.log = log

    def send(self, tensor: Tensor, to: int, *, name: str) -> Work:
        self.log.append(f"send {name}")
        return Waited(self.log, f"sent {name}")

    def receive(self, output: Tensor, source: int, *, name: str) -> Work:
        self.log.append(f"receive {name}")
        return Waited(self.log, f"received {name}")


class Waited(Work):
    def __init__(self, log: list[str], what: str) -> None:
        self._log, self._what = log, what

    def wait(self) -> None:
        self._log.append(self._what)


def test_each_hop_is_under_way_while_a_block_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def told(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (log.append("compute"), function(*args))[1]

    for name in ("block_forward", "block_backward"):
        monkeypatch.setattr(context, name, told(getattr(context, name)))
    attend_ = ContextAttend(Told(log), Segments((12,), zigzag(12, 3)), "ring")
    q, k, v = (torch.empty(4, 2, 4, device="meta", requires_grad=True) for _ in range(3))
    out = attend_.heads(q, k, v, 0)
    hop = ["receive kv", "send kv", "compute", "received kv", "sent kv"]
    assert log == [*hop, *hop, "compute"]
    log.clear()
    out.backward(torch.empty_like(out))
    start, taken = ["receive kv gradient", "send kv gradient"], "received kv gradient"
    before, after = hop[:3], hop[3:]  # a gradient is waited for when the next block's share is computed
    later = [taken, "sent kv gradient", *start]
    assert log == [*before, *start, *after, *before, *later, *after, "compute", *later, taken, "sent kv gradient"]


# ------------------------------------------------------------------------------------------ what is refused


def test_heads_that_cannot_be_exchanged_are_refused_with_what_works() -> None:
    model = preset("tiny", num_heads=6, num_kv_heads=3, head_dim=8)
    Layout.parse("cp=3,cp_kind=ulysses").check_model(model)
    Layout.parse("cp=4").check_model(model)
    with pytest.raises(LayoutError, match=r"cp=4 .* 6 attention heads .* use cp=1, 2, 3 or 6, or cp_kind=ring"):
        Layout.parse("cp=4,cp_kind=ulysses").check_model(model)
    with pytest.raises(LayoutError, match=r"the 3 KV heads of a rank must divide one another; use cp=1, 3 or 6"):
        Layout.parse("cp=2,cp_kind=ulysses").check_model(model)


def test_windows_and_compiled_blocks_are_refused() -> None:
    def config(layout: str, sets: Sequence[str], **model: object) -> RunConfig:
        shapes = {"vocab_size": 64, "dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 16, "max_positions": 64}
        return RunConfig.of({"model": shapes | model, "data": {"sources": "synthetic:sentences", "seq_len": 32}}, sets, layout)

    check_supported(config("cp=2,cp_kind=ulysses", [], sliding_window=8))
    check_supported(config("cp=2", [], sliding_window=32))
    with pytest.raises(LayoutError, match=r"window of 8 tokens is shorter than the sequence of 32; use cp_kind=ulysses"):
        check_supported(config("cp=2", [], sliding_window=8))
    with pytest.raises(LayoutError, match=r"train.compile=true with cp=2"):
        check_supported(config("cp=2", ["train.compile=true"]))


# ------------------------------------------------------------------------------------------ one block


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_stands_in_for_the_kernel_computes_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, d_out = inputs(12, 4, 2, 8, dtype)
    bound = 1e-14 if dtype == torch.float64 else 1e-6
    for causal, rows in ((True, 12), (False, 7)):
        part = q[:rows]
        out, lse = block_forward(part, k, v, causal)
        flat, statistics = out.reshape(rows, 4, 8), lse.reshape(rows, 4)
        gradients = block_backward(d_out[:rows], part, k, v, flat, statistics, causal)
        with monkeypatch.context() as patch:
            patch.setattr(flash, "_fused", lambda _: False)
            patch.setattr(flash, "SCORE_BYTES", 5 * 4 * 12 * dtype.itemsize)  # five rows at a time
            again = block_forward(part, k, v, causal)
            others = block_backward(d_out[:rows], part, k, v, flat, statistics, causal)
        for mine, other in zip((out, lse, *gradients), (*again, *others), strict=True):
            assert mine.shape == other.shape and mine.dtype == other.dtype
            assert relative(other, mine.double()) < bound


def test_merged_halves_are_the_whole() -> None:
    q, k, v, _ = inputs(6, 2, 2, 8, torch.float64)
    v[3:] *= 1e3
    q[0] *= 100  # one half outweighs the other
    out, lse = block_forward(q, k[:2], v[:2], causal=False)
    out, lse = out.clone(), lse.clone()
    merge(out, lse, *block_forward(q, k[2:], v[2:], causal=False))
    want, statistics = block_forward(q, k, v, causal=False)
    assert torch.allclose(out, want, rtol=1e-13) and torch.allclose(lse, statistics, rtol=1e-13)
