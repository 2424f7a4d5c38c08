"""A plan for people: tables of memory, traffic and time, and what limits it in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.plan import GIB, Candidate, CheckpointTime, Plan
from shardwright.plan.stack import MEASURED, Fit, Stack
from shardwright.plan.step_time import Pricer

SHOWN_STAGES = 6
_CLASSES = ("parameters", "gradients", "optimizer", "activations", "buffers")


def assumptions(plan: Plan, stack: Stack, fit: Fit, optimizer: str = "adamw") -> tuple[str, ...]:
    """What the numbers rest on, one line each."""
    chip, margin = plan.cluster.chip, plan.margin
    moments = "SGD with fp32 momentum" if optimizer == "sgd" else "Adam with fp32 moments"
    lines = [
        f"precision {plan.layout.precision}, gradients reduced in {plan.layout.reduce_dtype}, {moments}"
        + ("" if plan.layout.precision == "fp32" else " and master weights"),
        f"memory is allocated bytes; a device shows {margin.share:.0%} and {margin.fixed_bytes / GIB:.1f} GiB more",
        f"software stack {stack.name}: {stack.gemm(plan.layout.precision):.0%} of the peak in large products, "
        f"{'fused attention' if stack.flash else 'unfused attention'}, {stack.dp_overlap:.0%} of backward hides reductions",
    ]
    if fit.rows:
        lines.append(
            f"constants fitted on {fit.rows} runs ({fit.source}): {fit.mape:.1f} % mean error, "
            f"{fit.held_out_mape:.1f} % on runs held out"
        )
    elif stack.name == MEASURED:
        lines.append(f"constants of the stack are those of the cluster file: {fit.source}")
    else:
        lines.append("constants of the stack are guesses, not fitted on runs")
    if cores := plan.cluster.cores:
        lines.append(f"{min(plan.layout.world_size, plan.cluster.gpus_per_node)} ranks of a node share {cores} cores")
    if chip.unconfirmed:
        lines.append(f"not confirmed for {chip.name}: {', '.join(chip.unconfirmed)}")
    if plan.model.moe is not None:
        lines.append("experts are balanced: every rank computes as many rows as it sends")
    if plan.layout.world_size < plan.cluster.world_size:
        lines.append(f"the layout uses {plan.layout.world_size} of the cluster's {plan.cluster.world_size} GPUs")
    if "selective" in plan.layout.recompute.split("-") and stack.flash:
        lines.append(
            "recompute=selective drops attention scores, of which fused attention keeps none: no memory is saved"
        )
    return tuple(lines)


def dropped_terms(plan: Plan) -> tuple[str, ...]:
    """What the numbers leave out."""
    lines = ["data loading, logging and stragglers", "the token count's and the metrics' small messages"]
    if plan.layout.tp > 1:
        lines.append("reductions of norm weights over tp")
    if plan.layout.offload != "none":
        lines.append("the overlap of offload with compute")
    return tuple(lines)


def in_words(plan: Plan, pricer: Pricer) -> Iterator[str]:
    """What limits this layout, and what a change of the links would do."""
    step, memory = plan.step, plan.memory[0]
    parts = {
        "compute": step.compute_seconds,
        "the pipeline's bubble": step.bubble_seconds,
        "communication that nothing hides": step.exposed_communication_seconds,
        "the optimizer": step.optimizer_seconds,
    }
    first, second = sorted(parts, key=lambda name: -parts[name])[:2]
    yield (
        f"A step takes {step.seconds:.3g} s: {first} is {parts[first] / step.seconds:.0%} of it, "
        f"{second} {parts[second] / step.seconds:.0%}."
    )
    largest = max(_CLASSES, key=lambda name: getattr(memory, name))
    room = (plan.capacity - plan.device_bytes) / GIB
    yield (
        f"Pipeline rank {memory.stage} is the fullest with {memory.total / GIB:.1f} GiB allocated, most of it {largest}; "
        + (f"{room:.1f} GiB are free." if plan.fits else f"it lacks {-room:.1f} GiB.")
    )
    if exposed := [entry for entry in plan.communication if entry.exposed_seconds > 0]:
        worst = max(exposed, key=lambda entry: entry.exposed_seconds)
        yield (
            f"The message that is waited for most is the {worst.verb} of {worst.tensor} over {worst.axis} on {worst.link} "
            f"links: {worst.exposed_seconds:.3g} s a step."
        )
    if plan.checkpoint is not None:
        yield _checkpoint_in_words(plan, plan.checkpoint)
    if plan.sequence is not None:
        yield _sequence_in_words(plan, plan.sequence)
    for level in plan.cluster.levels:
        slow = pricer.with_cluster(_with_level(plan.cluster, level.name, 0.5)).price(plan.layout)
        change = slow.step.seconds / step.seconds - 1
        yield f"With half the bandwidth of the {level.name} links a step takes {change:.1%} longer."


def _checkpoint_in_words(plan: Plan, saved: CheckpointTime) -> str:
    """What saving costs at the plan's interval."""
    return (
        f"A checkpoint of {saved.bytes / 1e9:,.4g} GB is written in {saved.write_seconds:.3g} s at "
        f"{plan.cluster.storage_bandwidth / 1e9:.3g} GB/s a node; with one every {saved.interval_seconds:.4g} s, copying it to "
        f"host memory takes {saved.blocked_share:.2%} of the time, {saved.share_in_step:.2%} where training waits for all of it."
    )


