"""What the kernels of one unit cost: launch + max(arithmetic, memory), with whole tiles and whole waves.

A matrix product m x n x k takes ``launch + max(2 m n k / (peak share Q), bytes / (bandwidth share))``, where Q is the
share of useful work when the result is cut into tiles and the tiles into waves over the chip's SMs; of a few tile shapes
the best is taken, as libraries do. Element-wise work counts the bytes that it reads and writes. Backward of a linear
layer is two products of the same size (input gradient, weight gradient).

Notation: T tokens of one micro-batch on a rank, D dim, N and K query and KV heads, H head dim, F ffn, V vocab, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

from shardwright.core.cluster import Chip
from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.errors import ConfigError
from shardwright.plan.stack import Stack

TILES = ((256, 128, 1.0), (128, 128, 0.94), (128, 64, 0.80), (64, 64, 0.65))
"""Tile shapes of a matrix product (rows, columns) and the share of a large tile's rate that each reaches."""

ACTIVATION_BYTES = {"fp64": 8, "fp32": 4}
"""Bytes of an activation by precision; 2 (bf16 or fp16) for the others, fp8 and fp4 included."""
OPERAND_BYTES = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Bytes of an operand of a matrix product; fp4 carries a scale of one byte per 16 values."""
ATTENTION_BACKWARD = 2.5
"""Backward of fused attention over its forward in FLOPs: five products in place of two."""
ALIGNMENT = 8
"""Elements of 2 bytes: batched products whose head dim is no multiple of it (16 bytes) do not reach the tensor cores (NVIDIA,
Matrix Multiplication Background, Tensor Core Requirements; BigScience measured 40 % longer steps with 108 than with 144)."""
ADAM_BYTES = 30
"""Memory traffic of Adam per owned parameter: read fp32 p, m, v, g; write p, m, v and the bf16 copy."""


@dataclass(frozen=True)
class LayerKind:
    """What tells one layer's cost from another's: experts or not, how far attention looks back (None: all), and which of
    its parameters are not trained, by their names in the layer."""

    moe: bool
    window: int | None
    frozen: tuple[str, ...] = ()


def layer_kind(model: ModelConfig, layer: int) -> LayerKind:
    return LayerKind(model.is_moe_layer(layer), model.layer_window(layer))


@dataclass
class UnitCost:
    """Seconds, FLOPs and kernels of one unit for one micro-batch on one rank.

    ``attention_forward`` is the part of ``forward`` in the score products (a ring hides its messages behind it).
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    attention_forward: float = 0.0
    flops_forward: float = 0.0
    flops_backward: float = 0.0
    kernels_forward: int = 0
    kernels_backward: int = 0


