"""Data parallelism: gradients in flat buckets, reduced as backward makes them ready (DDP; Li et al. 2020), and the state
behind them sharded (ZeRO; Rajbhandari et al. 2020).

DDP:   batch[dp]  |  parameters, gradients, optimizer state on every rank
ZeRO:  stage 1 optimizer state / N, stage 2 gradients / N too, stage 3 parameters too (`parallel.gather`)  |  N = dp * cp
       / dp_replicate ranks
sends  DDP 2 (N-1)/N of the gradient bytes per rank and step, in one **all-reduce** per bucket (N = dp * cp ranks); stages 1
and 2 as much: one **reduce-scatter** of the gradients, one **all-gather** of the updated parameters.

Life of a bucket: *ready* when the last W of the last unit that uses it is done, *launched* in the same order on every
rank (so a ready bucket may wait for an earlier one), *waited for* before the update. What a rank waits for is the
exposed tail. With offload its sum is copied out before: when a unit is done and the reduction is over. Gradients are sums
(decision 5): the loss was divided by the tokens of the whole batch beforehand.

A bucket that is sharded is padded with zeros to N equal shards; which parameters a shard cuts through makes no
difference, since the optimizer works on flat ranges. The stages differ in what stays between uses of a bucket and in
when it is gathered and reduced, in nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwright.comm.base import Comm, Work
from shardwright.comm.mesh import Mesh
from shardwright.comm.solo import SoloComm
from shardwright.core.buckets import BucketPlan
from shardwright.core.layout import Layout
from shardwright.core.ledger import BucketTiming, StorageWindow
from shardwright.errors import ConfigError
from shardwright.ops.gradients import GradQueue, GradSlot, set_slot
from shardwright.parallel.bucket import Bucket
from shardwright.parallel.hooks import CommHook, ShardHook, check_shards
from shardwright.parallel.storage import Storage

MOST_IN_FLIGHT = 2
"""Temporary gradient buffers that may be on their way at once; before one more is sent, the first is waited for."""


def fingerprint(tensor: Tensor) -> int:
    """A number that tells tensors apart which differ in any bit or in the order of their elements."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.reshape(-1).view(whole).long()
    return int((bits * (2 * torch.arange(bits.numel(), device=bits.device) + 1)).sum().item())


@dataclass
class Launch:
    """One reduction of one bucket that was started. ``part``: its shard, on its way to where the sum is kept; ``buffer``:
    what it was made from. ``windows`` are theirs, ``add``: whether something is there already that it is added to.
    """

    index: int
    work: Work
    launch: float
    part: Tensor | None = None
    buffer: Tensor | None = None
    add: bool = False
    windows: list[StorageWindow] = field(default_factory=list)
    end: float = 0.0
    waited: float = 0.0
    kept: bool = False
    """Whether the sum is where gradients are kept; what it took is held until the launch is ``done``."""
    done: bool = False


