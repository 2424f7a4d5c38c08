"""`DataParallel`: the same buckets for a module of the user's own.

On our own model the executor knows when a unit is done; on a foreign module autograd's post-accumulate hooks say when a
parameter is. Gradients accumulate in the bucket's views, so ``parameter.grad`` is always part of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.mesh import Mesh
from shardwright.core.buckets import Member, plan_buckets
from shardwright.errors import ConfigError, LayoutError
from shardwright.parallel.data import GradientBuckets
from shardwright.parallel.hooks import AllReduce, CommHook


class _SummedByHand:
    """Lets `GradientBuckets` take a mean: here the user's loss decides, and the user said which."""

    reduction = "sum"

    def __init__(self, inner: CommHook) -> None:
        self.name, self.start = inner.name, inner.start


class DataParallel(nn.Module):
    """Replicas of ``module`` on every rank of ``mesh.dp_cp``, gradients reduced in buckets while backward runs.

    The caller shards the input. ``comm_hook`` decides how gradients are reduced (default: mean, for a loss that is a mean
    over the rank's own samples, as with PyTorch's wrapper); ``loss_reduction`` says what the loss is and must agree with
    the hook: ``mean`` needs a hook that averages, ``sum`` (a loss already divided by the global count) one that sums.
    Parameters start as rank 0's. After ``backward`` call :meth:`finish` (or use the optimizer after ``with`` nothing
    else: ``finish`` is called by the first forward of the next step at the latest). ``zero`` > 0 is not built yet.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        zero: int = 0,
        bucket_mb: float = 25.0,
        comm_hook: CommHook | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        super().__init__()
        if zero != 0:
            raise LayoutError(f"DataParallel(zero={zero}): sharded states are not built yet; use zero=0")
        hook = comm_hook or AllReduce("mean" if loss_reduction == "mean" else "sum")
        if hook.reduction != loss_reduction:
            raise ConfigError(
                f"the loss is a {loss_reduction} over ranks but communication hook {hook.name!r} does a {hook.reduction}; "
                f"use a hook with reduction={loss_reduction!r}, or say loss_reduction={hook.reduction!r}"
            )
        self.module, self.mesh = module, mesh
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for tensor in [*module.parameters(), *module.buffers()]:
            mesh.dp_cp.broadcast(tensor.data, name="initial state")
        axes = ("cp", "dp")
        members = [Member(name, tuple(p.shape), (name,), True, axes) for name, p in named.items()]
        plans = plan_buckets(members, list(named), bucket_mb)
        self.buckets = GradientBuckets(plans, named, mesh, _SummedByHand(hook), direct=False)
        self._synchronise, self._pending = True, False
        self._alive = [p.register_post_accumulate_grad_hook(self._hook(name)) for name, p in named.items()]

    def _hook(self, name: str) -> Any:
        def ready(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.grad_fn is not None:
                raise ConfigError(
                    "create_graph=True is not supported: gradients are reduced in place; call backward without it"
                )
            self._pending = True
            if self._synchronise:
                self.buckets.unit_done(name)

        return ready

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate; the first backward outside reduces what was accumulated."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def finish(self) -> None:
        """Wait for every reduction: after it each ``parameter.grad`` is that of the whole batch, on every rank."""
        if not self._synchronise:
            raise ConfigError("finish() inside no_sync(): gradients are not reduced there; call it after the last backward")
        with torch.no_grad():
            self.buckets.finish()
        self._pending = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a new step: gradients are zero, the buckets expect new ones. The views stay where they are."""
        self.buckets.begin()