_SEQUENCE = "tensor degree inside the fast domain, then pipeline, then data with sharding"


def _sequence_in_words(plan: Plan, usual: Candidate) -> str:
    """Where the best layout departs from what the field's sizing sequence gives."""
    if usual.layout is None or usual.seconds is None:
        return f"The sizing sequence of the field ({_SEQUENCE}) gives no layout: {usual.reason}."
    differs = [
        f"{field.name}={getattr(plan.layout, field.name)}"
        for field in fields(Layout)
        if getattr(plan.layout, field.name) != getattr(usual.layout, field.name)
    ]
    if not differs:
        return f"The best layout is the one that the sizing sequence of the field gives ({_SEQUENCE})."
    gain = usual.seconds / plan.step.seconds - 1
    return (
        f"The sizing sequence of the field ({_SEQUENCE}) gives {usual.layout}: {usual.seconds:.4g} s a step, {gain:.1%} more "
        f"than the best, which departs from it in {', '.join(differs)}."
    )


def _with_level(cluster: Cluster, name: str, factor: float) -> Cluster:
    levels = tuple(
        replace(level, bandwidth=level.bandwidth * factor) if level.name == name else level for level in cluster.levels
    )
    return replace(cluster, levels=levels)


# -- tables ----------------------------------------------------------------------------------------


def report(plan: Plan, pricer: Pricer) -> RenderableType:
    """Everything about a plan for a terminal."""
    verdict = Text("fits", style="bold green") if plan.fits else Text("does not fit", style="bold red")
    head = Text.assemble(
        (plan.model.name, "bold"), f" on {plan.cluster.nodes} x {plan.cluster.gpus_per_node} {plan.cluster.chip.name}, ",
        f"{plan.layout.global_batch} sequences of {plan.seq} tokens a step\n", f"{plan.layout}: ", verdict,
    )  # fmt: skip
    parts: list[RenderableType] = [head, memory_table(plan), time_table(plan)]
    if plan.communication:
        parts.append(traffic_table(plan))
    if plan.candidates:
        parts.append(candidate_table("Candidates", plan.candidates))
    if plan.rejected:
        parts.append(candidate_table("Rejected", plan.rejected))
    parts += [Text(line) for line in in_words(plan, pricer)]
    parts += [Text(f"assumed: {line}", style="dim") for line in plan.assumptions]
    parts += [Text(f"left out: {line}", style="dim") for line in plan.dropped_terms]
    return Group(*parts)


