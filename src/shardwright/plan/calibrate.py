"""Fit a stack's constants to measured runs: ``python -m shardwright.plan.calibrate FILE.csv... [--out stacks.toml]``.

For each stack the fields named in its ``fit.fields`` are moved (Nelder and Mead's simplex, in logarithms) until the mean
absolute logarithm of predicted over measured step time is least over all rows of that stack; then those of
``fit.memory_fields`` for the rows' peaks of memory, where too low is worse than too high. A weak pull towards the starting
values keeps what the rows do not tell. Constants belong to a chip and a stack, never to a row. Cross-validation: the rows
are cut into folds by their place in the file, each fold is predicted by constants fitted on the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log, log10
from pathlib import Path
from typing import Any

from shardwright.core.plan import GIB
from shardwright.errors import ShardwrightError
from shardwright.plan.rows import Case, Refused
from shardwright.plan.serving_rows import ServingCase, read_runs, serving_loss, unsaturated
from shardwright.plan.stack import Stack, read_tables, stack_of, write_tables
from shardwright.plan.step_time import Pricer

BOUNDS: Mapping[str, tuple[float, float]] = {
    "gemm_bf16": (0.2, 1.0), "gemm_fp8": (0.15, 1.0), "gemm_fp4": (0.1, 1.0), "grouped": (0.2, 1.0), "attention": (0.05, 1.0),
    "memory": (0.3, 1.0), "launch": (1e-7, 1e-4), "host": (1e-7, 1e-4), "intra": (0.1, 1.0), "inter": (0.1, 1.0),
    "part_node": (0.2, 1.0), "latency": (0.05, 20.0), "message": (1e-7, 5e-3), "fused": (0.2, 2.5), "dp_overlap": (1e-3, 1.0),
    "tp_overlap": (1e-3, 0.95), "ep_overlap": (1e-3, 0.95), "p2p_overlap": (1e-3, 1.0), "contention": (1e-3, 1.0),
    "imbalance": (1.0, 1.5), "step_seconds": (1e-5, 5.0), "kv": (0.1, 1.0), "request_seconds": (1e-4, 1.0),
    "burst": (1e-3, 1.0), "skew": (0.05, 2.5), "quantise": (0.1, 16.0), "async_tp": (0.05, 1.0), "reserve_gib": (1e-2, 20.0),
    "reserve_share": (1e-3, 0.3), "saved": (0.8, 2.5),
}  # fmt: skip
PULL = 0.03
"""Weight of the squared logarithm of a constant over its starting value."""
TOO_LOW = 3.0
"""How much worse a peak of memory is that is said to be lower than it is: such a plan runs out of memory."""
FOLDS, MOST_ROWS, ROUNDS = 4, 120, 200
SERVING_FOLDS = 3
EXPERT_FIELDS = ("gemm_fp4", "grouped", "skew")
"""Constants of serving engines that only models with experts tell."""


@dataclass(frozen=True)
class FitResult:
    """Fitted constants with mean absolute errors in per cent: on the rows fitted, and on rows held out."""

    stack: Stack
    rows: int
    mape: float
    held_out_mape: float


def predict(case: Case, stack: Stack, *, exact: bool = False) -> float:
    """Seconds of a step of ``case``."""
    pricer = Pricer(case.model, case.cluster, case.seq, case.stack_for(stack))
    return pricer.price(case.layout).step.seconds if exact else pricer.quick(case.layout)


def mean_error(cases: Sequence[Case], stack: Stack) -> float:
    """Mean absolute percentage error over measured cases."""
    errors = [abs(predict(case, stack) / case.seconds - 1) for case in cases if case.seconds]
    return 100 * sum(errors) / len(errors) if errors else 0.0


def fit(cases: Sequence[Case], start: Stack, names: Sequence[str], rounds: int = ROUNDS) -> Stack:
    """``start`` with the fields ``names`` moved to where ``cases`` are predicted best."""
    measured = [case for case in cases if case.seconds]
    if not measured or not names:
        return start
    bases = [(Pricer(case.model, case.cluster, case.seq, start), case, case.seconds or 1.0) for case in measured]

    def error(stack: Stack) -> float:
        found = ((base.with_stack(case.stack_for(stack)).quick(case.layout), seconds) for base, case, seconds in bases)
        return sum(abs(log(predicted / seconds)) for predicted, seconds in found) / len(bases)

    return least(error, start, names, rounds)


def least(
    error: Callable[[Stack], float], start: Stack, names: Sequence[str], rounds: int, *, pull: float = PULL
) -> Stack:
    """``start`` with the fields ``names`` moved, within their bounds, to where ``error`` with its pull is least.

    Steps in logarithms do not lead away from nothing: a field that starts at its least is tried from each power of ten of it.
    """
    found = [_least(error, begin, names, rounds, pull) for begin in _beginnings(start, names)]
    return min(found, key=lambda loss_and_stack: loss_and_stack[0])[1]


def _beginnings(start: Stack, names: Sequence[str]) -> list[Stack]:
    """``start``, and for each field that is at its least one more for every power of ten of it."""
    found = [start]
    for name in names:
        low, high = BOUNDS[name]
        if getattr(start, name) <= low:
            for power in range(1, int(log10(high / low)) + 1):
                changed: dict[str, Any] = {name: low * 10.0**power}
                found.append(replace(start, **changed))
    return found


def _least(
    error: Callable[[Stack], float], start: Stack, names: Sequence[str], rounds: int, pull: float
) -> tuple[float, Stack]:
    origin = [log(max(getattr(start, name), BOUNDS[name][0])) for name in names]

    def at(point: Sequence[float]) -> Stack:
        values: dict[str, Any] = {}
        for name, place in zip(names, point, strict=True):
            low, high = BOUNDS[name]
            values[name] = min(max(exp(place), low), high)
        return replace(start, **values)

    def loss(point: Sequence[float]) -> float:
        return error(at(point)) + pull * sum((a - b) ** 2 for a, b in zip(point, origin, strict=True))

    found = simplex(loss, origin, rounds)
    return loss(found), at(found)


def simplex(
    loss: Callable[[Sequence[float]], float], start: Sequence[float], rounds: int, step: float = 0.25
) -> list[float]:
    """Nelder and Mead's search for the least of ``loss`` from ``start``."""
    corners = [list(start)] + [[x + step * (i == j) for j, x in enumerate(start)] for i in range(len(start))]
    scored = sorted((loss(corner), corner) for corner in corners)
    for _ in range(rounds):
        (_, *_), (worst, last) = scored[0], scored[-1]
        middle = [sum(axis) / (len(scored) - 1) for axis in zip(*(c for _, c in scored[:-1]), strict=True)]

        def along(factor: float, middle: list[float] = middle, last: list[float] = last) -> tuple[float, list[float]]:
            point = [m + factor * (m - w) for m, w in zip(middle, last, strict=True)]
            return loss(point), point

        tried = along(1.0)
        if tried[0] < scored[0][0]:
            tried = min(tried, along(2.0))
        elif tried[0] >= scored[-2][0]:
            tried = min(tried, along(-0.5))
        if tried[0] < worst:
            scored[-1] = tried
        else:
            best = scored[0][1]
            shrunk = [[(a + b) / 2 for a, b in zip(best, corner, strict=True)] for _, corner in scored[1:]]
            scored = [scored[0], *((loss(corner), corner) for corner in shrunk)]
        scored.sort()
        if scored[-1][0] - scored[0][0] < 1e-6:
            break
    return scored[0][1]


