"""The executor: one short loop over a rank's row of the schedule, a handler for each kind of action.

PP:  layers[pp]  |  each rank holds its stages' units; one stage (pp=1) is not special
sends T x D activations forward and as many gradients backward per micro-batch and boundary (**send**, neighbours).

F and B are loops over units (embedding, block, head). Each unit has its own small autograd graph: a detached input and
the gradient edge of its output. Everything that happens *between* units (recomputation, deferred weight gradients,
reduction, later gather and free) happens here, never in autograd or module hooks.

`parallel.pipeline_modules` runs modules of a user's own in the same loop, with tuples of tensors between stages.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.comm.base import Comm, Work
from shardwright.comm.record import Recorder
from shardwright.core.ledger import Wait
from shardwright.errors import RankError
from shardwright.ops.gradients import GradQueue, Waiting
from shardwright.schedule.action import Action, Kind, Schedule
from shardwright.schedule.passes import receives_to_post
from shardwright.schedule.simulate import Span

Value = Any
"""What units take and hand on: a tensor; in stages of a user's own modules a tuple of tensors."""


class MicroBatch(Protocol):
    """What the executor must know of a micro-batch; units get it whole. ``tokens`` is what the first stage takes."""

    tokens: Value


Unit = Callable[[Value, Any], Value]
"""(x, micro-batch) -> the next x; the last unit of the last stage gives a scalar loss."""


class Reducer(Protocol):
    """Who is told that a unit's last weight gradient of the step is written."""

    queue: GradQueue

    def unit_done(self, unit: str) -> None: ...


class Weights(Protocol):
    """Who is told when a unit's parameters are needed: before and after each of its forward and backward passes."""

    def begin(self) -> None: ...
    def acquire(self, unit: str) -> None: ...
    def release(self, unit: str) -> None: ...


class Resident:
    """Parameters that are always there."""

    def begin(self) -> None:
        """A step begins."""

    def acquire(self, unit: str) -> None:
        """Nothing to gather."""

    def release(self, unit: str) -> None:
        """Nothing to free."""


class SideLosses(Protocol):
    """What units add to the loss beside what they hand on (routers' losses): outputs that get their gradients in the
    unit's own backward."""

    def forward_done(self, unit: str, m: int, microbatch: Any, *, again: bool) -> None: ...
    def side_losses(self, unit: str, m: int) -> tuple[list[Tensor], list[Tensor]]: ...


class NoSideLosses:
    """Units whose output is all that there is."""

    def forward_done(self, unit: str, m: int, microbatch: Any, *, again: bool) -> None:
        """Nothing to collect."""

    def side_losses(self, unit: str, m: int) -> tuple[list[Tensor], list[Tensor]]:
        return [], []


@dataclass
class StageUnits:
    """One stage: its units by name, in order, and the features of what it takes and hands on (0: whatever comes)."""

    units: Mapping[str, Unit]
    width: int = 0


@dataclass
class _InFlight:
    """One micro-batch on one stage between its F and its W."""

    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    deferred: deque[tuple[str, Waiting, list[Callable[[], None]]]] = field(default_factory=deque)
    """Of each unit whose W is due: what its weight gradients hold, and themselves."""


