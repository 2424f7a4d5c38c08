"""`Stack`: what a piece of software makes of a chip, as a few constants that are fitted to measured runs.

The constants live in ``stacks.toml`` beside this file, one table per stack, with what they were fitted on and the error
that is left (``python -m shardwright.plan.calibrate``). No constant belongs to one row of measurements.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from math import inf
from typing import Any

from shardwright.core.cluster import Chip, Cluster
from shardwright.core.suggest import did_you_mean
from shardwright.errors import ConfigError


@dataclass(frozen=True)
class Stack:
    """Shares are of the chip's peak (or of the link's bandwidth), times in seconds.

    ``gemm_*``: matrix products, large and in whole tiles; ``grouped``: of that in the products of several experts. ``tiles``:
    products are cut into an accelerator's tiles, so that odd sizes waste some (a CPU's are too small to count).
    ``attention``: the score products, of the bf16 peak. ``memory``: of the memory's bandwidth. ``launch``: what one
    kernel takes beyond its work; ``host``: what the host needs to launch it (a micro-batch takes at least that for all
    its kernels).
    ``intra``, ``inter``: of the links' bandwidth; ``part_node``: of that, across nodes, where a group has some but not all
    GPUs of a node (its ring enters at one and leaves at another, so each direction has a part of the node's links);
    ``latency``: factor on the links' latency; ``message``: what a message takes
    beyond the links, in the software that calls for it (nothing where a device's queue hides it). ``flash``: attention is one
    kernel that keeps no scores. ``fused``: share of the memory traffic of element-wise work that fusion leaves.
    ``quantise``: bytes of traffic per element of an fp8 or fp4 product's operands for casts, scales and transposed copies.
    ``accumulate``: bytes per parameter that adding a micro-batch's gradients to the sum of those before moves (6: two are
    read and one is written of 2 bytes; or the product reads and writes sums of 4 where it would have written 2).
    ``selective_repeats``: share of a forward that ``recompute=selective`` repeats beside fused attention (per-operator
    policies keep every second product). ``saved``: what autograd keeps of a layer over the formula's bytes (unfused norms,
    casts, rotary copies).
    ``dp_overlap``: rate of gathers and reductions beside compute (0: none). ``tp_overlap``, ``ep_overlap``,
    ``p2p_overlap``: share of those messages that is hidden; ``async_tp``: of what ``tp_overlap`` chunks of a layout could
    hide, the share that is. ``contention``: by how much compute slows while communication runs beside it.
    ``scatter_gather``: stage boundaries are sent in tp pieces without sequence parallelism too. ``imbalance``: busiest
    expert rank over the mean. ``step_seconds``: a constant part of each step. ``two_gradients``:
    working gradients are kept beside their fp32 sums. ``host_bandwidth``: link to the host for offload, bytes/s.
    ``reserve_*``: what a device holds beyond allocated bytes, a constant part (GiB) and a share.
    Of memory, in 2-byte training: ``state_bytes`` of parameters and optimizer state per parameter (14: bf16, an fp32 copy, two
    moments; 12: the fp32 copy is all there is; 6: moments in bf16). ``logit_bytes`` of a logit at the peak of the loss (8:
    logits, an fp32 copy, the gradient; 4: a compiled loss; 12 and, split over tp, 16: operator by operator in fp32).
    ``whole_logits``, ``whole_embedding``: not split over tp. ``late_gradients``: shards of gradients come when the loss's
    tensors, or the whole gradients of several micro-batches, are gone (a peak of allocated bytes; of reserved ones it is
    not, as streams have pools of their own). ``keeps_root``: embedding and head stay gathered from forward to backward.
    ``keeps_outputs``: the last stage keeps the logits of all micro-batches. ``keeps_attention``: full recomputation keeps
    what attention over cp gave. ``keeps_deferred``: where the backward is split, x and dy of every product wait for W.
    ``compiled``: backward's graph drops what it does not need.
    Of serving engines: ``kv``, of the memory's bandwidth when the cache is read; ``request_seconds`` before a request is
    computed; ``burst``, the share of requests that arrive together; ``skew``, the exponent of the
    experts' popularity.
    """

    name: str = "default"
    gemm_bf16: float = 0.75
    gemm_fp8: float = 0.62
    gemm_fp4: float = 0.5
    grouped: float = 0.8
    tiles: bool = True
    attention: float = 0.5
    memory: float = 0.8
    launch: float = 3e-6
    host: float = 0.0
    intra: float = 0.75
    inter: float = 0.8
    part_node: float = 1.0
    latency: float = 1.0
    message: float = 0.0
    flash: bool = True
    fused: float = 0.7
    quantise: float = 0.0
    accumulate: float = 6.0
    selective_repeats: float = 0.0
    saved: float = 1.0
    dp_overlap: float = 0.9
    tp_overlap: float = 0.0
    async_tp: float = 1.0
    ep_overlap: float = 0.0
    p2p_overlap: float = 0.9
    contention: float = 0.0
    scatter_gather: bool = False
    imbalance: float = 1.0
    step_seconds: float = 0.0
    two_gradients: bool = False
    host_bandwidth: float = 25e9
    reserve_gib: float = 1.5
    reserve_share: float = 0.03
    state_bytes: float = 14.0
    logit_bytes: float = 8.0
    whole_logits: bool = False
    whole_embedding: bool = False
    late_gradients: bool = False
    keeps_root: bool = False
    keeps_outputs: bool = False
    keeps_deferred: bool = True
    keeps_attention: bool = True
    compiled: bool = True
    kv: float = 0.7
    request_seconds: float = 0.0
    burst: float = 0.1
    skew: float = 0.0

    def gemm(self, precision: str) -> float:
        """Share of the peak that matrix products reach in ``precision``; wider types as bf16."""
        return {"fp8": self.gemm_fp8, "fp4": self.gemm_fp4}.get(precision, self.gemm_bf16)


@dataclass(frozen=True)
class Fit:
    """Where a stack's constants come from: the rows, the fitted ``fields``, mean absolute errors in per cent on the
    rows and on rows held out (0: not fitted). Of step time; of TPOT (and of TTFT) for serving engines. ``memory_*``: of the
    constants that rows with a peak of memory tell."""

    source: str
    fields: tuple[str, ...] = ()
    rows: int = 0
    mape: float = 0.0
    held_out_mape: float = 0.0
    ttft_mape: float = 0.0
    held_out_ttft_mape: float = 0.0
    memory_fields: tuple[str, ...] = ()
    memory_rows: int = 0
    memory_mape: float = 0.0
    held_out_memory_mape: float = 0.0


_FIELDS = tuple(field.name for field in fields(Stack) if field.name != "name")


def read_tables() -> dict[str, dict[str, Any]]:
    """The content of ``stacks.toml``: a table of constants for each stack, with a table ``fit``."""
    return tomllib.loads(files("shardwright.plan").joinpath("stacks.toml").read_text(encoding="utf-8"))


def write_tables(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of ``stacks.toml``."""
    lines = ["# Constants of software stacks, written by python -m shardwright.plan.calibrate; see plan/stack.py."]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_text(value)}" for key, value in table.items() if key != "fit")]
        lines += ["", f"[{name}.fit]", *(f"{key} = {_text(value)}" for key, value in table["fit"].items())]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def stack_of(name: str, tables: Mapping[str, Mapping[str, Any]] | None = None) -> Stack:
    """The stack called ``name``; raises `ConfigError` that lists those there are."""
    tables = read_tables() if tables is None else tables
    if name not in tables:
        raise ConfigError(f"no software stack {name!r}; {did_you_mean(name, tables)}")
    values = {key: value for key, value in tables[name].items() if key != "fit"}
    for key in values:
        if key not in _FIELDS:
            raise ConfigError(f"stack {name}: unknown constant {key!r}; {did_you_mean(key, _FIELDS)}")
    return Stack(name=name, **values)


