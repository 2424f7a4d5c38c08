"""How far the planner is from measured runs: ``python -m shardwright.plan.accuracy FILE.csv... [--json]``.

Every row is priced or refused with the reason. Errors are of the step time (predicted over measured, less one), by group
of rows. Beside each stands the straw man: one constant share of the peak for the whole group, the best one for its rows,
which is more than a user without measurements has. Where rows differ in their layout only, ``regret`` is what the layout
predicted fastest takes more than the fastest measured, and ``spearman`` the rank correlation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwright.core.plan import GIB, Plan
from shardwright.errors import ShardwrightError
from shardwright.plan.compute import compute_peak
from shardwright.plan.rows import Case, Refused
from shardwright.plan.serving_rows import LOW_CONCURRENCY, ServingCase, read_runs, serving_errors
from shardwright.plan.stack import stack_of
from shardwright.plan.step_time import Pricer

MEMORY_LOW, MEMORY_HIGH = -3.0, 8.0
"""Per cent within which a predicted peak of memory should lie: too low is worse."""
LEAST_LAYOUTS = 3
"""Layouts of one model below which a choice among them is not judged."""


def errors(predicted: Sequence[float], measured: Sequence[float]) -> dict[str, float]:
    """Mean, median, 90th percentile and largest absolute error and the mean signed one, in per cent."""
    signed = [100 * (p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    size = sorted(map(abs, signed))
    return {
        "mape": mean(size),
        "median": median(size),
        "p90": size[min(len(size) - 1, int(0.9 * len(size)))],
        "max": size[-1],
        "bias": mean(signed),
    }


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank."""
    a, b = _ranks(first), _ranks(second)
    middle = (len(a) - 1) / 2
    spread = (sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)) ** 0.5
    return sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True)) / spread if spread else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def straw_man(cases: Sequence[Case]) -> list[float]:
    """Seconds by a constant share of the peak of FLOPs with recomputation, the share that suits the group best."""
    ideal = [_ideal_seconds(case) for case in cases]
    ratios = sorted((case.seconds or 0.0) / seconds for case, seconds in zip(cases, ideal, strict=True))
    best = min(ratios, key=lambda ratio: sum(abs(ratio / other - 1) for other in ratios))
    return [seconds * best for seconds in ideal]


def _ideal_seconds(case: Case) -> float:
    layout, model = case.layout, case.model
    flops = model.flops_per_token(case.seq, convention="full")
    if layout.recompute == "full":
        flops += model.flops_per_token(case.seq, convention="full", backward=False)
    peak = compute_peak(case.cluster.chip, layout.precision)
    return flops * layout.global_batch * case.seq / (peak * layout.world_size)


def _choices(cases: Sequence[Case], predicted: Sequence[float]) -> dict[str, Any]:
    """Regret in per cent and rank correlation of every family of at least `LEAST_LAYOUTS` layouts."""
    families: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case, seconds in zip(cases, predicted, strict=True):
        families[case.family].append((seconds, case.seconds or 0.0))
    found = {}
    for name, pairs in families.items():
        if len(pairs) >= LEAST_LAYOUTS:
            chosen = min(pairs)[1]
            regret = 100 * (chosen / min(measured for _, measured in pairs) - 1)
            rank = spearman([p for p, _ in pairs], [m for _, m in pairs])
            found[name] = {"layouts": len(pairs), "regret": regret, "spearman": rank}
    if not found:
        return {}
    return {
        "regret": max(family["regret"] for family in found.values()),
        "spearman": mean(family["spearman"] for family in found.values()),
        "families": found,
    }


Run = Case | ServingCase | Refused


def assess(found: Sequence[Run]) -> dict[str, Any]:
    """The figures of every group, as the command prints them."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for case in found:
        groups[case.group].append(case)
    return {"groups": {name: _figures(cases) for name, cases in groups.items()}}


def _figures(found: Sequence[Run]) -> dict[str, Any]:
    serving = [case for case in found if isinstance(case, ServingCase)]
    if not serving:
        return _group([case for case in found if not isinstance(case, ServingCase)])
    result: dict[str, Any] = {"rows": len(found), "priced": len(serving), "refused": {}, **serving_errors(serving)}
    if "all" in result:
        result |= result["all"]["tpot"]
    return result


def peak_gib(case: Case, plan: Plan) -> float:
    """The plan's peak in the units and in the sense of the measured one."""
    return (plan.memory[0].total if case.allocated else plan.device_bytes) / GIB


