"""What tensor parallelism promises without other ranks: chunks, the loss' memory, refusals, masks, worked numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright import Layout, Ledger, Mesh, ModelConfig, full_state_dict, parallelize, vocab_parallel_cross_entropy
from shardwright.core.chunks import chunk_slices
from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError, LayoutError
from shardwright.model.loss import head_loss
from shardwright.model.transformer import Transformer
from shardwright.ops.attention import CausalAttend
from shardwright.plan.collectives import tensor_parallel_traffic
from shardwright.train.supported import check_supported


@given(st.integers(0, 50), st.integers(1, 9))
def test_chunks_cover_all_rows_once_and_are_even(rows: int, chunks: int) -> None:
    found = chunk_slices(rows, chunks)
    assert [row for part in found for row in range(part.start, part.stop)] == list(range(rows))
    sizes = [part.stop - part.start for part in found]
    assert len(sizes) == max(1, min(rows, chunks)) and max(sizes) - min(sizes) <= 1


# ---------------------------------------------------------------------------------- the loss in chunks of tokens


class LargestTensor(TorchDispatchMode):
    """Remembers the elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def loss_and_gradients(chunk: int, dtype: torch.dtype, *, train_weight: bool = True) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(37, 4).to(dtype).requires_grad_()
    weight = torch.randn(50, 4).to(dtype).requires_grad_(train_weight)
    targets = torch.randint(50, (37,))
    targets[5:9] = -100
    loss = head_loss(x, weight, targets, chunk=chunk)
    (loss / 3).backward()
    assert x.grad is not None
    return loss.detach(), x.grad, *([weight.grad] if weight.grad is not None else [])


