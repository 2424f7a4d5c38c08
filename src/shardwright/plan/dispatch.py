"""The closed form of what layers with experts send: dispatches over ep, routers' sums over the ranks of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from shardwright.core.dispatch import COUNT_BYTES, DispatchPlan, assumed_plan
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger, ring_bytes
from shardwright.core.model_config import ModelConfig, MoEConfig
from shardwright.core.run_config import RouterConfig

Dispatches = Mapping[str, Sequence[DispatchPlan]]
"""Layer -> its plans of one step, in order: one for each micro-batch, or two with ``ep_overlap``."""


def moe_layers(model: ModelConfig, units: Sequence[str]) -> list[int]:
    """The layers with experts among these units."""
    layers = [int(unit.removeprefix("blocks.")) for unit in units if unit.startswith("blocks.")]
    return [layer for layer in layers if model.is_moe_layer(layer)]


def even_dispatches(model: ModelConfig, layout: Layout, tokens: int, units: Sequence[str], rank: int) -> Dispatches:
    """The plans of a routing that spreads each rank's ``tokens`` evenly: what a dry run assumes too."""
    assert model.moe is not None
    parts = 2 if layout.ep_overlap else 1
    cuts = [tokens * index // parts for index in range(parts + 1)]
    plans = [
        assumed_plan(
            ep=layout.ep,
            rank=layout.grid.index_in_stage(rank) % layout.ep,
            num_experts=model.moe.num_experts,
            tokens=high - low,
            top_k=model.moe.top_k,
            deduplicate=layout.ep_deduplicate,
        )
        for low, high in pairwise(cuts)
    ]
    return {f"blocks.{layer}.moe": plans * layout.microbatches for layer in moe_layers(model, units)}


def dispatch_traffic(ledger: Ledger, model: ModelConfig, layout: Layout, dispatches: Dispatches, value: int) -> None:
    """Add one step's messages over ep: per dispatch E counts, and each way forward and backward the rows of D values of
    ``value`` bytes that are for other ranks. Full recomputation repeats what the forward pass sent.

    Where tokens are deduplicated rows are distinct tokens, and each pair's place and weight go along; backward the weight's
    gradient.
    """
    row = model.dim * value
    wide = 8 if layout.precision == "fp64" else 4
    parts = 2 if layout.ep_overlap else 1
    forward = ("F", "recompute") if layout.recompute == "full" else ("F",)
    for plans in dispatches.values():
        for index, plan in enumerate(plans):
            send, receive = (plan.remote(sizes) * row for sizes in plan.row_sizes)
            counts = (plan.ep - 1) * (plan.num_local + layout.ep_deduplicate) * COUNT_BYTES
            for phase in forward:
                ledger.add(phase, "all_to_all", "ep", "expert counts", counts, count=int(index % parts == 0))
                ledger.add(phase, "all_to_all", "ep", "dispatch", send)
                ledger.add(phase, "all_to_all", "ep", "combine", receive)
            ledger.add("B", "all_to_all", "ep", "combine", send)
            ledger.add("B", "all_to_all", "ep", "dispatch", receive)
            if layout.ep_deduplicate:
                for phase in forward:
                    pairs = plan.remote(plan.send_sizes) * 2 * wide
                    ledger.add(phase, "all_to_all", "ep", "dispatch weights", pairs)
                back = plan.remote(plan.receive_sizes) * wide
                ledger.add("B", "all_to_all", "ep", "dispatch weights", back)


def router_traffic(
    ledger: Ledger, model: ModelConfig, layout: Layout, router: RouterConfig, tokens: int, units: Sequence[str]
) -> None:
    """Add what the routers of ``units`` send in one step of micro-batches of ``tokens`` tokens on each rank.

    Choices are counted over all ranks of a stage (or of a sequence) for the auxiliary loss. With a capacity the choices
    of a sequence's tokens, and for rerouting or dropping by score their scores, are gathered over tp and cp.
    """
    moe = model.moe
    assert moe is not None
    times = len(moe_layers(model, units)) * layout.microbatches
    if not times:
        return
    sequence_ranks = layout.grid.degree("tp_cp")
    if moe.aux_coefficient:
        by_sequence = router.balance == "sequence"
        axis, ranks = ("tp_cp", sequence_ranks) if by_sequence else ("stage", layout.grid.degree("stage"))
        if ranks > 1:
            elements = moe.num_experts * (layout.micro_batch if by_sequence else 1)
            sent = ring_bytes("all_reduce", elements, COUNT_BYTES, ranks)
            ledger.add("F", "all_reduce", axis, "choices of experts", sent * times, count=times)
    if layout.capacity is not None and sequence_ranks > 1:
        _capacity_traffic(ledger, layout, moe, router, tokens * sequence_ranks, times)


def _capacity_traffic(
    ledger: Ledger, layout: Layout, moe: MoEConfig, router: RouterConfig, tokens: int, times: int
) -> None:
    assert layout.capacity is not None
    wide = 8 if layout.precision == "fp64" or router.dtype == "fp64" else 4
    ranks = layout.grid.degree("tp_cp")
    messages = {"choices": tokens * (moe.top_k + 2) * COUNT_BYTES}
    if layout.capacity[1] == "reroute" or router.drop_by == "probability":
        messages["scores"] = tokens * moe.num_experts * wide
    for phase in ("F", "recompute") if layout.recompute == "full" else ("F",):
        for name, size in messages.items():
            sent = ring_bytes("all_gather", size, 1, ranks)
            ledger.add(phase, "all_gather", "tp_cp", name, sent * times, count=times)


def report_traffic(ledger: Ledger, model: ModelConfig, layout: Layout) -> None:
    """Add the sum over all ranks of what the routers did: counts, dropped and rerouted choices by layer, and the loss."""
    if model.moe is None or layout.world_size == 1:
        return
    layers = sum(model.is_moe_layer(layer) for layer in range(model.num_layers))
    elements = layers * (model.moe.num_experts + 2) + 1
    sent = ring_bytes("all_reduce", elements, 8, layout.world_size)
    ledger.add("metrics", "all_reduce", "world", "routers", sent)
