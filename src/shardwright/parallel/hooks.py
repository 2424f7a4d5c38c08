"""Communication hooks: how one gradient bucket is reduced.

A hook says what it does to the numbers: ``reduction`` of ``sum`` or ``mean``. The loss normalisation must agree with it:
training divides the loss by the tokens of the whole batch, so there only a sum is right; `DataParallel` takes either,
as the user's loss says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from shardwright.comm.base import Comm, Work

Reduction = Literal["sum", "mean"]


class CommHook(Protocol):
    """Reduces a flat gradient buffer over every comm of ``comms``, in place; ``start`` returns at once."""

    name: str
    reduction: Reduction

    def start(self, gradients: Tensor, comms: Sequence[Comm], name: str) -> Work: ...


class _Chain(Work):
    """Reduce over further axes, and then finish, once the first reduction is done."""

    def __init__(self, first: Work, then: Callable[[], None]) -> None:
        self._first, self._then = first, then

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
        ranks = 1
        for comm in comms:
            ranks *= comm.size
        if not others and self.reduction == "sum":
            return work

        def rest() -> None:
            for comm in others:
                comm.all_reduce(gradients, name=name)
            if self.reduction == "mean":
                gradients.div_(ranks)

        return _Chain(work, rest)


class Compressed:
    """Sum (or mean) in a smaller dtype: half the bytes, rounded once before the sum and at each addition."""

    def __init__(self, dtype: torch.dtype, reduction: Reduction = "sum") -> None:
        self.name, self.dtype = f"{dtype} all-reduce {reduction}", dtype
        self.reduction: Reduction = reduction
        self._inner = AllReduce(reduction)

    def start(self, gradients: Tensor, comms: Sequence[Comm], name: str) -> Work:
        if not comms:
            return Work()
        small = gradients.to(self.dtype)
        work = self._inner.start(small, comms, name)

        def widen() -> None:
            gradients.copy_(small)

        return _Chain(work, widen)


def hook_for(reduce_dtype: str) -> CommHook:
    """The hook of a layout's ``reduce_dtype``: fp32 keeps the gradients' dtype, bf16 and fp16 compress."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return Compressed(dtypes[reduce_dtype]) if reduce_dtype in dtypes else AllReduce()
