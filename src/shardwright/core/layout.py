"""`Layout`: the degrees and switches of one run, a value that goes through everything.

>>> layout = Layout.parse("tp=8,pp=2,dp=4,zero=1,schedule=1f1b,microbatches=16")
>>> layout.world_size
64
>>> str(layout)
'tp=8,dp=4,pp=2,zero=1,schedule=1f1b,microbatches=16'
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from math import gcd, isfinite
from typing import Any

from shardwright.core.axes import ORDERS, RankGrid
from shardwright.core.model_config import ModelConfig
from shardwright.errors import LayoutError

V_SHAPED = ("zb_v", "dualpipe_v")
"""Schedules with two stages on each pipeline rank, the second in reverse order: rank r holds stages r and 2 pp - 1 - r."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v")
CHOICES: dict[str, tuple[str, ...]] = {
    "reshard": ("auto", "always", "after_backward"),
    "offload": ("none", "optimizer", "params"),
    "cp_kind": ("ring", "allgather", "ulysses"),
    "accumulate": ("defer", "reduce"),
    "zero1_reduce": ("scatter", "allreduce"),
    "reduce_dtype": ("fp32", "bf16", "fp16"),
    "comm": ("auto", "shm", "gloo", "nccl"),
    "order": tuple(ORDERS),
    "precision": ("fp32", "bf16", "fp8", "fp4", "fp64"),
    "sp": ("auto", "on", "off"),
}

RECOMPUTE = ("none", "selective", "full")
"""Of a layer's activations all are kept, or not those that are large beside their work, or only the layer's input."""
OVERFLOW = ("drop", "reroute")
"""What happens to a token's choice of an expert that is full: left out, or the next-best expert with room."""

_LEAST_ONE = ("tp", "cp", "dp", "pp", "ep", "microbatches", "micro_batch", "virtual", "dp_replicate", "tp_overlap")


