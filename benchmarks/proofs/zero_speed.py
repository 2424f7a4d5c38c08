"""Sharded data parallelism beside its peers: step time, and memory not above FSDP2's (4 and 5 of the issue ZeRO)."""

from __future__ import annotations

import importlib.util

from proofs.base import Check, Outcome, bench_train, ratio_of

SETTINGS = ("always", "after_backward")


def fsdp2(comm: str, bar: float, rounds: int = 12) -> Outcome:
    """Both reshard settings against FSDP2's: step time, and peak memory not above theirs."""
    shown, right = [], True
    for reshard in SETTINGS:
        layout = f"dp=2,micro_batch=4,zero=3,reshard={reshard},comm={comm}"
        found = bench_train(f"zero-fsdp2-{comm}-{reshard}", layout, "fsdp2", rounds=rounds)
        outcome = ratio_of(found, bar)
        shown.append(f"reshard={reshard} {outcome.value}")
        right = right and bool(outcome.passed) and found["ratio_of_memory"] <= 1.0
    return Outcome("; ".join(shown), right)


def deepspeed() -> Outcome:
    if importlib.util.find_spec("deepspeed") is None:
        return Outcome("skipped: deepspeed is not installed (benchmarks/peers/deepspeed.py says how)", None)
    shown, right = [], True
    for zero in (1, 2, 3):
        outcome = ratio_of(bench_train(f"zero-deepspeed-{zero}", f"dp=2,micro_batch=4,zero={zero}", "deepspeed"), 0.9)
        shown.append(f"zero={zero} {outcome.value}")
        right = right and bool(outcome.passed)
    return Outcome("; ".join(shown), right)


def own_ddp() -> Outcome:
    plain = "dp=2,micro_batch=4"
    return ratio_of(bench_train("zero-3-own-0", f"{plain},zero=3", "own", "--peer-layout", plain), 1.08)


CHECKS = [
    Check("4", "ZeRO-3 against FSDP2 over gloo, both reshard settings", "0.85, memory not above", lambda: fsdp2("gloo", 0.85)),
    Check("4b", "the same with comm=auto", "0.75, memory not above", lambda: fsdp2("auto", 0.75, rounds=28)),
    Check(
        "4c",
        "ZeRO-1 against ZeroRedundancyOptimizer, comm=auto",
        "0.90",
        lambda: ratio_of(bench_train("zero-redundancy", "dp=2,micro_batch=4,zero=1", "zero_redundancy", rounds=28), 0.9),
    ),
    Check("4d", "ZeRO-1, 2, 3 against DeepSpeed at the same stage, comm=auto", "0.90", deepspeed),
    Check("4e", "ZeRO-3 against our own ZeRO-0, comm=auto", "1.08", own_ddp),
]
