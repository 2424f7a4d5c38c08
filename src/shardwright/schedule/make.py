"""Generators: each schedule is a few lines over `Action`. One stage is the schedule of pp=1, not a special case."""

from __future__ import annotations

from shardwright.core.layout import Layout
from shardwright.errors import LayoutError
from shardwright.schedule.action import Action, Kind, Schedule


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): every stage holds m micro-batches at its peak."""
    rows = []
    for stage in range(num_stages):
        forward = [Action(Kind.F, stage, m) for m in range(num_microbatches)]
        rows.append((*forward, *(Action(Kind.BW, stage, m) for m in range(num_microbatches))))
    return Schedule("gpipe", num_stages, num_microbatches, tuple(range(num_stages)), tuple(rows))


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B (Narayanan et al. 2021, section 2.2.1): stage s of p holds at most min(p - s, m) micro-batches."""
    rows = []
    for stage in range(num_stages):
        warm_up = min(num_stages - stage - 1, num_microbatches)
        row = [Action(Kind.F, stage, m) for m in range(warm_up)]
        for m in range(num_microbatches - warm_up):
            row += [Action(Kind.F, stage, warm_up + m), Action(Kind.BW, stage, m)]
        row += [Action(Kind.BW, stage, m) for m in range(num_microbatches - warm_up, num_microbatches)]
        rows.append(tuple(row))
    return Schedule("1f1b", num_stages, num_microbatches, tuple(range(num_stages)), tuple(rows))


def make_schedule(layout: Layout) -> Schedule:
    """The schedule that ``layout`` names, for its stages and micro-batches."""
    if layout.virtual > 1 and layout.schedule in ("1f1b", "gpipe"):
        raise LayoutError(f"virtual={layout.virtual} needs a schedule with several stages per rank; leave virtual out")
    if layout.pp == 1 or layout.schedule == "1f1b":
        return one_forward_one_backward(layout.pp, layout.microbatches)
    if layout.schedule == "gpipe":
        return gpipe(layout.pp, layout.microbatches)
    raise LayoutError(f"schedule={layout.schedule} is not built yet; use 1f1b or gpipe")
