"""Data parallelism: gradients in flat buckets, reduced as backward makes them ready (DDP; Li et al. 2020).

DDP:  batch[dp]  |  parameters, gradients, optimizer state on every rank
sends 2 (N-1)/N of the gradient bytes per rank and step, in one **all-reduce** per bucket (N = dp * cp ranks).

Life of a bucket: *ready* when the last W of the last unit that uses it is done, *launched* in the same order on every
rank (so a ready bucket may wait for an earlier one), *waited for* before the update. What a rank waits for is the
exposed tail. Gradients are sums (decision 5): the loss was divided by the tokens of the whole batch beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.comm.base import Comm, Work
from shardwright.comm.mesh import Mesh
from shardwright.core.buckets import BucketPlan
from shardwright.core.ledger import BucketTiming
from shardwright.errors import ConfigError
from shardwright.ops.gradients import GradQueue, GradSlot, set_slot
from shardwright.parallel.hooks import CommHook


@dataclass
class FlatRange:
    """A contiguous range of one bucket with one decay rule: what the optimizer works on."""

    name: str
    master: Tensor
    gradient: Tensor
    decay: bool


class Bucket:
    """One flat parameter buffer, its master copy and its flat gradient buffer, with an index of names.

    ``parameters``: compute dtype, the storage behind the module's parameters. ``master``: fp32 (fp64 for fp64), the same
    tensor when the compute dtype is that already. ``gradients``: the master's dtype. Not ``wide``: all in the compute dtype.
    """

    def __init__(
        self, plan: BucketPlan, parameters: Mapping[str, nn.Parameter], comms: Sequence[Comm], *, wide: bool = True
    ) -> None:
        first = parameters[plan.members[0].name]
        self.plan, self.comms, self.name = plan, list(comms), plan.name
        master = first.dtype if not wide or first.dtype == torch.float64 else torch.float32
        allocate = comms[0].empty if comms else _empty
        self.parameters = torch.empty(plan.numel, dtype=first.dtype, device=first.device)
        self.gradients = allocate(plan.numel, master, first.device)
        for member, view in self.views(self.parameters):
            parameter = parameters[member]
            view.copy_(parameter.detach())
            parameter.data = view
        self.master = self.parameters if first.dtype == master else self.parameters.to(master)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view of its shape) for each member of a flat tensor of this bucket's size."""
        for member, offset in zip(self.plan.members, self.plan.offsets, strict=True):
            yield member.name, flat[offset : offset + member.numel].view(member.shape)

    def ranges(self) -> list[FlatRange]:
        """The decayed and the undecayed range, without empty ones."""
        cut = self.plan.num_decayed
        pieces = [("decayed", slice(0, cut), True), ("plain", slice(cut, self.plan.numel), False)]
        return [
            FlatRange(f"{self.name}.{kind}", self.master[part], self.gradients[part], decay)
            for kind, part, decay in pieces
            if part.stop > part.start
        ]

    def publish(self) -> None:
        """Copy the updated master to the compute parameters (nothing to do when they are one tensor)."""
        if self.master is not self.parameters:
            self.parameters.copy_(self.master)


