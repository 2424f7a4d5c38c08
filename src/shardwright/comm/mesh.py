"""`Mesh`: a Layout and a rank, with one `Comm` per axis and per composite axis."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.comm.base import Comm
from shardwright.comm.dry import DryComm
from shardwright.comm.record import RecordComm, Recorder
from shardwright.comm.solo import SoloComm
from shardwright.comm.transport import Groups, transport_maker
from shardwright.core.dispatch import AssumeDispatch, assumed_plan
from shardwright.core.layout import Layout

MESH_AXES = (
    "tp", "cp", "dp", "pp", "dp_cp", "world", "ep", "edp", "tied", "dp_shard", "dp_replicate",
    "stage", "tp_cp", "edp_shard", "edp_replicate",
)  # fmt: skip
"""Axes that get a communicator, in the order in which all ranks create them."""


class Mesh:
    """Coordinates of one rank and its communicators; axes with the same ranks share one transport.

    ``mesh.tp``, ``mesh.cp``, ``mesh.dp``, ``mesh.pp``, ``mesh.dp_cp`` (ranks that hold the same dense slice),
    ``mesh.world``, ``mesh.ep``, ``mesh.edp``, ``mesh.tied`` (the two pipeline ends), ``mesh.dp_shard`` and
    ``mesh.dp_replicate`` (dp_cp cut for hybrid sharding), ``mesh.edp_shard`` and ``mesh.edp_replicate`` (edp in the same
    way), ``mesh.stage`` (all of a pipeline stage) and ``mesh.tp_cp`` (ranks with tokens of the same sequences). Every verb
    is written to ``mesh.recorder``'s ledger. In a dry run ``assume_dispatch`` answers for the routing of experts.
    """

    tp: Comm
    cp: Comm
    dp: Comm
    pp: Comm
    dp_cp: Comm
    world: Comm
    ep: Comm
    edp: Comm
    tied: Comm
    dp_shard: Comm
    dp_replicate: Comm
    stage: Comm
    tp_cp: Comm
    edp_shard: Comm
    edp_replicate: Comm

    def __init__(self, layout: Layout, rank: int, make: Callable[[str, Groups], Comm]) -> None:
        self.layout, self.rank = layout, rank
        self.grid = layout.grid
        self.coordinates = self.grid.coordinates(rank)
        self.recorder = Recorder()
        self.assume_dispatch: AssumeDispatch = assumed_plan
        transports: dict[Groups, Comm] = {}
        for axis in MESH_AXES:
            groups = self.grid.axis_groups(axis)
            ranks = next(group for group in groups if rank in group)
            if groups not in transports and any(len(group) > 1 for group in groups):
                transports[groups] = make(axis, groups)  # by all ranks together, also by those that are alone in it
                if len(ranks) > 1:
                    self.recorder.watch(axis, transports[groups])
            if len(ranks) == 1:
                setattr(self, axis, SoloComm(axis, rank))
                continue
            setattr(self, axis, _renamed(RecordComm(transports[groups], self.recorder), axis))

    @classmethod
    def solo(cls) -> Mesh:
        """The mesh of one process."""
        return cls(Layout(), 0, lambda axis, groups: SoloComm(axis))

    @classmethod
    def distributed(cls, layout: Layout, rank: int, timeout_s: float = 120.0) -> Mesh:
        """The mesh over ``torch.distributed`` (already initialised), by the transports of ``layout.comm``."""
        return cls(layout, rank, transport_maker(layout.comm, rank, timeout_s, MESH_AXES))

    @classmethod
    def dry(cls, layout: Layout, rank: int = 0) -> Mesh:
        """A mesh of any size with shapes only."""

        def make(axis: str, groups: Groups) -> Comm:
            ranks = next(group for group in groups if rank in group)
            return DryComm(axis, ranks.index(rank), ranks)

        return cls(layout, rank, make)

    def axis(self, name: str) -> Comm:
        comm: Comm = getattr(self, name)
        return comm

    def reduce_comms(self, axes: tuple[str, ...]) -> list[Comm]:
        """Communicators that together sum over ``axes``: tp, dp and cp as one group, the pipeline ends, or edp; size 1 left
        out."""
        comms = [self.axis(axis) for axis in ("tp", "edp") if axis in axes]
        data = tuple(axis for axis in ("cp", "dp") if axis in axes)
        comms += [self.dp_cp] if len(data) == 2 else [self.axis(axis) for axis in data]
        comms += [self.tied] if "tied" in axes else []
        return [comm for comm in comms if comm.size > 1]

    def shard_reduce_comms(self, axes: tuple[str, ...], shard_over: str) -> list[Comm]:
        """What is left to sum over ``axes`` once it is summed over ``shard_over`` (dp_shard, edp_shard); size 1 left out."""
        comms = [self.tp] if "tp" in axes else []
        comms += [self.axis(shard_over.replace("shard", "replicate"))]
        comms += [self.tied] if "tied" in axes else []
        return [comm for comm in comms if comm.size > 1]

    def wrap(self, wrapper: Callable[[Comm], Comm]) -> Mesh:
        """Replace every communicator by ``wrapper(comm)`` (fault injection, mutations); returns self."""
        for axis in MESH_AXES:
            setattr(self, axis, wrapper(self.axis(axis)))
        return self


def _renamed(comm: RecordComm, axis: str) -> RecordComm:
    comm.axis = axis
    return comm