@dataclass
class Kernels:
    """Adds up kernels of one unit on one chip with one stack; the methods are the kinds of kernel there are."""

    chip: Chip
    stack: Stack
    precision: str
    cost: UnitCost = field(default_factory=UnitCost)
    arithmetic: str = ""
    """Precision of the arithmetic where operands are only stored in ``precision``; empty: the same."""

    def __post_init__(self) -> None:
        self._memory_rate = self.chip.memory_bandwidth * self.stack.memory

    def gemm_seconds(self, m: float, n: float, k: float, groups: float = 1, precision: str = "") -> float:
        """One (grouped) product of m x n x k."""
        precision = precision or self.precision
        if min(m, n, k, groups) <= 0:
            return 0.0
        useful = self._useful_share(m, n, groups)
        share = self.stack.gemm(precision) * useful * (self.stack.grouped if groups > 1 else 1.0)
        arithmetic = 2.0 * m * n * k * groups / (compute_peak(self.chip, self.arithmetic or precision) * share)
        size, out = OPERAND_BYTES.get(precision, 2.0), ACTIVATION_BYTES.get(precision, 2)
        memory = groups * (size * k * (m + n) + out * m * n) / self._memory_rate
        return self.stack.launch + max(arithmetic, memory)

    def _useful_share(self, m: float, n: float, groups: float) -> float:
        return useful_share(m, n, groups, self.chip.num_sms) if self.stack.tiles else 1.0

    def linear(self, m: float, n: float, k: float, groups: float = 1, precision: str = "") -> None:
        """A linear layer: m tokens from k to n channels."""
        cost = self.cost
        cost.forward += self.gemm_seconds(m, n, k, groups, precision)
        cost.backward_input += self.gemm_seconds(m, k, n, groups, precision)
        if self.stack.quantise and (precision or self.precision) in ("fp8", "fp4"):
            rate = self.stack.quantise / self._memory_rate
            cost.forward += groups * (m + n) * k * rate
            cost.backward_input += groups * m * n * rate
        cost.backward_weight += self.gemm_seconds(n, k, m, groups, precision)
        cost.flops_forward += 2.0 * m * n * k * groups
        cost.flops_backward += 4.0 * m * n * k * groups
        cost.kernels_forward += 1
        cost.kernels_backward += 2

    def elementwise(self, num_bytes: float, backward: float = 1.5, kernels: int = 1) -> None:
        """Element-wise work that reads and writes ``num_bytes`` forward and ``backward`` times that backward."""
        seconds = num_bytes * self.stack.fused / self._memory_rate
        self.cost.forward += kernels * self.stack.launch + seconds
        self.cost.backward_input += kernels * self.stack.launch + backward * seconds
        self.cost.kernels_forward += kernels
        self.cost.kernels_backward += kernels

    def fused_attention(self, tokens: float, keys: float, heads: float, width: float, causal: bool) -> None:
        """Scores and values of ``heads`` heads in one kernel; ``width`` is the two head dims together."""
        flops = 2.0 * tokens * keys * heads * width * (0.5 if causal else 1.0)
        seconds = flops / (compute_peak(self.chip, _wide(self.precision)) * self.stack.attention)
        self.cost.forward += self.stack.launch + seconds
        self.cost.attention_forward += seconds
        self.cost.backward_input += 2 * self.stack.launch + ATTENTION_BACKWARD * seconds
        self.cost.flops_forward += flops
        self.cost.flops_backward += ATTENTION_BACKWARD * flops
        self.cost.kernels_forward += 1
        self.cost.kernels_backward += 2

    def unfused_attention(self, sequences: float, queries: float, keys: float, heads: float, width: float) -> None:
        """Scores as a tensor: two batched products over all keys, softmax and dropout over sequences x heads x keys."""
        batch, half = sequences * heads, width / 2
        wide, stack = _wide(self.precision), self.stack
        aligned = wide != "bf16" or half % ALIGNMENT == 0 or self.chip.fp32 is None
        rate = compute_peak(self.chip, wide if aligned else "fp32") * stack.attention
        product = 2.0 * batch * queries * keys * half
        scores = batch * queries * keys
        arithmetic = product / (rate * self._useful_share(queries, keys, batch))
        seconds = 2 * max(arithmetic, (2 * scores + 4 * batch * (queries + keys) * half) / self._memory_rate)
        self.cost.forward += 2 * stack.launch + seconds
        self.cost.attention_forward += seconds
        self.cost.backward_input += 4 * stack.launch + 2 * seconds
        self.cost.flops_forward += 2 * product
        self.cost.flops_backward += 4 * product
        self.cost.kernels_forward += 2
        self.cost.kernels_backward += 4
        rest = (
            scores * (4 + 5) / self._memory_rate
        )  # softmax reads and writes 2 bytes, dropout as well with a mask of 1
        self.cost.forward += 2 * stack.launch + rest
        self.cost.backward_input += 2 * stack.launch + rest
        self.cost.kernels_forward += 2
        self.cost.kernels_backward += 2


