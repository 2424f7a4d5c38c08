"""The closed form of one training step's traffic: the ledger that the run must show, from the specs alone."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.buckets import BucketPlan, plan_buckets
from shardwright.core.chunks import chunk_slices
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger, ring_bytes
from shardwright.core.model_config import ModelConfig
from shardwright.core.run_config import RouterConfig
from shardwright.core.specs import TIED, bucket_members, unit_names
from shardwright.core.stages import split_units
from shardwright.plan.dispatch import Dispatches, dispatch_traffic, even_dispatches, report_traffic, router_traffic
from shardwright.schedule.gathers import plan_gathers, unit_uses
from shardwright.schedule.make import make_schedule

REDUCE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ACTIVATION_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
COUNT_ELEMENTS, COUNT_BYTES = 2, 8
"""Valid tokens and stop requests, int64: one all-reduce before the first backward of each step."""
METRIC_ELEMENTS, METRIC_BYTES = 2, 8
"""Loss sum and busy seconds of each rank, fp64: one all-gather after the last backward."""


def held_units(model: ModelConfig, layout: Layout, rank: int = 0) -> list[str]:
    """The units of one rank's pipeline stages, in order of use."""
    schedule = make_schedule(layout)
    stages = split_units(model, schedule.num_stages, layout.stages)
    return [unit for stage in schedule.stages_of(layout.grid.coordinates(rank)["pp"]) for unit in stages[stage]]


def gradient_buckets(
    model: ModelConfig, layout: Layout, frozen: Sequence[str] = (), rank: int = 0
) -> list[BucketPlan]:
    """The buckets of one rank, without parameters whose name starts with one of ``frozen``."""
    members = bucket_members(model, layout, layout.grid.coordinates(rank), held_units(model, layout, rank))
    trained = [member for member in members if not (frozen and member.name.startswith(tuple(frozen)))]
    return plan_buckets(trained, unit_names(model), layout.bucket_mb, by_unit=layout.zero == 3)


def frozen_buckets(model: ModelConfig, layout: Layout, frozen: Sequence[str] = (), rank: int = 0) -> list[BucketPlan]:
    """The parameters of one rank that are not trained, as ZeRO-3 shards them; none in other stages."""
    if layout.zero < 3 or not frozen:
        return []
    members = bucket_members(model, layout, layout.grid.coordinates(rank), held_units(model, layout, rank))
    kept = [member for member in members if member.name.startswith(tuple(frozen))]
    return plan_buckets(kept, unit_names(model), layout.bucket_mb, by_unit=True, prefix="frozen")


def predict_step(
    model: ModelConfig,
    layout: Layout,
    seq_len: int,
    frozen: Sequence[str] = (),
    rank: int = 0,
    router: RouterConfig | None = None,
    dispatches: Dispatches | None = None,
) -> Ledger:
    """Bytes that ``rank`` sends in one optimizer step of micro-batches of ``layout.micro_batch`` x ``seq_len`` tokens.

    DDP (Li et al. 2020, section 3): 2 (N-1)/N of each bucket's bytes, once a step whatever the accumulation. Tensor and
    context parallelism: per micro-batch and layer, see :func:`tensor_parallel_traffic` and :func:`context_traffic`. Pipeline:
    T x D per micro-batch and boundary, each way. Sharded data parallelism: :func:`bucket_traffic`. Experts: `plan.dispatch`,
    by the routing that was taken (``dispatches``: this rank's plans of the step) or an even one. And the small messages that
    make every rank agree on the token count, the norm and the loss.
    """
    ledger = Ledger()
    wide = 8 if layout.precision == "fp64" else 4
    layout = layout.on_pipeline_rank(layout.grid.coordinates(rank)["pp"])
    units = held_units(model, layout, rank)
    if layout.world_size > 1:
        sent = ring_bytes("all_reduce", COUNT_ELEMENTS, COUNT_BYTES, layout.world_size)
        ledger.add("data", "all_reduce", "world", "tokens", sent)
    if layout.tp > 1:
        tensor_parallel_traffic(ledger, model, layout, seq_len, frozen, units)
    if layout.cp > 1:
        context_traffic(ledger, model, layout, seq_len, units)
    if layout.pp > 1:
        pipeline_traffic(ledger, model, layout, seq_len, rank)
    if model.moe is not None:
        tokens = layout.local_tokens(seq_len) // layout.tp
        router_traffic(ledger, model, layout, router or RouterConfig(), tokens, units)
        if layout.ep > 1:
            plans = even_dispatches(model, layout, tokens, units, rank) if dispatches is None else dispatches
            dispatch_traffic(ledger, model, layout, plans, ACTIVATION_BYTES[layout.precision])
        report_traffic(ledger, model, layout)
    buckets = gradient_buckets(model, layout, frozen, rank)
    for axis in _norm_axes(layout, buckets):
        ledger.add("update", "all_reduce", axis, "norm", ring_bytes("all_reduce", 1, wide, layout.grid.degree(axis)))
    for bucket in buckets:
        bucket_traffic(ledger, layout, bucket)
        offload_traffic(ledger, layout, bucket)
    if layout.zero == 3:
        gather_traffic(ledger, model, layout, [*buckets, *frozen_buckets(model, layout, frozen, rank)], rank)
    if layout.num_shards() > 1 and not layout.whole_gradients:
        sent = ring_bytes("all_reduce", 2, wide, layout.num_shards())
        ledger.add("update", "all_reduce", "dp_shard", "norm", sent)
    if layout.world_size > 1:
        gathered = METRIC_ELEMENTS * layout.world_size
        sent = ring_bytes("all_gather", gathered, METRIC_BYTES, layout.world_size)
        ledger.add("metrics", "all_gather", "world", "metrics", sent)
    return ledger


