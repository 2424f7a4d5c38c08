"""What training refuses, before any process starts, and why."""

from __future__ import annotations

import torch

from shardwright.core.run_config import RunConfig
from shardwright.errors import LayoutError
from shardwright.schedule.action import Kind
from shardwright.schedule.make import make_schedule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def check_supported(config: RunConfig) -> None:
    """Refuse, before any process starts, what training cannot do yet."""
    layout = config.layout
    layout.check_training(config.model, config.data.seq_len)
    _check_experts(config)
    if config.train.attention == "scores" and layout.cp > 1:
        raise LayoutError(
            f"train.attention=scores needs whole sequences on a rank, and cp={layout.cp} splits them; use cp=1 or leave "
            "train.attention out"
        )
    if layout.precision not in DTYPES:
        raise LayoutError(f"precision={layout.precision} can be planned but not trained; use fp32, bf16 or fp64")
    for axis in ("tp", "cp"):
        if config.train.compile and layout.grid.degree(axis) > 1:
            raise LayoutError(
                f"train.compile=true with {axis}={layout.grid.degree(axis)}: a block's collectives cannot be compiled; "
                f"use {axis}=1 or leave compile out"
            )
    _check_compiled_schedule(config)
    if layout.zero >= 2 and config.train.compile:
        raise LayoutError(
            f"zero={layout.zero} needs gradients that are written in place, which compiled blocks do not; "
            "use zero=1 or train.compile=false"
        )
    if config.model.tied_head and layout.schedule.startswith("file:"):
        place = make_schedule(layout).placement
        if place[0] != place[-1] and {place[0], place[-1]} != {0, layout.pp - 1}:
            raise LayoutError(
                f"{layout.schedule} has the first stage on rank {place[0]} and the last on rank {place[-1]}, and the head is "
                f"tied to the embedding; put them on ranks 0 and {layout.pp - 1}, or both on one rank"
            )


def _check_compiled_schedule(config: RunConfig) -> None:
    layout = config.layout
    if config.train.compile and layout.pp > 1:
        rows = make_schedule(layout).rows
        if any(action.kind is Kind.W for row in rows for action in row):
            raise LayoutError(
                f"train.compile=true with schedule={layout.schedule}: compiled blocks write weight gradients in B, so "
                "nothing is left for W and the bubble stays; use schedule=1f1b or interleaved, or leave compile out"
            )


def _check_experts(config: RunConfig) -> None:
    moe = config.model.moe
    if moe is None:
        return
    if moe.top_k == 1 and moe.normalise_top_k:
        raise LayoutError(
            "moe.top_k=1 with moe.normalise_top_k=true weighs every expert with 1, so the loss gives its router no gradient; "
            "set normalise_top_k=false, or top_k=2"
        )
    if config.train.compile:
        raise LayoutError(
            "train.compile=true with experts: how many rows each gets is known only as it runs; leave compile out"
        )
