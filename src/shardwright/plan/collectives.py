"""The closed form of one training step's traffic: the ledger that the run must show, from the specs alone."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.buckets import BucketPlan, plan_buckets
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger, ring_bytes
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import bucket_members, unit_names

REDUCE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
COUNT_ELEMENTS, COUNT_BYTES = 2, 8
"""Valid tokens and stop requests, int64: one all-reduce before the first backward of each step."""
METRIC_ELEMENTS, METRIC_BYTES = 2, 8
"""Loss sum and busy seconds of each rank, fp64: one all-gather after the last backward."""


def gradient_buckets(model: ModelConfig, layout: Layout, frozen: Sequence[str] = ()) -> list[BucketPlan]:
    """The buckets of rank 0, without parameters whose name starts with one of ``frozen``."""
    members = bucket_members(model, layout, layout.grid.coordinates(0))
    trained = [member for member in members if not member.name.startswith(tuple(frozen))]
    return plan_buckets(trained, unit_names(model), layout.bucket_mb)


def predict_step(model: ModelConfig, layout: Layout, frozen: Sequence[str] = ()) -> Ledger:
    """Bytes that one rank sends in one optimizer step.

    DDP (Li et al. 2020, section 3): 2 (N-1)/N of each bucket's bytes, once a step whatever the accumulation; and the two
    small messages that make every rank agree on the token count and the reported loss.
    """
    ledger = Ledger()
    num_data = layout.dp * layout.cp
    if num_data > 1:
        ledger.add("data", "all_reduce", "dp_cp", "tokens", ring_bytes("all_reduce", COUNT_ELEMENTS, COUNT_BYTES, num_data))
    wide = 8 if layout.precision == "fp64" else 4
    element = wide if layout.reduce_dtype == "fp32" else REDUCE_BYTES[layout.reduce_dtype]
    for bucket in gradient_buckets(model, layout, frozen):
        if num_data > 1:
            sent = ring_bytes("all_reduce", bucket.numel, element, num_data)
            ledger.add("reduce", "all_reduce", "dp_cp", bucket.name, sent)
    if layout.world_size > 1:
        gathered = METRIC_ELEMENTS * layout.world_size
        sent = ring_bytes("all_gather", gathered, METRIC_BYTES, layout.world_size)
        ledger.add("metrics", "all_gather", "world", "metrics", sent)
    return ledger
