"""Parameters in one flat buffer, whole or as one shard of it on each rank: what is below gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwright.comm.base import Comm, Work
from shardwright.core.buckets import BucketPlan
from shardwright.core.ledger import StorageWindow
from shardwright.parallel.storage import Storage


class FlatParameters:
    """One flat parameter buffer in the compute dtype, the storage behind the module's parameters, with an index of names.

    ``shard`` are the ranks that it is cut over, padded with zeros to equal parts; ``own`` is this rank's. ``zero`` 1 and 2:
    the buffer is whole, and this rank updates its part. ``zero`` 3: ``parameters`` is this rank's part, and ``full`` what
    is gathered of all for a while; between, a parameter is an expanded NaN of its shape. Offloaded, the first elements
    of the part are ``on_host`` instead. ``mover`` allocates what is sent. ``write(name, view)`` gives a parameter its first
    value where the module has none yet. ``side_by_side``: all ranks change their parts only after reductions that follow the
    last use of what was gathered, so a transport may show the parts themselves instead of copies.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, nn.Parameter],
        shard: Comm,
        *,
        zero: int = 0,
        mover: Comm | None = None,
        storage: Storage | None = None,
        write: Callable[[str, Tensor], None] | None = None,
        side_by_side: bool = False,
    ) -> None:
        first = parameters[plan.members[0].name]
        self.plan, self.shard, self.name, self.zero, self.device = plan, shard, plan.name, zero, first.device
        self.storage = storage or Storage()
        self.num_elements = plan.padded(shard.size)
        self.width = self.num_elements // shard.size
        self.own = slice(shard.rank * self.width, (shard.rank + 1) * self.width)
        self._mover = mover or shard
        self._modules = [parameters[member.name] for member in plan.members]
        self.full: Tensor | None = None
        self._together: Tensor | None = None
        """The parts of all ranks in one, where the transport can show them so: what they are gathered into."""
        self._arriving: Work | None = None
        self._sources: Tensor | None = None
        self._windows: list[StorageWindow] = []
        allocate = self._empty if zero in (1, 2) else self._plain
        whole = allocate(self.num_elements, first.dtype)
        whole[plan.numel :].zero_()
        for parameter, (name, view) in zip(self._modules, self.views(whole), strict=True):
            if write is None:
                view.copy_(parameter.detach())
            else:
                write(name, view)
            parameter.data = view
        self.parameters, self.on_host = whole, whole.new_empty(0)
        if zero == 3:
            self._cut(whole[self.own], side_by_side)

    def _cut(self, own: Tensor, side_by_side: bool) -> None:
        """Keep this rank's part only, in its places."""
        hosted = self.storage.layout.hosted(self.width) if self.storage.hosts_parameters else 0
        self.on_host = self.storage.host_empty(hosted, own.dtype, self.device)
        self.on_host.copy_(own[:hosted])
        placed = self._mover.side_by_side(self.width, own.dtype, self.device) if side_by_side and not hosted else None
        if placed is None:
            self.parameters = self._empty(self.width - hosted, own.dtype)
        else:
            self.parameters, self._together = placed
        self.parameters.copy_(own[hosted:])
        self._show(None)

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return self._mover.empty(size, dtype, self.device)

    def _plain(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    @property
    def own_parts(self) -> list[Tensor]:
        """What this rank updates, in the compute dtype: what is in host memory, then what is on the device."""
        if self.zero < 3:
            return [self.parameters[self.own]]
        return [part for part in (self.on_host, self.parameters) if part.numel()] or [self.parameters]

    def own_range(self, part: slice) -> Tensor:
        """A range of what this rank updates that lies in one place."""
        if self.zero < 3:
            return self.parameters[self.own][part]
        hosted = self.on_host.numel()
        return self.on_host[part] if part.stop <= hosted else self.parameters[part.start - hosted : part.stop - hosted]

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view of its shape) for each member of a flat tensor of this bucket's size."""
        for member, offset in zip(self.plan.members, self.plan.offsets, strict=True):
            yield member.name, flat[offset : offset + member.numel].view(member.shape)

    # -- parameters that are gathered for a while (stage 3) ----------------------------------------------

    @property
    def gathered_in_place(self) -> bool:
        """Whether the parameters are whole now and not on their way."""
        return self.full is not None and self._arriving is None

    def start_gather(self) -> None:
        """Start to gather the parameters from all ranks of ``shard``."""
        assert self.full is None, f"{self.name} is gathered twice"
        name = self.plan.gather_name
        together = self._together
        self.full = self._empty(self.num_elements, self.parameters.dtype) if together is None else together
        self._windows = [self.storage.open("gathered", name, self.plan, self.full.nbytes)]
        self._sources = self._from_host() if self.on_host.numel() else self.parameters
        self._arriving = self.shard.all_gather_start(self.full, self._sources, name=name)

    def _from_host(self) -> Tensor:
        """This rank's part on the device, for as long as the gather takes."""
        hosted = self.on_host.numel()
        part = self._empty(self.width, self.parameters.dtype)
        self._windows.append(self.storage.open("buffers", self.plan.gather_name, self.plan, part.nbytes))
        self.storage.copy_in(part[:hosted], self.on_host, self.plan.gather_name)
        part[hosted:].copy_(self.parameters)
        return part

    def finish_gather(self, *, before_reduction: bool = False) -> None:
        """Wait for the gather and give the module's parameters their values.

        ``before_reduction``: this rank's part stays as it is until a reduction over ``shard`` that comes later is done, so
        slower peers may read it until then.
        """
        if self._arriving is not None:
            if before_reduction and not self.on_host.numel():
                self._arriving.arrive()
            else:
                self._arriving.wait()
            self._arriving = self._sources = None
            for window in self._windows[1:]:
                self.storage.close(window)
            self._show(self.full)

    def free(self) -> None:
        """Take the gathered values from the module's parameters."""
        assert self.full is not None and self._arriving is None, f"{self.name} is not gathered"
        self.full = None
        self.storage.close(self._windows[0])
        self._show(None)

    def _show(self, whole: Tensor | None) -> None:
        if whole is None:
            nothing = torch.full((), torch.nan, dtype=self.parameters.dtype, device=self.device)
            for parameter, member in zip(self._modules, self.plan.members, strict=True):
                parameter.data = nothing.expand(member.shape)
        else:
            for parameter, (_, view) in zip(self._modules, self.views(whole), strict=True):
                parameter.data = view

    # -- the whole, for checkpoints and comparisons ------------------------------------------------------

    def gathered(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole of a flat tensor of which each rank has a shard, in ``parts`` that follow one another.

        All ranks of ``shard`` must call.
        """
        flat = parts[0].to(self.device) if len(parts) == 1 else torch.cat([part.to(self.device) for part in parts])
        if self.zero == 0:
            return flat
        whole = flat.new_empty(self.num_elements)
        self.shard.all_gather_start(whole, flat, name=f"state of {self.name}").wait()
        return whole

    def named(self, kind: str = "parameters") -> dict[str, Tensor]:
        """Whole tensors by name. In stage 3 all ranks of ``shard`` must call."""
        assert kind == "parameters", kind
        return dict(self.views(self.parameters if self.zero < 3 else self.gathered(self.own_parts)))

    def fill(self, parts: Sequence[Tensor], write: Callable[[str, Tensor], None]) -> None:
        """``write(name, view)`` gives the value of every member that ``parts``, this rank's part of a state, cut."""
        in_place = self.zero == 0 and len(parts) == 1
        whole = parts[0] if in_place else parts[0].new_zeros(self.num_elements)
        for (name, view), offset in zip(self.views(whole), self.plan.offsets, strict=True):
            if self.zero == 0 or (offset < self.own.stop and offset + view.numel() > self.own.start):
                write(name, view)
        if not in_place:
            for part, values in zip(parts, whole[self.own].split([part.numel() for part in parts]), strict=True):
                part.copy_(values)

    def fill_parameters(self, write: Callable[[str, Tensor], None]) -> None:
        """New values for the parameters."""
        if self.zero == 3:
            self.fill(self.own_parts, write)
        else:
            for name, view in self.views(self.parameters):
                write(name, view)