def _empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _fingerprint(tensor: Tensor) -> int:
    """A number that tells tensors apart which differ in any bit or in the order of their elements."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.reshape(-1).view(whole).long()
    return int((bits * (2 * torch.arange(bits.numel(), device=bits.device) + 1)).sum().item())


class GradientBuckets:
    """All buckets of a rank: begin a step, learn which units are done, reduce, wait.

    ``direct``: parameters get a :class:`GradSlot` and `ops` write gradients in place. Otherwise ``parameter.grad`` is the
    bucket's view and autograd accumulates into it (compiled blocks, modules of the user's own).
    """

    def __init__(
        self,
        plans: Sequence[BucketPlan],
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        hook: CommHook,
        *,
        direct: bool = True,
        wide: bool = True,
    ) -> None:
        self.mesh, self.hook, self.queue, self.direct = mesh, hook, GradQueue(), direct
        self.buckets = [Bucket(plan, parameters, mesh.reduce_comms(plan.reduce_axes), wide=wide) for plan in plans]
        self._slots: list[list[GradSlot]] = []
        for bucket in self.buckets:
            self._slots.append([self._attach(parameters[name], view) for name, view in bucket.views(bucket.gradients)])
        self.begin()

    def _attach(self, parameter: nn.Parameter, view: Tensor) -> GradSlot:
        slot = GradSlot(view, self.queue)
        if self.direct:
            set_slot(parameter, slot)
            parameter.grad = None
        else:
            parameter.grad = None
            parameter.grad_dtype = view.dtype  # autograd sums in it, whatever the parameter's own dtype
            parameter.grad = view
        return slot

    # -- one step --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the last step's gradients and expect new ones."""
        for bucket, slots in zip(self.buckets, self._slots, strict=True):
            for slot in slots:
                slot.written = not self.direct
            if not self.direct:
                bucket.gradients.zero_()
        self.expect()

    def expect(self) -> None:
        """Expect every unit again, and keep the gradients: what comes is added to them."""
        self._pending = [set(bucket.plan.units) for bucket in self.buckets]
        self._ready: list[float | None] = [None] * len(self.buckets)
        self._launched: list[tuple[Work, float]] = []
        self._ends: list[float] = [0.0] * len(self.buckets)
        self._origin = time.perf_counter()

    def unit_done(self, unit: str) -> None:
        """The last weight gradient of ``unit`` in this step is written; launches every bucket whose turn has come."""
        for index, pending in enumerate(self._pending):
            pending.discard(unit)
            if not pending and self._ready[index] is None:
                self._ready[index] = self._now()
        while len(self._launched) < len(self.buckets) and self._ready[len(self._launched)] is not None:
            self._launch(len(self._launched))

    def finish(self) -> list[BucketTiming]:
        """Launch what is left, wait for all buckets, in order; the gradients are then those of the whole batch."""
        for pending in self._pending:
            pending.clear()
        self.unit_done("")
        timings = []
        for index, (work, launch) in enumerate(self._launched):
            before = self._now()
            with self.mesh.recorder.phase("reduce"):
                work.wait()
            now = self._now()
            ready = self._ready[index]
            assert ready is not None
            end = min(self._ends[index] or now, now)
            bucket = self.buckets[index]
            size = bucket.gradients.numel() * bucket.gradients.element_size()
            timings.append(BucketTiming(bucket.name, size, ready, launch, end, now - before))
        return timings

    def _launch(self, index: int) -> None:
        bucket = self.buckets[index]
        for slot in self._slots[index]:
            if not slot.written:  # unused in this step: a zero gradient, not an old one
                slot.view.zero_()
                slot.written = True
        launch = self._now()
        with self.mesh.recorder.phase("reduce"):
            work = self.hook.start(bucket.gradients, bucket.comms, bucket.name)
        self._launched.append((work, launch))
        ends = self._ends  # of this step: the call may come late, from another thread
        work.on_done(lambda: ends.__setitem__(index, self._now()))

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    # -- whole-state views -----------------------------------------------------------------------------

    def named(self, kind: str) -> dict[str, Tensor]:
        """Views by parameter name; ``kind`` is ``gradients``, ``master`` or ``parameters``."""
        return {name: view for bucket in self.buckets for name, view in bucket.views(getattr(bucket, kind))}

    def check_replicas(self) -> None:
        """Refuse to start when ranks that must hold equal parameters do not; names the parameter."""
        comm = self.mesh.dp_cp
        if comm.size == 1:
            return
        prints = {name: _fingerprint(view) for name, view in self.named("parameters").items()}
        every = comm.gather_objects(prints)
        for rank, other in enumerate(every):
            for name, fingerprint in every[0].items():
                if other.get(name) != fingerprint:
                    raise ConfigError(
                        f"parameter {name} differs between rank {comm.ranks[0]} and rank {comm.ranks[rank]} before the "
                        "first step; start all ranks from the same seed and the same checkpoint"
                    )

    def memory(self) -> dict[str, int]:
        """Persistent bytes by class."""
        buckets = self.buckets
        master = sum(b.master.nbytes for b in buckets if b.master is not b.parameters)
        return {
            "parameters": sum(b.parameters.nbytes for b in buckets),
            "gradients": sum(b.gradients.nbytes for b in buckets),
            "master": master,
        }
