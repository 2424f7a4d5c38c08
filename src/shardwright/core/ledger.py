"""`Ledger`: what was sent (or is predicted to be sent), per phase, verb, axis and tensor.

One kind of value for three sources: closed form (``plan.collectives``), the dry run and the real run. Bytes
are what **one rank sends** with ring collectives of N ranks over a full buffer of B bytes:

====================  ==============================================
all_reduce            2 (N-1)/N B
reduce_scatter        (N-1)/N B     (B: the whole input)
all_gather            (N-1)/N B     (B: the whole output)
broadcast             (N-1)/N B     (mean over the ranks of a pipelined ring)
all_to_all            bytes for other ranks (what stays local moves no bytes)
send                  B             (recv sends nothing)
barrier               0
copy_out, copy_in     B             (between device and host memory: axis ``host``)
====================  ==============================================

Elements that do not divide by N are counted as if padded to N equal pieces, as a ring must.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from shardwright.core.dispatch import DispatchPlan

PHASES = ("setup", "data", "F", "B", "W", "recompute", "reduce", "update", "metrics", "eval", "checkpoint")


def ring_bytes(verb: str, num_elements: int, element_bytes: int, num_ranks: int) -> int:
    """Bytes that one rank sends for ``verb`` over a full buffer of ``num_elements``; see the module's table."""
    if num_ranks == 1:
        return 0
    piece = -(-num_elements // num_ranks) * element_bytes
    if verb == "all_reduce":
        return 2 * (num_ranks - 1) * piece
    if verb in ("reduce_scatter", "all_gather", "broadcast"):
        return (num_ranks - 1) * piece
    if verb == "send":
        return num_elements * element_bytes
    if verb in ("recv", "barrier"):
        return 0
    raise ValueError(f"no ring formula for {verb!r}")


class Wait(NamedTuple):
    """One message and when the rank stood still for it: launched, waited for from ``start`` to ``end`` (`time.perf_counter`)."""

    verb: str
    axis: str
    tensor: str
    launch: float
    start: float
    end: float


@dataclass
class LedgerEntry:
    """One kind of message of one step. ``seconds`` is its duration, ``exposed_seconds`` the part that a rank waited.

    ``link`` names the level of the cluster that carries it; empty where that is not known (a real run).
    """

    phase: str
    verb: str
    axis: str
    tensor: str
    bytes: int
    count: int = 1
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    link: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.phase, self.verb, self.axis, self.tensor)


@dataclass
class BucketTiming:
    """When one gradient bucket was ready, launched and done, in seconds from the start of the step."""

    bucket: str
    bytes: int
    ready: float
    launch: float
    end: float
    waited: float


@dataclass
class StorageWindow:
    """Bytes of one class that were held for a while: gathered parameters (until they are freed) or a buffer.

    ``tensor`` is the name that its messages have, ``units`` whose parameters are in it, ``phase`` where it was made.
    ``start`` and ``end`` are seconds from the start of the step.
    """

    kind: str
    tensor: str
    units: tuple[str, ...]
    phase: str
    bytes: int
    start: float
    end: float


@dataclass
class Ledger:
    """Entries of one step (or a sum over steps), with memory by class in bytes and the buckets' timings.

    ``moved_bytes``: what the rank has really read and written in memory for the verbs of each axis, where the transport
    tells (shared memory). Entries have what the strategy sends, whatever carries it. Axes with the same ranks share a
    transport and are counted under the first of them.

    ``memory`` is what stays between steps, ``peak`` the most that a class had at any time of the step: of parameters,
    gradients and optimizer state the same, of gathered parameters and buffers what their ``windows`` add up to. Classes in
    host memory (offload) begin with ``host``. Of schedules that split the backward ``held for W`` is what weight gradients hold
    between B and W, x and dy of each product, and ``gathered for W`` the part of it that is gathered tokens (sp).

    ``dispatches``: by layer, in order, how the step's tokens went to their experts (one step only).
    """

    entries: dict[tuple[str, str, str, str], LedgerEntry] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    buckets: list[BucketTiming] = field(default_factory=list)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    windows: list[StorageWindow] = field(default_factory=list)
    dispatches: dict[str, list[DispatchPlan]] = field(default_factory=dict)

    def add(
        self,
        phase: str,
        verb: str,
        axis: str,
        tensor: str,
        num_bytes: int,
        *,
        count: int = 1,
        seconds: float = 0.0,
        exposed_seconds: float = 0.0,
        link: str = "",
    ) -> LedgerEntry:
        """Add a message; messages with the same phase, verb, axis and tensor are summed."""
        entry = self.entries.setdefault(
            (phase, verb, axis, tensor), LedgerEntry(phase, verb, axis, tensor, bytes=0, count=0, link=link)
        )
        entry.bytes += num_bytes
        entry.count += count
        entry.seconds += seconds
        entry.exposed_seconds += exposed_seconds
        return entry

    @property
    def total_bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries.values())

    @property
    def exposed_seconds(self) -> float:
        return sum(entry.exposed_seconds for entry in self.entries.values())

    @property
    def exposed_tail(self) -> float:
        """Seconds that the rank waited for gradient buckets after its last backward."""
        return sum(bucket.waited for bucket in self.buckets)

    def differences(self, other: Ledger) -> list[str]:
        """Where two ledgers disagree in bytes or counts, one line each; empty when they are equal."""
        lines = []
        for key in sorted(self.entries.keys() | other.entries.keys()):
            mine, theirs = self.entries.get(key), other.entries.get(key)
            ours = (mine.bytes, mine.count) if mine else (0, 0)
            others = (theirs.bytes, theirs.count) if theirs else (0, 0)
            if ours != others:
                name = " ".join(key)
                lines.append(f"{name}: {ours[0]} B in {ours[1]} calls against {others[0]} B in {others[1]} calls")
        return lines

    def sorted_entries(self) -> list[LedgerEntry]:
        """Entries in the order of the step's phases, heaviest first inside a phase."""
        order = {phase: index for index, phase in enumerate(PHASES)}
        return sorted(self.entries.values(), key=lambda e: (order.get(e.phase, len(order)), -e.bytes, e.tensor))

    def to_json(self) -> dict[str, Any]:
        return {
            "communication": [
                {("bytes_per_gpu" if name == "bytes" else name): value for name, value in asdict(entry).items()}
                for entry in self.sorted_entries()
            ],
            "memory": dict(self.memory),
            "peak_memory": dict(self.peak),
            "windows": [asdict(window) for window in self.windows],
            "buckets": [asdict(bucket) for bucket in self.buckets],
            "total_bytes": self.total_bytes,
            "moved_bytes": dict(self.moved_bytes),
            "exposed_tail_seconds": self.exposed_tail,
        }

    @classmethod
    def merged(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """The sum of several ledgers (several steps); memory is the maximum, buckets and windows follow one another."""
        total = cls()
        for ledger in ledgers:
            for e in ledger.entries.values():
                total.add(
                    *e.key, e.bytes, count=e.count, seconds=e.seconds, exposed_seconds=e.exposed_seconds, link=e.link
                )
            total.buckets += ledger.buckets
            for axis, moved in ledger.moved_bytes.items():
                total.moved_bytes[axis] = total.moved_bytes.get(axis, 0) + moved
            total.windows += ledger.windows
            for mine, theirs in ((total.memory, ledger.memory), (total.peak, ledger.peak)):
                for name, value in theirs.items():
                    mine[name] = max(mine.get(name, 0), value)
        return total
