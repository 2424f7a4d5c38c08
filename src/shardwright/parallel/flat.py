"""Parameters in one flat buffer, whole or as one shard of it on each rank: what is below gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from shardwright.comm.base import Comm, Work
from shardwright.core.buckets import BucketPlan


class FlatParameters:
    """One flat parameter buffer in the compute dtype, the storage behind the module's parameters, with an index of names.

    ``shard`` are the ranks that it is cut over, padded with zeros to equal parts; ``own`` is this rank's. ``zero`` 1 and 2:
    the buffer is whole, and this rank updates its part. ``zero`` 3: ``parameters`` is this rank's part, and ``full`` what
    is gathered of all for a while; between, a parameter is an expanded NaN of its shape. ``mover`` allocates what is sent.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, nn.Parameter],
        shard: Comm,
        *,
        zero: int = 0,
        mover: Comm | None = None,
    ) -> None:
        first = parameters[plan.members[0].name]
        self.plan, self.shard, self.name, self.zero, self.device = plan, shard, plan.name, zero, first.device
        self.num_elements = plan.padded(shard.size)
        width = self.num_elements // shard.size
        self.own = slice(shard.rank * width, (shard.rank + 1) * width)
        self._mover = mover or shard
        self._modules = [parameters[member.name] for member in plan.members]
        self.full: Tensor | None = None
        self._arriving: Work | None = None
        allocate = self._empty if zero in (1, 2) else self._plain
        whole = allocate(self.num_elements, first.dtype)
        whole[plan.numel :].zero_()
        for parameter, (_, view) in zip(self._modules, self.views(whole), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.parameters = whole
        if zero == 3:
            self.parameters = self._empty(width, first.dtype)
            self.parameters.copy_(whole[self.own])
            self._show(None)

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return self._mover.empty(size, dtype, self.device)

    def _plain(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    @property
    def own_parameters(self) -> Tensor:
        """What this rank updates, in the compute dtype."""
        return self.parameters if self.zero == 3 else self.parameters[self.own]

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view of its shape) for each member of a flat tensor of this bucket's size."""
        for member, offset in zip(self.plan.members, self.plan.offsets, strict=True):
            yield member.name, flat[offset : offset + member.numel].view(member.shape)

    # -- parameters that are gathered for a while (stage 3) ----------------------------------------------

    @property
    def gathered_in_place(self) -> bool:
        """Whether the parameters are whole now and not on their way."""
        return self.full is not None and self._arriving is None

    def start_gather(self) -> int:
        """Start to gather the parameters from all ranks of ``shard``; returns the bytes of the buffer."""
        assert self.full is None, f"{self.name} is gathered twice"
        self.full = self._empty(self.num_elements, self.parameters.dtype)
        self._arriving = self.shard.all_gather_start(self.full, self.parameters, name=self.plan.gather_name)
        return self.full.nbytes

    def finish_gather(self) -> None:
        """Wait for the gather and give the module's parameters their values."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            self._show(self.full)

    def free(self) -> int:
        """Take the gathered values from the module's parameters; returns the bytes that are free again."""
        assert self.full is not None and self._arriving is None, f"{self.name} is not gathered"
        freed, self.full = self.full.nbytes, None
        self._show(None)
        return freed

    def _show(self, whole: Tensor | None) -> None:
        if whole is None:
            nothing = torch.full((), torch.nan, dtype=self.parameters.dtype, device=self.device)
            for parameter, member in zip(self._modules, self.plan.members, strict=True):
                parameter.data = nothing.expand(member.shape)
        else:
            for parameter, (_, view) in zip(self._modules, self.views(whole), strict=True):
                parameter.data = view

    # -- the whole, for checkpoints and comparisons ------------------------------------------------------

    def gathered(self, flat: Tensor) -> Tensor:
        """The whole of a flat tensor of which each rank has a shard; all ranks of ``shard`` must call."""
        if self.zero == 0:
            return flat
        whole = flat.new_empty(self.num_elements)
        self.shard.all_gather_start(whole, flat, name=f"state of {self.name}").wait()
        return whole

    def named(self, kind: str = "parameters") -> dict[str, Tensor]:
        """Whole tensors by name; ``kind`` names the flat tensor. In stage 3 all ranks of ``shard`` must call."""
        if kind == "parameters" and self.zero <= 2:
            return dict(self.views(self.parameters))
        return dict(self.views(self.gathered(getattr(self, kind))))

    def fill(self, flat: Tensor, write: Callable[[str, Tensor], None]) -> None:
        """``write(name, view)`` gives every member's value; ``flat`` (this rank's part of a state) gets its own of them."""
        whole = flat if self.zero == 0 else flat.new_zeros(self.num_elements)
        for name, view in self.views(whole):
            write(name, view)
        if self.zero:
            flat.copy_(whole[self.own])

    def fill_parameters(self, write: Callable[[str, Tensor], None]) -> None:
        """New values for the parameters."""
        if self.zero == 3:
            self.fill(self.parameters, write)
        else:
            for name, view in self.views(self.parameters):
                write(name, view)
