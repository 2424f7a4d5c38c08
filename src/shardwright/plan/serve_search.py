"""The best group for a latency or throughput target, and the answer as a value with the keys of a plan.

A cluster of G GPUs is cut into equal replicas of tp x pp ranks, with or without experts spread over replicas. Layouts
whose cache cannot hold one request are rejected; those that miss a target come after those that meet all of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.ledger import LedgerEntry
from shardwright.core.model_config import ModelConfig
from shardwright.core.plan import GIB, Candidate
from shardwright.errors import ConfigError, LayoutError
from shardwright.plan.serving import Load, ServingPrice, ServingPricer, fewest_gpus
from shardwright.plan.stack import Fit

OBJECTIVES = ("latency", "throughput")


@dataclass(frozen=True)
class Target:
    """Limits in seconds (None: no limit), and what to improve within them: ``latency`` (TPOT) or ``throughput``."""

    objective: str = "throughput"
    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(f"objective={self.objective} is not known; use one of {', '.join(OBJECTIVES)}")
        for name in ("ttft", "tpot"):
            limit = getattr(self, name)
            if limit is not None and limit <= 0:
                raise ConfigError(f"a target of {limit} s for {name} must be above 0")

    def missed(self, price: ServingPrice) -> str:
        """Which limit ``price`` breaks, in words; empty when it keeps both."""
        times = price.times
        for name, limit, value in (("TTFT", self.ttft, times.ttft_seconds), ("TPOT", self.tpot, times.tpot_seconds)):
            if limit is not None and value > limit:
                return f"{name} of {1e3 * value:.4g} ms is above the target of {1e3 * limit:.4g} ms"
        return ""

    def cost(self, price: ServingPrice) -> float:
        """What the search makes least."""
        if self.objective == "latency":
            return price.times.tpot_seconds
        return -price.tokens_per_second_per_gpu


@dataclass(frozen=True)
class ServingPlan:
    """The chosen group under a load, its rivals, and those left out with the reason."""

    model: ModelConfig
    cluster: Cluster
    load: Load
    target: Target
    price: ServingPrice
    communication: tuple[LedgerEntry, ...]
    least_gpus: int
    assumptions: tuple[str, ...] = ()
    dropped_terms: tuple[str, ...] = ()
    candidates: tuple[ServingPrice, ...] = ()
    rejected: tuple[Candidate, ...] = ()
    least: ServingPrice | None = None
    """The group of the fewest GPUs of the cluster that serve the load within the target."""

    @property
    def fits(self) -> bool:
        """Whether a request fits and every target is met."""
        return self.price.fits and not self.target.missed(self.price)

    def to_json(self) -> dict[str, Any]:
        """The keys of a plan, and ``serving`` with what a user of the endpoint sees."""
        price, memory, times = self.price, self.price.memory, self.price.times
        return {
            "model": {
                "name": self.model.name,
                "parameters": self.model.num_parameters(),
                "active_parameters": self.model.num_active_parameters(),
                "input_tokens": self.load.input_tokens,
                "output_tokens": self.load.output_tokens,
            },
            "cluster": {
                "chip": self.cluster.chip.name,
                "nodes": self.cluster.nodes,
                "gpus_per_node": self.cluster.gpus_per_node,
                "gpus": self.cluster.world_size,
                "unconfirmed": list(self.cluster.chip.unconfirmed),
            },
            "layout": str(price.layout),
            "fits": self.fits,
            "memory": [
                {
                    "stage": 0, "parameters": memory.weights, "gradients": 0, "optimizer": 0, "activations": 0,
                    "buffers": memory.workspace, "cache": memory.cache, "total": memory.total + memory.cache,
                    "capacity": memory.capacity,
                }
            ],
            "communication": [
                {("bytes_per_gpu" if name == "bytes" else name): value for name, value in asdict(entry).items()}
                for entry in self.communication
            ],
            "pipeline": {
                "schedule": "none", "stages": price.layout.pp, "microbatches": price.layout.pp, "bubble_fraction": 0.0,
                "in_flight": [1.0] * price.layout.pp,
            },
            "step": {
                "seconds": times.decode_seconds,
                "tokens_per_second_per_gpu": price.tokens_per_second_per_gpu,
                "compute_seconds": times.compute_seconds,
                "exposed_communication_seconds": times.communication_seconds,
                "bubble_seconds": 0.0,
                "mfu": None,
                "mfu_convention": "a decode step is bound by memory: no MFU",
            },
            "serving": self.serving(price)
            | {
                "least_group": None
                if self.least is None
                else {"gpus": self.least.layout.world_size, "layout": str(self.least.layout), **self.serving(self.least)}
            },
            "assumptions": list(self.assumptions),
            "dropped_terms": list(self.dropped_terms),
            "candidates": [{"layout": str(other.layout), **self.serving(other)} for other in self.candidates],
            "rejected": [candidate.to_json() for candidate in self.rejected],
        }  # fmt: skip

    def serving(self, price: ServingPrice) -> dict[str, Any]:
        """What ``price`` promises, in seconds, bytes and tokens."""
        memory, times = price.memory, price.times
        found: dict[str, Any] = {
            "concurrency": self.load.concurrency,
            "running": times.running,
            "ttft_seconds": times.ttft_seconds,
            "tpot_seconds": times.tpot_seconds,
            "prefill_seconds": times.prefill_seconds,
            "decode_seconds": times.decode_seconds,
            "queue_seconds": times.queue_seconds,
            "requests_per_second": times.requests_per_second,
            "output_tokens_per_second": times.output_tokens_per_second,
            "tokens_per_second_per_gpu": price.tokens_per_second_per_gpu,
            "weight_bytes_per_gpu": memory.weights,
            "kv_bytes_per_token_per_gpu": memory.kv_bytes_per_token,
            "kv_bytes_per_token": self.model.kv_bytes_per_token(1) * self.load.kv_bytes,
            "capacity_tokens": memory.tokens,
            "capacity_sequences": memory.sequences,
            "least_gpus_for_weights": self.least_gpus,
        }
        return found | ({} if price.tokens_per_expert is None else {"tokens_per_expert": price.tokens_per_expert})


def plan_serving(
    pricer: ServingPricer, load: Load, target: Target, layout: Layout | None, precision: str, top: int, fit: Fit
) -> ServingPlan:
    """Price ``layout``, or all layouts of the cluster; raises :class:`ConfigError` where nothing is legal."""
    rejected: list[Candidate] = []
    priced: list[ServingPrice] = []
    for choice in [layout] if layout is not None else _layouts(pricer, precision):
        try:
            price = pricer.price(choice, load)
        except LayoutError as error:
            if layout is not None:
                raise
            rejected.append(Candidate(choice, reason=str(error)))
            continue
        if not price.fits and layout is None:
            rejected.append(_too_large(pricer, price))
            continue
        priced.append(price)
    if not priced:
        least = fewest_gpus(pricer.model, pricer.cluster, precision)
        raise ConfigError(
            f"no group on {pricer.cluster.world_size} {pricer.cluster.chip.name} holds {pricer.model.name} and one request "
            f"of {load.length} tokens; the weights alone need {least} GPUs in {precision}: add GPUs or lower the precision"
        )
    priced.sort(key=lambda price: (bool(target.missed(price)), target.cost(price), str(price.layout)))
    best = priced[0]
    rejected += [
        Candidate(p.layout, p.times.tpot_seconds, reason=target.missed(p)) for p in priced[1:] if target.missed(p)
    ]
    return ServingPlan(
        pricer.model, pricer.cluster, load, target, best,
        tuple(pricer.messages(best.layout, best.times.running / best.layout.dp / best.layout.pp)),
        fewest_gpus(pricer.model, pricer.cluster, best.layout.precision),
        _assumptions(pricer, best, load, fit), _dropped(), tuple(priced[:top]), tuple(rejected),
        least_group(pricer, load, target, best.layout.precision),
    )  # fmt: skip


def least_group(pricer: ServingPricer, load: Load, target: Target, precision: str) -> ServingPrice | None:
    """The fewest GPUs of the cluster that meet the target, at the load's whole concurrency; None where none do."""
    for gpus in (k for k in range(1, pricer.cluster.world_size + 1) if pricer.cluster.world_size % k == 0):
        per_node = min(gpus, pricer.cluster.gpus_per_node)
        part = replace(pricer.cluster, nodes=gpus // per_node, gpus_per_node=per_node)
        smaller = ServingPricer(pricer.model, part, pricer.stack)
        found = []
        for layout in _layouts(smaller, precision):
            try:
                price = smaller.price(layout, load)
            except LayoutError:
                continue
            if price.fits and not target.missed(price):
                found.append(price)
        if found:
            return min(found, key=target.cost)
    return None


def _layouts(pricer: ServingPricer, precision: str) -> list[Layout]:
    model, world = pricer.model, pricer.cluster.world_size
    fast = pricer.cluster.fast_size
    found = []
    for tp in (k for k in range(1, min(fast, world) + 1) if world % k == 0 and model.num_heads % k == 0):
        for pp in (k for k in (1, 2, 4, 8, 16) if world % (tp * k) == 0 and k <= model.num_layers):
            dp = world // (tp * pp)
            for ep in {1, tp, tp * dp} if model.moe is not None else {1}:
                if model.moe is None or model.moe.num_experts % ep == 0:
                    found.append(Layout(tp=tp, pp=pp, dp=dp, ep=ep, precision=precision))
    return found


def _too_large(pricer: ServingPricer, price: ServingPrice) -> Candidate:
    memory, usable = price.memory, price.memory.capacity
    lacks = "weights and workspace" if memory.cache == 0 else "the cache of one request"
    return Candidate(
        price.layout,
        memory_bytes=memory.total,
        reason=f"no room for {lacks}: {memory.weights / GIB:.1f} GiB of weights on {usable / GIB:.1f} GiB",
    )


def _assumptions(pricer: ServingPricer, price: ServingPrice, load: Load, fit: Fit) -> tuple[str, ...]:
    stack, layout = pricer.stack, price.layout
    lines = [
        f"weights in {layout.precision}, cache in {load.kv_bytes:g} bytes a value; 90 % of a GPU for weights, workspace, cache",
        f"engine {stack.name}: {stack.memory:.0%} of the memory's bandwidth, {stack.gemm(layout.precision):.0%} of the peak",
        "TTFT from arrival, waiting included; TPOT over all output tokens but the first",
        f"all {load.concurrency} requests are sent at once, a new one when one ends, spread evenly over dp={layout.dp} replicas",
    ]
    if fit.rows:
        lines.append(
            f"constants fitted on {fit.rows} runs ({fit.source}): TPOT {fit.mape:.1f} % off, TTFT {fit.ttft_mape:.1f} %; "
            f"on runs held out {fit.held_out_mape:.1f} % and {fit.held_out_ttft_mape:.1f} %"
        )
    else:
        lines.append("constants of the engine are guesses, not fitted on runs")
    if pricer.model.moe is not None:
        lines.append("experts are chosen by popularity; 4-bit checkpoints hold experts in 4 bits, the rest in bf16")
    return tuple(lines)


def _dropped() -> tuple[str, ...]:
    return ("prefix reuse", "speculative decoding", "preemption and swapping", "a queue before the engine")
