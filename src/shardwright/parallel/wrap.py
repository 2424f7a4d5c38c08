"""`DataParallel`: the same buckets for a module of the user's own, in the ordinary PyTorch loop.

    model = DataParallel(module, mesh)
    for x, y in batches_of_this_rank:
        optimizer.zero_grad()
        criterion(model(x), y).backward()  # when it returns, gradients are those of all ranks
        optimizer.step()

On our own model the executor knows when a unit is done; on a foreign module autograd's post-accumulate hooks say when a
parameter is, and a callback at the end of the backward pass waits for what is still on its way.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwright.comm.mesh import Mesh
from shardwright.core.buckets import BucketPlan, Member, plan_buckets
from shardwright.core.layout import Layout
from shardwright.core.ledger import BucketTiming
from shardwright.errors import ConfigError
from shardwright.parallel.bucket import Bucket
from shardwright.parallel.copies import EXPERT, Copies, broadcast
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.flat import FlatParameters
from shardwright.parallel.hooks import AllReduce, CommHook, Reduction, check_reduction, num_ranks
from shardwright.parallel.units import UnitHooks, unit_of_parameters


class DataParallel(nn.Module):
    """Replicas of ``module`` on every rank of ``mesh.dp_cp``, gradients reduced in buckets while backward runs.

    The caller gives each rank its own part of the batch. Each ``backward()`` outside :meth:`no_sync` reduces: when it
    returns, every ``parameter.grad`` is the same on all ranks. All ranks must call it equally often.

    ``loss_reduction`` says what the loss is: ``mean`` over the rank's own samples (gradients are averaged over ranks, as
    PyTorch's wrapper does), or ``sum``, a loss that is already divided by the samples of all ranks (gradients are summed;
    right also where ranks have different numbers of samples). ``comm_hook`` reduces in another way (`Compressed`,
    `FunctionHook`) and must agree with it. ``bucket_mb`` is the size of a bucket in MiB.

    - Parameters and buffers start as rank 0's. With ``broadcast_buffers``, buffers (running statistics) are set to rank 0's
      after each reduction.
    - A parameter that takes no part in a backward, on this rank or on all, has a zero gradient (or what :meth:`no_sync`
      gathered), and is reduced with the rest. One that is frozen when it is wrapped stays out.
    - Gradients may be set to None or to zero, or be left where they are to accumulate: what is reduced already counts once.
    - Gradients have the parameter's dtype. Move or convert the module before it is wrapped.
    - What differs between ranks (experts of an `ExpertParallel`) is reduced over the ranks that have the same only; a part
      says so itself, by its ``gradient_axes`` (`parallel.copies`). A mean is over all ranks nevertheless.

    ``zero`` 1 to 3 shard the state over the ranks (of one replica, where the mesh's layout has ``dp_replicate``)::

        model = DataParallel(module, mesh, zero=3)
        optimizer = torch.optim.AdamW(model.shards())  # flat, fp32; an optimizer that treats all elements alike
        criterion(model(x), y).backward()              # shards have gradients, the module's parameters have none
        model.clip_grad_norm_(1.0)
        optimizer.step()                               # the next forward uses the updated values

    A shard's gradient accumulates over backward passes like any other until it is set to None. Gradients are reduced as
    soon as a bucket is ready and not kept whole, so 1 and 2 are the same here. With 3 ``units`` (names of submodules; the
    direct children by default) are gathered around their forward and backward: ``reshard=after_backward`` keeps them
    between, ``prefetch`` of the following ones are gathered ahead. All ranks must use the units in the same order.
    `full_state_dict` has the whole parameters.

    Of the mesh's layout the degrees count; its ``microbatches`` and ``accumulate`` do not, as `no_sync` says when gradients
    are reduced. Raises `ConfigError` for a layout with ``offload`` or ``delayed_update``, which only training of our own
    models has, a hook that does not fit the loss, a module that differs between ranks or has nothing to train, and for
    ``backward(create_graph=True)``.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        zero: int = 0,
        bucket_mb: float = 25.0,
        comm_hook: CommHook | None = None,
        loss_reduction: Reduction = "mean",
        broadcast_buffers: bool = True,
        units: Sequence[str] | None = None,
        reshard: str = "always",
        prefetch: int = 1,
    ) -> None:
        super().__init__()
        if loss_reduction not in ("mean", "sum"):
            raise ConfigError(f"loss_reduction={loss_reduction!r} is not known; use 'mean' or 'sum'")
        hook = comm_hook or AllReduce(loss_reduction)
        check_reduction(hook, loss_reduction, f"the loss is a {loss_reduction} (loss_reduction={loss_reduction!r})")
        stage = max(zero, 2) if zero == 1 else zero
        _check_on_device(mesh.layout)
        # a backward is one micro-batch, and reduces once: what is gathered over several is the caller's no_sync
        once = mesh.layout.with_(microbatches=1, accumulate="defer")
        layout = once.with_(zero=stage, reshard=reshard, prefetch=prefetch, bucket_mb=bucket_mb)
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._trained:
            raise ConfigError("the module has no parameter with requires_grad; there is nothing to reduce")
        self._copies = Copies(module, mesh)
        self._copies.check()
        self.module, self.mesh = module, mesh
        if zero:
            self._copies.broadcast(dict(module.named_parameters()), "initial state")
        names, users = unit_of_parameters(module, units)
        plans = _plan(self._trained, self._copies, bucket_mb, users if zero == 3 else None)
        self.buckets = GradientBuckets(plans, self._trained, mesh, hook, direct=False, wide=zero > 0, layout=layout)
        self.timings: list[BucketTiming] = []
        """Of the last reduction: when each bucket was ready, launched and done, and what was waited for."""
        self._sharded, self._buffers_too = zero > 0, broadcast_buffers
        self._views = {} if zero else self.buckets.named("gradients")
        self._slots = self.buckets.slots()
        self._shards = [nn.Parameter(bucket.pieces[0].master) for bucket in self.buckets.buckets] if zero else []
        self._updated = False
        if zero:
            _watch(self)
        self._synchronise = True
        self._reduced = False  # the buffers hold reduced gradients, and nothing was added to them since
        self._backward_pass: int | None = None
        self._register_hooks()
        frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._frozen: list[FlatParameters] = []
        self._units: UnitHooks | None = None
        if zero == 3:
            self._units = self._gathered_units(names, users, frozen, layout)
        elif not zero:
            for bucket in self.buckets.buckets:
                broadcast([bucket.parameters], self._copies.holders(bucket.plan), "initial state")
            self._copies.broadcast(frozen, "initial state")
        self._copies.broadcast(dict(module.named_buffers()), "initial state")

    def _gathered_units(
        self, names: Sequence[str], users: Mapping[str, tuple[str, ...]], frozen: Mapping[str, nn.Parameter], layout: Layout
    ) -> UnitHooks:
        """Units ``names`` whose parameters, the ``frozen`` ones too, are gathered for their use; ``users``: of a parameter."""
        storage, mesh = self.buckets.storage, self.mesh
        for plan in _plan(frozen, self._copies, layout.bucket_mb, users):
            self._frozen.append(FlatParameters(plan, frozen, mesh.axis(plan.shard_over), zero=3, storage=storage))
        groups = [*self.buckets.buckets, *self._frozen]
        using = [users[group.plan.members[0].name] for group in groups]
        keep = layout.reshard == "after_backward"
        return UnitHooks(self.module, names, groups, using, keep=keep, prefetch=layout.prefetch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.publish()
        return self.module(*args, **kwargs)

    # -- sharded state ---------------------------------------------------------------------------------

    def shards(self) -> list[nn.Parameter]:
        """This rank's flat shards of the parameters (fp32, or fp64), one for each bucket: what the optimizer updates."""
        if not self._sharded:
            raise ConfigError("shards() needs zero=1, 2 or 3; with zero=0 give the optimizer module.parameters()")
        return list(self._shards)

    @torch.no_grad()
    def publish(self) -> None:
        """Hand shards that an optimizer has updated to the parameters of all ranks; each forward does so by itself."""
        if self._updated:
            with self.mesh.recorder.phase("update"):
                for work in [bucket.publish() for bucket in self.buckets.buckets]:
                    work.wait()
            self._updated = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale gradients so that the norm of the whole gradient is at most ``max_norm``; returns the norm before.

        All ranks must call. What other ranks have (shards, experts, parts of split layers) counts, so the norm is the same on
        all of them: ``torch.nn.utils.clip_grad_norm_`` would scale by the rank's own part.
        """
        kept = [(bucket.plan, gradient) for bucket in self.buckets.buckets for gradient in self._kept(bucket)]
        norm = self._norm(kept)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, gradient in kept:
            gradient.mul_(factor.to(gradient.device))
        return norm

    def _kept(self, bucket: Bucket) -> list[Tensor]:
        """The gradients that this rank's optimizer sees of a bucket."""
        if self._sharded:
            owners = [self._shards[self.buckets.buckets.index(bucket)]]
        else:
            owners = [self._trained[member.name] for member in bucket.plan.members]
        return [owner.grad for owner in owners if owner.grad is not None]

    def _norm(self, kept: Sequence[tuple[BucketPlan, Tensor]]) -> Tensor:
        mesh, first = self.mesh, self.buckets.buckets[0].gradients
        dtype = functools.reduce(torch.promote_types, (bucket.dtype for bucket in self.buckets.buckets), torch.float32)
        whole, split, experts = torch.zeros((3, 1), dtype=dtype, device=first.device).unbind()
        for plan, gradient in kept:
            square = torch.linalg.vector_norm(gradient, dtype=dtype).square().to(whole.device)
            (experts if plan.reduce_axes == EXPERT else split if plan.shard_axes else whole).add_(square)
        sums = [(mesh.dp_shard, whole), (mesh.dp_shard, split), (mesh.edp_shard, experts)] if self._sharded else []
        for comm, square in (*sums, (mesh.tp, split), (mesh.ep, experts)):
            comm.all_reduce(square, name="norm")
        return (whole + split + experts).sqrt().squeeze(0)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's state with whole parameters, whatever is sharded; all ranks must call."""
        self.publish()
        state = {name: value.detach() for name, value in self.module.state_dict().items()}
        groups: list[FlatParameters] = [*self.buckets.buckets, *self._frozen] if self._units is not None else []
        named = {name: value for group in groups for name, value in group.named().items()}
        known = {id(parameter): name for name, parameter in self.module.named_parameters()}
        aliases = dict(self.module.named_parameters(remove_duplicate=False))
        return {name: named[known[id(aliases[name])]] if named and name in aliases else v for name, v in state.items()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A ``backward()`` called inside only accumulates; the first one outside reduces all that was accumulated."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def reduce(self) -> None:
        """Reduce what was gathered under `no_sync`, without one more ``backward()``; all ranks must call."""
        self._take_share()
        if self._sharded and self._backward_pass is None:
            self._before_reductions()
        for name in self._trained if not self._sharded else ():
            self._keep_in_view(name)
        self._finish_buckets()
        if self._buffers_too:
            with self.mesh.recorder.phase("reduce"):
                self._copies.broadcast(dict(self.module.named_buffers()), "buffers")

    # -- during backward ---------------------------------------------------------------------------------

    def _register_hooks(self) -> None:
        for bucket in self.buckets.buckets:
            factor = self._factor(bucket)
            for name in (member.name for member in bucket.plan.members):
                parameter = self._trained[name]
                parameter.grad = None
                parameter.register_hook(self._before(factor))
                parameter.register_post_accumulate_grad_hook(self._after(name))

    def _factor(self, bucket: Bucket) -> float:
        """What gradients of a bucket are multiplied by so that its mean is one over all ranks that have samples."""
        if self.buckets.hook.reduction == "sum":
            return 1.0
        return num_ranks(self.mesh.reduce_comms(bucket.plan.reduce_axes)) / self.mesh.dp_cp.size

    def _before(self, factor: float) -> Callable[[Tensor], Tensor | None]:
        """The hook of one parameter: a gradient is about to be added to ``parameter.grad``."""

        def hook(gradient: Tensor) -> Tensor | None:
            if self._backward_pass not in (None, torch._C._current_graph_task_id()):
                self._finish_buckets()  # of a pass that failed on its way, or one inside which this one runs
            self._take_share()
            return None if factor == 1.0 else gradient * factor

        return hook

    def _take_share(self) -> None:
        """Leave each rank its share of gradients that are reduced, so that the next sum counts them once."""
        if not self._reduced or self._sharded:
            return
        self._reduced = False
        if self.buckets.hook.reduction == "sum":
            for bucket in self.buckets.buckets:
                bucket.gradients.div_(num_ranks(bucket.comms))

    def _after(self, name: str) -> Callable[[Tensor], None]:
        """The hook of one parameter: its gradient was added to ``parameter.grad``."""

        def hook(parameter: Tensor) -> None:
            if torch.is_grad_enabled():
                raise ConfigError(
                    "backward(create_graph=True) is not supported: gradients are reduced in place; leave it out"
                )
            if self._sharded:
                self._to_slot(name)
            else:
                self._keep_in_view(name)
            if self._synchronise:
                if self._backward_pass is None:
                    self._backward_pass = torch._C._current_graph_task_id()
                    Variable._execution_engine.queue_callback(self._leave_backward)
                    self._before_reductions()
                self.buckets.unit_done(name)

        return hook

    def _to_slot(self, name: str) -> None:
        """Add ``parameter.grad`` to the bucket's buffer, and give its memory up."""
        parameter = self._trained[name]
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self._slots[name].add(gradient.to_dense() if gradient.is_sparse else gradient)
        if self._units is not None:
            self._units.written(name)

    def _before_reductions(self) -> None:
        """What is reduced in this pass is added to gradients that the shards have already."""
        kept = [shard.grad for shard in self._shards]
        self.buckets.adds_up = any(gradient is not None for gradient in kept)
        for bucket, gradient in zip(self.buckets.buckets, kept, strict=bool(kept)):
            if self.buckets.adds_up and gradient is not bucket.gradients:
                bucket.gradients.copy_(gradient) if gradient is not None else bucket.gradients.zero_()
            if self.buckets.adds_up and self.buckets.hook.reduction == "sum":  # shards are summed over these once more
                bucket.gradients.div_(num_ranks(bucket.comms))

    def _keep_in_view(self, name: str) -> None:
        """Make ``parameter.grad`` the bucket's view again, with the value that it has now (None: zero)."""
        parameter, view = self._trained[name], self._views[name]
        gradient = parameter.grad
        if gradient is view:
            return
        if parameter.dtype != view.dtype or parameter.device != view.device:
            raise ConfigError(
                f"parameter {name} became {parameter.dtype} on {parameter.device} after it was wrapped as {view.dtype} on "
                f"{view.device}; move or convert the module first, then wrap it"
            )
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if parameter.requires_grad:  # not so when it was frozen later: then no optimizer shall touch it
            parameter.grad = view

    def _leave_backward(self) -> None:
        """The backward pass is over: reduce what is left and wait for all."""
        if self._backward_pass is not None:
            self.reduce()

    def _finish_buckets(self) -> None:
        self.timings = self.buckets.finish()
        self.buckets.expect()
        self._backward_pass, self._reduced = None, True
        for shard, bucket in zip(self._shards, self.buckets.buckets, strict=self._sharded):
            shard.grad = bucket.gradients


def _check_on_device(layout: Layout) -> None:
    """Refuse what the wrapper cannot do: the optimizer is the caller's, so state and update stay on the device."""
    for name, value in (("offload", layout.offload), ("delayed_update", "on" if layout.delayed_update else "none")):
        if value != "none":
            raise ConfigError(
                f"the mesh's layout has {name}={value}, and DataParallel keeps the state of a module of your own on its device, "
                f"for your optimizer; leave {name} out of the layout"
            )


def _watch(model: DataParallel) -> None:
    """Notice every optimizer step that updates ``model``'s shards: its parameters are then not those of the shards.

    An optimizer of the module's own parameters would do nothing, as these have no gradients: refused.
    """
    seen, mine = weakref.ref(model), {id(shard) for shard in model.shards()}
    not_mine = {id(parameter) for parameter in model.module.parameters()}

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        wrapped = seen()
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]} if wrapped is not None else set()
        if wrapped is not None and updated & not_mine:
            raise ConfigError("the optimizer has the module's parameters, whose gradients are sharded; give it model.shards()")
        if wrapped is not None and updated & mine:
            wrapped._updated = True

    weakref.finalize(model, register_optimizer_step_post_hook(stepped).remove)


def _plan(
    parameters: Mapping[str, nn.Parameter],
    copies: Copies,
    bucket_mb: float,
    users: Mapping[str, tuple[str, ...]] | None = None,
) -> list[BucketPlan]:
    """Buckets in reverse order of registration; parameters of another dtype or device have buckets of their own.

    ``users``: the units that use each parameter; what the same units use is then one bucket, whatever its size. Ranks that
    have other experts may have more buckets of them, so these are numbered for themselves.
    """
    kinds: dict[Any, list[Member]] = {}
    for name, p in parameters.items():
        key = (p.dtype, p.device, None if users is None else users[name])
        kinds.setdefault(key, []).append(copies.member(name, p.shape))
    size = bucket_mb if users is None else float("inf")
    plans = [
        plan
        for (dtype, *_), members in kinds.items()
        for plan in plan_buckets(members, list(parameters), min(size, 2**40), dtype.itemsize)
    ]
    numbers = {expert: itertools.count() for expert in (False, True)}
    named = []
    for plan in plans:
        expert = plan.reduce_axes == EXPERT
        named.append(replace(plan, name=f"gradients.{'experts.' * expert}{next(numbers[expert])}"))
    return named
