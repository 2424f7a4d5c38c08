"""What serving a model costs: memory and capacity of one group of GPUs, prefill and decode, TTFT, TPOT, throughput.

Definitions. TTFT: from the arrival of a request to its first token, waiting included. TPOT: (latency - TTFT) / (output
tokens - 1). A group is tp x pp x dp ranks with one router before it; its dp replicas share the concurrency evenly.

A step is a roofline of its kernels (`plan.compute`): decode reads each weight once, the running sequences' keys and values
once, and multiplies B rows; prefill multiplies all tokens of a prompt. Two all-reduces of T x D a layer over tp, two
all-to-alls over ep, T x D between stages. Requests that arrive while others decode are prefilled between their steps, so
B requests of n output tokens add B prefills to n steps:

    TPOT = decode(B) + (B - 1) / n x prefill        TTFT = request + queue + prefill (1 + burst (B - 1) / 2) + decode(B)

``burst`` is the share of requests that arrive together (a load generator starts all B at once), fitted per engine like the
other constants. A pipeline of p stages keeps p groups of B/p sequences in flight: a token passes all stages.

Notation: T tokens of a step on a rank, B running sequences of a replica, D dim, N query and K KV heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.ledger import LedgerEntry, ring_bytes
from shardwright.core.model_config import ModelConfig
from shardwright.errors import ConfigError, LayoutError
from shardwright.plan.compute import (
    OPERAND_BYTES,
    Kernels,
    LayerKind,
    attention_products,
    layer_kind,
    mlp,
    tokens_per_expert,
)
from shardwright.plan.memory import least_gpus
from shardwright.plan.network import Network
from shardwright.plan.stack import Stack
from shardwright.plan.stages import ParameterTable, layers_per_stage

MEMORY_SHARE = 0.9
"""Of a GPU's memory that weights, workspace and cache may take; the rest is context and allocator."""
STEP_TOKENS = 8192
"""Most tokens of one prefill step: what the workspace is sized for."""
WIDE = 2
"""Bytes of activations, of the embedding, the head and the norms."""


@dataclass(frozen=True)
class Load:
    """``concurrency`` requests at once, each of ``input_tokens`` in and ``output_tokens`` out; bytes of a cached value."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    kv_bytes: float = 2.0

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def length(self) -> int:
        """Tokens in the cache when a request ends."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True)
class ServingMemory:
    """Bytes on the fullest GPU of a group. ``tokens`` and ``sequences``: what the cache of the whole group holds."""

    weights: int
    workspace: int
    kv_bytes_per_token: float
    cache: int
    tokens: int
    sequences: int
    capacity: int

    @property
    def total(self) -> int:
        """Weights and workspace: what must fit before there is any cache."""
        return self.weights + self.workspace


@dataclass(frozen=True)
class ServingTimes:
    """Seconds of one prompt's prefill and of one decode step, what a user sees, and rates of the whole group."""

    prefill_seconds: float
    decode_seconds: float
    queue_seconds: float
    ttft_seconds: float
    tpot_seconds: float
    running: int
    requests_per_second: float
    output_tokens_per_second: float
    compute_seconds: float
    communication_seconds: float


@dataclass(frozen=True)
class ServingPrice:
    """One layout under one load."""

    layout: Layout
    memory: ServingMemory
    times: ServingTimes
    tokens_per_expert: float | None

    @property
    def fits(self) -> bool:
        """Whether at least one request fits into the cache."""
        return self.memory.sequences >= 1

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.times.output_tokens_per_second / self.layout.world_size