class Executor:
    """Runs one step of ``schedule`` on pipeline rank ``pp.rank`` over ``stages`` (stage index -> StageUnits).

    ``recompute``: ``full`` keeps a unit's input only and runs its forward again before its backward. ``token_shards``:
    ranks that the tokens between units are split over (tp with sequence parallelism); stages exchange T / token_shards
    rows. ``reduce_each``: the reducer hears of every micro-batch's W, not of the last one's only.

    After a step ``spans`` has the start and end of each action (``time.perf_counter``; on CUDA, when it was launched) and how
    long it waited for messages, gathers and reductions among them; ``waits`` has those waits.
    ``most_in_flight`` the most micro-batches that each stage held; ``most_waiting`` is what all weight gradients between
    their B and W held when that was most. ``note`` is told what the rank is at, in words.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, StageUnits],
        pp: Comm,
        reducer: Reducer,
        recorder: Recorder,
        *,
        recompute: str = "none",
        dtype: torch.dtype = torch.float32,
        token_shards: int = 1,
        reduce_each: bool = False,
        weights: Weights | None = None,
        sides: SideLosses | None = None,
    ) -> None:
        self.weights, self.sides = weights or Resident(), sides or NoSideLosses()
        self.token_shards, self.reduce_each = token_shards, reduce_each
        self.schedule, self.stages, self.pp, self.reducer, self.recorder = schedule, stages, pp, reducer, recorder
        self.recompute, self.dtype = recompute, dtype
        self._order = self._incoming()
        self._posted = max(1, receives_to_post(schedule))  # so many per neighbour: then even sends that block end
        self._sends: deque[tuple[Work, Tensor]] = deque()
        self._most_sends = 2 * schedule.num_stages + 2  # where a transport does not tell what has been taken
        self.spans: list[Span] = []
        self.waits: list[Wait] = []
        self.most_in_flight: Counter[int] = Counter()
        self.most_waiting = Waiting()
        self.on_action: Callable[[Action], None] | None = None
        self.note: Callable[[str], None] | None = None
        self._handlers: dict[Kind, Callable[[int, int], None]] = {
            Kind.F: self._forward,
            Kind.B: lambda stage, m: self._backward(stage, m, defer=True),
            Kind.BW: lambda stage, m: self._backward(stage, m, defer=False),
            Kind.W: self._weights,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
        }

    def run(self, microbatches: Sequence[MicroBatch], loss_scale: Tensor) -> Tensor:
        """One step's F, B and W. Returns this rank's summed loss (0 without the last stage), not scaled.

        ``loss_scale`` (scalar tensor) is the gradient of the summed loss: 1 / valid tokens of the whole batch.
        """
        self._microbatches, self._loss_scale = microbatches, loss_scale
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._activations: dict[tuple[int, int], Value] = {}
        self._gradients: dict[tuple[int, int], Value] = {}
        self._expected = {source: deque(order) for source, order in self._order.items()}
        self._arriving: dict[Action, tuple[Work, Value]] = {}
        self._num_arriving: Counter[int] = Counter()
        self._weights_done = dict.fromkeys(self.stages, 0)
        self._held: Counter[int] = Counter()
        self.spans, self.most_in_flight = [], Counter()
        self.waits = self.recorder.waits = []
        self._now_waiting = self.most_waiting = Waiting()
        self._loss = torch.zeros((), dtype=loss_scale.dtype, device=loss_scale.device)
        self.weights.begin()
        for source in self._expected:
            self._post_ahead(source)
        for action in self.schedule.rows[self.pp.rank]:
            self._act(action)
        while self._sends:
            self._sends.popleft()[0].wait()
        self.recorder.waits = None
        assert not self._in_flight, f"micro-batches left in flight: {sorted(self._in_flight)}"
        return self._loss

    def _act(self, action: Action) -> None:
        if self.note is not None:
            self.note(in_words(action))
        if self.on_action is not None:
            self.on_action(action)
        waits, start = len(self.waits), time.perf_counter()
        try:
            with self.recorder.phase(_PHASES[action.kind]):
                self._handlers[action.kind](action.stage, action.microbatch)
        except RankError as error:
            raise RankError(f"{error}; the rank was at {in_words(action)}", rank=error.rank) from error
        self.spans.append(Span(action, start, time.perf_counter(), _seconds(self.waits, waits)))

    # -- compute -----------------------------------------------------------------------------------------

    def _forward(self, stage: int, m: int) -> None:
        flight = self._in_flight[stage, m] = _InFlight()
        self._held[stage] += 1
        self.most_in_flight[stage] = max(self.most_in_flight[stage], self._held[stage])
        x = self._microbatches[m].tokens if stage == 0 else self._activations.pop((stage, m))
        for name in self.stages[stage].units:
            self.weights.acquire(name)
            x = self._detached(x)
            if self.recompute == "full":
                with torch.no_grad():
                    y = self._unit_forward(stage, m, name, x)
            else:
                x = self._tracked(x)
                y = self._unit_forward(stage, m, name, x)
                flight.outputs.append(y)
            self.weights.release(name)
            flight.inputs.append(x)
            x = y
        if stage == self.schedule.num_stages - 1:
            self._loss += x.detach()
        else:
            self._activations[stage + 1, m] = self._detached(x)

    def _detached(self, x: Value) -> Value:
        """``x`` without its graph."""
        return x.detach()

    def _tracked(self, x: Value) -> Value:
        """``x``, which has no graph, as an input that gets a gradient."""
        return x.requires_grad_(x.is_floating_point())

    def _unit_forward(self, stage: int, m: int, name: str, x: Value, *, again: bool = False) -> Value:
        """One unit's forward; ``again``: repeated before its backward."""
        y = self.stages[stage].units[name](x, self._microbatches[m])
        self.sides.forward_done(name, m, self._microbatches[m], again=again)
        return y

    def _unit_backward(self, stage: int, m: int, name: str, x: Value, y: Value, gradient: Value) -> Value:
        """One unit's backward: the gradient of its input (what came, where there is none)."""
        outputs, gradients = self.sides.side_losses(name, m)
        if y.requires_grad:  # not so for an embedding whose parameters are all frozen
            torch.autograd.backward([y, *outputs], [gradient.to(y.dtype), *gradients])
        if x.grad is not None:
            gradient, x.grad = x.grad, None
        return gradient

    def _backward(self, stage: int, m: int, *, defer: bool) -> None:
        last = stage == self.schedule.num_stages - 1
        flight = self._in_flight[stage, m]
        gradient = self._loss_scale if last else self._gradients.pop((stage, m))
        queue = self.reducer.queue
        queue.defer = defer
        for name in reversed(list(self.stages[stage].units)):
            self.weights.acquire(name)
            x = flight.inputs.pop()
            if self.recompute == "full":
                x = self._tracked(x)
                with self.recorder.phase("recompute"):
                    y = self._unit_forward(stage, m, name, x, again=True)
            else:
                y = flight.outputs.pop()
            gradient = self._unit_backward(stage, m, name, x, y, gradient)
            del y
            self.weights.release(name)
            if defer:
                held = self._waiting(stage, name)
                self._count_waiting(held, 1)
                flight.deferred.append((name, held, queue.take()))
            else:
                self._unit_written(stage, name)
        queue.defer = False
        if stage > 0:
            self._gradients[stage - 1, m] = gradient
        if not defer:
            self._microbatch_written(stage, m)

    @torch.no_grad()
    def _weights(self, stage: int, m: int) -> None:
        deferred = self._in_flight[stage, m].deferred
        while deferred:
            name, held, writes = deferred.popleft()
            while writes:
                writes.pop(0)()  # nothing is held longer than it is needed
            self._count_waiting(held, -1)
            self._unit_written(stage, name)
        self._microbatch_written(stage, m)

    def _waiting(self, stage: int, name: str) -> Waiting:
        """What the weight gradients of the unit that has just had its B hold."""
        return self.reducer.queue.waiting()

    def _count_waiting(self, held: Waiting, sign: int) -> None:
        now = self._now_waiting
        self._now_waiting = Waiting(now.bytes + sign * held.bytes, now.gathered + sign * held.gathered)
        self.most_waiting = max(self.most_waiting, self._now_waiting)

    def _unit_written(self, stage: int, unit: str) -> None:
        if self.reduce_each or self._weights_done[stage] + 1 == self.schedule.num_microbatches:
            self.reducer.unit_done(unit)

    def _microbatch_written(self, stage: int, m: int) -> None:
        self._weights_done[stage] += 1
        self._held[stage] -= 1
        del self._in_flight[stage, m]

    # -- neighbours --------------------------------------------------------------------------------------

    def _send_forward(self, stage: int, m: int) -> None:
        value = self._activations.pop((stage + 1, m))
        self._send(value, self.schedule.placement[stage + 1], f"activations.{stage}")

    def _receive_forward(self, stage: int, m: int) -> None:
        self._activations[stage, m] = self._arrived(Action(Kind.RECV_F, stage, m))

    def _send_backward(self, stage: int, m: int) -> None:
        value = self._gradients.pop((stage - 1, m))
        self._send(value, self.schedule.placement[stage - 1], f"activation_gradients.{stage}")

    def _receive_backward(self, stage: int, m: int) -> None:
        self._gradients[stage, m] = self._arrived(Action(Kind.RECV_B, stage, m))

    def _send(self, value: Value, to: int, name: str) -> None:
        tensor = value.contiguous()
        self._sends.append((self.pp.send(tensor, to, name=name), tensor))
        while self._sends and (self._sends[0][0].done or len(self._sends) > self._most_sends):
            self._sends.popleft()[0].wait()

    def _arrived(self, action: Action) -> Value:
        """What ``action`` receives. Receives are posted in the order in which the neighbour sends, some ahead."""
        source = self._source(action)
        while action not in self._arriving:
            self._post_receive(source)
        work, value = self._arriving.pop(action)
        work.wait()
        self._num_arriving[source] -= 1
        self._post_ahead(source)
        return value

    def _post_ahead(self, source: int) -> None:
        """Keep as many receives posted as the schedule needs, if it is known what comes."""
        order = self._expected[source]
        while order and self._num_arriving[source] < self._posted and self._is_known(order[0]):
            self._post_receive(source)

    def _post_receive(self, source: int) -> None:
        action = self._expected[source].popleft()
        self._num_arriving[source] += 1
        forward = action.kind is Kind.RECV_F
        name = f"activations.{action.stage - 1}" if forward else f"activation_gradients.{action.stage + 1}"
        with self.recorder.phase(_PHASES[action.kind]):
            self._arriving[action] = self._receive(action, source, name)

    def _is_known(self, receive: Action) -> bool:
        """Whether the shape of what ``receive`` gets is known before it comes."""
        return True

    def _receive(self, receive: Action, source: int, name: str) -> tuple[Work, Value]:
        """Start ``receive``; where it will be once the work is done."""
        tokens = self._microbatches[receive.microbatch].tokens
        shape = (tokens.shape[0] // self.token_shards, self.stages[receive.stage].width)
        buffer = torch.empty(shape, dtype=self.dtype, device=tokens.device)
        return self.pp.receive(buffer, source, name=name), buffer

    def _source(self, receive: Action) -> int:
        """The pipeline rank that ``receive`` gets its tensor from."""
        return self.schedule.placement[receive.stage + (-1 if receive.kind is Kind.RECV_F else 1)]

    def _incoming(self) -> dict[int, deque[Action]]:
        """For each neighbour, this rank's receives in the order in which the neighbour sends them."""
        mine = {a for a in self.schedule.rows[self.pp.rank] if a.kind in (Kind.RECV_F, Kind.RECV_B)}
        expected: dict[int, deque[Action]] = {}
        for rank, row in enumerate(self.schedule.rows):
            for action in row if rank != self.pp.rank else ():
                if action.kind in _RECEIVES:
                    kind, step = _RECEIVES[action.kind]
                    receive = Action(kind, action.stage + step, action.microbatch)
                    if receive in mine:
                        expected.setdefault(rank, deque()).append(receive)
        return expected

    # -- evaluation --------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, microbatch: MicroBatch) -> Tensor:
        """The forward pass of all stages on one micro-batch: the summed loss on the last stage's rank, else 0."""
        place, last = self.schedule.placement, self.schedule.num_stages - 1
        loss = torch.zeros(())
        x = microbatch.tokens
        for stage, units in sorted(self.stages.items()):
            if stage > 0 and place[stage - 1] != self.pp.rank:
                shape = (microbatch.tokens.shape[0] // self.token_shards, units.width)
                x = torch.empty(shape, dtype=self.dtype, device=microbatch.tokens.device)
                self.pp.receive(x, place[stage - 1], name=f"activations.{stage - 1}").wait()
            for name, unit in units.units.items():
                self.weights.acquire(name)
                x = unit(x, microbatch)
                self.weights.release(name)
            if stage == last:
                loss = x
            elif place[stage + 1] != self.pp.rank:
                self._send(x, place[stage + 1], f"activations.{stage}")
        return loss


def _seconds(waits: Sequence[Wait], first: int) -> float:
    """Time that the waits from number ``first`` on cover. They are in order of their ends; one may lie inside the next."""
    total, covered = 0.0, float("inf")
    for index in range(len(waits) - 1, first - 1, -1):
        _, _, _, _, start, end = waits[index]
        total += max(0.0, min(end, covered) - min(start, covered))
        covered = min(start, covered)
    return total


def in_words(action: Action) -> str:
    """Stage, action and micro-batch, for messages."""
    return f"stage {action.stage}, action {action}, micro-batch {action.microbatch}"


_PHASES = {kind: ("B" if kind in (Kind.BW, Kind.SEND_B, Kind.RECV_B) else kind.value) for kind in Kind} | {
    Kind.SEND_F: "F",
    Kind.RECV_F: "F",
}
_RECEIVES = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}
"""What takes a send, and how many stages further on."""
