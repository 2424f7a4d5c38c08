"""Sharded data parallelism: one class of flat groups whose stages differ in when they gather and reduce."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
from grids import compared, traced

matplotlib.use("Agg")
from matplotlib import pyplot
from proofs.base import RESULTS, Check, Outcome, keep, on_a_gpu, tests

from shardwright.comm.mesh import Mesh
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv, init_process_group, run_local_ranks
from shardwright.train.memory import MemoryWatch
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.train.step import Trainer
from shardwright.verify.memory import memory_differences
from shardwright.verify.parity import train_sampler

ZERO, OFFLOAD = "tests/ranks/test_zero.py", "tests/ranks/test_offload.py"
SMALL = {
    "vocab_size": 320, "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
}  # fmt: skip
STAGES = {
    "0": "", "1": "zero=1", "1, all-reduce": "zero=1,zero1_reduce=allreduce", "2": "zero=2", "3": "zero=3,reshard=always",
    "3, kept": "zero=3,reshard=after_backward",
}  # fmt: skip
PIPELINES = ("schedule=1f1b", "schedule=interleaved,virtual=2", "schedule=zb_v")
OFFLOADS = (
    "zero=0,offload=optimizer", "zero=1,offload=optimizer", "zero=2,offload=optimizer", "zero=3,offload=optimizer",
    "zero=3,offload=params", "zero=3,offload=params,offload_fraction=0.5", "zero=2,offload=optimizer,delayed_update=on",
)  # fmt: skip


def config_of(folder: Path, layout: str, optimizer: str = "adamw", model: dict[str, Any] | None = None) -> RunConfig:
    table = {
        "model": model or SMALL,
        "data": {"sources": "synthetic:sentences", "seq_len": 32, "cache": str(folder / "datasets")},
        "optim": {"name": optimizer, "lr": 0.01, "delay_after": 1},
        "train": {"steps": 20, "threads": 1, "run_dir": str(folder / "run")},
    }
    return RunConfig.of(table, (), layout)


# -- 2 and 3 -------------------------------------------------------------------------------------------


def layouts() -> Iterator[str]:
    """Every stage x accumulation x dp x replicas in fp64; offload; with tp, cp and pp; other dtypes."""
    for stage, accumulation, dp, replicas in product(
        STAGES.values(), ("", "microbatches=4", "microbatches=4,accumulate=reduce"), (2, 3, 4), (1, 2)
    ):
        sharded = "zero=2" in stage or "zero=3" in stage
        buckets = "" if "zero=3" in stage else "bucket_mb=0.03"
        if (replicas == 1 or (stage and dp % replicas == 0)) and (sharded or "reduce" not in accumulation):
            yield f"dp={dp},dp_replicate={replicas},{stage},{accumulation},{buckets},precision=fp64"
    for stage, accumulation in product(OFFLOADS, ("", "microbatches=4", "microbatches=4,accumulate=reduce")):
        if "reduce" not in accumulation or "zero=2" in stage or "zero=3" in stage:
            buckets = "" if "zero=3" in stage else "bucket_mb=0.03"
            yield f"dp=2,{stage},{accumulation},{buckets},precision=fp64"
    for stage in (*STAGES.values(), *OFFLOADS[1:5]):
        yield f"dp=2,tp=2,{stage},microbatches=2,precision=fp64"
        yield f"dp=2,cp=2,{stage},microbatches=2,precision=fp64"
        for pipeline in PIPELINES:
            yield f"dp=2,pp=2,{pipeline},{stage},microbatches=4,precision=fp64"
    for stage, dtype in product(STAGES.values(), ("precision=bf16", "precision=bf16,reduce_dtype=bf16", "reduce_dtype=bf16")):
        yield f"dp=2,{stage},{dtype}"


def one_process(layout: Layout) -> Layout:
    alone = Layout(precision=layout.precision, microbatches=layout.dp * layout.microbatches)
    return alone.with_(delayed_update=layout.delayed_update)


def verified() -> Outcome:
    """Loss, gradients, parameters, bytes of every layout, and its peak memory by class against the planner's."""
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as name:
        configs = [config_of(Path(name), text, "adamw" if "fp64" in text else "sgd") for text in layouts()]
        worst, wrong, memory = 0.0, [], 0
        for run, found in compared(prepare_data(configs[0]), configs, one_process):
            config = run.config
            if config.layout.precision == "fp64":
                worst = max(worst, found.gradients.max_rel_diff)
                last = [(rank, trace.ledgers[-1]) for rank, trace in enumerate(run.traces)]
                differences = [line for rank, ledger in last for line in memory_differences(config, ledger, rank)]
                memory += not differences
                wrong += [f"{config.layout}: {differences[0]}"] if differences else []
            wrong += [] if found.passed else [str(config.layout)]
    value = f"{len(configs)} layouts, worst gradient in fp64 {worst:.1e}, memory of {memory} within 2 % of the planner's"
    return Outcome(value + (f"; wrong: {wrong[:3]}" if wrong else ""), not wrong)