def compute_peak(chip: Chip, precision: str) -> float:
    """Peak of ``precision`` for products: bf16 falls back on fp16 (V100), fp64 on half of fp32."""
    if precision == "bf16" and chip.bf16 is None and chip.fp16 is not None:
        return chip.fp16
    if precision == "fp64":
        return chip.peak("fp32") / 2
    return chip.peak(precision)


def _wide(precision: str) -> str:
    return "bf16" if precision in ("fp8", "fp4") else precision


@lru_cache(maxsize=65536)
def useful_share(m: float, n: float, groups: float, num_sms: int) -> float:
    """Share of the rate that is left by part tiles and a part last wave, for the best tile shape."""
    best = 0.0
    for rows, columns, rate in TILES:
        tiles_m, tiles_n = ceil(m / rows), ceil(n / columns)
        share = rate * m / (tiles_m * rows) * n / (tiles_n * columns)
        if num_sms:
            tiles = tiles_m * tiles_n * groups
            share *= tiles / (ceil(tiles / num_sms) * num_sms)
        best = max(best, share)
    return best


# -- units -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What one rank meets in one micro-batch. ``tokens``: T; ``split``: ranks that share T outside of products (sp)."""

    tokens: float
    sequences: float
    seq: int
    cp: int
    tp: int
    split: int
    ep: int

    @classmethod
    def of(cls, layout: Layout, seq: int) -> Shape:
        split = layout.tp if layout.sequence_parallel else 1
        tokens = layout.micro_batch * seq / layout.cp
        return cls(tokens, layout.micro_batch, seq, layout.cp, layout.tp, split, layout.ep)


def layer_cost(model: ModelConfig, kind: LayerKind, shape: Shape, kernels: Kernels) -> UnitCost:
    """One block: attention, then a dense MLP or experts. Communication is not in it."""
    size = ACTIVATION_BYTES.get(kernels.precision, 2)
    local, hidden = shape.tokens / shape.split, model.dim
    for _ in range(2):  # norms, then residual sums (with dropout: a mask)
        kernels.elementwise(2 * size * local * hidden)
        kernels.elementwise((3 * size + (model.dropout > 0)) * local * hidden, backward=1.0)
    _attention(model, kind, shape, kernels, size)
    if kind.moe:
        _experts(model, shape, kernels, size)
    else:
        mlp(model, shape.tokens, model.ffn_dim / shape.tp, kernels, size)
    return kernels.cost