def _group(found: Sequence[Case | Refused]) -> dict[str, Any]:
    refused = [case.reason for case in found if isinstance(case, Refused)]
    priced: list[Case] = []
    predicted: list[float] = []
    memory: list[tuple[float, float]] = []
    too_large = {"rows": 0, "refused": 0}
    for case in found:
        if isinstance(case, Refused):
            continue
        pricer = Pricer(case.model, case.cluster, case.seq, case.stack_for(stack_of(case.stack)))
        try:
            plan = pricer.price(case.layout)
        except ShardwrightError as error:
            refused.append(str(error))
            continue
        if case.memory_gib:
            memory.append((peak_gib(case, plan), case.memory_gib))
        if case.seconds is None:
            too_large["rows"] += 1
            too_large["refused"] += not plan.fits
            continue
        priced.append(case)
        predicted.append(plan.step.seconds)
    result: dict[str, Any] = {"rows": len(found), "priced": len(priced), "refused": dict(Counter(refused))}
    if priced:
        measured = [case.seconds or 0.0 for case in priced]
        result |= errors(predicted, measured)
        result["straw_man"] = errors(straw_man(priced), measured)
        result |= _choices(priced, predicted)
    if memory:
        signed = [100 * (said / real - 1) for said, real in memory]
        result["memory"] = {
            "rows": len(memory), **errors(*zip(*memory, strict=True)), "lowest": min(signed), "highest": max(signed),
            "within": sum(MEMORY_LOW <= apart <= MEMORY_HIGH for apart in signed),
        }  # fmt: skip
    if too_large["rows"]:
        result["out_of_memory"] = too_large
    return result


def table(result: dict[str, Any]) -> Table:
    """The figures as a table."""
    shown = Table(title="Error of predicted step times, per cent of the measured")
    for column in (
        "group",
        "rows",
        "priced",
        "mean",
        "median",
        "p90",
        "max",
        "bias",
        "straw man",
        "regret",
        "Spearman",
    ):
        shown.add_column(column, justify="left" if column == "group" else "right")
    for name, group in result["groups"].items():
        cells = [name, str(group["rows"]), str(group["priced"])]
        cells += [f"{group[key]:.1f}" if key in group else "-" for key in ("mape", "median", "p90", "max", "bias")]
        cells.append(f"{group['straw_man']['mape']:.1f}" if "straw_man" in group else "-")
        cells.append(f"{group['regret']:.1f}" if "regret" in group else "-")
        cells.append(f"{group['spearman']:.2f}" if "spearman" in group else "-")
        shown.add_row(*cells)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Price the files' rows and print the errors."""
    parser = argparse.ArgumentParser(
        prog="python -m shardwright.plan.accuracy", description="Errors of the planner on measured runs, by group."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.csv")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    options = parser.parse_args(arguments)
    try:
        result = assess([case for path in options.files for case in read_runs(path)])
    except ShardwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    console = Console()
    console.print(table(result))
    for name, group in result["groups"].items():
        for reason, count in group["refused"].items():
            console.print(f"{name}: {count} refused: {reason}", soft_wrap=True, highlight=False)
        if "out_of_memory" in group:
            oom = group["out_of_memory"]
            console.print(
                f"{name}: {oom['refused']} of {oom['rows']} runs that ran out of memory do not fit by the plan"
            )
        for name_of, key in (("", "all"), (f" at up to {LOW_CONCURRENCY} requests", "low_concurrency")):
            if key in group:
                tpot, ttft = group[key]["tpot"], group[key]["ttft"]
                console.print(
                    f"{name}{name_of}: {group[key]['rows']} rows; TPOT {tpot['mape']:.1f} % (median {tpot['median']:.1f}, "
                    f"straw man {tpot['straw_man']['mape']:.1f}), TTFT {ttft['mape']:.1f} % (median {ttft['median']:.1f}, "
                    f"straw man {ttft['straw_man']['mape']:.1f})",
                    highlight=False, soft_wrap=True,
                )  # fmt: skip
        if "memory" in group:
            console.print(
                f"{name}: peak memory {group['memory']['mape']:.1f} % off, {group['memory']['bias']:+.1f} %; "
                f"{group['memory']['within']} of {group['memory']['rows']} rows {MEMORY_LOW:+.0f} to {MEMORY_HIGH:+.0f} %"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