def stages_agree() -> Outcome:
    """20 steps of AdamW in fp32 at every stage."""
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as name:
        configs = [config_of(Path(name), f"dp=2,microbatches=2,{stage}") for stage in STAGES.values()]
        runs = list(traced(prepare_data(configs[0]), configs, 20))
    plain = runs[0].traces[0].losses
    apart = [abs(a - b) / b for run in runs for trace in run.traces for a, b in zip(trace.losses, plain, strict=True)]
    return Outcome(f"losses of {len(runs)} settings differ by at most {max(apart):.1e}, {plain[0]:.3f} -> {plain[-1]:.3f}",
                   max(apart) <= 1e-6)  # fmt: skip


# -- 3b: the picture -----------------------------------------------------------------------------------

PICTURED = {
    "ZeRO-0": "", "ZeRO-1": "zero=1", "ZeRO-2": "zero=2,bucket_mb=0.03", "ZeRO-3": "zero=3",
    "ZeRO-3, kept": "zero=3,reshard=after_backward", "ZeRO-3, offload": "zero=3,offload=params",
}  # fmt: skip


def windows_plot() -> Outcome:
    """Bytes of each class on one of two ranks during one step, from the ledger's windows."""
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as name:
        configs = [config_of(Path(name), f"dp=2,{text}", model=SMALL | {"num_layers": 6}) for text in PICTURED.values()]
        runs = list(traced(prepare_data(configs[0]), configs))
    figure, panels = pyplot.subplots(2, 3, figsize=(10, 5), sharey=True, layout="constrained")
    for label, run, axes in zip(PICTURED, runs, panels.flat, strict=True):
        _draw(axes, label, run.traces[0].ledgers[-1])
    panels[1][2].legend(loc="upper right", fontsize=7)
    figure.supxlabel("time in the step")
    figure.supylabel("MB on the device")
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "zero-storage.svg")
    last = [run.traces[0].ledgers[-1].peak for run in runs]
    peaks = [sum(size for kind, size in peak.items() if not kind.startswith("host")) for peak in last]
    return Outcome(f"peaks {[round(peak / 1e6, 2) for peak in peaks]} MB; benchmarks/results/zero-storage.svg", True)


def _draw(axes: Any, label: str, ledger: Ledger) -> None:
    times = sorted({0.0, *(t for w in ledger.windows for t in (w.start, w.end))})
    end = max(times) or 1.0
    times = [*times, end * 1.05] if len(times) > 1 else [0.0, 1.0]
    rows = [[ledger.memory.get(kind, 0) / 1e6] * len(times) for kind in ("parameters", "gradients", "optimizer")]
    for kind in ("gathered", "buffers"):
        mine = [w for w in ledger.windows if w.kind == kind]
        rows.append([sum(w.bytes for w in mine if w.start <= t < w.end) / 1e6 for t in times])
    axes.stackplot(
        [t / times[-1] for t in times], rows, step="post", labels=["parameters", "gradients", "optimizer", "gathered", "buffers"]
    )
    axes.set(title=label, xticks=[])


