"""Compute beside communication: two streams of one rank as an event simulation with contention.

A rank has a compute stream and a communication stream, each in order. A task starts when the tasks it names have ended and
its stream is free. While both streams work they slow each other: communication runs at ``beside`` of its rate (0: it makes
no progress beside compute, so all of it shows), compute at 1 / (1 + ``contention``). What the makespan has above the
compute is exposed.

One pass over n units: with full sharding unit i's parameters are gathered before its forward (``prefetch`` units ahead)
and again before its backward, and its gradient is reduced after it; otherwise only buckets are reduced as backward
finishes them. Equal units reach a steady state within a few, so many are continued from two short simulations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwright.core.layout import Layout
from shardwright.plan.stack import Stack
from shardwright.plan.traffic import Message

SHORT, LONG = 3, 5
"""Units of the two simulations from which more are continued."""


@dataclass(frozen=True)
class Task:
    """``seconds`` of work on its stream, once the tasks of the indices ``after`` have ended."""

    stream: int
    seconds: float
    after: tuple[int, ...] = ()


COMPUTE, SEND = 0, 1


def makespan(tasks: Sequence[Task], beside: float, contention: float) -> float:
    """Seconds until every task has ended; tasks of a stream run in the order given."""
    queues = [[index for index, task in enumerate(tasks) if task.stream == stream] for stream in (COMPUTE, SEND)]
    left = [task.seconds for task in tasks]
    place, ended, now = [0, 0], [False] * len(tasks), 0.0
    while True:
        heads: list[int | None] = []
        for stream, queue in enumerate(queues):
            head = queue[place[stream]] if place[stream] < len(queue) else None
            heads.append(head if head is not None and all(ended[i] for i in tasks[head].after) else None)
        if heads == [None, None]:
            assert place == [len(queue) for queue in queues], "tasks wait for one another"
            return now
        both = None not in heads
        rates = (1 / (1 + contention) if both else 1.0, beside if both else 1.0)
        finish = [
            left[head] / rate if rate > 0 else float("inf") if left[head] > 0 else 0.0
            for head, rate in zip(heads, rates, strict=True)
            if head is not None
        ]
        step = min(finish)
        now += step
        for stream, head in enumerate(heads):
            if head is None:
                continue
            left[head] -= step * rates[stream]
            if left[head] <= 1e-15 + 1e-12 * tasks[head].seconds:
                ended[head] = True
                place[stream] += 1


@lru_cache(maxsize=65536)
def exposed(
    units: int, forward: float, backward: float, gather: float, again: float, reduce: float, prefetch: int, beside: float,
    contention: float,
) -> float:  # fmt: skip
    """Seconds of one pass over ``units`` equal units that communication adds to their compute.

    ``forward`` and ``backward`` of one unit; ``gather`` of its parameters before forward, ``again`` before backward,
    ``reduce`` of its gradient after (0: none).
    """
    if gather == again == reduce == 0.0:
        return 0.0
    if units > LONG:
        short, long = (
            exposed(count, forward, backward, gather, again, reduce, prefetch, beside, contention)
            for count in (SHORT, LONG)
        )
        return long + (long - short) / (LONG - SHORT) * (units - LONG)
    tasks = _pass(units, forward, backward, gather, again, reduce, prefetch)
    return makespan(tasks, beside, contention) - units * (forward + backward)


def _pass(
    units: int, forward: float, backward: float, gather: float, again: float, reduce: float, prefetch: int
) -> list[Task]:
    """The tasks of one forward and one backward, in the order in which each stream is fed."""
    tasks: list[Task] = []
    compute: list[int] = []
    sequence = [(forward, gather, 0.0)] * units + [(backward, again, reduce)] * units
    gathered: dict[int, int] = {}

    def start_gather(use: int) -> None:
        if use < len(sequence) and use not in gathered and sequence[use][1] > 0:
            ready = use - prefetch - 1  # so many units ahead are whole at once
            after = (compute[ready],) if 0 <= ready < len(compute) else ()
            gathered[use] = len(tasks)
            tasks.append(Task(SEND, sequence[use][1], after))

    for use, (seconds, _, sent) in enumerate(sequence):
        for ahead in range(prefetch + 1):
            start_gather(use + ahead)
        after = (gathered[use],) if use in gathered else ()
        compute.append(len(tasks))
        tasks.append(Task(COMPUTE, seconds, after))
        if sent > 0:
            tasks.append(Task(SEND, sent, (compute[-1],)))
    return tasks


def hidden(
    messages: Sequence[Message], layout: Layout, units: int, times: tuple[float, float, float], stack: Stack
) -> list[Message]:
    """A rank's messages of parameters and gradients with what of them shows; ``times``: F, B and W of a micro-batch.

    Fully sharded units are gathered for every micro-batch (or once) and reduced with the last one's backward, or with
    every one's; updated parameters of ZeRO-1 and 2 are gathered beside the next step's first forward.
    """
    forward, backward = times[0] / units, (times[1] + times[2]) / units
    total = {
        phase: sum(m.seconds * m.count for m in messages if m.phase == phase)
        for phase in ("F", "B", "reduce", "update")
    }
    each = layout.microbatches if layout.accumulate == "reduce" else 1
    passes = layout.microbatches if layout.zero == 3 and not layout.keeps_gathered else each

    def shown(gather: float, again: float, reduce: float, prefetch: int) -> float:
        return exposed(units, forward, backward, gather, again, reduce, prefetch, stack.dp_overlap, stack.contention)

    gather, again = total["F"] / passes / units, total["B"] / passes / units
    reduce = total["reduce"] / each / units
    during = each * shown(gather, again, reduce, layout.prefetch) + (passes - each) * shown(
        gather, again, 0.0, layout.prefetch
    )
    after = shown(total["update"] / units, 0.0, 0.0, units)
    sums = {"F": during, "B": during, "reduce": during, "update": after}
    whole = total["F"] + total["B"] + total["reduce"]
    weight = dict.fromkeys(("F", "B", "reduce"), whole) | {"update": total["update"]}
    return [
        replace(m, exposed=m.seconds * (sums[m.phase] / weight[m.phase] if weight[m.phase] else 0.0)) for m in messages
    ]