def _norm_axes(layout: Layout, buckets: Sequence[BucketPlan]) -> list[str]:
    """The axes over which one scalar is summed for the norm: what is split over tp, the stages, and the experts."""
    axes = ["tp", "pp"]
    if any(bucket.shard_over == "edp_shard" for bucket in buckets):
        axes += ["ep"] if layout.whole_gradients else ["ep", "edp_shard"]
    return [axis for axis in axes if layout.grid.degree(axis) > 1]


def bucket_traffic(ledger: Ledger, layout: Layout, bucket: BucketPlan) -> None:
    """Add one step's traffic of one bucket of P elements, padded to the N shards (Rajbhandari et al. 2020, section 7).

    ZeRO-1 and 2: (N-1)/N P reduce-scattered, once or after every micro-batch (``accumulate``), and (N-1)/N P gathered in
    the compute dtype after the update (ZeRO-3: :func:`gather_traffic` instead). ``zero1_reduce=allreduce``: 2 (N-1)/N P
    and the gather. Over tp, between replicas and between tied ends only the shard of P/N elements is summed, once a step.
    Experts have shards over edp.
    """
    over = bucket.shard_over
    shards = layout.num_shards(over)
    padded = bucket.padded(shards)
    wide = 8 if layout.precision == "fp64" else 4
    element = wide if layout.reduce_dtype == "fp32" else REDUCE_BYTES[layout.reduce_dtype]
    if layout.whole_gradients:
        elements, reductions = padded, _reductions(layout, bucket.reduce_axes)
    else:
        elements, reductions = padded // shards, _shard_reductions(layout, bucket)
        if shards > 1:
            times = layout.num_reductions
            sent = ring_bytes("reduce_scatter", padded, element, shards)
            ledger.add("reduce", "reduce_scatter", over, bucket.name, sent * times, count=times)
    for axis, size in reductions:
        ledger.add("reduce", "all_reduce", axis, bucket.name, ring_bytes("all_reduce", elements, element, size))
    if shards > 1 and layout.zero < 3:
        sent = ring_bytes("all_gather", padded, ACTIVATION_BYTES[layout.precision], shards)
        ledger.add("update", "all_gather", over, bucket.gather_name, sent)