# -- 5 -------------------------------------------------------------------------------------------------

LARGE = SMALL | {
    "dim": 512, "num_layers": 20, "num_heads": 8, "num_kv_heads": 8, "ffn_dim": 1408,
}  # fmt: skip


def peak_of_rank(env: RankEnv, config: RunConfig, data: PreparedData) -> tuple[int, int]:
    """Peak proportional set size from before the model is built to after two steps, and the sum of the classes' peaks."""
    init_process_group(env)
    mesh = Mesh.distributed(config.layout, env.rank)
    with MemoryWatch(0.02) as watch:
        trainer = Trainer(config, mesh)
        sampler = train_sampler(config, data, mesh.coordinates["dp"])
        ledgers = [trainer.step(sampler.batches(step), step).ledger for step in range(2)]
    return watch.peak, sum(size for kind, size in ledgers[-1].peak.items() if not kind.startswith("host"))


def peak_memory() -> Outcome:
    found: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="shardwright-proof-") as name:
        for stage in ("zero=0", "zero=3"):
            config = config_of(Path(name), f"dp=4,{stage}", model=LARGE)
            data = prepare_data(config)
            ranks = run_local_ranks(peak_of_rank, 4, (config, data), threads_per_rank=1, time_limit_s=900)
            found[stage] = {"pss": max(pss for pss, _ in ranks), "classes": max(size for _, size in ranks)}
    keep("zero-peak-memory.json", found | {"parameters": config.model.num_parameters()})
    whole, sharded = found["zero=0"], found["zero=3"]
    ratios = {kind: sharded[kind] / whole[kind] for kind in whole}
    sizes = [f"{kind} {sharded[kind] >> 20} of {whole[kind] >> 20} MiB = {ratio:.2f}" for kind, ratio in ratios.items()]
    shown = ", ".join(sizes)
    value = f"{config.model.num_parameters() / 1e6:.0f}M parameters, dp=4: {shown} (pss with some 230 MiB of Python and torch)"
    return Outcome(value, ratios["classes"] <= 0.4)


CHECKS = [
    Check(
        "1",
        "momentum example and ZeRO tables of the worked examples",
        "equal, on real ranks",
        lambda: tests(ZERO, "tests/unit/test_plan_memory.py", "-k", "momentum or table or formula or model_state or bytes"),
    ),
    Check("2", "verify over stages, accumulation, dp, replicas, offload, tp, cp, pp; peak memory", "all; within 2 %", verified),
    Check("2b", "every stage, 20 steps", "losses within 1e-6 of ZeRO-0's", stages_agree),
    Check("2c", "bucket sizes and prefetch depths in fp32", "no bit", lambda: tests(ZERO, "-k", "no_bit")),
    Check("2d", "mutations of every collective and copy", "red", lambda: tests(ZERO, OFFLOAD, "-k", "mutation")),
    Check("3", "bytes by the closed form; peak memory by class", "equal; within 2 %", lambda: tests(OFFLOAD, "-k", "memory")),
    Check("3b", "storage windows of a step", "a picture", windows_plot),
    Check("5", "peak memory per rank, ZeRO-3 against ZeRO-0, dp=4", "0.40", peak_memory),
    Check(
        "6",
        "groups ZF, GN, LN at every stage",
        "hold",
        lambda: tests("tests/ranks/test_zero_pitfalls.py", "tests/ranks/test_loss_norm.py", OFFLOAD, "-k", "not memory"),
    ),
    Check("7", "on a GPU: losses, speed, peak memory beside the planner's, ZeRO-3 and offload", "losses within 1e-3", on_a_gpu),
]
