"""Bytes on one GPU, by class, from formulas. Each function says what it counts; all counts are of the fullest rank.

State by ZeRO stage (Rajbhandari et al. 2020) over N ranks that hold the same slice, with p bytes of parameters, g of
gradients and o of optimizer state per parameter (2, 2, 12 in bf16 with Adam, or g = 4 with fp32 gradients):

=====  ================  ==================
stage  bytes             in bf16, N large
=====  ================  ==================
0      p + g + o         16
1      p + g + o/N       4
2      p + (g + o)/N     2
3      (p + g + o)/N     0
=====  ================  ==================

Activations of one layer and one micro-batch of T tokens (Korthikanti et al. 2022, section 4, made general; a = N heads,
t = tp, σ = t with sequence parallelism, else 1), 2-byte values::

    T [ (8 + 2 dropout) D/σ + (4 N H + 4 K H)/t + mlp F/t + scores/t ]      mlp: 4 GeLU, 6 SwiGLU
    scores = 5 a s (2 a s without dropout) where they are kept; 4 a for the softmax statistics of fused attention

For GPT with dropout and unfused scores this is the paper's ``s b h (10 + 24/t + 5 a s/(h t))``. ``selective`` drops the
scores, ``full`` keeps the input of each layer only (``2 T D/σ``) and has one layer at a time in full.

Where a schedule splits the backward, B frees all that and leaves x and dy of every product until W; what sequence
parallelism gathers for a product is whole there (A: F for each matrix that leads into the MLP, SwiGLU two)::

    T [ 2 (4 D + (2 N H + 2 K H)/t + (F + A)/t) ]
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from math import ceil

from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.plan import StageMemory
from shardwright.errors import ConfigError
from shardwright.plan.buffers import Peaks, Walk, by_size, by_unit
from shardwright.plan.compute import ACTIVATION_BYTES, LayerKind, Shape
from shardwright.plan.stack import Stack
from shardwright.plan.stages import Parameters, ParameterTable, RankUnits, chunks_per_rank
from shardwright.schedule import memory as held_by
from shardwright.schedule.action import Schedule
from shardwright.schedule.make import make_schedule
from shardwright.schedule.memory import Moments, Peak, StageBytes, moments, peak_of

PARAMETER_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4}
"""Bytes of a working parameter; 2 in the other precisions."""
GRADIENT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
WALKED_ROUNDS, LEAST_WALKED = 3, 4
"""Rounds of pp micro-batches each, and micro-batches at least, after which buffers have been as full as they will be: two
buffers are on their way, and from a bucket's second reduction on there is a shard beside each."""
SPLIT = ("zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
"""Schedules with B and W of their own."""


def optimizer_bytes(precision: str, stack: Stack | None = None, moments: int = 2) -> float:
    """Adam's two moments (SGD has one), and a master copy where parameters are held in fewer bits and the stack keeps one."""
    if precision in PARAMETER_BYTES:
        return moments * PARAMETER_BYTES[precision]
    both = 12 if stack is None else stack.state_bytes - 2
    return both - (2 - moments) * (4 if both >= 12 else both / 2)


def bytes_per_parameter(
    stage: int, ranks: int, param: float = 2, grad: float = 2, optimizer: float = 12
) -> tuple[float, float, float]:
    """Parameters, gradients and optimizer state of one parameter on one of ``ranks`` ranks under ZeRO ``stage``."""
    if not 0 <= stage <= 3 or ranks < 1:
        raise ConfigError(f"ZeRO stage {stage} over {ranks} ranks; use stage 0, 1, 2 or 3 and at least one rank")
    return (
        param / ranks if stage == 3 else param,
        grad / ranks if stage >= 2 else grad,
        optimizer / ranks if stage >= 1 else optimizer,
    )


def least_gpus(weight_bytes: float, gpu_bytes: float) -> int:
    """The fewest GPUs that hold the weights alone."""
    if gpu_bytes <= 0:
        raise ConfigError(f"a GPU with {gpu_bytes} bytes holds nothing; give its memory in bytes")
    return ceil(weight_bytes / gpu_bytes)


def gradient_bytes(layout: Layout, stack: Stack) -> float:
    """Bytes of gradient buffers per parameter: the dtype in which they are summed, and what a stack keeps beside them."""
    wide = 8 if layout.precision == "fp64" else 4
    summed = wide if layout.reduce_dtype == "fp32" else GRADIENT_BYTES[layout.reduce_dtype]
    beside = PARAMETER_BYTES.get(layout.precision, 2)
    return summed + (beside if stack.two_gradients and beside < summed else 0)


def shard_ranks(layout: Layout) -> tuple[int, int]:
    """Ranks over which ZeRO shards dense parameters and expert parameters; hybrid sharding keeps replicas."""
    dense, experts = layout.dp * layout.cp, layout.grid.edp
    return max(1, dense // layout.dp_replicate), max(1, experts // layout.dp_replicate)


def state_bytes(
    layout: Layout, held: Parameters, stack: Stack, trained: Parameters | None = None, moments: int = 2
) -> dict[str, float]:
    """Parameters, gradients and optimizer state of a rank whose slice has ``held`` parameters before ZeRO divides them, of
    which ``trained`` (all by default) have gradients and optimizer state.

    From stage 2 on gradients are shards here, and what is whole for a while is a buffer. What is offloaded is not counted
    (:func:`host_bytes`): where gradients are sharded, those of offloaded parameters neither.
    """
    param = PARAMETER_BYTES.get(layout.precision, 2)
    grad, optimizer = gradient_bytes(layout, stack), optimizer_bytes(layout.precision, stack, moments)
    trained = held if trained is None else trained
    dense_ranks, expert_ranks = shard_ranks(layout)
    total = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for count, learning, ranks in (
        (held.dense, trained.dense, dense_ranks),
        (held.experts, trained.experts, expert_ranks),
    ):
        shares = bytes_per_parameter(layout.zero, ranks, param, grad, optimizer)
        for name, share in zip(total, shares, strict=True):
            total[name] += (count if name == "parameters" else learning) * share
    if layout.offload != "none":
        total["optimizer"] *= 1 - layout.offload_fraction
        total["gradients"] *= 1 - layout.offload_fraction * (layout.zero >= 2)
    if layout.offload == "params":
        total["parameters"] *= 1 - layout.offload_fraction
    return total


def host_bytes(
    layout: Layout, held: Parameters, trained: Parameters | None = None, moments: int = 2
) -> dict[str, float]:
    """Bytes of host memory that offload takes, by class, of a rank whose slice has ``held`` parameters before ZeRO, of which
    ``trained`` (all by default) have gradients and optimizer state.

    Masters of parameters that stay on the device are held beside the moments, whatever their dtype; gradients are held
    once, or twice where an update runs beside the step.
    """
    if layout.offload == "none":
        return {}
    param, wide = PARAMETER_BYTES.get(layout.precision, 2), 8 if layout.precision == "fp64" else 4
    dense_ranks, expert_ranks = shard_ranks(layout) if layout.zero else (1, 1)
    trained = held if trained is None else trained
    owned, learning = (
        layout.offload_fraction * (count.dense / dense_ranks + count.experts / expert_ranks) for count in (held, trained)
    )
    apart = param == wide and layout.offload == "optimizer"
    found = {
        "gradients": learning * wide * (1 + layout.delayed_update),
        "optimizer": learning * (optimizer_bytes(layout.precision, moments=moments) + wide * apart),
    }
    return ({"parameters": owned * param} if layout.offload == "params" else {}) | found


# -- activations -----------------------------------------------------------------------------------


def tensor_bytes(batch: int, seq: int, hidden: int, heads: int, n_hidden: int, n_score: int, size: int = 2) -> int:
    """Bytes of ``n_hidden`` tensors of batch x seq x hidden and ``n_score`` of batch x heads x seq x seq, of one layer."""
    return size * batch * seq * (n_hidden * hidden + n_score * heads * seq)


def layer_activation_bytes(
    model: ModelConfig, kind: LayerKind, shape: Shape, precision: str, stack: Stack, recompute: str = "none"
) -> float:
    """What backward needs of one layer for one micro-batch; the module's table in ``precision``."""
    size = ACTIVATION_BYTES.get(precision, 2)
    tokens, hidden, split, tp = shape.tokens, model.dim, shape.split, shape.tp
    if recompute == "full":
        return size * tokens * hidden / split
    if recompute == "selective" and stack.flash and stack.selective_repeats and not kind.moe and model.mla is None:
        return _per_operator_bytes(model, shape, size, stack)
    dropout = model.dropout > 0
    norms = 4 * size * tokens * hidden / split + (8 * tokens / split if model.norm == "rmsnorm" else 0)
    masks = 2 * tokens * hidden / split if dropout else 0
    kept = 1 - stack.selective_repeats if recompute == "selective" and stack.flash else 1.0
    total = norms + masks + _attention_bytes(model, shape, size, 4 if stack.flash else 0)
    if not stack.flash and recompute != "selective":
        keys = min(kind.window or shape.seq, shape.seq)
        total += tokens * model.num_heads * keys * (2 * size + 1 if dropout else size) / tp
    if kind.moe:
        total += _expert_bytes(model, shape, size)
    else:
        total += size * tokens * (3 if model.activation == "swiglu" else 2) * model.ffn_dim / tp
    return kept * stack.saved * total + (1 - kept) * size * tokens * hidden / split


def _per_operator_bytes(model: ModelConfig, shape: Shape, size: int, stack: Stack) -> float:
    """A layer under a policy that keeps every second product and the fused attention (PyTorch's selective checkpoints).

    Of q, k, v, out, gate, up, down the first, third and so on; the layer's input; over tp what is reduce-scattered. A
    compiled backward drops the last product, which only the residual needs.
    """
    tokens, tp, split = shape.tokens, shape.tp, shape.split
    heads, kv_heads = model.num_heads / tp, max(model.num_kv_heads / tp, 1)
    kept = model.dim / split + (2 * heads + kv_heads) * model.head_dim + model.ffn_dim / tp
    kept += 2 * model.dim / split if tp > 1 else 0
    if model.activation == "swiglu" and not stack.compiled:
        kept += model.dim / split
    return tokens * (size * kept + 4 * heads)


def _attention_bytes(model: ModelConfig, shape: Shape, size: int, statistics: int) -> float:
    """Queries, keys, values and the output, ``statistics`` bytes of each softmax; with latent attention the latents too."""
    tokens, tp = shape.tokens, shape.tp
    heads = model.num_heads / tp
    if model.mla is not None:
        mla = model.mla
        latents = (mla.q_lora_rank or 0) * 2 + mla.kv_lora_rank * 2 + mla.rope_head_dim
        return tokens * (size * (latents + heads * (2 * model.head_dim + 2 * mla.v_head_dim)) + statistics * heads)
    kv_heads = model.num_kv_heads / (tp if model.num_kv_heads >= tp else 1)  # fewer than ranks: each makes all
    return tokens * (size * (2 * heads + 2 * kv_heads) * model.head_dim + statistics * heads)


def _expert_bytes(model: ModelConfig, shape: Shape, size: int) -> float:
    """Permuted copies in and out, the routed products' inputs and outputs, router scores, the shared expert."""
    moe = model.moe
    assert moe is not None
    own, inward = shape.tokens / shape.tp, 3 if model.activation == "swiglu" else 2
    routed = size * own * moe.top_k * (2 * model.dim + inward * moe.expert_dim)
    return routed + 8 * own * moe.num_experts + size * shape.tokens * inward * moe.shared_dim / shape.tp


def logits_bytes(model: ModelConfig, shape: Shape, precision: str, stack: Stack | None = None) -> float:
    """Logits of one micro-batch with what cross entropy makes of them and the gradient, at its peak."""
    size = ACTIVATION_BYTES.get(precision, 2)
    each = 2.0 * size if size > 2 else (stack or Stack()).logit_bytes
    split = 1 if stack is not None and stack.whole_logits else shape.tp
    return shape.tokens * ceil(model.vocab_size / split) * each


def deferred_bytes(model: ModelConfig, kind: LayerKind, shape: Shape, precision: str) -> float:
    """x and dy of every product of one layer for one micro-batch: what is held between B and W."""
    size, tp = ACTIVATION_BYTES.get(precision, 2), shape.tp
    inward = 2 if model.activation == "swiglu" else 1
    heads, kv_heads = model.num_heads / tp, model.num_kv_heads / (tp if model.num_kv_heads >= tp else 1)
    if model.mla is None:
        inside = (2 * heads + 2 * kv_heads) * model.head_dim
    else:
        mla = model.mla
        queries = heads * model.head_dim + 2 * (mla.q_lora_rank or 0)
        latents = 2 * mla.kv_lora_rank + mla.rope_head_dim
        inside = queries + latents + heads * (mla.nope_head_dim + 2 * mla.v_head_dim)
    whole = shape.tokens * (2 * model.dim + inside)
    if not kind.moe:
        return size * (whole + shape.tokens * (2 * model.dim + (1 + inward) * model.ffn_dim / tp))
    moe = model.moe
    assert moe is not None
    own = shape.tokens / tp
    routed = own * moe.top_k * (2 * model.dim + (1 + inward) * moe.expert_dim)
    shared = shape.tokens * (2 * model.dim + (1 + inward) * moe.shared_dim / tp) if moe.shared_dim else 0
    return size * (whole + routed + shared) + max(4, size) * own * (model.dim + moe.num_experts)


def in_flight(layout: Layout, rank: int) -> float:
    """Micro-batches whose activations pipeline rank ``rank`` holds at its peak, in units of the rank's whole share.

    GPipe m; 1F1B min(p - r, m); interleaved (v-1)p + 2(p-r) - 1 chunks of 1/v; the zero-bubble kinds p on every rank, from
    F to W; DualPipeV half a micro-batch more. Never more than m. Of a file what its rows say.
    """
    p, m, chunks = layout.pp, layout.microbatches, chunks_per_rank(layout)
    if layout.schedule.startswith("file:"):
        schedule = _schedule(layout.schedule, p, layout.virtual, m)
        return held_by.in_flight(schedule)[rank] / max(1, len(schedule.stages_of(rank)))
    if p == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(m)
    if layout.schedule == "1f1b":
        return float(min(p - rank, m))
    if layout.schedule == "interleaved":
        return min(float(m), ((chunks - 1) * p + 2 * (p - rank) - 1) / chunks)
    if layout.schedule == "dualpipe_v":
        return min(float(m), p + 0.5)
    return float(min(p, m))


def by_rows(layout: Layout) -> bool:
    """Whether what a rank holds, and when, is read off the schedule's rows: where B and W are apart, or a file says."""
    return layout.schedule.startswith("file:") or (layout.pp > 1 and layout.schedule in SPLIT)


# -- one rank --------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _schedule(name: str, pp: int, virtual: int, microbatches: int) -> Schedule:
    """The rows that a layout's buffers are walked along."""
    return make_schedule(Layout(schedule=name, pp=pp, virtual=virtual, microbatches=microbatches))


@lru_cache(maxsize=256)
def _moments(name: str, pp: int, virtual: int, microbatches: int, rank: int) -> Moments:
    return moments(_schedule(name, pp, virtual, microbatches), rank)


def _walked(layout: Layout) -> int:
    """Micro-batches after which nothing new is held: the rounds of a steady state, by multiples of pp."""
    most = max(LEAST_WALKED, WALKED_ROUNDS * layout.pp + layout.microbatches % layout.pp)
    return layout.microbatches if layout.schedule.startswith("file:") else min(layout.microbatches, most)


class MemoryModel:
    """Prices the memory of pipeline ranks of one model under one stack."""

    def __init__(self, model: ModelConfig, table: ParameterTable, stack: Stack, moments: int = 2) -> None:
        self.model, self.table, self.stack, self.moments = model, table, stack, moments
        self._peaks: dict[Hashable, Peaks] = {}

    def stage(self, layout: Layout, rank: int, units: RankUnits, shape: Shape, *, walk: bool = True) -> StageMemory:
        """Peak bytes of one GPU of pipeline rank ``rank``; without ``walk`` those of ZeRO's buffers are left out."""
        layout = layout.on_pipeline_rank(rank)
        held = self.table.of_rank(units, layout.tp, layout.ep)
        trained = self.table.trained_of_rank(units, layout.tp, layout.ep)
        if self.stack.whole_embedding and units.embedding:
            whole = Parameters(self.table.embedding(1).dense - self.table.embedding(layout.tp).dense)
            held, trained = held.plus(whole), trained.plus(whole)
        state = state_bytes(layout, held, self.stack, trained, self.moments)
        activations = self._activations(layout, rank, units, shape)
        buffers = self._buffers(layout, shape)
        if walk and layout.zero >= 2 and units.num_units:
            buffers |= self._sharding_buffers(layout, rank, units)
        if self.stack.late_gradients and layout.zero >= 2:
            self._make_late(layout, trained, state, activations, buffers)
        return StageMemory(
            stage=rank,
            parameters=ceil(state["parameters"]),
            gradients=ceil(state["gradients"]),
            optimizer=ceil(state["optimizer"]),
            activations=ceil(sum(activations.values())),
            buffers=ceil(sum(buffers.values())),
            parts={name: ceil(size) for name, size in (activations | buffers).items() if size},
            host={name: ceil(size) for name, size in host_bytes(layout, held, trained, self.moments).items()},
        )

    def _make_late(
        self,
        layout: Layout,
        held: Parameters,
        state: dict[str, float],
        activations: dict[str, float],
        buffers: dict[str, float],
    ) -> None:
        """Shards of gradients come one by one as the whole ones of several micro-batches go, or after the loss's tensors."""
        if layout.microbatches > 1 and layout.accumulate == "defer":
            state["gradients"] = 0.0
            buffers["gradient buffers"] = gradient_bytes(layout, self.stack) * held.total
            return
        late = state["gradients"] + buffers.pop("gradient buffers", 0.0)
        state["gradients"] = max(0.0, late - activations.get("logits", 0.0))

    def _activations(self, layout: Layout, rank: int, units: RankUnits, shape: Shape) -> dict[str, float]:
        model, precision = self.model, layout.precision
        size = ACTIVATION_BYTES.get(precision, 2)
        kept = sum(
            count * layer_activation_bytes(model, kind, shape, precision, self.stack, layout.recompute)
            for kind, count in units.layers
        )
        one = {"saved by layers": kept}  # of one micro-batch, from its F to its B
        logits, recomputed = logits_bytes(model, shape, precision, self.stack) if units.head else 0.0, 0.0
        if layout.recompute == "full" and units.layers:  # never at the same time as the logits
            layer = max(layer_activation_bytes(model, kind, shape, precision, self.stack) for kind, _ in units.layers)
            recomputed = max(0.0, layer - logits)
            ring = layout.cp > 1 and layout.cp_kind != "ulysses" and model.mla is None
            if ring and self.stack.keeps_attention:  # so that it runs once
                width = size * model.head_dim + (8 if precision == "fp64" else 4)
                each = shape.tokens * model.num_heads / layout.tp * width
                one["attention outputs"] = each * sum(count for _, count in units.layers)
        hidden = size * shape.tokens * model.dim / shape.split
        if units.embedding and model.dropout > 0:
            one["embedding"] = shape.tokens * model.dim / shape.split
        if by_rows(layout):
            whole = sum(one.values())
            peak = self._peak_of_rows(layout, rank, units, shape, whole, recomputed)
            flying, recomputed = peak.saved / whole if whole else 0.0, peak.working
        else:
            flying, peak = in_flight(layout, rank), Peak()
        found = {name: each * flying for name, each in one.items()}
        found |= {"held for W": peak.waiting, "one layer recomputed": recomputed}
        if units.head:
            found["head"] = hidden + size * shape.tokens * model.dim  # norm's input, gathered input of the logits
            found["logits"] = logits
            if self.stack.keeps_outputs and layout.pp > 1:
                columns = ceil(model.vocab_size / shape.tp)
                found["logits of all micro-batches"] = layout.microbatches * size * shape.tokens * columns
        return found

    def _peak_of_rows(
        self, layout: Layout, rank: int, units: RankUnits, shape: Shape, saved: float, working: float
    ) -> Peak:
        """The fullest moment of the rank's row of the schedule, where one micro-batch leaves ``saved`` on all its stages."""
        key = (layout.schedule, layout.pp, layout.virtual, _walked(layout))
        stages = _schedule(*key).stages_of(rank)
        layers, last, num = list(units.stages), len(stages) - 1, max(1, units.num_layers)
        if len(layers) != len(stages):  # a file that has more stages than the layout says
            layers = [units.num_units] * len(stages)
            num, layers = num * len(stages), [count - units.embedding - units.head for count in layers]
        else:
            layers[0] -= units.embedding
            layers[last] -= units.head
        deferred = sum(count * deferred_bytes(self.model, kind, shape, layout.precision) for kind, count in units.layers)
        size = ACTIVATION_BYTES.get(layout.precision, 2)
        head = size * shape.tokens * (self.model.dim + ceil(self.model.vocab_size / shape.tp)) if units.head else 0.0
        waits = float(self.stack.keeps_deferred)
        each = [
            StageBytes(saved * count / num, waits * (deferred * count / num + head * (place == last)), working, max(1, count))
            for place, count in enumerate(layers)
        ]
        return peak_of(_moments(*key, rank), each)

    def waiting_bytes(self, layout: Layout, rank: int, units: RankUnits, shape: Shape) -> float:
        """The most that weight gradients hold between B and W on one GPU of pipeline rank ``rank``; 0 where B has its W."""
        if not by_rows(layout):
            return 0.0
        return self._peak_of_rows(layout, rank, units, shape, 0.0, 0.0).waiting

    def _buffers(self, layout: Layout, shape: Shape) -> dict[str, float]:
        """Gathered tokens, key and value blocks, stage boundaries."""
        model = self.model
        size = ACTIVATION_BYTES.get(layout.precision, 2)
        tokens, found = shape.tokens, dict[str, float]()
        if shape.split > 1:
            found["gathered tokens"] = 2 * size * tokens * model.dim
        if layout.cp > 1 and model.mla is None:
            found["key and value blocks"] = self._blocks(layout, tokens, size)
        if layout.num_stages > 1:
            found["stage boundaries"] = 4 * size * tokens * model.dim / shape.split
        return found

    def _sharding_buffers(self, layout: Layout, rank: int, units: RankUnits) -> dict[str, float]:
        """Gathered parameters (stage 3) and gradients on their way to the shards (stages 2 and 3)."""
        degrees = (layout.tp, layout.cp, layout.dp, layout.ep, layout.dp_replicate, layout.sequence_parallel)
        packing = (layout.zero, layout.bucket_mb, layout.precision, layout.reduce_dtype)
        order = (layout.pp, layout.schedule, _walked(layout), rank)
        key = (units, *degrees, *packing, *order, layout.accumulate, layout.microbatches > 1, layout.reshard,
               layout.prefetch, layout.offload, layout.offload_fraction)  # fmt: skip
        if key not in self._peaks:
            self._peaks[key] = self._walk(layout, rank, units)
        peaks = self._peaks[key]
        found = {"gradient buffers": peaks.buffers - peaks.arriving, "shards from the host": peaks.arriving}
        if layout.zero == 3 and layout.keeps_gathered:
            found["parameters kept gathered"] = peaks.gathered
        elif layout.zero == 3:
            found["gathered units"] = self._with_root(layout, units) if self.stack.keeps_root else peaks.gathered
        return found

    def _with_root(self, layout: Layout, units: RankUnits) -> float:
        """Embedding and head gathered all the time, beside a layer and those that are prefetched."""
        table, tp = self.table, layout.tp
        root = table.embedding(tp).total if units.embedding else 0
        root += table.head(tp, with_embedding=units.embedding).total if units.head else 0
        layer = max((table.layer(kind, tp, layout.ep).total for kind, _ in units.layers), default=0)
        return PARAMETER_BYTES.get(layout.precision, 2) * (root + min(1 + layout.prefetch, units.num_layers) * layer)

    def _walk(self, layout: Layout, rank: int, units: RankUnits) -> Peaks:
        param, grad = PARAMETER_BYTES.get(layout.precision, 2), gradient_bytes(layout, self.stack)
        parts, stages, first = self.table.parts(units, layout), {}, 0
        held = by_unit(parts) if layout.zero == 3 else by_size(parts, int(layout.bucket_mb * 2**20 / 4))
        schedule = _schedule(layout.schedule, layout.pp, layout.virtual, _walked(layout))
        for stage, count in zip(schedule.stages_of(rank), units.stages, strict=True):
            stages[stage] = range(first, first + count)
            first += count
        return Walk(layout, held, stages, param, grad).peaks(schedule.rows[rank])

    def _blocks(self, layout: Layout, tokens: float, size: int) -> float:
        """Beside what one layer's attention saves, at the peak of its backward: keys and values of other ranks, and wide sums.

        Ring: two blocks on their way, three of their gradients, the queries' gradient. Gathered: c blocks, c gradients and
        their sum. Ulysses: what is exchanged, packed and unpacked.
        """
        model, wide = self.model, 8 if layout.precision == "fp64" else 4
        heads, kv_heads = model.num_heads / layout.tp, max(model.num_kv_heads / layout.tp, 1)
        block, queries = 2 * tokens * kv_heads * model.head_dim, tokens * heads * model.head_dim
        if layout.cp_kind == "ulysses":
            return 2 * size * (queries + 2 * tokens * max(kv_heads, layout.cp) * model.head_dim)
        if layout.cp_kind == "allgather":
            return block * (size * layout.cp + wide * (layout.cp + 1)) + wide * queries
        return block * (size * min(2, layout.cp - 1) + 3 * wide) + wide * queries
