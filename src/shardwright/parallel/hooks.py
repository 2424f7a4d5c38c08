"""Communication hooks: how one gradient bucket is reduced.

A hook says what it does to the numbers: ``reduction`` of ``sum`` or ``mean``. The loss normalisation must agree with it:
training divides the loss by the tokens of the whole batch, so there only a sum is right; `DataParallel` takes either,
as the user's loss says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from shardwright.comm.base import Comm, ReduceOp, Work
from shardwright.errors import ConfigError

Reduction = Literal["sum", "mean"]


class CommHook(Protocol):
    """Reduces a flat gradient buffer over every comm of ``comms``, in place; ``start`` returns at once."""

    name: str
    reduction: Reduction

    def start(self, gradients: Tensor, comms: Sequence[Comm], name: str) -> Work: ...


@runtime_checkable
class ShardHook(CommHook, Protocol):
    """A hook that can also leave each rank its shard of the sum: ``gradients`` (N k) -> ``shard`` (k), over one comm."""

    def scatter(self, gradients: Tensor, shard: Tensor, comm: Comm, name: str) -> Work: ...


def num_ranks(comms: Sequence[Comm]) -> int:
    """How many ranks ``comms`` reduce over together."""
    return math.prod(comm.size for comm in comms)


class _Chain(Work):
    """Reduce over further axes (``meets``: ``then`` waits for other ranks), and then finish, once the first reduction is done."""

    def __init__(self, first: Work, then: Callable[[], None], *, meets: bool = False) -> None:
        self._first, self._then, self._meets = first, then, meets

    @property
    def done(self) -> bool:
        return not self._meets and self._first.done

    def wait(self) -> None:
        self._first.wait()
        self._then()

    def on_done(self, callback: Callable[[], None]) -> None:
        self._first.on_done(callback)


class AllReduce:
    """The plain hook: sum (or mean) of the gradients, in their own dtype."""

    def __init__(self, reduction: Reduction = "sum") -> None:
        self.name, self.reduction = f"all-reduce {reduction}", reduction

    def start(self, gradients: Tensor, comms: Sequence[Comm], name: str) -> Work:
        if not comms:
            return Work()
        first, *others = comms
        work = first.all_reduce_start(gradients, name=name)
        if not others and self.reduction == "sum":
            return work

        def rest() -> None:
            for comm in others:
                comm.all_reduce(gradients, name=name)
            if self.reduction == "mean":
                gradients.div_(num_ranks(comms))

        return _Chain(work, rest, meets=bool(others))

    def scatter(self, gradients: Tensor, shard: Tensor, comm: Comm, name: str) -> Work:
        op: ReduceOp = "avg" if self.reduction == "mean" else "sum"
        return comm.reduce_scatter_start(shard, gradients, op, name=name)


class Compressed:
    """Sum (or mean) in a smaller dtype: half the bytes, rounded once before the sum and at each addition.

    A mean divides before it rounds, so that the sum stays in the range of fp16.
    """

    def __init__(self, dtype: torch.dtype, reduction: Reduction = "sum") -> None:
        self.name, self.dtype = f"{dtype} all-reduce {reduction}", dtype
        self.reduction: Reduction = reduction

    def start(self, gradients: Tensor, comms: Sequence[Comm], name: str) -> Work:
        if not comms:
            return Work()
        share = gradients / num_ranks(comms) if self.reduction == "mean" else gradients
        small = share.to(self.dtype)
        work = AllReduce().start(small, comms, name)

        def widen() -> None:
            gradients.copy_(small)

        return _Chain(work, widen)

    def scatter(self, gradients: Tensor, shard: Tensor, comm: Comm, name: str) -> Work:
        share = gradients / comm.size if self.reduction == "mean" else gradients
        small = share.to(self.dtype)
        part = small.new_empty(shard.numel())
        work = comm.reduce_scatter_start(part, small, name=name)

        def widen() -> None:
            shard.copy_(part)

        return _Chain(work, widen)


class FunctionHook:
    """A function of the user's own: ``function(gradients, comms, name)`` reduces the flat ``gradients`` in place.

    ``comms`` may be empty (one rank). It may return a `Work` that is waited for before the gradients are used; None means
    that the result is there. ``reduction`` says whether it sums or averages over the ranks.

    >>> def halved(gradients, comms, name):
    ...     for comm in comms:
    ...         comm.all_reduce(gradients, name=name)
    ...     gradients.div_(num_ranks(comms) * 2)
    >>> hook = FunctionHook(halved, reduction="mean")
    """

    def __init__(self, function: Callable[[Tensor, Sequence[Comm], str], Work | None], reduction: Reduction) -> None:
        self.name = f"{getattr(function, '__name__', type(function).__name__)} ({reduction})"
        self.function, self.reduction = function, reduction

    def start(self, gradients: Tensor, comms: Sequence[Comm], name: str) -> Work:
        return self.function(gradients, comms, name) or Work()


def check_shards(hook: CommHook) -> None:
    """Refuse a hook that knows whole gradients only where each rank keeps a shard of them."""
    if not isinstance(hook, ShardHook):
        raise ConfigError(
            f"communication hook {hook.name!r} reduces whole gradients, but this layout keeps shards of them; give it a "
            "method scatter(gradients, shard, comm, name), or use zero=0 or zero1_reduce=allreduce"
        )


def check_reduction(hook: CommHook, wanted: Reduction, why: str) -> None:
    """Refuse a hook that averages where the loss asks for a sum, or the reverse. ``why``: what the loss is."""
    reduction = getattr(hook, "reduction", None)
    if reduction not in ("sum", "mean"):
        name = getattr(hook, "__name__", type(hook).__name__)
        raise ConfigError(
            f"communication hook {name!r} does not say what it does; give FunctionHook({name}, reduction='mean') "
            "(or 'sum'), so that it can be compared with the loss"
        )
    if reduction != wanted:
        does = "averages" if reduction == "mean" else "sums"
        raise ConfigError(f"{why}, so gradients need a {wanted}, but communication hook {hook.name!r} {does}")


def hook_for(reduce_dtype: str) -> CommHook:
    """The hook of a layout's ``reduce_dtype``: fp32 keeps the gradients' dtype, bf16 and fp16 compress."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return Compressed(dtypes[reduce_dtype]) if reduce_dtype in dtypes else AllReduce()