def fit_of(name: str) -> Fit:
    """How the constants of ``name`` were found."""
    if name == MEASURED:
        return Fit("steps that `bench comm` took on this machine")
    table = read_tables()[name]["fit"]
    lists = {name: tuple(table.get(name, ())) for name in ("fields", "memory_fields")}
    return Fit(**{**table, **lists})


_DEFAULTS: Mapping[str, str] = {
    "A100": "composer-a100",
    **dict.fromkeys(("H100", "H200", "H800"), "nemo-hopper"),
    **dict.fromkeys(("B200", "B300", "GB200", "GB300"), "bridge-blackwell-26b"),
}


_ENGINES: Mapping[str, str] = {
    **dict.fromkeys(("H100", "H200", "H800"), "vllm-hopper"),
    **dict.fromkeys(("B200", "B300", "GB200", "GB300"), "vllm-blackwell"),
}
_UNKNOWN_ENGINE = Stack(latency=0.3, step_seconds=6e-4, request_seconds=0.05, launch=2e-6)


def serving_stack(chip: Chip) -> Stack:
    """A serving engine fitted on this chip's generation, or plain guesses."""
    name = _ENGINES.get(chip.name.split("-")[0])
    return stack_of(name) if name else _UNKNOWN_ENGINE


EAGER_TRAFFIC = 2.0
"""Element-wise traffic without a compiler over that with one: each operator reads and writes by itself (a norm takes 3
passes for 1.5, a gated activation 8 for 4, by counting)."""


def eager(stack: Stack) -> Stack:
    """The same software without a compiler that fuses element-wise work."""
    return replace(stack, fused=stack.fused * EAGER_TRAFFIC, compiled=False)


_RATES = (
    "gemm_bf16", "gemm_fp8", "gemm_fp4", "grouped", "attention", "memory", "intra", "inter", "part_node", "host_bandwidth",
    "kv",
)  # fmt: skip
"""Constants that something is divided by."""
MEASURED = "measured"
"""Name of a stack whose constants a cluster file has."""


def stack_for(cluster: Cluster) -> Stack:
    """What was measured on ``cluster`` itself, else the default of its chip; raises `ConfigError` for an unknown constant."""
    for key, value in cluster.software:
        if key not in _FIELDS:
            raise ConfigError(f"cluster file, [software]: unknown constant {key!r}; {did_you_mean(key, _FIELDS)}")
        switch = isinstance(getattr(Stack(), key), bool)
        if isinstance(value, bool) is not switch:
            raise ConfigError(f"cluster file, [software]: {key}={value} must be {'true or false' if switch else 'a number'}")
        if not 0 <= value < inf or (not value and key in _RATES):
            least = "above" if key in _RATES else "at least"
            raise ConfigError(f"cluster file, [software]: {key}={value} must be finite and {least} 0")
    if not cluster.software:
        return default_stack(cluster.chip)
    values: dict[str, Any] = dict(cluster.software)
    return Stack(name=MEASURED, **values)


def software_of(stack: Stack) -> tuple[tuple[str, float | bool], ...]:
    """The constants of ``stack`` that are not `Stack`'s own: what a cluster file keeps of it."""
    return tuple((key, getattr(stack, key)) for key in _FIELDS if getattr(stack, key) != getattr(Stack(), key))


def default_stack(chip: Chip) -> Stack:
    """A modern stack (fused attention, overlapped reductions) fitted on this chip's generation, or plain guesses."""
    name = _DEFAULTS.get(chip.name.split("-")[0])
    return stack_of(name) if name else Stack()
