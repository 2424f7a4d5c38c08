"""Measured serving runs as cases to price: one CSV row is a model, a group of GPUs, a load, and its TTFT and TPOT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.core.cluster import Cluster, find_chip
from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.presets import preset
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.plan.rows import Case, Refused, Row, read_rows, training_cases
from shardwright.plan.serving import Load, ServingPrice, ServingPricer
from shardwright.plan.stack import Stack, stack_of

LOW_CONCURRENCY = 16
"""Requests at once up to which a row counts as lightly loaded."""
_SYSTEMS: Mapping[str, tuple[str, str]] = {
    "h100_sxm": ("h100-80gb", "hopper"), "h200_sxm": ("h200", "hopper"), "b200_sxm": ("b200", "blackwell"),
    "b300_sxm": ("b300", "blackwell"), "gb200": ("gb200", "blackwell"), "gb300": ("gb300", "blackwell"),
}  # fmt: skip
_MODELS = (
    ("llama-3.1-70b", "llama-3.1-70b"), ("llama-3.1-8b", "llama-3.1-8b"), ("qwen3-32b", "qwen3-32b"),
    ("qwen3-235b", "qwen3-235b-a22b"), ("deepseek", "deepseek-v3"), ("gpt-oss-120b", "gpt-oss-120b"),
    ("kimi-k2", "kimi-k2"),
)  # fmt: skip
_PRECISIONS = {"": "bf16", "bf16": "bf16", "fp8": "fp8", "fp4": "fp4", "int4": "fp4"}


@dataclass(frozen=True)
class ServingCase:
    """One measured run; ``stack`` is the engine on a generation of chips."""

    group: str
    label: str
    stack: str
    model: ModelConfig
    layout: Layout
    cluster: Cluster
    load: Load
    ttft: float
    tpot: float

    def price(self, stack: Stack) -> ServingPrice:
        return ServingPricer(self.model, self.cluster, stack).price(self.layout, self.load)


def read_runs(path: Path) -> list[Case | ServingCase | Refused]:
    """Every row of a CSV file of training or of serving runs; raises :class:`ConfigError` for a file of another kind."""
    rows = read_rows(path)
    if rows and "silicon_tpot_ms" in rows[0]:
        return [*serving_cases(rows)]
    return [*training_cases(path, rows)]


def serving_cases(rows: Sequence[Row]) -> list[ServingCase | Refused]:
    """Rows as cases or refusals, in their order."""
    found: list[ServingCase | Refused] = []
    for row in rows:
        group = f"serving {row['backend']}"
        try:
            found.append(_case(row, group))
        except ShardwrightError as error:
            found.append(Refused(group, row["model_path"], str(error)))
    return found


def _case(row: Row, group: str) -> ServingCase:
    if row["mode"] != "agg":
        raise ConfigError("prefill and decode on separate workers: two groups, not one")
    name = row["model_path"].lower()
    known = next((model for part, model in _MODELS if part in name), None)
    if known is None:
        raise ConfigError("no shapes of this model are known")
    chip, generation = _SYSTEMS[row["system"]]
    model = preset(known)
    layout = _layout(row, model)
    gpus = layout.world_size
    per_node = max(k for k in range(1, min(8, gpus) + 1) if gpus % k == 0)
    kind = "MoE" if model.moe is not None else "dense"
    load = Load(int(row["isl"]), int(row["osl"]), int(row["batch_size"]))
    return ServingCase(
        group=f"{group} {kind} {generation}",
        label=f"{row['model_path']} on {gpus} {chip}, {load.input_tokens}+{load.output_tokens} x {load.concurrency}",
        stack=f"{row['backend']}-{generation}",
        model=model,
        layout=layout,
        cluster=Cluster.of(find_chip(chip), gpus // per_node, per_node),
        load=load,
        ttft=float(row["silicon_ttft_ms"]) / 1e3,
        tpot=float(row["silicon_tpot_ms"]) / 1e3,
    )


def _layout(row: Row, model: ModelConfig) -> Layout:
    """Attention over tp x dp ranks; experts whole on each of ``moe_ep_size`` ranks, or in slices."""
    tp, pp = int(row["tp_size"] or 1), int(row["pp_size"] or 1)
    dp, ep = int(row["attention_dp_size"] or 1) or 1, int(row["moe_ep_size"] or 1) or 1
    if model.moe is None:
        ep = 1
    if tp > 8 or dp > 8 or ep > tp * dp or (dp > 1 and tp > 1):
        raise ConfigError("the columns of degrees contradict one another: products stand where factors should")
    return Layout(tp=tp, pp=pp, dp=dp, ep=ep, precision=_PRECISIONS[row["precision"]])


def saturated(case: ServingCase, priced: ServingPrice) -> bool:
    """Whether requests wait for cache: TTFT is then the waiting, which the length of the test decides."""
    return priced.memory.sequences < case.load.concurrency


def serving_errors(cases: Sequence[ServingCase]) -> dict[str, Any]:
    """Errors in per cent of TTFT and TPOT: all cases, and those with at most `LOW_CONCURRENCY` requests.

    Beside them the straw man: the time to read the weights (TPOT) and to multiply the prompt by them (TTFT), each times
    the one factor that suits the group best.
    """
    from shardwright.plan.accuracy import errors

    result: dict[str, Any] = {}
    priced = [(case, case.price(stack_of(case.stack))) for case in cases]
    open_cases = [(case, price) for case, price in priced if not saturated(case, price)]
    result["saturated"] = len(priced) - len(open_cases)
    low = [pair for pair in open_cases if pair[0].load.concurrency <= LOW_CONCURRENCY]
    for name, some in (("all", open_cases), ("low_concurrency", low)):
        if not some:
            continue
        measured = {"tpot": [c.tpot for c, _ in some], "ttft": [c.ttft for c, _ in some]}
        predicted = {
            "tpot": [p.times.tpot_seconds for _, p in some], "ttft": [p.times.ttft_seconds for _, p in some]
        }  # fmt: skip
        plain = {"tpot": [_reading(c) for c, _ in some], "ttft": [_prompt(c) for c, _ in some]}
        result[name] = {"rows": len(some)}
        for what in ("tpot", "ttft"):
            factor = median(m / p for m, p in zip(measured[what], plain[what], strict=True))
            straw = [p * factor for p in plain[what]]
            result[name][what] = errors(predicted[what], measured[what])
            result[name][what]["straw_man"] = errors(straw, measured[what])
    return result


def _reading(case: ServingCase) -> float:
    weights = ServingPricer(case.model, case.cluster, Stack()).weight_bytes(case.layout)
    return weights / case.cluster.chip.memory_bandwidth


def _prompt(case: ServingCase) -> float:
    flops = case.model.flops_per_token(case.load.input_tokens, backward=False) * case.load.input_tokens
    return flops / (case.cluster.chip.peak("bf16") * case.layout.world_size)


# -- constants -------------------------------------------------------------------------------------

TTFT_WEIGHT = 0.5


def serving_loss(cases: Sequence[ServingCase], stack: Stack) -> float:
    """Mean absolute logarithm of predicted over measured TPOT, and half that of TTFT."""
    total = 0.0
    for case in cases:
        times = case.price(stack).times
        total += abs(log(times.tpot_seconds / case.tpot)) + TTFT_WEIGHT * abs(log(times.ttft_seconds / case.ttft))
    return total / len(cases)


def unsaturated(cases: Sequence[ServingCase], stack: Stack) -> list[ServingCase]:
    """The cases whose requests all have cache."""
    return [case for case in cases if not saturated(case, case.price(stack))]
