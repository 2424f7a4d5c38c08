"""The executor (`parallel.pipeline`) over modules of a user's own: one unit for each stage, tuples of tensors between them.

`parallel.pipeline_modules` has the interface.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.base import AllOf, Work
from shardwright.comm.mesh import Mesh
from shardwright.errors import ConfigError
from shardwright.ops.deferred import deferrable, deferring
from shardwright.ops.gradients import GradQueue
from shardwright.parallel.pipeline import Executor, StageUnits, Value, in_words
from shardwright.schedule.action import Action, Kind, Schedule

Tensors = tuple[Tensor, ...]
Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""
LossFunction = Callable[[Any, Any], Tensor]
"""(the last stage's output, target) of one micro-batch -> one number."""


@dataclass
class Part:
    """One micro-batch: the first stage's inputs, the target, and what the last stage makes of them."""

    tokens: Tensors
    target: Any
    output: Any = None
    loss: Any = None


class _Gradients:
    """What the executor calls a reducer: keeps what is deferred; `DataParallel` reduces after the step."""

    def __init__(self) -> None:
        self.queue = GradQueue()

    def unit_done(self, unit: str) -> None:
        """All of a step's gradients of a stage are written."""


class ModuleExecutor(Executor):
    """The executor with stages of one unit each, a user's module, and tuples of tensors between them.

    Forms (shapes and dtypes) are agreed as they come: with the first micro-batch that a stage sends to another rank goes
    what its tensors are. Until a rank knows that, it posts no receive ahead and waits for no send, so a first step cannot
    lock up; afterwards each output is compared with what was agreed. Tensors travel as bytes, so that every dtype does.
    """

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[int, nn.Module],
        mesh: Mesh,
        loss_fn: LossFunction | None,
        device: torch.device,
    ) -> None:
        last = schedule.num_stages - 1
        units = {index: _Unit(module, index, loss_fn if index == last else None) for index, module in modules.items()}
        stages = {index: StageUnits({f"stage {index}": unit}) for index, unit in units.items()}
        super().__init__(schedule, stages, mesh.pp, _Gradients(), mesh.recorder)
        split = {action.stage for action in schedule.rows[mesh.pp.rank] if action.kind is Kind.B}
        self._deferrable = {index: deferrable(modules[index]) if index in split else [] for index in modules}
        self._device = device
        self._forms: dict[int, tuple[Form, ...]] = {}
        """Stage -> what it hands on."""
        self._told: set[int] = set()
        self._usual_sends, self._most_sends = self._most_sends, sys.maxsize

    def run(self, microbatches: Sequence[Any], loss_scale: Tensor) -> Tensor:
        """One step; as `Executor.run`."""
        loss = super().run(microbatches, loss_scale)
        self._most_sends = self._usual_sends
        return loss

    # -- compute -----------------------------------------------------------------------------------------

    def _detached(self, x: Value) -> Value:
        return tuple(tensor.detach() for tensor in x)

    def _tracked(self, x: Value) -> Value:
        return tuple(tensor.requires_grad_(_differentiable(tensor.dtype)) for tensor in x)

    def _unit_forward(self, stage: int, m: int, name: str, x: Value, *, again: bool = False) -> Value:
        with deferring(self._deferrable[stage], self.reducer.queue):
            y = super()._unit_forward(stage, m, name, x, again=again)
        if stage < self.schedule.num_stages - 1:
            self._check_forms(Action(Kind.F, stage, m), y)
        return y

    def _check_forms(self, action: Action, y: Tensors) -> None:
        forms = tuple((tuple(tensor.shape), tensor.dtype) for tensor in y)
        agreed = self._forms.setdefault(action.stage, forms)
        if forms != agreed:
            raise ConfigError(
                f"{in_words(action)}: the module returned {_described(forms)}, and {_described(agreed)} at first; what goes "
                "from stage to stage keeps its shape and dtype: give batches of one shape, or make a Schedule for each"
            )

    def _unit_backward(self, stage: int, m: int, name: str, x: Value, y: Value, gradient: Value) -> Value:
        queue = self.reducer.queue
        if isinstance(y, Tensor):  # the loss
            pairs = [(y, gradient.to(y.dtype))]
        else:
            pairs = list(zip((tensor for tensor in y if _differentiable(tensor.dtype)), gradient, strict=True))
        pairs = [(output, given) for output, given in pairs if output.requires_grad]
        if pairs:
            at_once, queue.defer = not queue.defer, True  # never inside of autograd's own pass
            with deferring(self._deferrable[stage], queue):
                torch.autograd.backward([output for output, _ in pairs], [given for _, given in pairs])
            queue.defer = not at_once
            for write in queue.take() if at_once else ():
                write()
        if stage == 0:
            return ()
        return tuple(_gradient_of(tensor) for tensor in x if _differentiable(tensor.dtype))

    # -- neighbours --------------------------------------------------------------------------------------

    def _send_forward(self, stage: int, m: int) -> None:
        if stage not in self._told:
            self._told.add(stage)
            for message in _encoded(self._forms[stage], self._device):
                super()._send(message, self.schedule.placement[stage + 1], f"forms.{stage}")
        super()._send_forward(stage, m)

    def _send(self, value: Value, to: int, name: str) -> None:
        for tensor in value:
            if tensor.numel():
                super()._send(_bytes(tensor.resolve_conj().resolve_neg().contiguous()), to, name)

    def _is_known(self, receive: Action) -> bool:
        return _boundary(receive) in self._forms

    def _receive(self, receive: Action, source: int, name: str) -> tuple[Work, Value]:
        boundary = _boundary(receive)
        if boundary not in self._forms:
            self._forms[boundary] = self._receive_forms(source, f"forms.{boundary}")
        forms = self._forms[boundary]
        if receive.kind is Kind.RECV_B:
            forms = tuple(form for form in forms if _differentiable(form[1]))
        buffers = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in forms)
        works = [self.pp.receive(_bytes(buffer), source, name=name) for buffer in buffers if buffer.numel()]
        return AllOf(works), buffers

    def _receive_forms(self, source: int, name: str) -> tuple[Form, ...]:
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        self.pp.receive(size, source, name=name).wait()
        data = torch.empty(_numbers(size)[0], dtype=torch.uint8, device=self._device)
        self.pp.receive(data, source, name=name).wait()
        found = json.loads(bytes(_numbers(data)))
        return tuple((tuple(shape), getattr(torch, dtype)) for shape, dtype in found)