def memory_table(plan: Plan) -> Table:
    """Bytes per GPU, heaviest pipeline rank first."""
    shown = Table(title=f"Memory per GPU, GiB of {plan.capacity / GIB:.0f}")
    for column in ("stage", "params", "grads", "optim.", "activ.", "buffers", "sum", "device"):
        shown.add_column(column, justify="right")
    for stage in plan.memory[:SHOWN_STAGES]:
        sizes = [f"{getattr(stage, name) / GIB:.2f}" for name in _CLASSES]
        device = plan.margin.device_bytes(stage.total) / GIB
        shown.add_row(str(stage.stage), *sizes, f"{stage.total / GIB:.2f}", f"{device:.2f}")
    if len(plan.memory) > SHOWN_STAGES:
        shown.caption = f"and {len(plan.memory) - SHOWN_STAGES} lighter"
    return shown


def time_table(plan: Plan) -> Table:
    """The step's parts and its rates."""
    step = plan.step
    shown = Table(title=f"Step, {plan.pipeline.schedule} with {plan.pipeline.microbatches} micro-batches")
    for column in ("part", "seconds", "share"):
        shown.add_column(column, justify="left" if column == "part" else "right")
    for name, seconds in (
        ("compute", step.compute_seconds), ("bubble", step.bubble_seconds),
        ("exposed communication", step.exposed_communication_seconds), ("optimizer", step.optimizer_seconds),
        ("other", step.other_seconds), ("step", step.seconds),
    ):  # fmt: skip
        if seconds:
            shown.add_row(name, f"{seconds:.4g}", f"{seconds / step.seconds:.1%}")
    shown.caption = (
        f"{step.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, MFU {step.mfu:.1%} of {step.mfu_precision} (causal; "
        f"{step.mfu_full_attention:.1%} with full attention, {step.mfu_with_embedding:.1%} with the embedding), "
        f"HFU {step.hfu:.1%}, bubble {plan.pipeline.bubble_fraction:.1%}"
    )
    return shown


def traffic_table(plan: Plan) -> Table:
    """What one GPU of the slowest pipeline rank sends in a step, by axis, verb and link, longest waits first."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for entry in plan.communication:
        total = sums.setdefault((entry.axis, entry.verb, entry.link), [0, 0, 0, 0])
        for index, value in enumerate((entry.count, entry.bytes, entry.seconds, entry.exposed_seconds)):
            total[index] += value
    shown = Table(title="Messages of one GPU in a step")
    for column in ("axis", "verb", "link", "count", "GB", "seconds", "exposed"):
        shown.add_column(column, justify="left" if column in ("axis", "verb", "link") else "right")
    for names, (count, sent, seconds, exposed) in sorted(sums.items(), key=lambda item: (-item[1][3], -item[1][2])):
        shown.add_row(*names, f"{count:.0f}", f"{sent / 1e9:,.3f}", f"{seconds:.3g}", f"{exposed:.3g}")
    return shown


def candidate_table(title: str, candidates: tuple[Candidate, ...]) -> Table:
    """Layouts with their time, memory and, where rejected, the reason."""
    shown = Table(title=title)
    for column in ("layout", "s/step", "GiB", "reason"):
        shown.add_column(column, justify="right" if column in ("s/step", "GiB") else "left", overflow="fold")
    for candidate in candidates:
        shown.add_row(
            "*" if candidate.layout is None else str(candidate.layout),
            "" if candidate.seconds is None else f"{candidate.seconds:.3g}",
            "" if candidate.memory_bytes is None else f"{candidate.memory_bytes / GIB:.1f}",
            candidate.reason,
        )
    return shown


def print_plan(console: Console, plan: Plan, pricer: Pricer) -> None:
    """Print the report."""
    console.print(report(plan, pricer))
