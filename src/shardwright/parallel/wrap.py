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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardwright.comm.base import Comm
from shardwright.comm.mesh import Mesh
from shardwright.core.buckets import BucketPlan, Member, plan_buckets
from shardwright.core.ledger import BucketTiming
from shardwright.errors import ConfigError, LayoutError
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.hooks import AllReduce, CommHook, Reduction, check_reduction

_AXES = ("cp", "dp")


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

    Raises `ConfigError` for a hook that does not fit the loss, a module that differs between ranks or has nothing to train,
    and for ``backward(create_graph=True)``. ``zero`` above 0 is not built yet.
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
    ) -> None:
        super().__init__()
        if zero != 0:
            raise LayoutError(f"DataParallel(zero={zero}): sharded states are not built yet; use zero=0")
        if loss_reduction not in ("mean", "sum"):
            raise ConfigError(f"loss_reduction={loss_reduction!r} is not known; use 'mean' or 'sum'")
        hook = comm_hook or AllReduce(loss_reduction)
        check_reduction(hook, loss_reduction, f"the loss is a {loss_reduction} (loss_reduction={loss_reduction!r})")
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._trained:
            raise ConfigError("the module has no parameter with requires_grad; there is nothing to reduce")
        _check_same(module, mesh.dp_cp)
        self.module, self.mesh = module, mesh
        self.buckets = GradientBuckets(
            _plan(self._trained, bucket_mb), self._trained, mesh, hook, direct=False, wide=False
        )
        self.timings: list[BucketTiming] = []
        """Of the last reduction: when each bucket was ready, launched and done, and what was waited for."""
        self._buffers_too = broadcast_buffers
        self._views = self.buckets.named("gradients")
        self._synchronise = True
        self._reduced = False  # the buffers hold reduced gradients, and nothing was added to them since
        self._backward_pass: int | None = None
        for name, parameter in self._trained.items():
            parameter.grad = None
            parameter.register_hook(self._before)
            parameter.register_post_accumulate_grad_hook(self._after(name))
        frozen = [p for p in module.parameters() if not p.requires_grad]
        for bucket in self.buckets.buckets:
            _broadcast([bucket.parameters], mesh.dp_cp, "initial state")
        _broadcast([*frozen, *module.buffers()], mesh.dp_cp, "initial state")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A ``backward()`` called inside only accumulates; the first one outside reduces all that was accumulated."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    # -- during backward ---------------------------------------------------------------------------------

    def _before(self, gradient: Tensor) -> None:
        """A gradient is about to be added to ``parameter.grad``."""
        if self._backward_pass not in (None, torch._C._current_graph_task_id()):
            self._finish_buckets()  # of a pass that failed on its way, or one inside which this one runs
        if self._reduced:
            self._reduced = False
            if self.buckets.hook.reduction == "sum":  # leave each rank its share, so that the next sum counts it once
                for bucket in self.buckets.buckets:
                    bucket.gradients.div_(self.mesh.dp_cp.size)

    def _after(self, name: str) -> Callable[[Tensor], None]:
        """The hook of one parameter: its gradient was added to ``parameter.grad``."""

        def hook(parameter: Tensor) -> None:
            if torch.is_grad_enabled():
                raise ConfigError(
                    "backward(create_graph=True) is not supported: gradients are reduced in place; leave it out"
                )
            self._keep_in_view(name)
            if self._synchronise:
                if self._backward_pass is None:
                    self._backward_pass = torch._C._current_graph_task_id()
                    Variable._execution_engine.queue_callback(self._leave_backward)
                self.buckets.unit_done(name)

        return hook

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
        if self._backward_pass is None:
            return
        for name in self._trained:
            self._keep_in_view(name)
        self._finish_buckets()
        if self._buffers_too:
            with self.mesh.recorder.phase("reduce"):
                _broadcast(list(self.module.buffers()), self.mesh.dp_cp, "buffers")

    def _finish_buckets(self) -> None:
        self.timings = self.buckets.finish()
        self.buckets.expect()
        self._backward_pass, self._reduced = None, True


def _plan(parameters: dict[str, nn.Parameter], bucket_mb: float) -> list[BucketPlan]:
    """Buckets in reverse order of registration; parameters of another dtype or device have buckets of their own."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Member]] = {}
    for name, p in parameters.items():
        kinds.setdefault((p.dtype, p.device), []).append(Member(name, tuple(p.shape), (name,), True, _AXES))
    plans = [
        plan
        for (dtype, _), members in kinds.items()
        for plan in plan_buckets(members, list(parameters), bucket_mb, dtype.itemsize)
    ]
    return [replace(plan, name=f"gradients.{index}") for index, plan in enumerate(plans)]


def _check_same(module: nn.Module, comm: Comm) -> None:
    """Refuse modules that differ between ranks: their buckets would not match."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    every = comm.gather_objects([(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors])
    for rank, other in enumerate(every):
        if other != every[0]:
            pairs = zip(every[0], other, strict=False)
            sizes = f"{len(every[0])} against {len(other)} tensors"
            first = next((f"{a} against {b}" for a, b in pairs if a != b), sizes)
            raise ConfigError(
                f"the module of rank {comm.ranks[rank]} is not that of rank {comm.ranks[0]} ({first}); "
                "build the same module on every rank"
            )


def _broadcast(tensors: Sequence[Tensor], comm: Comm, name: str) -> None:
    """Set tensors of any dtypes and strides to rank 0's, as bytes: one message for each dtype and device."""
    if comm.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.data)  # autograd sees no new version
    for members in kinds.values():
        flat = members[0].view(-1) if len(members) == 1 and members[0].is_contiguous() else _joined(members)
        comm.broadcast(flat.view(torch.uint8), name=name)
        for member, piece in zip(members, flat.split([m.numel() for m in members]), strict=True):
            if member.data_ptr() != piece.data_ptr():
                member.copy_(piece.view(member.shape))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