@dataclass(frozen=True)
class Layout:
    """Degrees of each axis and every switch that says who computes what and when it is sent.

    ``microbatches`` is the number of micro-batches of one step on one data-parallel rank (at pp=1 this is
    gradient accumulation), ``micro_batch`` the sequences in each. ``recompute`` is one policy for all, or one for
    each pipeline rank from first to last: with 1F1B ``full-full-none-none`` spares the ranks that hold most. Raises
    :class:`LayoutError` when a value is out of range or two values contradict each other.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    microbatches: int = 1
    micro_batch: int = 1
    virtual: int = 1
    sp: str = "auto"
    recompute: str = "none"
    reshard: str = "auto"
    dp_replicate: int = 1
    offload: str = "none"
    offload_fraction: float = 1.0
    delayed_update: bool = False
    cp_kind: str = "ring"
    moe: str = "dropless"
    bucket_mb: float = 25.0
    prefetch: int = 1
    accumulate: str = "defer"
    reduce_dtype: str = "fp32"
    zero1_reduce: str = "scatter"
    tp_overlap: int = 1
    ep_overlap: bool = False
    ep_deduplicate: bool = False
    stages: str = ""
    comm: str = "auto"
    order: str = "tp-cp-dp-pp"
    precision: str = "fp32"

    # -- text form ---------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``key=value,key=value``, in any order; what is left out has its default."""
        return cls.of(layout_values(text))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Layout:
        """Build from a mapping whose values may be text (from a command line) or typed (from TOML)."""
        known = {field.name: field for field in fields(cls)}
        typed: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else "known keys: " + ", ".join(known)
                raise LayoutError(f"layout: unknown key {key!r}; {hint}")
            typed[key] = _typed(key, value, type(known[key].default))
        return cls(**typed)

    def with_(self, **changes: Any) -> Layout:
        """A copy with some values changed (and everything checked again)."""
        return replace(self, **changes)

    def __str__(self) -> str:
        shown = [
            f"{field.name}={_text(getattr(self, field.name))}"
            for field in fields(self)
            if field.default is not MISSING and getattr(self, field.name) != field.default
        ]
        return ",".join(shown) or "dp=1"

    # -- derived -----------------------------------------------------------------------------------

    @property
    def grid(self) -> RankGrid:
        return RankGrid(self.tp, self.cp, self.dp, self.pp, self.ep, self.order, self.dp_replicate)

    @property
    def world_size(self) -> int:
        return self.grid.world_size

    def num_shards(self, over: str = "dp_shard") -> int:
        """Ranks that share one replica's optimizer state (ZeRO); 1 without ZeRO. ``over``: ``edp_shard`` for experts."""
        return self.grid.degree(over) if self.zero else 1

    def recompute_on(self, pipeline_rank: int) -> str:
        """The policy of recomputation of one pipeline rank."""
        policies = self.recompute.split("-")
        return policies[pipeline_rank] if len(policies) > 1 else policies[0]

    def on_pipeline_rank(self, rank: int) -> Layout:
        """The same layout with ``rank``'s policy of recomputation alone."""
        return self.with_(recompute=self.recompute_on(rank)) if "-" in self.recompute else self

    @property
    def whole_gradients(self) -> bool:
        """Whether every rank has the reduced gradients of all that it holds, not of its shard only."""
        return self.zero == 0 or (self.zero == 1 and self.zero1_reduce == "allreduce")

    @property
    def num_reductions(self) -> int:
        """How often each gradient bucket is reduced in a step."""
        return self.microbatches if self.zero >= 2 and self.accumulate == "reduce" else 1

    @property
    def capacity(self) -> tuple[float, str] | None:
        """Of each expert: the factor, and what happens to tokens above it (``drop``, ``reroute``); None without (dropless)."""
        return _capacity(self.moe)

    @property
    def keeps_gathered(self) -> bool:
        """``reshard`` resolved: whether ZeRO-3 keeps parameters gathered from forward to backward.

        On by default with a pipeline: units are needed by several micro-batches at once, so one gather serves a step.
        """
        return self.reshard == "after_backward" or (self.reshard == "auto" and self.pp > 1)

    def hosted(self, width: int) -> int:
        """Of ``width`` elements of a rank's optimizer state (``offload=params``: of its shard) those in host memory."""
        return 0 if self.offload == "none" else round(self.offload_fraction * width)

    @property
    def sequence_parallel(self) -> bool:
        """``sp`` resolved: on when tp > 1 unless switched off."""
        return self.sp == "on" or (self.sp == "auto" and self.tp > 1)

    @property
    def token_multiple(self) -> int:
        """What the tokens of a micro-batch are padded to a multiple of: two chunks for each rank of cp, whole rows for tp."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)

    def local_tokens(self, seq_len: int) -> int:
        """Tokens of a micro-batch on one rank of cp, padding included."""
        return -(-self.micro_batch * seq_len // self.token_multiple) * self.token_multiple // self.cp

    @property
    def num_stages(self) -> int:
        """Pipeline stages: ``virtual`` chunks on each pipeline rank, two in V-shaped schedules."""
        if self.pp > 1 and self.schedule in V_SHAPED:
            return self.pp * 2
        return self.pp * self.virtual

    @property
    def global_batch(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        return self.dp * self.microbatches * self.micro_batch

    # -- checks ------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        for name in _LEAST_ONE:
            if getattr(self, name) < 1:
                raise LayoutError(f"{name}={getattr(self, name)} must be at least 1; leave it out for 1")
        if self.prefetch < 0:
            raise LayoutError(f"prefetch={self.prefetch} must be at least 0 (units gathered ahead; 1 is usual)")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"zero={self.zero} is not a ZeRO stage; use 0 (DDP), 1, 2 or 3 (FSDP)")
        for name, choices in CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        policies = self.recompute.split("-")
        for policy in policies:
            _check_choice("recompute", policy, RECOMPUTE)
        if len(policies) not in (1, self.pp):
            raise LayoutError(
                f"recompute={self.recompute} gives {len(policies)} policies, the layout has pp={self.pp} pipeline ranks; "
                "give one for all, or one for each"
            )
        if not self.schedule.startswith("file:"):
            _check_choice("schedule", self.schedule, SCHEDULES)
        elif "," in self.schedule or not self.schedule.removeprefix("file:").strip():
            raise LayoutError(f"schedule={self.schedule} needs a path without commas after file:; rename the file")
        if self.moe != "dropless" and _capacity(self.moe) is None:
            raise LayoutError(
                f"moe={self.moe} is not known; use dropless or a capacity above 0 such as capacity:1.25, "
                "capacity:1.25:drop or capacity:1.25:reroute"
            )
        if not (isfinite(self.bucket_mb) and self.bucket_mb > 0):
            raise LayoutError(f"bucket_mb={self.bucket_mb} must be above 0 (MiB per gradient bucket; 25 is usual)")
        if not 0 <= self.offload_fraction <= 1:
            raise LayoutError(f"offload_fraction={self.offload_fraction} must lie between 0 and 1")
        self._check_groups()

    def _check_groups(self) -> None:
        if self.grid.stage_size % self.ep:
            good = _divisors(self.grid.stage_size)
            raise LayoutError(f"ep={self.ep} must divide tp*cp*dp={self.grid.stage_size}; use ep={good}")
        for axis, size in (("dp*cp", self.dp * self.cp), ("edp", self.grid.edp)):
            if size % self.dp_replicate:
                raise LayoutError(
                    f"dp_replicate={self.dp_replicate} must divide {axis}={size}; use dp_replicate={_divisors(size)}"
                )
        if self.virtual > 1 and self.pp == 1:
            raise LayoutError(f"virtual={self.virtual} needs pp > 1; set pp or leave virtual out")
        for name in ("ep_overlap", "ep_deduplicate"):
            if getattr(self, name) and self.ep == 1:
                raise LayoutError(f"{name}=on needs ep > 1: with ep=1 tokens stay where they are; set ep or leave {name} out")
        if self.sp == "on" and self.tp == 1:
            raise LayoutError("sp=on needs tp > 1: with tp=1 no tokens are split; leave sp out")

    @property
    def _needs(self) -> dict[str, tuple[bool, str]]:
        """For each switch of sharded or hosted state: whether it says anything in this layout, and what it needs."""
        return {
            "reshard": (self.zero == 3, "zero=3, which alone gathers parameters"),
            "prefetch": (self.zero == 3, "zero=3, which alone gathers parameters"),
            "zero1_reduce": (self.zero == 1, "zero=1"),
            "bucket_mb": (self.zero < 3, "zero below 3, as ZeRO-3 reduces unit by unit"),
            "offload_fraction": (self.offload != "none", "offload=optimizer or offload=params"),
        }

    def check_switches(self) -> None:
        """Refuse a switch that is set and would do nothing."""
        idle = self.without_idle()
        for name, (_, need) in self._needs.items():
            value = getattr(self, name)
            if value != getattr(idle, name):
                given = f"offload={self.offload}" if name == "offload_fraction" else f"zero={self.zero}"
                raise LayoutError(
                    f"{name}={_text(value)} does nothing with {given}: it needs {need}; set that, or leave {name} out"
                )

    def without_idle(self) -> Layout:
        """The same layout, switches that would do nothing left out."""
        defaults = {field.name: field.default for field in fields(self)}
        return self.with_(**{name: defaults[name] for name, (used, _) in self._needs.items() if not used})

    def check_world(self, num_processes: int) -> None:
        """Refuse a world of another size than the layout's."""
        if num_processes != self.world_size:
            dp, rest = divmod(num_processes, self.world_size // self.dp)
            other = f"use dp={dp}" if dp and not rest else "lower a degree"
            raise LayoutError(
                f"layout {self} needs {self.world_size} processes (tp*cp*dp*pp) but {num_processes} were started; "
                f"start {self.world_size} or {other}"
            )

    def for_world(self, num_processes: int) -> Layout:
        """The same run on another number of processes: dp follows, and accumulation keeps the sequences of a step as many.

        Raises `LayoutError` where the other axes, or the sequences, do not divide.
        """
        others = self.world_size // self.dp
        dp, rest = divmod(num_processes, others)
        if rest or not dp:
            raise LayoutError(
                f"{num_processes} processes cannot be shared by tp*cp*pp={others} of layout {self}; start a multiple of {others}"
            )
        share, rest = divmod(self.global_batch, dp)
        if rest:
            raise LayoutError(
                f"the {self.global_batch} sequences of a step do not divide over dp={dp}; "
                f"start processes for dp={_divisors(self.global_batch)}"
            )
        micro_batch = max(size for size in divisors(share) if size <= self.micro_batch)
        replicas = gcd(self.dp_replicate, dp * self.cp)
        return self.with_(dp=dp, micro_batch=micro_batch, microbatches=share // micro_batch, dp_replicate=replicas)

    def check_model(self, model: ModelConfig) -> None:
        """Refuse what this model cannot be cut into, before any process starts."""
        if model.num_heads % self.tp:
            raise LayoutError(
                f"tp={self.tp} must divide the model's {model.num_heads} attention heads; "
                f"use tp={_divisors(model.num_heads)}"
            )
        kv = model.num_kv_heads
        if kv % self.tp and self.tp % kv:
            good = [tp for tp in divisors(model.num_heads) if kv % tp == 0 or tp % kv == 0]
            raise LayoutError(
                f"tp={self.tp} and the model's {kv} KV heads must divide one another; use tp={_either(good)}"
            )
        if self.num_stages > model.num_layers:
            raise LayoutError(
                f"pp*virtual={self.num_stages} stages need as many layers, the model has {model.num_layers}; "
                f"use at most pp={model.num_layers}"
            )
        if self.cp > 1 and self.cp_kind == "ulysses":
            self._check_heads(model.num_heads // self.tp, max(kv // self.tp, 1))
        if self.ep > 1 and model.moe is None:
            raise LayoutError(f"ep={self.ep} needs a model with experts; {model.name} has none: leave ep out")
        if model.moe is not None and model.moe.num_experts % self.ep:
            fitting = [k for k in divisors(model.moe.num_experts) if self.grid.stage_size % k == 0]
            raise LayoutError(
                f"ep={self.ep} must divide the model's {model.moe.num_experts} experts; use ep={_either(fitting)}"
            )
        if model.moe is not None and self.tp > 1 and not self.sequence_parallel:
            raise LayoutError("experts with tp > 1 need sequence parallelism; leave sp out or set sp=on")

    def check_training(self, model: ModelConfig, seq_len: int) -> None:
        """Refuse what no run can do with sequences of ``seq_len`` tokens, whatever else it is told: what a plan refuses too."""
        if self.dp_replicate > 1 and not self.zero:
            raise LayoutError(
                f"dp_replicate={self.dp_replicate} makes replicas of shards, and with zero=0 nothing is sharded; "
                "set zero=1 or more, or leave dp_replicate out"
            )
        if self.accumulate == "reduce" and self.zero < 2:
            raise LayoutError(
                f"accumulate=reduce saves memory only where gradients are sharded, and with zero={self.zero} they are not; "
                "set zero=2, or leave accumulate out"
            )
        if self.capacity is not None and model.moe is None:
            raise LayoutError(f"moe={self.moe} needs a model with experts; {model.name} has none: leave moe out")
        self._check_offload()
        self._check_windows(model, seq_len)
        self.check_switches()

    def _check_offload(self) -> None:
        if self.offload == "params" and self.zero != 3:
            raise LayoutError(
                f"offload=params with zero={self.zero}: only ZeRO-3 brings a unit's parameters in and frees them after their "
                "use; set zero=3, or use offload=optimizer"
            )
        if self.delayed_update and self.offload != "optimizer":
            raise LayoutError(
                f"delayed_update=on with offload={self.offload}: an update that runs beside the step needs masters that the "
                "step does not read; set offload=optimizer, or leave delayed_update out"
            )
        if self.delayed_update and self.offload_fraction < 1:
            raise LayoutError(
                f"delayed_update=on with offload_fraction={self.offload_fraction}: only what is in host memory can be updated "
                "beside the step; leave offload_fraction out, or delayed_update"
            )

    def _check_windows(self, model: ModelConfig, seq_len: int) -> None:
        """A ring's rectangles are whole or causal; a window shorter than the sequence would cut them otherwise."""
        windows = {model.layer_window(layer) for layer in range(model.num_layers)}
        short = min((window for window in windows if window is not None and window < seq_len), default=None)
        if self.cp > 1 and self.cp_kind != "ulysses" and short is not None:
            raise LayoutError(
                f"cp_kind={self.cp_kind} has no sliding windows, and the model's window of {short} tokens is shorter than "
                f"the sequence of {seq_len}; use cp_kind=ulysses"
            )

    def _check_heads(self, heads: int, kv_heads: int) -> None:
        """Ulysses cuts the heads that a rank of tp has once more."""
        if heads % self.cp:
            raise LayoutError(
                f"cp={self.cp} with cp_kind=ulysses must divide the {heads} attention heads of a rank; "
                f"use cp={_divisors(heads)}, or cp_kind=ring"
            )
        if kv_heads % self.cp and self.cp % kv_heads:
            good = [cp for cp in divisors(heads) if kv_heads % cp == 0 or cp % kv_heads == 0]
            raise LayoutError(
                f"cp={self.cp} with cp_kind=ulysses and the {kv_heads} KV heads of a rank must divide one another; "
                f"use cp={_either(good)}, or cp_kind=ring"
            )


def layout_values(text: str) -> dict[str, str]:
    """The pairs of ``key=value,key=value`` as they stand: what changes a layout need not be one by itself."""
    values: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise LayoutError(f"layout: {part!r} is not key=value; write for instance dp=2,zero=1")
        if key in values:
            raise LayoutError(f"layout: {key} is given twice; give it once")
        values[key] = value
    return values


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(choices)}"
        raise LayoutError(f"{name}={value} is not known; {hint}")


def divisors(number: int) -> list[int]:
    """Every number that divides ``number``, least first."""
    return [k for k in range(1, number + 1) if number % k == 0]


def _divisors(number: int) -> str:
    return _either(divisors(number))


def _either(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def _capacity(text: str) -> tuple[float, str] | None:
    """Factor and kind in ``capacity:FACTOR[:drop|reroute]``; None when ``text`` is not that."""
    kind, _, rest = text.partition(":")
    number, _, overflow = rest.partition(":")
    try:
        factor = float(number)
    except ValueError:
        return None
    known = kind == "capacity" and isfinite(factor) and factor > 0 and (overflow or "drop") in OVERFLOW
    return (factor, overflow or "drop") if known and rest != f"{number}:" else None


def _typed(key: str, value: Any, kind: type) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        if value in ("on", "off"):
            return value == "on"
        raise LayoutError(f"{key}={value} must be on or off")
    if kind is str and isinstance(value, bool):  # TOML has true and false where the text form has on and off
        return "on" if value else "off"
    try:
        if kind is int and isinstance(value, float):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        noun = "a whole number" if kind is int else "a number"
        raise LayoutError(f"{key}={value} must be {noun}") from None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