class GradientBuckets:
    """All buckets of a rank: begin a step, learn which units are done, reduce, wait.

    ``direct``: parameters get a :class:`GradSlot` and `ops` write gradients in place. Otherwise ``parameter.grad`` is the
    bucket's view and autograd accumulates into it (compiled blocks, modules of the user's own); from stage 2 on, where
    views do not stay, the caller writes to :meth:`slots`. ``layout`` says what is
    sharded (its ``zero``) and offloaded; nothing without one. ``write(name, view)`` gives the parameters their first
    values, where the module's have no memory of their own yet. ``side_by_side``: as `FlatParameters` has it.
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
        layout: Layout | None = None,
        write: Callable[[str, Tensor], None] | None = None,
        side_by_side: bool = False,
    ) -> None:
        layout = layout or Layout()
        self.mesh, self.hook, self.queue, self.direct, self.zero = mesh, hook, GradQueue(), direct, layout.zero
        self.whole_gradients, self.num_reductions = layout.whole_gradients, layout.num_reductions
        if not self.whole_gradients:
            check_shards(hook)
        self.adds_up = False
        """Whether the next reductions are added to the shards that are there (as autograd adds to a gradient)."""
        self.storage = Storage(mesh.recorder, layout)
        self._buffer_windows: dict[int, StorageWindow] = {}
        self.buckets = [self._make(plan, parameters, wide, write, side_by_side) for plan in plans]
        self._slots: list[list[GradSlot]] = []
        for index, bucket in enumerate(self.buckets):
            self._slots.append(self._attach(index, bucket, parameters))
        self.begin()

    def _make(
        self,
        plan: BucketPlan,
        parameters: Mapping[str, nn.Parameter],
        wide: bool,
        write: Callable[[str, Tensor], None] | None,
        side_by_side: bool,
    ) -> Bucket:
        mesh, axes = self.mesh, plan.reduce_axes
        comms = mesh.reduce_comms(axes) if self.whole_gradients else mesh.shard_reduce_comms(axes, plan.shard_over)
        shard = mesh.axis(plan.shard_over) if self.zero else SoloComm(plan.shard_over, mesh.rank)
        storage = self.storage
        return Bucket(
            plan, parameters, comms, shard, zero=self.zero, wide=wide, storage=storage, write=write, side_by_side=side_by_side
        )

    def _attach(self, index: int, bucket: Bucket, parameters: Mapping[str, nn.Parameter]) -> list[GradSlot]:
        if bucket.whole is None:
            slots = [GradSlot(None, self.queue, lambda: self._allocate(index)) for _ in bucket.plan.members]
            views: list[Tensor] = []
        else:
            views = [view for _, view in bucket.views(bucket.whole)]
            slots = [GradSlot(view, self.queue) for view in views]
        for position, (member, slot) in enumerate(zip(bucket.plan.members, slots, strict=True)):
            parameter = parameters[member.name]
            parameter.grad = None
            if self.direct:
                set_slot(parameter, slot)
            elif views:
                parameter.grad_dtype = bucket.dtype  # autograd sums in it, whatever the parameter's own dtype
                parameter.grad = views[position]
        return slots

    def slots(self) -> dict[str, GradSlot]:
        """Where gradients are written, by parameter."""
        pairs = zip(self.buckets, self._slots, strict=True)
        return {m.name: slot for bucket, slots in pairs for m, slot in zip(bucket.plan.members, slots, strict=True)}

    def _allocate(self, index: int) -> None:
        """Give a bucket the buffer that its gradients of this step are written to."""
        bucket = self.buckets[index]
        bucket.whole = bucket.new_gradients()
        self._buffer_windows[index] = self.storage.open("buffers", bucket.name, bucket.plan, bucket.whole.nbytes)
        for slot, (_, view) in zip(self._slots[index], bucket.views(bucket.whole), strict=True):
            slot.view = view

    # -- one step --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the last step's gradients and expect new ones."""
        self.storage.begin()
        for bucket, slots in zip(self.buckets, self._slots, strict=True):
            for slot in slots:
                slot.written = not self.direct and bucket.whole is not None
            if not self.direct and bucket.whole is not None:
                bucket.whole.zero_()
        self.expect()

    def expect(self) -> None:
        """Expect every unit again, and keep the gradients: what comes is added to them."""
        self._written = [dict.fromkeys(bucket.plan.units, 0) for bucket in self.buckets]
        self._num_launched = [0] * len(self.buckets)
        self._ready: list[float | None] = [None] * len(self.buckets)
        self._launched: list[Launch] = []
        self._in_flight: deque[Launch] = deque()
        self._num_kept = 0
        self._origin = time.perf_counter()

    def unit_done(self, unit: str) -> None:
        """A weight gradient of ``unit`` is written that is to be reduced; launches every bucket whose turn has come.

        Called once a step for each unit, after its last W, or as often as the layout reduces.
        """
        for index, written in enumerate(self._written):
            if unit in written:
                written[unit] += 1
            if self._ready[index] is None and min(written.values(), default=0) >= self.num_reductions:
                self._ready[index] = self._now()
        self._launch_ready()
        if self.storage.hosts_state:
            self._copy_out()

    def _copy_out(self) -> None:
        """Copy to the host what reductions that are over by now have brought, in the order of their launches.

        What they took is given up where it would be anyway, so that the memory of a step does not depend on its timing.
        """
        with self.mesh.recorder.phase("reduce"):
            while self._num_kept < len(self._launched) and self._launched[self._num_kept].work.done:
                self._keep(self._launched[self._num_kept])

    def _launch_ready(self) -> None:
        if self.zero <= 1:
            while len(self._launched) < len(self.buckets) and self._ready[len(self._launched)] is not None:
                self._launch(len(self._launched))
            return
        for index, written in enumerate(self._written):  # at once, so that its buffer is free soon
            while self._num_launched[index] < min(self.num_reductions, *written.values()):
                self._launch(index)

    def finish(self) -> list[BucketTiming]:
        """Launch what is left, wait for all buckets, in order; the gradients are then those of the whole batch."""
        for index, written in enumerate(self._written):
            written.update(dict.fromkeys(written, self.num_reductions))
            if self._ready[index] is None:
                self._ready[index] = self._now()
        self._launch_ready()
        with self.mesh.recorder.phase("reduce"):
            for launch in self._launched:
                self.wait_for(launch)
            self._sum_shards()
        return self._timings()

    def _sum_shards(self) -> None:
        """Shards are summed over the axes that are left. Last, in order: other pipeline ranks may have to meet here."""
        if self.whole_gradients:
            return
        last = {launch.index: launch for launch in self._launched}
        for index, bucket in enumerate(self.buckets):
            if bucket.comms:
                before = self._now()
                shard = bucket.kept() if self.zero >= 2 else bucket.gradients
                copied = bucket.hosted * (self.zero >= 2)
                window = self.storage.open("buffers", bucket.name, bucket.plan, shard.nbytes if copied else 0)
                self.hook.start(shard, bucket.comms, bucket.name).wait()
                if bucket.hosted:
                    bucket.keep(shard, add=False)
                self.storage.close(window)
                last[index].end = self._now()
                last[index].waited += last[index].end - before

    def _timings(self) -> list[BucketTiming]:
        """One for each bucket: its last reduction, and what was waited for in all."""
        timings = []
        for index, bucket in enumerate(self.buckets):
            launches = [launch for launch in self._launched if launch.index == index]
            ready, waited = self._ready[index], sum(launch.waited for launch in launches)
            assert ready is not None
            size = bucket.num_elements * bucket.gradients.element_size()
            last = launches[-1]
            timings.append(BucketTiming(bucket.name, size, ready, last.launch, last.end, waited))
        return timings

    def _launch(self, index: int) -> None:
        bucket, launched = self.buckets[index], self._now()
        for slot in self._slots[index]:
            if not slot.written:  # unused in this step: a zero gradient, not an old one
                slot.view.zero_()
                slot.written = True
        if bucket.whole is None:
            self._allocate(index)
        assert bucket.whole is not None
        with self.mesh.recorder.phase("reduce"):
            if self.whole_gradients:
                launch = Launch(index, self.hook.start(bucket.whole, bucket.comms, bucket.name), launched)
            else:
                launch = self._scatter(index, bucket.whole, launched)
        self._num_launched[index] += 1
        self._launched.append(launch)
        # may be called late, from another thread
        launch.work.on_done(lambda: setattr(launch, "end", launch.end or self._now()))

    def _scatter(self, index: int, whole: Tensor, launched: float) -> Launch:
        """Start the sum over the shard axis; each rank gets its shard, and a temporary buffer is given up."""
        bucket, hook = self.buckets[index], self.hook
        assert isinstance(hook, ShardHook)
        while self.zero >= 2 and len(self._in_flight) >= MOST_IN_FLIGHT:
            self.wait_for(self._in_flight.popleft())
        add = self._num_launched[index] > 0 or self.adds_up
        apart = self.zero >= 2 and (add or bucket.hosted > 0)
        part = torch.empty(bucket.width, dtype=bucket.dtype, device=bucket.device) if apart else None
        target = bucket.gradients if part is None else part
        launch = Launch(index, hook.scatter(whole, target, bucket.shard, bucket.name), launched, part, add=add)
        if part is not None:
            launch.windows.append(self.storage.open("buffers", bucket.name, bucket.plan, part.nbytes))
        if self.zero >= 2:
            launch.buffer, bucket.whole = whole, None
            launch.windows.append(self._buffer_windows.pop(index))
            for slot in self._slots[index]:
                slot.view, slot.written = None, False
            self._in_flight.append(launch)
        return launch

    def wait_for(self, launch: Launch) -> None:
        """Return when a reduction is done: its shard is where gradients are kept (added to earlier ones), its buffer free."""
        if launch.done:
            return
        before = self._now()
        if not launch.kept:
            self._keep(launch)
        for window in launch.windows:
            self.storage.close(window)
        launch.part, launch.buffer, launch.done = None, None, True
        launch.waited = self._now() - before

    def _keep(self, launch: Launch) -> None:
        """Wait for a reduction, the first that is not kept yet, and put its sum where gradients are kept."""
        bucket = self.buckets[launch.index]
        launch.work.wait()
        if launch.part is not None:
            bucket.keep(launch.part, add=launch.add)
        elif bucket.hosted and (self.whole_gradients or not bucket.comms):
            bucket.keep(bucket.gradients, add=False)
        launch.work = Work()  # the transport's own would keep what it sent and received
        now = self._now()
        launch.end, launch.kept = min(launch.end or now, now), True
        self._num_kept += 1

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    # -- whole-state views -----------------------------------------------------------------------------

    def named(self, kind: str) -> dict[str, Tensor]:
        """Whole tensors by parameter name; ``kind`` is ``gradients``, ``master`` or ``parameters``.

        Views where this rank has all of it, else put together from the shards: then all ranks must call.
        """
        found: dict[str, Tensor] = {}
        for bucket in self.buckets:
            if kind == "gradients" and self.whole_gradients:
                assert bucket.whole is not None
                found |= dict(bucket.views(bucket.whole))
            else:
                found |= bucket.named(kind)
        return found

    @property
    def has_experts(self) -> bool:
        """Whether this pipeline rank trains experts; the same on all ranks of a stage."""
        return any(bucket.plan.shard_over == "edp_shard" for bucket in self.buckets)

    def reduced(self, bucket: Bucket) -> list[Tensor]:
        """A bucket's reduced gradients as this rank has them: whole, or the pieces of its shard."""
        if self.whole_gradients and bucket.whole is not None:
            return [bucket.whole]
        return [piece.gradients for piece in bucket.pieces]

    def scale(self, factor: float) -> None:
        """Multiply all gradients that this rank has, wherever they are."""
        for bucket in self.buckets:
            copies = [piece.gradients for piece in bucket.pieces if piece.hosted]
            for gradients in self.reduced(bucket) + (copies if self.whole_gradients else []):
                gradients.mul_(factor)

    def check_replicas(self) -> None:
        """Refuse to start when ranks that must hold equal parameters do not; names the parameter."""
        expert = {
            member.name for bucket in self.buckets if bucket.plan.shard_over == "edp_shard" for member in bucket.plan.members
        }
        prints = {name: fingerprint(view) for name, view in self.named("parameters").items()}
        for comm, experts in ((self.mesh.dp_cp, False), (self.mesh.edp, True)):
            if comm.size > 1:
                chosen = {name: value for name, value in prints.items() if (name in expert) == experts}
                self._compare_replicas(comm, comm.gather_objects(chosen))

    def _compare_replicas(self, comm: Comm, every: Sequence[Mapping[str, int]]) -> None:
        """``every``: the fingerprints of each rank of ``comm`` by parameter."""
        for rank, other in enumerate(every):
            for name, bits in every[0].items():
                if other.get(name) != bits:
                    raise ConfigError(
                        f"parameter {name} differs between rank {comm.ranks[0]} and rank {comm.ranks[rank]} before the "
                        "first step; start all ranks from the same seed and the same checkpoint"
                    )

    def memory(self) -> dict[str, int]:
        """Persistent bytes by class; ``master`` are those that are not parameters. Of host memory, with ``host`` before."""
        found = dict.fromkeys(("parameters", "gradients", "master"), 0)
        hosted = {f"host {kind}": 0 for kind in found}
        for bucket in self.buckets:
            found["parameters"] += bucket.parameters.nbytes
            hosted["host parameters"] += bucket.on_host.nbytes
            kept = bucket.whole if self.zero <= 1 and bucket.whole is not None else bucket.gradients
            found["gradients"] += kept.nbytes
            for piece in bucket.pieces:
                masters = hosted if piece.hosted else found
                masters["host master" if piece.hosted else "master"] += piece.master.nbytes * piece.separate
                if piece.hosted:
                    hosted["host gradients"] += piece.gradients.nbytes * (1 if piece.outstanding is None else 2)
        return found | hosted
