"""The planner: fits, speed, which layout, and the dry run that proves it. Checks of 2, 3 and 4 need the measured tables."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from functools import lru_cache
from typing import Any

from proofs.base import RESULTS, ROOT, Check, Outcome, keep, tests

from shardwright.core.cluster import Cluster
from shardwright.core.plan import GIB
from shardwright.core.presets import preset
from shardwright.core.run_config import RunConfig
from shardwright.plan.accuracy import assess
from shardwright.plan.exhaustive import exhaustive
from shardwright.plan.search import search
from shardwright.plan.serving_rows import read_runs
from shardwright.plan.step_time import Pricer
from shardwright.train.dryrun import dry_run

DATA = ROOT.parent / "shared" / "planner"
TRAINING = ("published_runs.csv", "a100_multi_node_steps.csv", "a100_single_node_steps.csv")
DENSE_OTHERS = ("torchtitan", "nanotron", "KempnerForge", "DGXC", "Megatron-Core hopper", "Megatron-Bridge hopper",
                "Megatron-Bridge blackwell", "Llama 3 report")  # fmt: skip
NO_DATA = Outcome("the measured tables are not here", None)


@lru_cache(maxsize=1)
def figures() -> dict[str, dict[str, Any]]:
    """The accuracy of every group of training runs; also kept as a file."""
    runs = [case for name in TRAINING for case in read_runs(DATA / name)]
    found: dict[str, dict[str, Any]] = assess(runs)["groups"]
    keep("planner-accuracy.json", found)
    return found


def group(name: str, bar: float) -> Outcome:
    """Mean absolute error of one group beside the straw man."""
    if not DATA.is_dir():
        return NO_DATA
    found = figures()[name]
    shown = f"{found['mape']:.1f} % of {found['priced']} rows (straw man {found['straw_man']['mape']:.1f} %)"
    return Outcome(shown, found["mape"] <= bar)


def choices() -> Outcome:
    """Regret and rank correlation of every model of the multi-node rows, and how many rows are refused."""
    if not DATA.is_dir():
        return NO_DATA
    found = figures()["A100 multi-node"]
    shown, right = [], found["rows"] == found["priced"]
    for name, family in found["families"].items():
        shown.append(f"{name}: regret {family['regret']:.1f} %, Spearman {family['spearman']:.2f}")
        right = right and family["regret"] <= 2 and family["spearman"] >= 0.85
    return Outcome(f"{found['priced']} of {found['rows']} priced; " + "; ".join(shown), right)


def pooled(names: tuple[str, ...], *, experts: bool, bar: float) -> Outcome:
    """Every group of dense (or expert) rows that no other line has, each against the bar."""
    if not DATA.is_dir():
        return NO_DATA
    chosen = {
        name: found
        for name, found in figures().items()
        if "mape" in found and (" MoE" in name) == experts and (experts or name.startswith(names))
    }
    shown = [f"{name} {found['mape']:.1f} ({found['straw_man']['mape']:.1f})" for name, found in chosen.items()]
    rows = sum(found["priced"] for found in chosen.values())
    mean = sum(found["mape"] * found["priced"] for found in chosen.values()) / rows
    return Outcome(f"{mean:.1f} % over {rows} rows (straw man in brackets): {', '.join(shown)}", mean <= bar)


def published_peaks() -> Outcome:
    """Every row with a peak of memory, by source."""
    if not DATA.is_dir():
        return NO_DATA
    found = {name: found["memory"] for name, found in figures().items() if "memory" in found}
    shown = [
        f"{name} {peak['mape']:.1f} % ({peak['lowest']:+.0f} to {peak['highest']:+.0f} %, "
        f"{peak['within']} of {peak['rows']} rows within)"
        for name, peak in found.items()
    ]
    return Outcome("; ".join(shown), all(peak["within"] == peak["rows"] for peak in found.values()))


def memory_on_ranks() -> Outcome:
    """30 random layouts beside today's plan; what the kept file of measurements lacks is run."""
    kept = RESULTS / "planned-memory.json"
    arguments = [sys.executable, "benchmarks/planned_memory.py", "--count", "30", "--out", str(kept)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=7200, check=False)
    if not done.stdout.strip():
        raise RuntimeError(done.stderr.strip()[-500:])
    beside = max(result["beside_state"] for result in json.loads(kept.read_text()).values())
    value = done.stdout.strip().splitlines()[-1]
    value += f"; tensors alive between steps differ from the state by {beside >> 10} KiB at most"
    return Outcome(value, done.returncode == 0)