class ServingPricer:
    """Prices groups that serve one model on one cluster's GPUs under one engine's constants."""

    def __init__(self, model: ModelConfig, cluster: Cluster, stack: Stack) -> None:
        self.model, self.cluster, self.stack = model, cluster, stack
        self.network = Network(cluster, stack)
        self.table = ParameterTable(model)
        self.kinds = tuple(layer_kind(model, layer) for layer in range(model.num_layers))
        self._chip = replace(cluster.chip, num_sms=0)  # few rows: libraries split k over the SMs that tiles leave idle

    def check(self, layout: Layout) -> None:
        """Raise :class:`LayoutError` for a group that cannot be."""
        layout.check_model(self.model)
        if layout.cp > 1 or layout.zero:
            raise LayoutError("a serving group has tp, pp, dp and ep only; drop cp and zero")
        if layout.world_size > self.cluster.world_size:
            raise LayoutError(
                f"layout {layout} needs {layout.world_size} GPUs, the cluster has {self.cluster.world_size}; lower a degree"
            )
        moe = self.model.moe
        if moe is not None and moe.num_experts % layout.ep:
            raise LayoutError(f"ep={layout.ep} must divide the model's {moe.num_experts} experts")

    # -- memory ------------------------------------------------------------------------------------

    def _precisions(self, layout: Layout) -> tuple[str, str]:
        """Stored precision of dense matrices and of experts: 4-bit checkpoints of MoE models pack experts only."""
        if layout.precision == "fp4" and self.model.moe is not None:
            return "bf16", "fp4"
        return layout.precision, layout.precision

    def _expert_split(self, layout: Layout) -> int:
        """Ranks that share one expert's channels: those of tp that ep leaves."""
        return max(1, layout.tp // layout.ep)

    def weight_bytes(self, layout: Layout) -> int:
        """Weights of the fullest pipeline rank."""
        dense, experts = self._precisions(layout)
        counts = layers_per_stage(self.model, layout)
        heaviest, start = 0.0, 0
        for index, count in enumerate(counts):
            size = 0.0
            for kind in self.kinds[start : start + count]:
                held = self.table.layer(kind, layout.tp, layout.ep)
                size += held.dense * OPERAND_BYTES[dense]
                size += held.experts / self._expert_split(layout) * OPERAND_BYTES[experts]
            start += count
            first, last = index == 0, index == len(counts) - 1
            size += WIDE * self.table.embedding(layout.tp).total * first
            size += WIDE * self.table.head(layout.tp, with_embedding=first).total * last
            heaviest = max(heaviest, size)
        return ceil(heaviest)

    def kv_bytes_per_token(self, layout: Layout, kv_bytes: float = 2.0) -> float:
        """Cache of one token on one rank: KV heads are split over tp as far as there are any, a latent is not."""
        model = self.model
        layers = max(layers_per_stage(model, layout))
        if model.mla is not None:
            return layers * (model.mla.kv_lora_rank + model.mla.rope_head_dim) * kv_bytes
        return 2 * layers * max(model.num_kv_heads / layout.tp, 1) * model.head_dim * kv_bytes

    def _cached_tokens(self, length: float) -> float:
        """Tokens' worth of cache of one sequence: a sliding layer keeps its window only."""
        kept = [min(length, kind.window or length) for kind in self.kinds]
        return sum(kept) / len(kept)

    def memory(self, layout: Layout, load: Load) -> ServingMemory:
        """What weights leave for the cache."""
        model = self.model
        weights = self.weight_bytes(layout)
        widest = max(2 * model.ffn_dim / layout.tp, 4 * model.dim)
        if model.moe is not None:
            widest = max(widest, model.moe.top_k * (model.dim + 2 * model.moe.expert_dim / self._expert_split(layout)))
        workspace = ceil(WIDE * min(STEP_TOKENS, max(load.input_tokens, load.concurrency)) * (widest + 2 * model.dim))
        per_token = self.kv_bytes_per_token(layout, load.kv_bytes)
        chip = self.cluster.chip
        cache = max(0, int(chip.memory_bytes * MEMORY_SHARE) - weights - workspace)
        sequences = int(cache / (per_token * self._cached_tokens(load.length)))
        return ServingMemory(
            weights, workspace, per_token, cache, int(cache / per_token) * layout.dp, sequences * layout.dp,
            chip.memory_bytes,
        )  # fmt: skip

    # -- steps -------------------------------------------------------------------------------------

    def prefill_seconds(self, layout: Layout, tokens: int) -> float:
        """One prompt of ``tokens`` through all stages."""
        return sum(self._pass(layout, tokens, 1, tokens, decode=False))

    def decode_seconds(self, layout: Layout, sequences: float, context: float) -> float:
        """One token for each of ``sequences`` on a replica, whose caches hold ``context`` tokens."""
        return sum(self._pass(layout, sequences, sequences, context, decode=True))

    def _pass(
        self, layout: Layout, tokens: float, sequences: float, context: float, *, decode: bool
    ) -> tuple[float, float]:
        """Seconds of kernels (with the host's share) and of messages of one pass over all layers.

        A pipeline runs pp groups of the sequences, one after another through each stage.
        """
        groups = min(layout.pp, max(1.0, sequences)) if decode else 1
        rows = tokens / groups
        compute = 0.0
        kinds = dict.fromkeys(self.kinds, 0)
        for kind in self.kinds:
            kinds[kind] += 1
        for kind, count in kinds.items():
            compute += count * self._layer_compute(layout, kind, rows, context, decode=decode)
        compute += self._ends(layout, rows, sequences / groups)
        sent = sum(entry.seconds for entry in self.messages(layout, rows))
        return compute + self.stack.step_seconds, sent

    def _kernels(self, layout: Layout, precision: str) -> Kernels:
        chip = self.cluster.chip
        known = {"fp8": chip.fp8, "fp4": chip.fp4}.get(precision, 1.0)
        return Kernels(self._chip, self.stack, precision, arithmetic="" if known else "bf16")

    def _layer_compute(self, layout: Layout, kind: LayerKind, rows: float, context: float, *, decode: bool) -> float:
        model, tp = self.model, layout.tp
        dense, experts = self._precisions(layout)
        kernels = self._kernels(layout, dense)
        for _ in range(2):  # norm with residual sum in one kernel
            kernels.elementwise(4 * WIDE * rows * model.dim)
        attention_products(model, rows, tp, kernels)
        keys = min(kind.window or context, context)
        heads = model.num_heads / tp
        kernels.elementwise(2 * WIDE * rows * heads * model.head_dim)
        if decode:
            kernels.cost.forward += self._decode_attention(rows, keys, heads, tp)
        else:
            width = model.head_dim + (model.mla.v_head_dim if model.mla is not None else model.head_dim)
            kernels.fused_attention(rows, keys, heads, width, causal=keys == context)
        if not kind.moe:
            mlp(model, rows, model.ffn_dim / tp, kernels, WIDE)
            return kernels.cost.forward
        moe = model.moe
        assert moe is not None
        if moe.shared_dim:
            mlp(model, rows, moe.shared_dim / tp, kernels, WIDE)
        return kernels.cost.forward + self._expert_compute(layout, experts, rows)

    def _decode_attention(self, rows: float, keys: float, heads: float, tp: int) -> float:
        """The cache is read once; with a latent all heads share it, and each multiplies it twice."""
        model, chip = self.model, self.cluster.chip
        if model.mla is not None:
            latent = model.mla.kv_lora_rank + model.mla.rope_head_dim
            flops = 2.0 * rows * keys * heads * (latent + model.mla.kv_lora_rank)
            num_bytes = WIDE * rows * keys * latent
        else:
            flops = 4.0 * rows * keys * heads * model.head_dim
            num_bytes = WIDE * rows * keys * 2 * max(model.num_kv_heads / tp, 1) * model.head_dim
        peak = chip.peak("bf16") * self.stack.attention
        return self.stack.launch + max(num_bytes / (chip.memory_bandwidth * self.stack.kv), flops / peak)

    def _expert_compute(self, layout: Layout, precision: str, rows: float) -> float:
        """Router, permutation, and the products of the experts that any token has chosen."""
        model, moe = self.model, self.model.moe
        assert moe is not None
        kernels = self._kernels(layout, precision)
        kernels.linear(rows, moe.num_experts, model.dim, precision="bf16")
        kernels.elementwise(2 * WIDE * rows * moe.top_k * model.dim, kernels=3)
        routed = rows * layout.dp if layout.ep > layout.tp else rows  # tokens whose experts this rank may hold
        local = moe.num_experts / layout.ep
        touched = local * touched_share(moe.num_experts, moe.top_k, max(routed, 1.0), self.stack.skew)
        each = routed * moe.top_k / layout.ep / max(touched, 1.0) * self.stack.imbalance
        mlp(model, each, moe.expert_dim / self._expert_split(layout), kernels, WIDE, max(touched, 1.0))
        return kernels.cost.forward

    def messages(self, layout: Layout, rows: float, phase: str = "F") -> list[LedgerEntry]:
        """What one rank sends in one pass of ``rows`` tokens; nothing hides it."""
        model, moe = self.model, self.model.moe
        elements = rows * model.dim
        found: list[LedgerEntry] = []

        def add(verb: str, axis: str, tensor: str, num_bytes: float, seconds: float, count: int, link: str) -> None:
            total = seconds * count
            found.append(LedgerEntry(phase, verb, axis, tensor, int(num_bytes) * count, count, total, total, link))

        if layout.tp > 1:
            span = self.network.span(layout.grid, "tp")
            sent = ring_bytes("all_reduce", ceil(elements), WIDE, layout.tp)
            seconds = self.network.seconds("all_reduce", WIDE * elements, span)
            add("all_reduce", "tp", "hidden", sent, seconds, 2 * model.num_layers, self.network.link(span))
        if moe is not None and layout.ep > layout.tp:
            span = self.network.span(layout.grid, "ep")
            whole = WIDE * elements * moe.top_k / layout.tp
            seconds = self.network.seconds("all_to_all", whole, span)
            layers = sum(kind.moe for kind in self.kinds)
            add("all_to_all", "ep", "tokens", whole * (1 - 1 / layout.ep), seconds, 2 * layers, self.network.link(span))
        if layout.pp > 1:
            seconds = self.network.send_seconds(WIDE * elements, layout.tp)
            add("send", "pp", "hidden", WIDE * elements, seconds, layout.pp - 1, self.network.send_link(layout.tp))
        return found

    def _ends(self, layout: Layout, rows: float, sequences: float) -> float:
        """Embedding of all rows, logits of each sequence's last one."""
        model = self.model
        kernels = self._kernels(layout, "bf16")
        kernels.elementwise(2 * WIDE * rows * model.dim)
        kernels.linear(sequences, ceil(model.vocab_size / layout.tp), model.dim)
        kernels.elementwise(4 * WIDE * sequences * model.vocab_size / layout.tp, kernels=3)
        return kernels.cost.forward

    # -- a load ------------------------------------------------------------------------------------

    def price(self, layout: Layout, load: Load) -> ServingPrice:
        """One group under ``load``; raises :class:`LayoutError` where it cannot be."""
        self.check(layout)
        memory = self.memory(layout, load)
        moe = self.model.moe
        rows = None
        times = self.times(layout, load, max(1, min(load.concurrency, memory.sequences)))
        if moe is not None:
            rows = tokens_per_expert(times.running, moe.top_k, moe.num_experts)
        return ServingPrice(layout, memory, times, rows)

    def times(self, layout: Layout, load: Load, running: int) -> ServingTimes:
        """What users see when at most ``running`` of the requests are in the group's cache at once; the others wait."""
        stack, out = self.stack, load.output_tokens
        batch = max(1.0, running / layout.dp)
        compute, sent = self._pass(layout, batch, batch, load.input_tokens + out / 2, decode=True)
        decode = compute + sent
        prefill = self.prefill_seconds(layout, load.input_tokens)
        occupied = prefill / layout.pp  # stages that others' prompts take from a decoding sequence
        tpot = decode + (batch - 1) / out * occupied
        service = prefill + out * tpot
        waiting = (load.concurrency - running) / running * service
        ttft = stack.request_seconds + waiting + prefill + stack.burst * (batch - 1) / 2 * occupied + decode
        rate = running / (service + ttft - waiting - prefill)
        return ServingTimes(
            prefill, decode, waiting, ttft, tpot, running, rate, rate * out, compute, sent
        )  # fmt: skip


@lru_cache(maxsize=65536)
def touched_share(num_experts: int, top_k: int, tokens: float, skew: float) -> float:
    """Share of the experts that at least one of ``tokens`` chooses, when the r-th most popular is chosen as r^-skew.

    Real routers prefer some experts: of few tokens' choices more fall together than with even ones (skew 0), and fewer
    weights are read. Choices of different tokens count as independent, and no expert takes more than all tokens.
    """
    weights = [float(rank) ** -skew for rank in range(1, num_experts + 1)]
    total = sum(weights)
    missed: float = sum((1 - min(1.0, top_k * weight / total)) ** tokens for weight in weights)
    return 1 - missed / num_experts


def fewest_gpus(model: ModelConfig, cluster: Cluster, precision: str) -> int:
    """The least GPUs that hold the weights in ``precision`` within `MEMORY_SHARE` of their memory."""
    pricer = ServingPricer(model, cluster, Stack())
    weights = pricer.weight_bytes(Layout(precision=precision))
    return least_gpus(weights, cluster.chip.memory_bytes * MEMORY_SHARE)
