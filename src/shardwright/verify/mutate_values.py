"""Mutations of what is computed: a scale, a seed, a position, a weight, an update; and of who is who on an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.comm.base import Comm, Work
from shardwright.train.data import IGNORE, MicroBatch
from shardwright.train.step import Trainer
from shardwright.verify.mutate import Mutation
from shardwright.verify.mutate_comms import ForwardingComm


class _SwapTwo(ForwardingComm):
    """What the first two ranks of an axis bring to a gather changes places."""

    def __init__(self, inner: Comm, axis: str) -> None:
        super().__init__(inner)
        self._meant = axis

    def all_gather_start(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        work = super().all_gather_start(output, tensor, name=name)
        if self.axis != self._meant or self.size < 2:
            return work
        work.wait()
        rows = output.view(self.size, *tensor.shape)
        rows[:2].copy_(rows[:2].flip(0))
        return Work()


def _skip_loss_scale(trainer: Trainer) -> None:
    run = trainer.executor.run
    trainer.executor.run = lambda batches, scale: run(batches, torch.ones_like(scale))  # type: ignore[method-assign,assignment]


def _skip_clip(trainer: Trainer) -> None:
    optim = trainer.config.optim.model_copy(update={"clip": 0.0})
    trainer.config = trainer.config.model_copy(update={"optim": optim})


def _reuse_seed(trainer: Trainer) -> None:
    """Every step draws the masks of the first."""
    context = trainer.model.context
    trainer.model.context = lambda *args, **told: context(*args, **{**told, "step": 0})  # type: ignore[method-assign]


def _shift_positions(batch: MicroBatch) -> MicroBatch:
    """The second half of the tokens is one position further on; all of them together would change no angle between two."""
    late = torch.arange(len(batch.tokens)) >= len(batch.tokens) // 2
    return replace(batch, positions=batch.positions + late)


def _shift_targets(batch: MicroBatch) -> MicroBatch:
    """A token is to predict itself."""
    return replace(batch, targets=torch.where(batch.targets == IGNORE, batch.targets, batch.tokens))


def _count_all(batch: MicroBatch) -> MicroBatch:
    return replace(batch, num_valid=len(batch.tokens))


def _drop_last_weight(trainer: Trainer) -> None:
    gradients = trainer.gradients

    def without(batches: Sequence[MicroBatch], step: int, tokens: int) -> Tensor:
        last = replace(batches[-1], targets=torch.full_like(batches[-1].targets, IGNORE))
        return gradients([*batches[:-1], last], step, tokens)

    trainer.gradients = without  # type: ignore[method-assign]


def _same_samples(trainer: Trainer) -> None:
    gradients = trainer.gradients

    def first(batches: Sequence[MicroBatch], step: int, tokens: int) -> Tensor:
        return gradients(trainer.mesh.dp.gather_objects(list(batches))[0], step, tokens)

    trainer.gradients = first  # type: ignore[method-assign]


def _around_update(trainer: Trainer, before: Callable[[float], float], after: Callable[[], None]) -> None:
    step = trainer.optimizer.step

    def changed(lr: float) -> None:
        step(before(lr))
        after()

    trainer.optimizer.step = changed  # type: ignore[method-assign]


def _nothing() -> None:
    pass


def _forget_momentum(trainer: Trainer) -> None:
    def forget(lr: float) -> float:
        for flats in trainer.optimizer.state.values():
            for flat in flats:
                flat.zero_()
        return lr

    _around_update(trainer, forget, _nothing)


def _late_rate(trainer: Trainer) -> None:
    """The learning rate of the step before."""
    seen: list[float] = []

    def late(lr: float) -> float:
        seen.append(lr)
        return seen[max(len(seen) - 2, 0)]

    _around_update(trainer, late, _nothing)


def _round_parameters(trainer: Trainer) -> None:
    def rounded() -> None:
        for _, piece in trainer.optimizer.pieces:
            piece.master.copy_(piece.master.bfloat16())

    _around_update(trainer, lambda lr: lr, rounded)


def _skip_bucket(trainer: Trainer) -> None:
    optimizer, update = trainer.optimizer, trainer.optimizer._update_piece
    last = len(optimizer.pieces) - 1

    def all_but_last(index: int, gradients: Tensor, lr: float) -> None:
        if index != last:
            update(index, gradients, lr)

    optimizer._update_piece = all_but_last  # type: ignore[method-assign]


def _old_gradients(trainer: Trainer) -> None:
    """What the step before has left is added to."""
    trainer.buckets.begin = trainer.buckets.expect  # type: ignore[method-assign]



VALUE_MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        Mutation("skip-loss-scale", "gradients are not divided by the tokens of the batch", trainer=_skip_loss_scale),
        Mutation("skip-clip", "gradients above the limit are used as they are", trainer=_skip_clip),
        Mutation("reuse-seed", "every step has the dropout masks of the first", trainer=_reuse_seed),
        Mutation("shift-positions", "positions are off by one from the middle on", batch=_shift_positions),
        Mutation("shift-targets", "targets are not shifted", batch=_shift_targets),
        Mutation("count-all-tokens", "tokens without a target count in the mean", batch=_count_all),
        Mutation("drop-loss-weight", "the last micro-batch's loss counts nothing", trainer=_drop_last_weight),
        Mutation("same-samples", "all replicas read the first one's samples", trainer=_same_samples),
        Mutation("forget-momentum", "the optimizer begins anew in every step", trainer=_forget_momentum),
        Mutation("late-learning-rate", "the schedule is one step behind", trainer=_late_rate),
        Mutation("round-parameters", "parameters are kept in half precision", trainer=_round_parameters),
        Mutation("skip-bucket", "one bucket is never updated", trainer=_skip_bucket),
        Mutation("old-gradients", "gradients of the step before are added to", trainer=_old_gradients),
    )
}
"""Those that any layout shows that has several replicas and micro-batches, dropout, warm-up and clipping."""

PLACE_MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        Mutation("swap-tp-ranks", "two ranks of tp are taken for one another", lambda comm: _SwapTwo(comm, "tp")),
        Mutation("swap-shard-ranks", "two ranks have each other's shard", lambda comm: _SwapTwo(comm, "dp_shard")),
    )
}
"""Those that take two ranks for one another: of tp with sequence parallelism, of sharded data parallelism."""