def bloom() -> Outcome:
    if not DATA.is_dir():
        return NO_DATA
    found = figures()["BLOOM"]
    oom = found["out_of_memory"]
    value = f"Spearman {found['spearman']:.2f}; {oom['refused']} of {oom['rows']} out-of-memory rows do not fit"
    return Outcome(value, found["spearman"] >= 0.85 and oom["refused"] == oom["rows"])


def serving() -> Outcome:
    if not DATA.is_dir():
        return NO_DATA
    groups = assess(read_runs(DATA / "serving_latency.csv"))["groups"]
    keep("planner-serving.json", groups)
    low = groups["serving vllm dense hopper"]["low_concurrency"]
    worse = [
        f"{name.removeprefix('serving ')} {found['all']['tpot']['median']:.0f}/{found['all']['ttft']['median']:.0f}"
        for name, found in groups.items()
        if "all" in found
    ]
    value = (
        f"TPOT {low['tpot']['mape']:.1f} %, TTFT {low['ttft']['median']:.1f} % (median) of {low['rows']} rows; medians of "
        f"TPOT/TTFT at all loads: {', '.join(worse)}"
    )
    return Outcome(value, low["tpot"]["mape"] <= 12 and low["ttft"]["median"] <= 25)


def search_speed() -> Outcome:
    """70B on 1,024 GPUs, 671B with experts on 2,048, on one core."""
    shown, seconds = [], []
    for model, nodes, batch in (("llama-3.1-70b", 128, 2048), ("deepseek-v3", 256, 4096)):
        start = time.process_time()
        plan = search(preset(model), Cluster.parse(f"h100-80gb:{nodes}x8"), 8192 if nodes == 128 else 4096, batch)
        seconds.append(time.process_time() - start)
        shown.append(
            f"{model} on {nodes * 8}: {seconds[-1]:.1f} s of a core, {plan.layout} at {plan.step.seconds:.2f} s"
        )
    return Outcome("; ".join(shown), seconds[0] < 5 and seconds[1] < 30)


def against_exhaustive() -> Outcome:
    """The search's answer beside every layout of a small grid, each priced by the schedule's rows."""
    model, cluster = preset("llama-3.1-8b"), Cluster.parse("h100-80gb:2x8")
    found = search(model, cluster, 8192, 64)
    best = exhaustive(Pricer(model, cluster, 8192), 64)
    ratio = found.step.seconds / best.step.seconds - 1
    value = (
        f"{found.layout} at {found.step.seconds:.3f} s against {best.layout} at {best.step.seconds:.3f} s: {ratio:+.2%}"
    )
    return Outcome(value, ratio <= 0.02)


def dry_run_405b() -> Outcome:
    """All stages of Llama 3.1 405B on 16,384 ranks, ZeRO-1 and ZeRO-3, 64 micro-batches."""
    shown, right = [], True
    for zero in (1, 3):
        layout = f"tp=8,pp=16,dp=128,zero={zero},microbatches=64,precision=bf16"
        start = time.perf_counter()
        result = dry_run(RunConfig.load(ROOT / "examples" / "llama-405b.toml", (), layout))
        seconds = time.perf_counter() - start
        heaviest = max(stage.memory.total for stage in result.stages) / GIB
        verdict = "equal" if result.agrees else "not equal"
        shown.append(f"ZeRO-{zero} {seconds:.0f} s, heaviest stage {heaviest:.1f} GiB, closed form {verdict}")
        right = right and seconds < 60 and result.agrees and len(result.stages) == 16
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    return Outcome(f"{'; '.join(shown)}; {peak:.1f} GiB of memory", right and peak < 4)