def offload_traffic(ledger: Ledger, layout: Layout, bucket: BucketPlan) -> None:
    """Add one step's copies between device and host memory of one bucket (Ren et al. 2021, section 4).

    Reduced gradients of the hosted part of a shard go out, after every reduction; from ZeRO-2 on they come back once more
    where shards are summed over further axes. Updated parameters come back in the compute dtype, unless they are read from
    the host at each gather (``offload=params``).
    """
    wide = 8 if layout.precision == "fp64" else 4
    shards = layout.num_shards(bucket.shard_over)
    hosted = layout.hosted(bucket.padded(shards) // shards)
    if not hosted:
        return
    again = layout.zero >= 2 and bool(_shard_reductions(layout, bucket))
    times = layout.num_reductions + again
    ledger.add("reduce", "copy_out", "host", bucket.name, hosted * wide * times, count=times)
    if again:
        ledger.add("reduce", "copy_in", "host", bucket.name, hosted * wide)
    if layout.offload == "optimizer":
        ledger.add("update", "copy_in", "host", bucket.gather_name, hosted * ACTIVATION_BYTES[layout.precision])


def gather_traffic(
    ledger: Ledger, model: ModelConfig, layout: Layout, buckets: Sequence[BucketPlan], rank: int
) -> None:
    """Add the gathers of ZeRO-3 in one step: (N-1)/N P each, as often as `schedule.gathers` says.

    ``reshard=always``: before each forward and each backward. ``after_backward``: once a step while gradients are deferred,
    else once for each run of micro-batches in flight (at pp=1 once each).
    """
    schedule = make_schedule(layout)
    stages = split_units(model, schedule.num_stages, layout.stages)
    uses = unit_uses(schedule, layout.grid.coordinates(rank)["pp"], stages)
    for use in plan_gathers(uses, [bucket.units for bucket in buckets], layout):
        for bucket in (buckets[index] for index in use.gather):
            shards = layout.num_shards(bucket.shard_over)
            padded = bucket.padded(shards)
            if shards > 1:
                sent = ring_bytes("all_gather", padded, ACTIVATION_BYTES[layout.precision], shards)
                ledger.add(use.phase, "all_gather", bucket.shard_over, bucket.gather_name, sent)
            hosted = layout.hosted(padded // shards) if layout.offload == "params" else 0
            if hosted:
                copied = hosted * ACTIVATION_BYTES[layout.precision]
                ledger.add(use.phase, "copy_in", "host", bucket.gather_name, copied)


def pipeline_traffic(ledger: Ledger, model: ModelConfig, layout: Layout, seq_len: int, rank: int) -> None:
    """Add one step's sends and receives of ``rank`` over pp: activations forward, their gradients backward."""
    schedule = make_schedule(layout)
    place, last = schedule.placement, schedule.num_stages - 1
    tokens = layout.local_tokens(seq_len)
    rows = tokens // layout.tp if layout.sequence_parallel else tokens
    sent, count = rows * model.dim * ACTIVATION_BYTES[layout.precision], layout.microbatches
    for stage in schedule.stages_of(layout.grid.coordinates(rank)["pp"]):
        if stage < last and place[stage + 1] != place[stage]:
            ledger.add("F", "send", "pp", f"activations.{stage}", sent * count, count=count)
            ledger.add("B", "recv", "pp", f"activation_gradients.{stage + 1}", 0, count=count)
        if stage > 0 and place[stage - 1] != place[stage]:
            ledger.add("F", "recv", "pp", f"activations.{stage - 1}", 0, count=count)
            ledger.add("B", "send", "pp", f"activation_gradients.{stage}", sent * count, count=count)


def _reductions(layout: Layout, axes: Sequence[str]) -> list[tuple[str, int]]:
    """The groups that a bucket is reduced over, one after another: tp, then dp and cp as one; or edp."""
    data = [axis for axis in ("cp", "dp") if axis in axes]
    found = [(axis, layout.grid.degree(axis)) for axis in ("tp", "edp") if axis in axes]
    if data:
        name = "dp_cp" if len(data) == 2 else data[0]
        found.append((name, layout.grid.degree(name)))
    if "tied" in axes:
        found.append(("tied", 2))
    return [(name, size) for name, size in found if size > 1]


def _shard_reductions(layout: Layout, bucket: BucketPlan) -> list[tuple[str, int]]:
    """The groups that a bucket's shard is summed over once it is summed over its shards' axis."""
    found = [("tp", layout.tp)] if "tp" in bucket.reduce_axes else []
    found.append((bucket.shard_over.replace("shard", "replicate"), layout.dp_replicate))
    if "tied" in bucket.reduce_axes:
        found.append(("tied", 2))
    return [(name, size) for name, size in found if size > 1]


def tensor_parallel_traffic(
    ledger: Ledger,
    model: ModelConfig,
    layout: Layout,
    seq_len: int,
    frozen: Sequence[str] = (),
    units: Sequence[str] | None = None,
) -> None:
    """Add one step's traffic over tp of a rank with these ``units`` (all by default) to ``ledger``: what
    `parallel.tensor` and `model.loss` send for every micro-batch.

    Without sequence parallelism two all-reduces of T x D a layer forward and two backward (Shoeybi et al. 2019); with it
    each becomes an all-gather and a reduce-scatter at the same volume, and the two inputs are gathered once more in
    backward (Korthikanti et al. 2022, section 4.2.2). Full recomputation repeats what the forward pass sent.
    ``tp_overlap`` sends the layers' messages in that many parts, but the gather of inputs in backward. Inputs of ``frozen``
    weights are not gathered again, nor is the gradient of a frozen embedding.
    """
    sequence, tp = layout.sequence_parallel, layout.tp
    tokens = layout.local_tokens(seq_len)
    held = unit_names(model) if units is None else tuple(units)
    value = ACTIVATION_BYTES[layout.precision]
    wide = 8 if layout.precision == "fp64" else 4
    count = layout.microbatches
    layers = {part: len(_matrices(model, part, held)) for part in ("attention", "mlp")}
    chunks = [chunk.stop - chunk.start for chunk in chunk_slices(tokens // tp if sequence else tokens, layout.tp_overlap)]

    def add(phase: str, verb: str, name: str, messages: Sequence[int], width: int, times: int = 1) -> None:
        if not times:
            return
        sent = sum(ring_bytes(verb, elements, width, tp) for elements in messages)
        ledger.add(phase, verb, "tp", name, sent * count * times, count=len(messages) * count * times)

    whole = [tokens * model.dim]
    parts = [rows * model.dim * (tp if sequence else 1) for rows in chunks]
    for phase in ("F", "recompute") if layout.recompute == "full" else ("F",):
        leave = "reduce_scatter" if sequence else "all_reduce"
        if "embedding" in held:
            add(phase, leave, "embedding", whole, value)
        for part in ("attention", "mlp"):
            if sequence:
                add(phase, "all_gather", f"{part} in", parts, value, layers[part])
            add(phase, leave, f"{part} out", parts, value, layers[part])
        if sequence and "head" in held:
            add(phase, "all_gather", "head", whole, value)
        for name in ("loss maximum", "loss denominator", "loss target") if "head" in held else ():
            add(phase, "all_reduce", name, [tokens], wide)
    for part in ("attention", "mlp"):
        if sequence:
            add("B", "all_gather", f"{part} out", parts, value, layers[part])
            add("B", "all_gather", f"{part} in again", whole, value, _num_trained(model, part, frozen, held))
        add("B", "reduce_scatter" if sequence else "all_reduce", f"{part} in gradient", parts, value, layers[part])
    if sequence and "embedding" in held and not TIED.startswith(tuple(frozen)):
        add("B", "all_gather", "embedding", whole, value)
    if "head" in held:
        add("B", "reduce_scatter" if sequence else "all_reduce", "head gradient", whole, value)


def context_traffic(ledger: Ledger, model: ModelConfig, layout: Layout, seq_len: int, units: Sequence[str]) -> None:
    """Add one step's traffic over cp of a rank with these ``units``: the table of `parallel.context`, for every micro-batch
    and layer. Full recomputation repeats ulysses' exchanges; the other kinds keep what attention gave.
    """
    c, tokens = layout.cp, layout.local_tokens(seq_len)
    value, wide = ACTIVATION_BYTES[layout.precision], 8 if layout.precision == "fp64" else 4
    times = layout.microbatches * sum(unit.startswith("blocks.") for unit in units)
    heads, kv_heads = model.num_heads // layout.tp, max(model.num_kv_heads // layout.tp, 1)
    width = model.head_dim
    if model.mla is not None:  # latents are taken apart before attention, all heads to one width
        kv_heads, width = heads, max(width, model.mla.v_head_dim)
    block = 2 * tokens * kv_heads * width  # elements of the keys and values of one rank's tokens

    def add(phase: str, verb: str, tensor: str, num_bytes: int, count: int = 1) -> None:
        if times:
            ledger.add(phase, verb, "cp", tensor, num_bytes * count * times, count=count * times)

    if layout.cp_kind == "ulysses":
        others = (c - 1) * tokens * width * value  # of one head of each rank
        for phase in ("F", "recompute", "B") if layout.recompute == "full" else ("F", "B"):
            add(phase, "all_to_all", "heads in", others * ((heads + 2 * max(kv_heads, c)) // c))
            add(phase, "all_to_all", "heads out", others * (heads // c))
    elif layout.cp_kind == "allgather":
        for phase in ("F", "B"):
            add(phase, "all_gather", "kv", ring_bytes("all_gather", c * block, value, c))
        add("B", "reduce_scatter", "kv gradient", ring_bytes("reduce_scatter", c * block, wide, c))
    else:
        hops = [("F", "kv", c - 1, value), ("B", "kv", c - 1, value), ("B", "kv gradient", c, wide)]
        for phase, tensor, count, width in hops:
            add(phase, "send", tensor, block * width, count)
            add(phase, "recv", tensor, 0, count)


def _num_trained(model: ModelConfig, part: str, frozen: Sequence[str], held: Sequence[str]) -> int:
    """Held layers in which some column-parallel weight of ``part`` is trained."""
    return sum(not all(name.startswith(tuple(frozen)) for name in names) for names in _matrices(model, part, held))


def _matrices(model: ModelConfig, part: str, held: Sequence[str]) -> list[list[str]]:
    """The column-parallel weights of ``part`` in each held layer that has it; a shared expert is an MLP like others."""
    found = []
    for block in (unit for unit in held if unit.startswith("blocks.")):
        if part == "attention":
            queries = "q_down" if model.mla is not None and model.mla.q_lora_rank is not None else "q"
            inward = ("q", "k", "v") if model.mla is None else (queries, "kv_down")
            found.append([f"{block}.attention.{name}.weight" for name in inward])
            continue
        names = ("gate", "up") if model.activation == "swiglu" else ("up",)
        if not model.is_moe_layer(int(block.removeprefix("blocks."))):
            found.append([f"{block}.mlp.{name}.weight" for name in names])
        elif model.moe is not None and model.moe.shared_dim:
            found.append([f"{block}.moe.shared.{name}.weight" for name in names])
    return found