class _Unit:
    """A stage's module as the executor's unit: the last stage's gives the loss."""

    def __init__(self, module: nn.Module, index: int, loss_fn: LossFunction | None) -> None:
        self.module, self.index, self.loss_fn = module, index, loss_fn

    def __call__(self, x: Tensors, part: Part) -> Value:
        if self.index == 0:  # what comes from outside gets no gradient
            x = tuple(tensor.detach() for tensor in x)
        output = self.module(*x)
        outputs = as_tuple(output, f"stage {self.index}: the module's output")
        if self.loss_fn is None:
            return outputs
        loss = self.loss_fn(output, part.target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"loss_fn returned {given}; it must be one number, the mean or the sum over the micro-batch"
            )
        detached = tuple(tensor.detach() for tensor in outputs)
        part.output, part.loss = detached[0] if isinstance(output, Tensor) else detached, loss.detach()
        return loss.reshape(())


def _boundary(receive: Action) -> int:
    """The stage whose outputs are what is received, or what its gradients are of."""
    return receive.stage - 1 if receive.kind is Kind.RECV_F else receive.stage


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _gradient_of(x: Tensor) -> Tensor:
    """What backward left of an input, zeros if it has no part in the loss."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def as_tuple(value: Any, what: str) -> Tensors:
    """A tensor, or a tuple or list of them, as a tuple. Raises `ConfigError`, with ``what`` it is, for anything else."""
    tensors = tuple(value) if isinstance(value, tuple | list) else (value,)
    wrong = next((type(tensor).__name__ for tensor in tensors if not isinstance(tensor, Tensor)), None)
    if wrong is not None or not tensors:
        raise ConfigError(f"{what} must be a tensor or a tuple of tensors, not {wrong or 'an empty one'}")
    return tensors


def _bytes(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor, seen as bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def _encoded(forms: Sequence[Form], device: torch.device) -> Tensors:
    """The forms as two messages: how many bytes there are, and the bytes."""
    data = json.dumps([[shape, str(dtype).removeprefix("torch.")] for shape, dtype in forms]).encode()
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    return size, torch.tensor(list(data), dtype=torch.uint8, device=device)


def _numbers(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.tolist()
    return found


def _described(forms: Sequence[Form]) -> str:
    return ", ".join(f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in forms) or "nothing"
