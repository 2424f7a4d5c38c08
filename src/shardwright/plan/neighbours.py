"""Layouts one change away from another: what would make it fit, and a plan of one layout beside them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from shardwright.core.layout import Layout
from shardwright.core.plan import GIB, Candidate, Plan
from shardwright.errors import LayoutError
from shardwright.plan.step_time import Pricer


def neighbours(layout: Layout) -> list[Layout]:
    """Layouts one change away that need less memory: what would make ``layout`` fit."""
    changes: list[dict[str, Any]] = []
    if layout.dp * layout.cp > 1:
        reduced = {"accumulate": "reduce"} if layout.microbatches > 1 else {}
        changes += [{"zero": zero, **(reduced if zero > 1 else {})} for zero in (1, 2, 3) if zero > layout.zero]
    if layout.recompute != "full":
        changes.append({"recompute": "full"})
    if layout.micro_batch % 2 == 0:
        changes.append({"micro_batch": layout.micro_batch // 2, "microbatches": layout.microbatches * 2})
    if layout.dp % 2 == 0:
        more = {"dp": layout.dp // 2, "microbatches": layout.microbatches * 2}
        changes += [{**more, "tp": layout.tp * 2}, {**more, "pp": layout.pp * 2}, {**more, "cp": layout.cp * 2}]
    changes.append({"offload": "optimizer"})
    found = []
    for change in changes:
        try:
            found.append(layout.with_(**change).without_idle())
        except LayoutError:
            continue
    return found


def remedy(pricer: Pricer, layout: Layout) -> str:
    """The first change that makes ``layout`` fit, in words for the end of a sentence; empty where none does."""
    for other in neighbours(layout):
        if not pricer.refusal(other) and pricer.peak_bytes(other) <= pricer.cluster.chip.memory_bytes:
            changed = [f for f in fields(Layout) if getattr(other, f.name) != getattr(layout, f.name)]
            return "; fits with " + ", ".join(f"{f.name}={getattr(other, f.name)}" for f in changed)
    return ""


def price_with_neighbours(pricer: Pricer, layout: Layout, top: int = 5) -> Plan:
    """One layout with its neighbours: those that fit as candidates, the others as rejected with the reason."""
    plan = pricer.price(layout)
    fitting, rejected = [plan], []
    for other in neighbours(layout):
        if reason := pricer.refusal(other):
            rejected.append(Candidate(other, reason=reason))
            continue
        near = pricer.price(other)
        if near.fits:
            fitting.append(near)
        else:
            lacks = (near.device_bytes - near.capacity) / GIB
            reason = f"{lacks:.1f} GiB more than the GPU has"
            rejected.append(Candidate(other, near.step.seconds, near.device_bytes, reason))
    shown = sorted((p for p in fitting if p.fits), key=lambda p: p.step.seconds)[:top]
    candidates = tuple(Candidate(p.layout, p.step.seconds, p.memory[0].total) for p in shown)
    return replace(plan, candidates=candidates, rejected=tuple(rejected))
