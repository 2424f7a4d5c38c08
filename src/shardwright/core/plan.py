"""`Plan`: a model, a layout and a cluster with what they need and how long a step takes. A value; the planner makes it.

Units: bytes, seconds. Memory is per GPU and means bytes that a framework allocates; `Margin` says what comes on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwright.core.cluster import Cluster
from shardwright.core.layout import Layout
from shardwright.core.ledger import LedgerEntry
from shardwright.core.model_config import ModelConfig

GIB = 2**30


@dataclass(frozen=True)
class Margin:
    """What a device holds beyond allocated bytes: context and communicators, and the allocator's slack (a share)."""

    fixed_bytes: int = int(1.5 * GIB)
    share: float = 0.03

    def device_bytes(self, allocated: float) -> float:
        """Bytes that a device with ``allocated`` bytes of tensors shows as used."""
        return allocated * (1 + self.share) + self.fixed_bytes


@dataclass(frozen=True)
class StageMemory:
    """Peak bytes of one GPU of pipeline rank ``stage``, by class. ``parts`` splits classes further, for reports.

    ``host``: bytes of host memory by class, where state is offloaded; no part of ``total``.
    """

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    parts: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def model_state(self) -> int:
        """Parameters, gradients and optimizer state: what stays between steps."""
        return self.parameters + self.gradients + self.optimizer

    def to_json(self, capacity: int) -> dict[str, Any]:
        values = asdict(self)
        parts, host = values.pop("parts"), values.pop("host")
        return {**values, "total": self.total, "capacity": capacity, "parts": dict(parts), "host": dict(host)}


@dataclass(frozen=True)
class PipelineSummary:
    """``bubble_fraction``: 1 - busy / (p x makespan) over all ranks; ``in_flight``: micro-batches held per rank."""

    schedule: str
    stages: int
    microbatches: int
    bubble_fraction: float
    in_flight: tuple[float, ...]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step and their parts, which add up; throughput and utilisation.

    ``mfu``: model FLOPs (``mfu_convention``) over the dense peak of ``mfu_precision``; ``mfu_full_attention`` counts the
    whole square of scores, ``mfu_with_embedding`` the look-up as if it were a product (6 N with all parameters N), ``hfu`` the
    FLOPs that are computed, with recomputation.
    """

    seconds: float
    tokens_per_second_per_gpu: float
    mfu: float
    mfu_convention: str
    mfu_precision: str
    mfu_full_attention: float
    mfu_with_embedding: float
    hfu: float
    compute_seconds: float
    bubble_seconds: float
    exposed_communication_seconds: float
    optimizer_seconds: float
    other_seconds: float


@dataclass(frozen=True)
class CheckpointTime:
    """One checkpoint: bytes of parameters and optimizer state, seconds that training waits (the copy to host memory), seconds
    of writing, which goes on beside training, and the seconds between two."""

    bytes: int
    blocked_seconds: float
    write_seconds: float
    interval_seconds: float

    @property
    def blocked_share(self) -> float:
        """Of an interval, what training waits: the copy, and what of the writing is not done when the next is due."""
        late = max(0.0, self.blocked_seconds + self.write_seconds - self.interval_seconds)
        return (self.blocked_seconds + late) / self.interval_seconds

    @property
    def share_in_step(self) -> float:
        """The same where training waits for the writing too."""
        return (self.blocked_seconds + self.write_seconds) / self.interval_seconds


@dataclass(frozen=True)
class Candidate:
    """One layout of a search; ``reason`` says why it was rejected (empty: it is in). No layout: a whole group of them."""

    layout: Layout | None
    seconds: float | None = None
    memory_bytes: float | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"layout": "*" if self.layout is None else str(self.layout)}
        if self.seconds is not None:
            found["seconds"] = self.seconds
        if self.memory_bytes is not None:
            found["memory_bytes"] = int(self.memory_bytes)
        return found | ({"reason": self.reason} if self.reason else {})


@dataclass(frozen=True)
class Plan:
    """One priced layout with its neighbours. ``memory`` is heaviest stage first; ``explored`` holds what a search priced,
    with the device bytes of each; ``sequence`` is the layout that the field's sizing sequence gives in place of a search."""

    model: ModelConfig
    layout: Layout
    cluster: Cluster
    seq: int
    memory: tuple[StageMemory, ...]
    communication: tuple[LedgerEntry, ...]
    pipeline: PipelineSummary
    step: StepTime
    margin: Margin = Margin()
    assumptions: tuple[str, ...] = ()
    dropped_terms: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    rejected: tuple[Candidate, ...] = ()
    explored: tuple[Candidate, ...] = ()
    checkpoint: CheckpointTime | None = None
    sequence: Candidate | None = None

    @property
    def capacity(self) -> int:
        return self.cluster.chip.memory_bytes

    @property
    def device_bytes(self) -> float:
        """What the fullest device shows as used: allocated bytes and the margin."""
        return self.margin.device_bytes(self.memory[0].total)

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.capacity

    def to_json(self) -> dict[str, Any]:
        """The keys that scripts rely on."""
        model, step = self.model, asdict(self.step)
        return {
            "model": {
                "name": model.name,
                "parameters": model.num_parameters(),
                "active_parameters": model.num_active_parameters(),
                "seq": self.seq,
                "global_batch": self.layout.global_batch,
            },
            "cluster": {
                "chip": self.cluster.chip.name,
                "nodes": self.cluster.nodes,
                "gpus_per_node": self.cluster.gpus_per_node,
                "gpus": self.cluster.world_size,
                "unconfirmed": list(self.cluster.chip.unconfirmed),
            },
            "layout": str(self.layout),
            "fits": self.fits,
            "memory": [stage.to_json(self.capacity) for stage in self.memory],
            "device_bytes": int(self.device_bytes),
            "communication": [
                {("bytes_per_gpu" if name == "bytes" else name): value for name, value in asdict(entry).items()}
                for entry in self.communication
            ],
            "pipeline": asdict(self.pipeline) | {"in_flight": list(self.pipeline.in_flight)},
            "step": step,
            "checkpoint": None
            if self.checkpoint is None
            else asdict(self.checkpoint) | {"blocked_share": self.checkpoint.blocked_share},
            "sizing_sequence": None if self.sequence is None else self.sequence.to_json(),
            "assumptions": list(self.assumptions),
            "dropped_terms": list(self.dropped_terms),
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "rejected": [candidate.to_json() for candidate in self.rejected],
        }
