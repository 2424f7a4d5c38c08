"""A serving plan for people: what a user of the endpoint sees, memory, candidates, and what limits it in words."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.core.plan import GIB
from shardwright.plan.explain import candidate_table
from shardwright.plan.serve_search import ServingPlan

SHOWN_REJECTED = 8


def serving_report(plan: ServingPlan) -> RenderableType:
    """Everything about a serving plan for a terminal."""
    verdict = Text("fits", style="bold green") if plan.fits else Text("does not meet the target", style="bold red")
    load = plan.load
    head = Text.assemble(
        (plan.model.name, "bold"), f" on {plan.cluster.nodes} x {plan.cluster.gpus_per_node} {plan.cluster.chip.name}, "
        f"{load.concurrency} requests at once of {load.input_tokens} + {load.output_tokens} tokens\n",
        f"{plan.price.layout}: ", verdict,
    )  # fmt: skip
    parts: list[RenderableType] = [head, users_table(plan), cache_table(plan)]
    if plan.rejected:
        parts.append(candidate_table("Rejected", plan.rejected[:SHOWN_REJECTED]))
    parts += [Text(line) for line in serving_in_words(plan)]
    parts += [Text(f"assumed: {line}", style="dim") for line in plan.assumptions]
    parts += [Text(f"left out: {line}", style="dim") for line in plan.dropped_terms]
    return Group(*parts)


def users_table(plan: ServingPlan) -> Table:
    """Candidates, the chosen one first."""
    shown = Table(title="Groups")
    for column in ("layout", "TTFT ms", "TPOT ms", "tokens/s", "per GPU", "requests/s", "sequences"):
        shown.add_column(column, justify="left" if column == "layout" else "right", overflow="fold")
    for price in plan.candidates:
        times = price.times
        shown.add_row(
            str(price.layout), f"{1e3 * times.ttft_seconds:.0f}", f"{1e3 * times.tpot_seconds:.2f}",
            f"{times.output_tokens_per_second:,.0f}", f"{price.tokens_per_second_per_gpu:,.0f}",
            f"{times.requests_per_second:.3g}", f"{price.memory.sequences:,}",
        )  # fmt: skip
    return shown


def cache_table(plan: ServingPlan) -> Table:
    """What is on the fullest GPU of the chosen group."""
    memory = plan.price.memory
    shown = Table(title=f"Memory per GPU, GiB of {memory.capacity / GIB:.0f}")
    for column in ("weights", "workspace", "cache", "KiB per token", "tokens in the group's cache"):
        shown.add_column(column, justify="right")
    sizes = [f"{size / GIB:.2f}" for size in (memory.weights, memory.workspace, memory.cache)]
    shown.add_row(*sizes, f"{memory.kv_bytes_per_token / 1024:.1f}", f"{memory.tokens:,}")
    return shown


def serving_in_words(plan: ServingPlan) -> Iterator[str]:
    """What a decode step spends its time on, what the cache holds, and how few GPUs the weights need."""
    price, times = plan.price, plan.price.times
    share = times.communication_seconds / times.decode_seconds
    others = 1e3 * (times.tpot_seconds - times.decode_seconds)
    yield (
        f"A decode step takes {1e3 * times.decode_seconds:.2f} ms, {share:.0%} of it messages; a prompt takes "
        f"{1e3 * times.prefill_seconds:.0f} ms, and prompts of others add {others:.2f} ms to each token."
    )
    if times.running < plan.load.concurrency:
        yield (
            f"The cache holds {times.running} of {plan.load.concurrency} requests: the others wait "
            f"{times.queue_seconds:.3g} s on average."
        )
    if price.tokens_per_expert is not None:
        yield f"An expert sees {price.tokens_per_expert:.2g} rows a step: with few rows its products are bound by memory."
    yield f"The weights need at least {plan.least_gpus} GPUs of this kind."
    if plan.least is None:
        yield f"No group of the cluster's {plan.cluster.world_size} GPUs or fewer serves the load within the target."
    else:
        least = plan.least
        yield (
            f"The fewest GPUs that serve the load within the target are {least.layout.world_size} ({least.layout}): TTFT "
            f"{1e3 * least.times.ttft_seconds:.0f} ms, TPOT {1e3 * least.times.tpot_seconds:.2f} ms."
        )


def print_serving(console: Console, plan: ServingPlan) -> None:
    """Print the report."""
    console.print(serving_report(plan))
