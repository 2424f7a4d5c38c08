"""A bucket: flat parameters, their master copy and their flat gradients, whole or a shard, on the device or in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.comm.base import Comm, Work
from shardwright.core.buckets import BucketPlan
from shardwright.parallel.flat import FlatParameters
from shardwright.parallel.storage import Storage


@dataclass
class FlatRange:
    """A contiguous range of one piece of a shard with one decay rule: what the optimizer works on."""

    name: str
    part: slice
    master: Tensor
    gradient: Tensor
    decay: bool


@dataclass
class Piece:
    """The range ``part`` of this rank's shard, whose master, gradients and optimizer state are in one place.

    ``own``: its parameters in the compute dtype. ``master`` is the same memory where dtype and place are the same.
    ``outstanding``: the gradients of the step before, which an update that runs meanwhile reads (``delayed_update``).
    """

    part: slice
    hosted: bool
    own: Tensor
    master: Tensor
    gradients: Tensor
    outstanding: Tensor | None = None

    @property
    def separate(self) -> bool:
        return self.master is not self.own


class Bucket(FlatParameters):
    """Flat parameters, their master copy and their flat gradients.

    Master and gradients are fp32 (fp64 for fp64). Not ``wide``: all in the compute dtype. ``comms`` are the axes to sum
    over. Both are kept in ``pieces``: one, or with offload one in host memory and one (``offload_fraction`` below 1) on the
    device, in the order of the shard.

    With ``zero`` >= 1 the pieces are this rank's shard. ``whole`` is the buffer that gradients are written to: ``gradients``
    itself (stage 0), a buffer of which it is a part (1), or one that is there from the first gradient of a step to the end
    of its reduction only (2, 3). ``gradients`` is what the device keeps of them between.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, nn.Parameter],
        comms: Sequence[Comm],
        shard: Comm,
        *,
        zero: int = 0,
        wide: bool = True,
        storage: Storage | None = None,
        write: Callable[[str, Tensor], None] | None = None,
        side_by_side: bool = False,
    ) -> None:
        mover = None if zero or not comms else comms[0]
        super().__init__(
            plan, parameters, shard, zero=zero, mover=mover, storage=storage, write=write, side_by_side=side_by_side
        )
        self.comms = list(comms)
        own = self.parameters.dtype
        self.dtype = own if not wide or own == torch.float64 else torch.float32
        self.has_master = own != self.dtype
        self.hosted = self.storage.layout.hosted(self.width)
        if zero <= 1:
            self.whole: Tensor | None = self.new_gradients()
            self.gradients = self.whole[self.own]
        else:
            self.whole, self.gradients = None, self._empty(self.width - self.hosted, self.dtype)
        cuts = [slice(0, self.hosted), slice(self.hosted, self.width)]
        self.pieces = [self._piece(part) for part in cuts if part.stop > part.start] or [self._piece(slice(0, 0))]

    def _piece(self, part: slice) -> Piece:
        own, size = self.own_range(part), part.stop - part.start
        if part.stop > self.hosted or not size:
            whole = self.zero <= 1 or not self.hosted
            gradients = self.gradients[part] if whole else self.gradients
            return Piece(part, False, own, own.to(self.dtype) if self.has_master else own, gradients)
        master = own
        if self.has_master or not self.storage.hosts_parameters:
            master = self._host(size)
            master.copy_(own)
        delayed = self.storage.layout.delayed_update
        return Piece(part, True, own, master, self._host(size), self._host(size) if delayed else None)

    def _host(self, size: int) -> Tensor:
        return self.storage.host_empty(size, self.dtype, self.device)

    def new_gradients(self) -> Tensor:
        """A flat gradient buffer of the whole bucket: uninitialised, zero behind the last parameter."""
        whole = self._empty(self.num_elements, self.dtype)
        whole[self.plan.numel :].zero_()
        return whole

    def ranges(self, piece: Piece, gradients: Tensor) -> list[FlatRange]:
        """The decayed and the undecayed range of a piece of what this rank updates, without empty ones."""
        cut, end, first = self.plan.num_decayed, self.plan.numel, self.own.start + piece.part.start
        found = []
        for kind, low, high, decay in (("decayed", 0, cut, True), ("plain", cut, end, False)):
            part = slice(max(low, first) - first, min(high, self.own.start + piece.part.stop) - first)
            if part.stop > part.start:
                name = f"{self.name}.{kind}"
                found.append(FlatRange(name, part, piece.master[part], gradients[part], decay))
        return found

    # -- gradients that are kept as shards -----------------------------------------------------------------

    def keep(self, shard: Tensor, *, add: bool) -> None:
        """Reduced gradients of this rank's shard (on the device) to where they are kept, or added to what is there."""
        for piece in self.pieces:
            part = shard[piece.part]
            if piece.hosted:
                self.storage.copy_out(piece.gradients, part, self.name, add=add)
            elif add:
                piece.gradients.add_(part)
            elif piece.gradients.data_ptr() != part.data_ptr():
                piece.gradients.copy_(part)

    def kept(self) -> Tensor:
        """This rank's shard of the reduced gradients on the device; :meth:`keep` puts it back if it is a copy."""
        if not self.hosted:
            return self.gradients
        shard = self._empty(self.width, self.dtype)
        for piece in self.pieces:
            if piece.hosted:
                self.storage.copy_in(shard[piece.part], piece.gradients, self.name)
            else:
                shard[piece.part].copy_(piece.gradients)
        return shard

    def publish(self) -> Work:
        """Start to hand the updated master to the compute parameters of every rank."""
        for piece in self.pieces:
            if piece.hosted and not self.storage.hosts_parameters:
                self.storage.copy_in(piece.own, piece.master, self.plan.gather_name)
            elif piece.separate:
                piece.own.copy_(piece.master)
        if self.zero not in (1, 2):
            return Work()
        return self.shard.all_gather_start(self.parameters, self.parameters[self.own], name=self.plan.gather_name)

    # -- the whole, for checkpoints and comparisons --------------------------------------------------------

    def named(self, kind: str = "parameters") -> dict[str, Tensor]:
        """Whole tensors by name; ``kind`` is ``gradients``, ``master`` or ``parameters``."""
        if kind == "parameters" or (kind == "master" and not self.has_master):
            return super().named()
        return dict(self.views(self.gathered([getattr(piece, kind) for piece in self.pieces])))

    def fill_parameters(self, write: Callable[[str, Tensor], None]) -> None:
        """New values for the parameters, and for the master in its own precision."""
        super().fill_parameters(write)
        if any(piece.separate for piece in self.pieces):
            self.fill([piece.master for piece in self.pieces], write)
