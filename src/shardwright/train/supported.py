"""What training refuses, before any process starts, and why."""

from __future__ import annotations

import torch

from shardwright.core.layout import Layout
from shardwright.core.run_config import RunConfig
from shardwright.errors import LayoutError
from shardwright.schedule.action import Kind
from shardwright.schedule.make import make_schedule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def check_supported(config: RunConfig) -> None:
    """Refuse, before any process starts, what training cannot do yet."""
    layout = config.layout
    _check_zero(config)
    _check_experts(config)
    _check_offload(layout)
    if config.train.attention == "scores" and layout.cp > 1:
        raise LayoutError(
            f"train.attention=scores needs whole sequences on a rank, and cp={layout.cp} splits them; use cp=1 or leave "
            "train.attention out"
        )
    layout.check_switches()
    _check_compiled_schedule(config)
    if layout.precision not in DTYPES:
        raise LayoutError(f"precision={layout.precision} can be planned but not trained; use fp32, bf16 or fp64")
    for axis in ("tp", "cp"):
        if config.train.compile and layout.grid.degree(axis) > 1:
            raise LayoutError(
                f"train.compile=true with {axis}={layout.grid.degree(axis)}: a block's collectives cannot be compiled; "
                f"use {axis}=1 or leave compile out"
            )
    _check_windows(config)
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
    layout, moe = config.layout, config.model.moe
    if moe is None:
        if layout.capacity is not None:
            raise LayoutError(
                f"moe={layout.moe} needs a model with experts; {config.model.name} has none: leave moe out"
            )
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


def _check_windows(config: RunConfig) -> None:
    """A ring's rectangles are whole or causal; a window shorter than the sequence would cut them otherwise."""
    model, layout = config.model, config.layout
    windows = {model.layer_window(layer) for layer in range(model.num_layers)}
    short = min((window for window in windows if window is not None and window < config.data.seq_len), default=None)
    if layout.cp > 1 and layout.cp_kind != "ulysses" and short is not None:
        raise LayoutError(
            f"cp_kind={layout.cp_kind} has no sliding windows, and the model's window of {short} tokens is shorter than "
            f"data.seq_len={config.data.seq_len}; use cp_kind=ulysses"
        )


def _check_zero(config: RunConfig) -> None:
    layout = config.layout
    if layout.dp_replicate > 1 and not layout.zero:
        raise LayoutError(
            f"dp_replicate={layout.dp_replicate} makes replicas of shards, and with zero=0 nothing is sharded; "
            "set zero=1 or more, or leave dp_replicate out"
        )
    if layout.accumulate == "reduce" and layout.zero < 2:
        raise LayoutError(
            f"accumulate=reduce saves memory only where gradients are sharded, and with zero={layout.zero} they are not; "
            "set zero=2, or leave accumulate out"
        )
    if layout.zero >= 2 and config.train.compile:
        raise LayoutError(
            f"zero={layout.zero} needs gradients that are written in place, which compiled blocks do not; "
            "use zero=1 or train.compile=false"
        )


def _check_offload(layout: Layout) -> None:
    if layout.offload == "params" and layout.zero != 3:
        raise LayoutError(
            f"offload=params with zero={layout.zero}: only ZeRO-3 brings a unit's parameters in and frees them after their use; "
            "set zero=3, or use offload=optimizer"
        )
    if layout.delayed_update and layout.offload != "optimizer":
        raise LayoutError(
            f"delayed_update=on with offload={layout.offload}: an update that runs beside the step needs masters that the step "
            "does not read; set offload=optimizer, or leave delayed_update out"
        )
    if layout.delayed_update and layout.offload_fraction < 1:
        raise LayoutError(
            f"delayed_update=on with offload_fraction={layout.offload_fraction}: only what is in host memory can be updated "
            "beside the step; leave offload_fraction out, or delayed_update"
        )