def calibrate(cases: Sequence[Case], start: Stack, names: Sequence[str]) -> FitResult:
    """Fit all rows, and each fold's rows on the others'."""
    measured = [case for case in cases if case.seconds]
    if len(measured) > MOST_ROWS:
        measured = measured[:: -(-len(measured) // MOST_ROWS)]
    fitted = fit(measured, start, names)
    folds = min(FOLDS, len(measured) // 2)
    total = 0.0
    for fold in range(folds):
        others = [case for index, case in enumerate(measured) if index % folds != fold]
        held_out = measured[fold::folds]
        total += mean_error(held_out, fit(others, fitted, names, ROUNDS // 2)) * len(held_out)
    return FitResult(fitted, len(measured), mean_error(measured, fitted), total / len(measured) if folds else 0.0)


class Peaks:
    """The plan's peaks of memory over the measured ones, for some rows and any stack."""

    def __init__(self, cases: Sequence[Case], stack: Stack) -> None:
        self.bases = [(Pricer(case.model, case.cluster, case.seq, stack), case) for case in cases]

    def ratios(self, stack: Stack) -> list[float]:
        found = []
        for base, case in self.bases:
            pricer = base.with_stack(case.stack_for(stack))
            allocated = pricer.stage_memory(case.layout)[0].total
            held = allocated if case.allocated else pricer.margin.device_bytes(allocated)
            found.append(held / GIB / (case.memory_gib or 1.0))
        return found

    def fit(self, start: Stack, names: Sequence[str]) -> Stack:
        """``start`` with the fields ``names`` moved to where the peaks are predicted best."""

        def error(stack: Stack) -> float:
            apart = [log(ratio) for ratio in self.ratios(stack)]
            return sum(max(value, -TOO_LOW * value) for value in apart) / len(apart)

        return least(error, start, names, ROUNDS // 2)


def calibrate_memory(cases: Sequence[Case], start: Stack, names: Sequence[str]) -> FitResult:
    """Fit the peaks of all rows that have one, and those of each fold on the others'."""
    peaks = Peaks(cases, start)
    fitted = peaks.fit(start, names)
    folds, held_out = min(FOLDS, len(cases) // 2), list[float]()
    for fold in range(folds):
        others = [case for index, case in enumerate(cases) if index % folds != fold]
        held_out += Peaks(cases[fold::folds], start).ratios(Peaks(others, start).fit(fitted, names))
    own = [100 * abs(ratio - 1) for ratio in peaks.ratios(fitted)]
    apart = [100 * abs(ratio - 1) for ratio in held_out]
    return FitResult(fitted, len(cases), sum(own) / len(own), sum(apart) / len(apart) if apart else 0.0)


def calibrate_serving(cases: Sequence[ServingCase], start: Stack, names: Sequence[str]) -> tuple[Stack, dict[str, Any]]:
    """Fit an engine's constants on runs whose requests all had cache, and each fold's runs on the others'.

    Returns the stack and its ``fit``: mean errors of TPOT (``mape``) and TTFT on the rows, and on rows held out.
    """
    usable = unsaturated(list({(case.label, case.layout, case.tpot): case for case in cases}.values()), start)
    rows = usable[:: -(-len(usable) // MOST_ROWS)]

    def fitted(some: Sequence[ServingCase], begin: Stack, rounds: int) -> Stack:
        """Constants of dense models on their rows, then those of experts on the others."""
        dense = [case for case in some if case.model.moe is None]
        experts = [case for case in some if case.model.moe is not None]
        common = [name for name in names if name not in EXPERT_FIELDS]
        parts = (
            ((dense, common), (experts, [name for name in names if name in EXPERT_FIELDS]))
            if dense
            else ((experts, names),)
        )
        for part, fields in parts:
            if part and fields:
                begin = least(partial(serving_loss, part), begin, fields, rounds)
        return begin

    stack = fitted(rows, start, ROUNDS)
    held: list[tuple[float, float]] = []
    folds = min(SERVING_FOLDS, len(rows) // 2)
    for fold in range(folds):
        others = [case for index, case in enumerate(rows) if index % folds != fold]
        held += [
            _serving_error(case, other) for other in [fitted(others, stack, ROUNDS // 4)] for case in rows[fold::folds]
        ]
    own = [_serving_error(case, stack) for case in rows]
    found: dict[str, Any] = {"rows": len(rows)}
    for name, pairs in (("", own), ("held_out_", held)):
        found[f"{name}mape"] = round(100 * sum(tpot for tpot, _ in pairs) / max(len(pairs), 1), 2)
        found[f"{name}ttft_mape"] = round(100 * sum(ttft for _, ttft in pairs) / max(len(pairs), 1), 2)
    return stack, found


def _serving_error(case: ServingCase, stack: Stack) -> tuple[float, float]:
    times = case.price(stack).times
    return abs(times.tpot_seconds / case.tpot - 1), abs(times.ttft_seconds / case.ttft - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit every stack that the files have rows of, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m shardwright.plan.calibrate", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.csv")
    parser.add_argument("--out", type=Path, help="write the constants here (default: only print the errors)")
    parser.add_argument("--stack", action="append", help="fit this stack only; repeatable")
    options = parser.parse_args(arguments)
    try:
        found = [case for path in options.files for case in read_runs(path) if not isinstance(case, Refused)]
        tables = read_tables()
        for name, table in tables.items():
            if options.stack and name not in options.stack:
                continue
            times, peaks = _refit(name, tables, found), _refit_memory(name, tables, found)
            if not (times or peaks):
                continue
            if options.out:  # after each stack: what is done stays done
                options.out.write_text(write_tables(tables), encoding="utf-8")
            table_fit = table["fit"]
            print(
                f"{name}: {table_fit['rows']} rows, {table_fit['mape']} %, held out {table_fit['held_out_mape']} %"
                + (
                    f"; memory of {table_fit['memory_rows']} rows {table_fit['memory_mape']} %, held out "
                    f"{table_fit['held_out_memory_mape']} %"
                    if peaks
                    else ""
                ),
                flush=True,
            )
    except ShardwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _refit(name: str, tables: dict[str, dict[str, Any]], found: Sequence[Case | ServingCase]) -> bool:
    """Put new constants and their errors into the table of ``name``; False where there are no rows for it."""
    table = tables[name]
    names = table["fit"].get("fields", [])
    if not names:
        return False
    training = [case for case in found if isinstance(case, Case) and case.stack == name and case.seconds]
    serving = [case for case in found if isinstance(case, ServingCase) and case.stack == name]
    start = stack_of(name, tables)
    if training:
        result = calibrate(training, start, names)
        stack = result.stack
        table["fit"] |= {
            "rows": result.rows, "mape": round(result.mape, 2), "held_out_mape": round(result.held_out_mape, 2)
        }  # fmt: skip
    elif serving:
        stack, errors = calibrate_serving(serving, start, names)
        table["fit"] |= errors
    else:
        return False
    for field in names:
        table[field] = float(f"{getattr(stack, field):.4g}")
    return True


def _refit_memory(name: str, tables: dict[str, dict[str, Any]], found: Sequence[Case | ServingCase]) -> bool:
    """The same for the constants of memory."""
    table = tables[name]
    names = table["fit"].get("memory_fields", [])
    cases = [case for case in found if isinstance(case, Case) and case.stack == name and case.memory_gib]
    if not names or not cases:
        return False
    result = calibrate_memory(cases, stack_of(name, tables), names)
    table["fit"] |= {
        "memory_rows": result.rows, "memory_mape": round(result.mape, 2), "held_out_memory_mape": round(result.held_out_mape, 2)
    }  # fmt: skip
    for field in names:
        table[field] = float(f"{getattr(result.stack, field):.4g}")
    return True


if __name__ == "__main__":
    sys.exit(main())
