"""The closed form of one training step's traffic: the ledger that the run must show, from the specs alone."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.buckets import BucketPlan, plan_buckets
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger, ring_bytes
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import bucket_members, unit_names

REDUCE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
ACTIVATION_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
COUNT_ELEMENTS, COUNT_BYTES = 2, 8
"""Valid tokens and stop requests, int64: one all-reduce before the first backward of each step."""
METRIC_ELEMENTS, METRIC_BYTES = 2, 8
"""Loss sum and busy seconds of each rank, fp64: one all-gather after the last backward."""


def gradient_buckets(
    model: ModelConfig, layout: Layout, frozen: Sequence[str] = (), rank: int = 0
) -> list[BucketPlan]:
    """The buckets of one rank, without parameters whose name starts with one of ``frozen``."""
    members = bucket_members(model, layout, layout.grid.coordinates(rank))
    trained = [member for member in members if not member.name.startswith(tuple(frozen))]
    return plan_buckets(trained, unit_names(model), layout.bucket_mb)


def predict_step(
    model: ModelConfig, layout: Layout, seq_len: int, frozen: Sequence[str] = (), rank: int = 0
) -> Ledger:
    """Bytes that ``rank`` sends in one optimizer step of micro-batches of ``layout.micro_batch`` x ``seq_len`` tokens.

    DDP (Li et al. 2020, section 3): 2 (N-1)/N of each bucket's bytes, once a step whatever the accumulation. Tensor
    parallelism: per micro-batch and layer, see :func:`tensor_parallel_traffic`. And the small messages that make every
    rank agree on the token count, the norm and the reported loss.
    """
    ledger = Ledger()
    wide = 8 if layout.precision == "fp64" else 4
    if layout.world_size > 1:
        sent = ring_bytes("all_reduce", COUNT_ELEMENTS, COUNT_BYTES, layout.world_size)
        ledger.add("data", "all_reduce", "world", "tokens", sent)
    if layout.tp > 1:
        tensor_parallel_traffic(ledger, model, layout, seq_len)
        ledger.add("update", "all_reduce", "tp", "norm", ring_bytes("all_reduce", 1, wide, layout.tp))
    element = wide if layout.reduce_dtype == "fp32" else REDUCE_BYTES[layout.reduce_dtype]
    for bucket in gradient_buckets(model, layout, frozen, rank):
        for axis, size in _reductions(layout, bucket.reduce_axes):
            sent = ring_bytes("all_reduce", bucket.numel, element, size)
            ledger.add("reduce", "all_reduce", axis, bucket.name, sent)
    if layout.world_size > 1:
        gathered = METRIC_ELEMENTS * layout.world_size
        sent = ring_bytes("all_gather", gathered, METRIC_BYTES, layout.world_size)
        ledger.add("metrics", "all_gather", "world", "metrics", sent)
    return ledger


def _reductions(layout: Layout, axes: Sequence[str]) -> list[tuple[str, int]]:
    """The groups that a bucket is reduced over, one after another: tp, then dp and cp as one."""
    data = [axis for axis in ("cp", "dp") if axis in axes]
    found = [("tp", layout.tp)] if "tp" in axes else []
    if data:
        name = "dp_cp" if len(data) == 2 else data[0]
        found.append((name, layout.grid.degree(name)))
    return [(name, size) for name, size in found if size > 1]


def tensor_parallel_traffic(ledger: Ledger, model: ModelConfig, layout: Layout, seq_len: int) -> None:
    """Add one step's traffic over tp to ``ledger``: what `parallel.tensor` and `model.loss` send for every micro-batch.

    Without sequence parallelism two all-reduces of T x D a layer forward and two backward (Shoeybi et al. 2019); with it
    each becomes an all-gather and a reduce-scatter at the same volume, and the two inputs are gathered once more in
    backward (Korthikanti et al. 2022, section 4.2.2). Full recomputation repeats what the forward pass sent.
    """
    sequence, tp = layout.sequence_parallel, layout.tp
    tokens = layout.micro_batch * seq_len
    tokens += -tokens % tp if sequence else 0
    value = ACTIVATION_BYTES[layout.precision]
    wide = 8 if layout.precision == "fp64" else 4
    count = layout.microbatches

    def add(phase: str, verb: str, name: str, elements: int, width: int, times: int = 1) -> None:
        sent = ring_bytes(verb, elements, width, tp) * count * times
        ledger.add(phase, verb, "tp", name, sent, count=count * times)

    hidden, layers = tokens * model.dim, model.num_layers
    for phase in ("F", "recompute") if layout.recompute == "full" else ("F",):
        leave = "reduce_scatter" if sequence else "all_reduce"
        add(phase, leave, "embedding", hidden, value)
        for part in ("attention", "mlp"):
            if sequence:
                add(phase, "all_gather", f"{part} in", hidden, value, layers)
            add(phase, leave, f"{part} out", hidden, value, layers)
        if sequence:
            add(phase, "all_gather", "head", hidden, value)
        for name in ("loss maximum", "loss denominator", "loss target"):
            add(phase, "all_reduce", name, tokens, wide)
    for part in ("attention", "mlp"):
        if sequence:
            add("B", "all_gather", f"{part} out", hidden, value, layers)
            add("B", "all_gather", f"{part} in again", hidden, value, layers)
        add("B", "reduce_scatter" if sequence else "all_reduce", f"{part} in gradient", hidden, value, layers)
    if sequence:
        add("B", "all_gather", "embedding", hidden, value)
    add("B", "reduce_scatter" if sequence else "all_reduce", "head gradient", hidden, value)