def attention_products(model: ModelConfig, tokens: float, tp: int, kernels: Kernels) -> None:
    """The products into and out of attention, with their latents where attention is latent."""
    heads, hidden = model.num_heads / tp, model.dim
    if model.mla is not None:
        mla = model.mla
        if mla.q_lora_rank is None:
            kernels.linear(tokens, heads * model.head_dim, hidden)
        else:
            kernels.linear(tokens, mla.q_lora_rank, hidden)
            kernels.linear(tokens, heads * model.head_dim, mla.q_lora_rank)
        kernels.linear(tokens, mla.kv_lora_rank + mla.rope_head_dim, hidden)
        kernels.linear(tokens, heads * (mla.nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        out = heads * mla.v_head_dim
    else:
        kernels.linear(tokens, (heads + 2 * max(model.num_kv_heads / tp, 1)) * model.head_dim, hidden)
        out = heads * model.head_dim
    kernels.linear(tokens, hidden, out)


def _attention(model: ModelConfig, kind: LayerKind, shape: Shape, kernels: Kernels, size: int) -> None:
    tokens, heads = shape.tokens, model.num_heads / shape.tp
    attention_products(model, tokens, shape.tp, kernels)
    width = model.head_dim + (model.mla.v_head_dim if model.mla is not None else model.head_dim)
    turned = heads if model.mla is not None else max(model.num_kv_heads / shape.tp, 1)
    kernels.elementwise(2 * size * tokens * (heads + turned) * model.head_dim, backward=1.0, kernels=2)
    keys = min(kind.window or shape.seq, shape.seq)
    if kernels.stack.flash:
        kernels.fused_attention(tokens, keys, heads, width, causal=keys == shape.seq)
    else:
        kernels.unfused_attention(shape.sequences, shape.seq / shape.cp, shape.seq, heads, width)


def mlp(model: ModelConfig, rows: float, width: float, kernels: Kernels, size: int, groups: float = 1) -> None:
    """One MLP of ``width`` channels on ``rows`` tokens, or one for each of ``groups`` experts."""
    inward = 2 if model.activation == "swiglu" else 1
    kernels.linear(rows, inward * width, model.dim, groups)
    kernels.elementwise((inward + 1) * size * rows * width * groups)
    kernels.linear(rows, model.dim, width, groups)


def _experts(model: ModelConfig, shape: Shape, kernels: Kernels, size: int) -> None:
    """Router, the permutation there and back, grouped products over the rank's experts, the shared expert.

    With ep ranks sharing the experts, a rank computes as many rows as it sends: T top_k / tp over E / ep experts.
    """
    moe = model.moe
    assert moe is not None
    own = shape.tokens / shape.tp  # each rank of a stage routes its own tokens once
    kernels.linear(own, moe.num_experts, model.dim, precision=_wide(kernels.precision))
    kernels.elementwise(6 * 4 * own * moe.num_experts, kernels=4)
    kernels.elementwise(2 * 2 * size * own * moe.top_k * model.dim, backward=1.0, kernels=4)
    local_experts = moe.num_experts / shape.ep
    rows = own * moe.top_k / local_experts * kernels.stack.imbalance
    mlp(model, rows, moe.expert_dim, kernels, size, local_experts)
    if moe.shared_dim:
        mlp(model, shape.tokens, moe.shared_dim / shape.tp, kernels, size)


def embedding_cost(model: ModelConfig, shape: Shape, kernels: Kernels) -> UnitCost:
    """The table's look-up and its scattered gradient."""
    size = ACTIVATION_BYTES.get(kernels.precision, 2)
    kernels.elementwise(2 * size * shape.tokens * model.dim, backward=2.0, kernels=2)
    return kernels.cost


def head_cost(model: ModelConfig, shape: Shape, kernels: Kernels) -> UnitCost:
    """Final norm, logits (in the wide precision) and cross entropy: logits are read three times and written once."""
    size = ACTIVATION_BYTES.get(kernels.precision, 2)
    vocab = ceil(model.vocab_size / shape.tp)
    kernels.elementwise(2 * size * shape.tokens / shape.split * model.dim)
    kernels.linear(shape.tokens, vocab, model.dim, precision=_wide(kernels.precision))
    kernels.elementwise((3 * size + 4) * shape.tokens * vocab, backward=0.6, kernels=5)
    return kernels.cost


def optimizer_seconds(chip: Chip, stack: Stack, owned: float, moments: int = 2) -> float:
    """Adam (SGD: one moment) over ``owned`` parameters on the device: memory traffic alone."""
    return (ADAM_BYTES - 8 * (2 - moments)) * owned / (chip.memory_bandwidth * stack.memory)


def forward_flops(weights: float) -> float:
    """FLOPs that one token's forward spends in ``weights`` matrix weights: a product and a sum for each."""
    return 2 * weights


# -- experts in serving ----------------------------------------------------------------------------


def tokens_per_expert(tokens: int, top_k: int, num_experts: int) -> float:
    """Mean rows of one expert's products; few rows leave them bound by memory."""
    if num_experts < 1:
        raise ConfigError(f"num_experts={num_experts} must be at least 1")
    return tokens * top_k / num_experts


def expert_capacity(tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Rows that one expert takes under a capacity factor: ceil(k T / E x factor)."""
    return ceil(tokens_per_expert(tokens, top_k, num_experts) * factor)
