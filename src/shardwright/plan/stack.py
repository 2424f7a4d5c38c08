"""`Stack`: what a piece of software makes of a chip, as a few constants that are fitted to measured runs.

The constants live in ``stacks.toml`` beside this file, one table per stack, with what they were fitted on and the error
that is left (``python -m shardwright.plan.calibrate``). No constant belongs to one row of measurements.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

from shardwright.core.cluster import Chip
from shardwright.core.suggest import did_you_mean
from shardwright.errors import ConfigError


@dataclass(frozen=True)
class Stack:
    """Shares are of the chip's peak (or of the link's bandwidth), times in seconds.

    ``gemm_*``: matrix products, large and in whole tiles. ``attention``: the score products of a fused kernel, of the
    bf16 peak (also where scores are unfused). ``memory``: of the memory's bandwidth. ``launch``: what one kernel takes
    beyond its work; ``host``: what the host needs to launch it (a micro-batch takes at least that for all its kernels).
    ``intra``, ``inter``: of the links' bandwidth; ``latency``: factor on the links' latency. ``flash``: attention is one
    kernel that keeps no scores. ``fused``: share of the memory traffic of element-wise work that fusion leaves.
    ``dp_overlap``, ``tp_overlap``, ``ep_overlap``, ``p2p_overlap``: share of the compute that hides communication
    (tp: of the communication). ``contention``: by how much compute slows while communication runs beside it.
    ``scatter_gather``: stage boundaries are sent in tp pieces without sequence parallelism too. ``imbalance``: busiest
    expert rank over the mean. ``step_seconds``: a constant part of each step. ``gradient_bytes``: bytes of gradients of
    a parameter where the stack keeps two copies (0: those of the layout's ``reduce_dtype``). ``host_gb_s``: link to the
    host for offload, bytes/s.
    """

    name: str = "default"
    gemm_bf16: float = 0.75
    gemm_fp8: float = 0.62
    gemm_fp4: float = 0.5
    attention: float = 0.5
    memory: float = 0.8
    launch: float = 3e-6
    host: float = 0.0
    intra: float = 0.75
    inter: float = 0.8
    latency: float = 1.0
    flash: bool = True
    fused: float = 0.7
    dp_overlap: float = 0.9
    tp_overlap: float = 0.0
    ep_overlap: float = 0.0
    p2p_overlap: float = 0.9
    contention: float = 0.0
    scatter_gather: bool = True
    imbalance: float = 1.0
    step_seconds: float = 0.0
    gradient_bytes: float = 0.0
    host_gb_s: float = 25e9

    def gemm(self, precision: str) -> float:
        """Share of the peak that matrix products reach in ``precision``; wider types as bf16."""
        return {"fp8": self.gemm_fp8, "fp4": self.gemm_fp4}.get(precision, self.gemm_bf16)


@dataclass(frozen=True)
class Fit:
    """Where a stack's constants come from: rows, mean absolute error in per cent on them and on rows held out."""

    source: str
    rows: int = 0
    mape: float = 0.0
    held_out_mape: float = 0.0


def _tables() -> Mapping[str, Any]:
    return tomllib.loads(files("shardwright.plan").joinpath("stacks.toml").read_text(encoding="utf-8"))


def load_stacks() -> dict[str, tuple[Stack, Fit]]:
    """Every stack of ``stacks.toml`` by name, with its fit."""
    known = {field.name for field in fields(Stack)}
    found = {}
    for name, table in _tables().items():
        values = {key: value for key, value in table.items() if key in known}
        found[name] = (Stack(name=name, **values), Fit(**table["fit"]))
    return found


def find_stack(name: str) -> Stack:
    """The stack called ``name``; raises `ConfigError` that lists them."""
    stacks = load_stacks()
    if name not in stacks:
        raise ConfigError(f"no software stack {name!r}; {did_you_mean(name, stacks)}")
    return stacks[name][0]


def default_stack(chip: Chip) -> Stack:
    """A modern stack (fused attention, overlapped reductions) on this chip's generation."""
    generation = {"A100": "modern-a100", "B200": "modern-blackwell", "B300": "modern-blackwell"}
    generation |= {"GB200": "modern-blackwell", "GB300": "modern-blackwell"}
    return find_stack(generation.get(chip.name.split("-")[0], "modern-hopper"))