@pytest.mark.parametrize("chunk", [1, 8, 36, 37, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_the_loss_in_chunks_is_the_loss(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    for trained in (True, False):
        want = loss_and_gradients(0, dtype, train_weight=trained)
        got = loss_and_gradients(chunk, dtype, train_weight=trained)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == theirs.dtype
            assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_the_loss_in_chunks_never_holds_all_logits() -> None:
    largest = {}
    for chunk in (0, 8):
        with LargestTensor() as mode:
            loss_and_gradients(chunk, torch.float32)
        largest[chunk] = mode.elements
    assert largest[0] == 37 * 50
    assert largest[8] == 8 * 50  # more than x (37, 4) and the weight (50, 4)


def test_evaluation_takes_chunks_too() -> None:
    x, weight, targets = torch.randn(37, 4), torch.randn(50, 4), torch.randint(50, (37,))
    with torch.no_grad(), LargestTensor() as mode:
        got = head_loss(x, weight, targets, chunk=8)
    assert mode.elements == 8 * 50
    assert got.item() == pytest.approx(nn.functional.cross_entropy(x @ weight.t(), targets, reduction="sum").item(), rel=1e-5)


# ---------------------------------------------------------------------------------- refused before anything starts

MODEL = {"vocab_size": 300, "dim": 32, "num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64}


@pytest.mark.parametrize("sp", ["on", "off"])
def test_kv_heads_that_ranks_cannot_share_evenly_are_refused(sp: str) -> None:  # US-04
    table = {"model": MODEL, "data": {"sources": "none.txt", "seq_len": 16}}
    check_supported(RunConfig.of(table, layout=f"tp=4,sp={sp}"))
    three = {**table, "model": MODEL | {"num_heads": 12, "num_kv_heads": 3, "head_dim": 4}}
    with pytest.raises(LayoutError, match=r"tp=4 and the model's 3 KV heads must divide one another; use tp=1, 3, 6 or 12"):
        check_supported(RunConfig.of(three, layout=f"tp=4,sp={sp}"))


def test_compiled_blocks_cannot_hold_collectives() -> None:
    table = {"model": MODEL, "data": {"sources": "none.txt", "seq_len": 16}, "train": {"compile": True}}
    check_supported(RunConfig.of(table, layout="dp=2"))
    with pytest.raises(LayoutError, match=r"train\.compile=true with tp=2: .* use tp=1 or leave compile out"):
        check_supported(RunConfig.of(table, layout="tp=2,dp=2"))


# ---------------------------------------------------------------------------------- dropout on split tokens


def test_ranks_drop_other_features_of_their_own_tokens_as_one_process_would() -> None:  # RN-01, RN-02
    config = ModelConfig(**{**MODEL, "dropout": 0.5})
    index, ones = torch.arange(8) + 100, torch.ones(8, 32)

    def mask(layout: Layout, rank: int, step: int) -> Tensor:
        model = Transformer(config, Mesh.dry(layout, rank), torch.float32, "meta")
        context = model.context(
            torch.zeros(8, dtype=torch.int64), torch.arange(8), CausalAttend([8]), token_index=index, seed=1, step=step
        )
        return context.drop(model.region.own_tokens(ones), 0, 1)

    split, copied = Layout(tp=2), Layout(tp=2, sp="off")
    for step in range(20):
        halves = [mask(split, rank, step) for rank in range(2)]
        assert not torch.equal(*halves)
        assert torch.equal(torch.cat(halves), mask(Layout(), 0, step))
        assert torch.equal(mask(copied, 0, step), mask(copied, 1, step))


# ---------------------------------------------------------------------------------- worked numbers


def test_the_traffic_of_eighty_layers(shared: Path) -> None:
    example = json.loads((shared / "vectors" / "worked_examples.json").read_text())["tensor_parallel_traffic"]
    given = example["inputs"]
    model = ModelConfig(
        vocab_size=8, dim=given["hidden"], num_layers=given["layers"], num_heads=64, num_kv_heads=8, ffn_dim=8
    )
    entries = {}
    for sp in ("off", "on"):
        ledger = Ledger()
        layout = Layout(tp=given["tp"], sp=sp, precision="bf16")
        tensor_parallel_traffic(ledger, model, layout, given["seq"])
        entries[sp] = {key: entry for key, entry in ledger.entries.items() if key[3].startswith(("attention", "mlp"))}
    forward = [entry for key, entry in entries["off"].items() if key[0] == "F"]
    assert sum(entry.count for entry in forward) == given["layers"] * given["all_reduces_per_layer_forward"]
    assert {entry.bytes // entry.count for entry in forward} == {example["bytes_per_all_reduce"]}
    total = sum(entry.bytes for entry in forward)
    assert total // given["layers"] == example["bytes_per_layer_forward"]
    assert total / 1e9 == pytest.approx(example["gb_all_layers_forward"], rel=example["tol"])
    for speed, seconds in example["seconds_at"].items():
        assert total / (float(speed.split("_")[0]) * 1e9) == pytest.approx(seconds, rel=example["tol"])
    assert sum(entry.bytes for entry in entries["off"].values() if entry.phase == "B") == total
    assert sum(entry.bytes for entry in entries["on"].values() if entry.phase == "F") == total  # pairs: the same volume
    again = [entry for key, entry in entries["on"].items() if key[3].endswith("again")]
    assert sum(entry.bytes for entry in again) == total // 2
    assert sum(entry.bytes for entry in entries["on"].values() if entry.phase == "B") == total + total // 2


# ---------------------------------------------------------------------------------- the table of styles


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)


def test_the_table_splits_what_it_names_and_leaves_the_rest() -> None:
    net = Net()
    net.blocks[0].up.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    mesh = Mesh.dry(Layout(tp=4), rank=3)
    table = {"embed": "vocab", "blocks.*.up": "column", "blocks.0.down": "row", "head": "column_gather"}
    assert parallelize(net.eval(), table, mesh) is net
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    assert shapes["embed.weight"] == (1, 4) and shapes["head.weight"] == (1, 4)  # 3 + 3 + 3 + 1 rows
    assert shapes["blocks.0.up.weight"] == (0, 4) and shapes["blocks.0.up.bias"] == (0,)
    assert shapes["blocks.0.down.weight"] == (4, 0) and shapes["blocks.0.down.bias"] == (4,)
    assert shapes["blocks.1.down.weight"] == (4, 6) and shapes["norm.weight"] == (4,)
    assert torch.equal(net.embed.weight, before["embed.weight"][9:])
    assert net.head.gather_output and not net.blocks[1].up.gather_output and not net.head.training
    assert not net.blocks[0].up.weight.requires_grad and net.blocks[1].up.weight.requires_grad
    assert {name: value.shape for name, value in full_state_dict(net).items()} == {n: v.shape for n, v in before.items()}


def test_on_one_rank_split_layers_are_the_layers() -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    parallelize(net, {"embed": "vocab", "blocks.*.up": "column", "blocks.*.down": "row", "head": "column"}, Mesh.solo())
    after = full_state_dict(net)
    assert list(after) == list(before) and all(torch.equal(after[name], value) for name, value in before.items())


def tied() -> Net:
    net = Net()
    net.head.weight = net.embed.weight
    return net


def with_padding() -> Net:
    net = Net()
    net.embed = nn.Embedding(10, 4, padding_idx=0)
    return net


@pytest.mark.parametrize(
    ("net", "table", "message"),
    [
        (Net(), {"head": "colum"}, r"style 'colum' of 'head' is not known; did you mean 'column'"),
        (Net(), {"haed": "column"}, r"pattern 'haed' matches no layer; did you mean 'head'\?"),
        (Net(), {"embed": "column"}, r"style 'column' needs a plain Linear, but embed is a Embedding"),
        (Net(), {"norm": "row"}, r"style 'row' needs a plain Linear, but norm is a LayerNorm"),
        (Net(), {"blocks.*.up": "column", "blocks.1.*": "row"}, r"blocks\.1\.up is matched by .* give it two styles"),
        (tied(), {"embed": "vocab"}, r"head\.weight is shared with embed, which is split"),
        (tied(), {"embed": "vocab", "head": "row"}, r"embed and head share a weight, .* split it the same way"),
        (with_padding(), {"embed": "vocab"}, r"embed: padding_idx=0 is not offered by a split embedding"),
    ],
)
def test_a_table_that_cannot_be_followed_is_refused(net: Net, table: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parallelize(net, table, Mesh.dry(Layout(tp=2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0 and below 1"),
        ({"reduction": "average"}, "reduction='average' is not known"),
        ({"vocab_size": 6}, "have 3 columns, but of a vocabulary of 6 rank 0 of tp=1 holds 6"),
    ],
)
def test_a_loss_that_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vocab_parallel_cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), Mesh.solo(), **options)
    with pytest.raises(ConfigError, match=r"need targets \(2,\), not \(3,\)"):
        vocab_parallel_cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), Mesh.solo())
