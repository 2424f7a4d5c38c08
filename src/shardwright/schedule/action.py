"""`Action` and `Schedule`: a pipeline schedule is data, a row of actions for each pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a rank does. F forward, B input gradient, W weight gradient, BW both at once; the rest moves bytes."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.W, Kind.BW})


@dataclass(frozen=True, order=True)
class Action:
    """One entry of a row: ``kind`` on ``stage`` for ``microbatch`` (``F0.3``: forward of micro-batch 3 on stage 0).

    For sends and receives ``stage`` is the stage of the rank that acts.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """``rows[r]`` is what pipeline rank r does, in order; ``placement[s]`` is the pipeline rank of stage s."""

    name: str
    num_stages: int
    num_microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: " + " ".join(map(str, row)) for rank, row in enumerate(self.rows))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that pipeline rank ``rank`` holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)
