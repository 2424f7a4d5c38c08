"""What a rank holds of the logical tensors: which part of them it writes to a checkpoint, and its slices of full tensors.

Everything a rank trains lies in flat ranges: a bucket's own range (its ZeRO shard, or all of it) of the parameters, the
master copies, each kind of optimizer state and the gradients. Ranks that hold the same range of the same slice (replicas)
share the writing of it: each byte is written once, and which rank writes it follows from the layout alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shardwright.checkpoint.save import Group, Piece
from shardwright.comm.base import Comm
from shardwright.comm.mesh import Mesh
from shardwright.comm.solo import SoloComm
from shardwright.core.specs import Spec, held_specs
from shardwright.parallel.flat import FlatParameters
from shardwright.train.step import Trainer
from shardwright.train.supported import DTYPES

SPLIT_BYTES = 1 << 16
"""Replicas do not split a range into pieces of fewer bytes: one of them writes it whole."""


@dataclass(frozen=True)
class _Range:
    """One parameter's part of a flat tensor: elements ``[start, stop)`` of the slice, ``offset`` elements into the tensor.

    ``shard``: the ranks that a bucket is cut over."""

    name: str
    start: int
    stop: int
    offset: int
    shard: Comm


class StateWriter:
    """The pieces of every tensor that this rank of ``trainer`` writes; no communication."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.mesh = trainer, trainer.mesh
        self._specs = trainer.model.specs
        held = tuple(unit for stage in trainer.executor.stages.values() for unit in stage.units)
        copies = {name for name, spec in held_specs(trainer.config.model, held).items() if spec.unit not in held}
        self._buckets = [[*_ranges(bucket, copies)] for bucket in trainer.buckets.buckets]
        self._frozen = [[*_ranges(flat, copies)] for flat in trainer.frozen]
        flats: list[FlatParameters] = [*trainer.buckets.buckets, *trainer.frozen]
        in_flats = {member.name for flat in flats for member in flat.plan.members} | copies
        alone = SoloComm("dp_shard", self.mesh.rank)
        self._plain = [
            _Range(name, 0, parameter.numel(), 0, alone)
            for name, parameter in trainer.parameters.items()
            if name not in in_flats
        ]
        self._replicas: dict[object, tuple[int, ...]] = {}
        frozen = tuple(trainer.config.train.freeze)
        self._trained = [
            name for name, spec in self._specs.items() if not spec.buffer and not (frozen and name.startswith(frozen))
        ]

    def weights(self) -> Group:
        """Every parameter, in the compute dtype."""
        trainer = self.trainer
        pieces: list[Piece] = []
        for flats, groups in ((trainer.buckets.buckets, self._buckets), (trainer.frozen, self._frozen)):
            for flat, ranges in zip(flats, groups, strict=True):
                pieces += self._pieces(ranges, flat.own_parts)
        for each in self._plain:
            pieces += self._pieces([each], [trainer.parameters[each.name].detach().reshape(-1)])
        dtypes = {name: self._dtype(wide=spec.buffer) for name, spec in self._specs.items()}
        return Group({name: spec.shape for name, spec in self._specs.items()}, dtypes, pieces)

    def optimizer(self) -> dict[str, Group]:
        """Every kind of optimizer state, and ``master`` where the compute dtype is not the master's."""
        optimizer = self.trainer.optimizer
        state = {kind: [parts for _, parts in optimizer.by_bucket(flats)] for kind, flats in optimizer.state.items()}
        if self._dtype(wide=False) != self._dtype(wide=True):
            state["master"] = [[piece.master for piece in bucket.pieces] for bucket in self.trainer.buckets.buckets]
        return {kind: self._trained_group(kept) for kind, kept in state.items()}

    def gradients(self) -> Group:
        """The reduced gradients of the trained parameters."""
        return self._trained_group([[piece.gradients for piece in bucket.pieces] for bucket in self.trainer.buckets.buckets])

    def _trained_group(self, flats: Sequence[Sequence[Tensor]]) -> Group:
        """``flats``: what this rank has of each bucket, in parts that follow one another."""
        pieces = [
            piece for ranges, parts in zip(self._buckets, flats, strict=True) for piece in self._pieces(ranges, parts)
        ]
        dtypes = dict.fromkeys(self._trained, self._dtype(wide=True))
        return Group({name: self._specs[name].shape for name in self._trained}, dtypes, pieces)

    def _dtype(self, wide: bool) -> torch.dtype:
        """Of the parameters, or of what the optimizer works on; known also where a rank trains nothing."""
        dtype = DTYPES[self.trainer.layout.precision]
        return torch.float32 if wide and dtype != torch.float64 else dtype

    def _pieces(self, ranges: Sequence[_Range], parts: Sequence[Tensor]) -> Iterator[Piece]:
        begins = [0, *accumulate(part.numel() for part in parts)]
        for each in ranges:
            start, stop = self._share(each, parts[0].element_size())
            shift = each.offset - each.start  # from the slice to the parts
            slices = self._specs[each.name].slices(self.mesh.layout, self.mesh.coordinates)
            for part, begin, end in zip(parts, begins, begins[1:], strict=False):
                low, high = max(start + shift, begin), min(stop + shift, end)
                if low < high:
                    yield Piece(each.name, slices, low - shift, part[low - begin : high - begin])

    def _share(self, each: _Range, itemsize: int) -> tuple[int, int]:
        """What this one of the replicas of a range writes of it; small ranges go to the replicas in turn, by name."""
        index, count = self._replica(each)
        length = each.stop - each.start
        parts = max(1, min(count, length * itemsize // SPLIT_BYTES))
        turn = (index - zlib.crc32(each.name.encode())) % count
        if turn >= parts:
            return each.start, each.start
        return each.start + length * turn // parts, each.start + length * (turn + 1) // parts

    def _replica(self, each: _Range) -> tuple[int, int]:
        """(which of them this rank is, how many ranks hold the same range of the same slice)."""
        mesh, shard = self.mesh, each.shard
        holders = self._holders(self._specs[each.name])
        if shard.size == 1:
            return holders.index(mesh.rank), len(holders)
        groups = [group for group in mesh.grid.axis_groups(shard.axis) if group[0] in holders]
        mine = next(index for index, group in enumerate(groups) if mesh.rank in group)
        return mine, len(groups)

    def _holders(self, spec: Spec) -> tuple[int, ...]:
        """The ranks of this rank's pipeline stage that hold the same slice, ascending."""
        key = (spec.shape, spec.dims, spec.pieces)
        if key not in self._replicas:
            mesh = self.mesh
            mine = spec.slices(mesh.layout, mesh.coordinates)
            stage = sorted(mesh.grid.stage_ranks(mesh.coordinates["pp"]))
            self._replicas[key] = tuple(
                rank for rank in stage if spec.slices(mesh.layout, mesh.grid.coordinates(rank)) == mine
            )
        return self._replicas[key]


def _ranges(flat: FlatParameters, copies: set[str]) -> Iterator[_Range]:
    """The members that this rank's own range of a bucket cuts, but copies of a weight that another stage has."""
    low, high = flat.own.start, flat.own.stop
    for member, offset in zip(flat.plan.members, flat.plan.offsets, strict=True):
        start, stop = max(low, offset), min(high, offset + member.numel)
        if start < stop and member.name not in copies:
            yield _Range(member.name, start - offset, stop - offset, start - low, flat.shard)


def local_tensors(named: Mapping[str, Tensor], specs: Mapping[str, Spec], mesh: Mesh) -> dict[str, Tensor]:
    """This rank's slices of full tensors."""
    return {name: full[specs[name].slices(mesh.layout, mesh.coordinates)] for name, full in named.items()}