def own_machine() -> Outcome:
    """20 random layouts on 2 and on 4 ranks; wants a quiet machine."""
    import planned_steps

    found = [planned_steps.compare(ranks, count=20, rounds=3, repeats=2, seed=0) for ranks in (2, 4)]
    keep("planned-steps.json", found)
    shown = [
        f"{r['ranks']} ranks: Spearman {r['spearman']:.2f}, median error {r['as_planned']['median']:.1f} % (one-rank steps were "
        f"{r['slower_than_when_measured']:.2f} times as slow as in bench comm; that taken out "
        f"{r['at_the_same_speed']['median']:.1f} %)"
        for r in found
    ]
    right = all(r["spearman"] >= 0.9 and r["as_planned"]["median"] <= 15 for r in found)
    return Outcome("; ".join(shown), right)


UNIT = "tests/unit"
CHECKS = [
    Check("1", "worked examples by the product's code", "equal",
          lambda: tests(f"{UNIT}/test_vectors.py", f"{UNIT}/test_plan_memory.py", f"{UNIT}/test_plan_network.py")),
    Check("2a", "SC21 table 1", "5 %", lambda: group("SC21 table 1", 5.0)),
    Check("2b", "Korthikanti table 5", "3.5 %", lambda: group("Korthikanti table 5", 3.5)),
    Check("2c", "A100 multi-node", "10 %", lambda: group("A100 multi-node", 10.0)),
    Check("2d", "choice among layouts, multi-node", "all priced, regret <= 2 %, Spearman >= 0.85 each", choices),
    Check("2e", "A100 single-node", "15 %", lambda: group("A100 single-node", 15.0)),
    Check("2f", "FSDP on H100", "8 %", lambda: group("FSDP hopper", 8.0)),
    Check("2g", "other dense rows", "12 %", lambda: pooled(DENSE_OTHERS, experts=False, bar=12.0)),
    Check("2h", "rows with experts", "15 %", lambda: pooled((), experts=True, bar=15.0)),
    Check("2i", "BLOOM rows", "in order, out-of-memory rows refused", bloom),
    Check("3", "memory: Korthikanti figure 1", "2.5 %", lambda: tests(f"{UNIT}/test_plan_memory.py", "-k", "figure")),
    Check("3b", "memory: published peaks", "each within 8 %, never 3 % low", published_peaks),
    Check("3c", "memory by class of 30 random layouts on real ranks", "2 % of the plan", memory_on_ranks),
    Check("4", "serving: vLLM dense on H100 and H200, at most 16 requests", "TPOT 12 %, TTFT 25 % median", serving),
    Check("5", "search for 70B on 1,024 GPUs and 671B on 2,048", "5 s of one core; seconds", search_speed),
    Check("5b", "against an exhaustive grid", "within 2 %", against_exhaustive),
    Check("6", "dry run of 405B on 16,384 ranks", "60 s, 4 GiB, closed form equal", dry_run_405b),
    Check("6b", "closed form = dry run = full replay over a grid", "every entry", lambda: tests(f"{UNIT}/test_dryrun.py")),
    Check("7", "predicted steps of random layouts on real ranks", "Spearman >= 0.9, median <= 15 %", own_machine),
    Check("8", "pitfalls PL, impossible inputs", "one clear line each",
          lambda: tests(f"{UNIT}/test_plan_pitfalls.py", f"{UNIT}/test_plan_serving.py", "-k", "PL or impossible or refused")),
]  # fmt: skip
