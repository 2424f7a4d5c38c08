"""Where a parameter's gradient goes: straight into a flat fp32 view, at once or deferred (the W of B and W).

`parallel.data` gives each trainable parameter a :class:`GradSlot`; the backward functions of `ops` write through it
(``mm`` with ``out=`` for the first micro-batch, accumulation after) and hand autograd None. A parameter without a
slot takes autograd's ordinary way. A slot is found on the parameter itself, so nothing is global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.errors import ConfigError


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For a ``backward`` that cannot be differentiated again: ``create_graph=True`` is refused, not silently wrong."""

    @wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise ConfigError("create_graph=True is not supported: gradients are written in place; leave it out")
        return backward(*args)

    return checked


class Waiting(NamedTuple):
    """Bytes of the tensors that weight gradients hold from B to W, x and dy of each product; ``gathered``: of those the
    tokens of other ranks that sequence parallelism gathered for it."""

    bytes: int = 0
    gathered: int = 0


class GradQueue:
    """Weight gradients that wait for their W. While ``defer`` is set, writes are queued instead of done."""

    def __init__(self) -> None:
        self.defer = False
        self._waiting: list[Callable[[], None]] = []
        self._gathered: list[Tensor] = []

    def submit(self, write: Callable[[], None], gathered: Tensor | None = None) -> None:
        """Do ``write`` now, or keep it for :meth:`take`; ``gathered`` is what it holds of other ranks' tokens, if anything."""
        if self.defer:
            self._waiting.append(write)
            if gathered is not None:
                self._gathered.append(gathered)
        else:
            write()

    def waiting(self) -> Waiting:
        """What the writes that wait hold, each storage once; parameters are not counted."""
        held = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_in(self._waiting)}
        gathered = {storage_of(tensor) for tensor in self._gathered}
        return Waiting(sum(held.values()), sum(size for storage, size in held.items() if storage in gathered))

    def take(self) -> list[Callable[[], None]]:
        """The writes that wait, in order; the queue is empty afterwards."""
        waiting, self._waiting, self._gathered = self._waiting, [], []
        return waiting


def storage_of(tensor: Tensor) -> int:
    """Identity of what holds a tensor's values, while that lives (on meta all data pointers are alike)."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    """Tensors among ``values`` but parameters, in sequences and dataclasses of them, and in what functions among them have
    captured or were given in advance."""
    for value in values:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, partial):
            yield from tensors_in((value.func, *value.args, *value.keywords.values()))
        elif callable(value) and getattr(value, "__closure__", None):
            yield from tensors_in(cell.cell_contents for cell in value.__closure__)  # type: ignore[attr-defined]
        elif hasattr(value, "__dataclass_fields__"):
            yield from tensors_in(vars(value).values())


class GradSlot:
    """The gradient view of one parameter (same shape, contiguous) and whether this step has written it yet.

    A slot whose buffer is temporary has no view between steps; ``allocate`` gives it one when it is first needed.
    """

    __slots__ = ("_allocate", "_view", "queue", "written")

    def __init__(self, view: Tensor | None, queue: GradQueue, allocate: Callable[[], None] | None = None) -> None:
        self._view, self.queue, self.written, self._allocate = view, queue, False, allocate

    @property
    def view(self) -> Tensor:
        if self._view is None:
            assert self._allocate is not None
            self._allocate()
            assert self._view is not None
        return self._view

    @view.setter
    def view(self, view: Tensor | None) -> None:
        self._view = view

    def add(self, gradient: Tensor) -> None:
        """Accumulate a gradient that exists as a tensor."""
        if self.written:
            self.view.add_(gradient)
        else:
            self.view.copy_(gradient)
            self.written = True


def slot_of(parameter: Tensor) -> GradSlot | None:
    """The slot of a trainable parameter, None when its gradient goes through autograd."""
    return getattr(parameter, "grad_slot", None)


def set_slot(parameter: Tensor, slot: GradSlot | None) -> None:
    parameter.grad_slot = slot  # type: ignore[attr-defined]


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """One view over matrices that lie directly after one another in one storage, None when they do not."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    end, rows = first.storage_offset(), 0
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == storage and tensor.shape[1:] == first.shape[1:]
        if not same or not tensor.is_contiguous() or tensor.storage_offset() != end:
            return None
        end, rows = end + tensor.numel(), rows + tensor.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def write_linear(slots: Sequence[GradSlot], dy: Tensor, x: Tensor) -> None:
    """dW += dy^T x for the weights of ``slots``, whose outputs are side by side in ``dy`` (T, sum of outs)."""
    target = joined([slot.view for slot in slots])
    one_state = len({slot.written for slot in slots}) == 1
    if target is not None and one_state and target.dtype == dy.dtype:
        if slots[0].written:
            target.addmm_(dy.t(), x)
        else:
            torch.mm(dy.t(), x, out=target)
            for slot in slots:
                slot.written = True
        return
    start = 0
    for slot in slots:
        out = slot.view.shape[0]
        slot.add(dy[:, start : start + out].t() @ x)
        start += out
