"""Mutations: break one thing at a time and see that verification turns red.

A check that no mutation can turn red proves nothing. New collectives and new machinery add their own here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.base import Comm
from shardwright.core.suggest import did_you_mean
from shardwright.errors import ConfigError
from shardwright.model.attention import Attention
from shardwright.model.mlp import MLP
from shardwright.ops.linear import add_bias
from shardwright.parallel.bucket import Bucket
from shardwright.parallel.data import Launch
from shardwright.schedule.action import Action, Kind
from shardwright.train.data import MicroBatch
from shardwright.train.optim import FlatOptimizer
from shardwright.train.step import Trainer
from shardwright.verify.mutate_comms import (
    BordersLeftOut,
    Drift,
    DropAllReduce,
    HalfWire,
    LeaveOut,
    LoseSends,
    OthersShard,
    OwnPart,
    ReduceTwice,
    ScaleAllReduce,
    SwapMetrics,
)


def _own_seed(trainer: Trainer) -> None:
    trainer.model.initialise(trainer.config.train.seed + trainer.mesh.rank)


def _reduce_early(trainer: Trainer) -> None:
    """All buckets are reduced before the last micro-batch's backward adds to them."""

    def before(action: Action) -> None:
        if action.kind in (Kind.B, Kind.BW) and action.microbatch == trainer.layout.microbatches - 1:
            trainer.buckets.finish()

    trainer.executor.on_action = before


def _last_micro_batch_only(trainer: Trainer) -> None:
    """Each micro-batch overwrites the gradients of the one before."""
    trainer.executor.on_action = lambda action: trainer.buckets.begin() if action.kind is Kind.F else None


def _decay_all(trainer: Trainer) -> None:
    """Norms and biases decay too."""
    for bucket in trainer.optimizer.buckets:
        bucket.plan = replace(bucket.plan, num_decayed=bucket.plan.numel)
    trainer.optimizer = FlatOptimizer(trainer.config.optim, trainer.optimizer.buckets)


def _bias_before_the_sum(trainer: Trainer) -> None:
    """Every rank adds the bias of a row-parallel layer to its partial product, so the sum holds it tp times."""

    def again(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        bias = module.out.bias if isinstance(module, Attention) else module.down.bias if isinstance(module, MLP) else None
        for _ in range(trainer.mesh.tp.size - 1):
            y = y if bias is None else add_bias(y, bias)
        return y

    for module in trainer.model.modules():
        if isinstance(module, (Attention, MLP)):
            module.register_forward_hook(again)


def _norm_counts_copies(trainer: Trainer) -> None:
    """Parameters that every tp rank holds whole are counted once for each."""
    for bucket in trainer.buckets.buckets:
        bucket.plan = replace(bucket.plan, shard_axes=("tp",))


def _other_order(trainer: Trainer) -> None:
    """All pipeline ranks but the first take the micro-batches in reverse."""
    run = trainer.executor.run
    if trainer.mesh.pp.rank > 0:
        trainer.executor.run = lambda batches, scale: run(batches[::-1], scale)  # type: ignore[method-assign,assignment]


def _forget_deferred(trainer: Trainer) -> None:
    """What a B leaves for its W is lost."""
    queue = trainer.buckets.queue
    take = queue.take

    def take_nothing() -> list[Callable[[], None]]:
        take()
        return []

    queue.take = take_nothing  # type: ignore[method-assign]


def _last_reduction_only(trainer: Trainer) -> None:
    """A shard of gradients is overwritten by each micro-batch's instead of added to."""
    buckets = trainer.buckets
    add = buckets.wait_for

    def overwrite(launch: Launch) -> None:
        if launch.part is not None:
            buckets.buckets[launch.index].gradients.zero_()
        add(launch)

    buckets.wait_for = overwrite  # type: ignore[method-assign]


def _never_freed(trainer: Trainer) -> None:
    """What was gathered once is used in every step after."""
    for bucket in trainer.buckets.buckets:
        bucket.free = lambda: None  # type: ignore[method-assign]


def _gradients_of_the_last_step(trainer: Trainer) -> None:
    """A temporary gradient buffer is not cleared where nothing is written, and holds what was there before."""
    for bucket in trainer.buckets.buckets:
        bucket.new_gradients = _dirty(bucket)  # type: ignore[method-assign]


def _dirty(bucket: Bucket) -> Callable[[], Tensor]:
    return lambda: torch.ones(bucket.num_elements, dtype=bucket.dtype)


def _overwritten_on_the_host(trainer: Trainer) -> None:
    """What is reduced later replaces what was copied out before."""
    storage = trainer.buckets.storage
    copy_out = storage.copy_out
    storage.copy_out = (  # type: ignore[method-assign]
        lambda host, tensor, name, *, add=False: copy_out(host, tensor, name)
    )


def _lost_on_the_way_out(trainer: Trainer) -> None:
    """The host has no gradients."""
    storage = trainer.buckets.storage
    copy_out = storage.copy_out
    storage.copy_out = (  # type: ignore[method-assign]
        lambda host, tensor, name, *, add=False: copy_out(host.zero_(), torch.zeros_like(tensor), name)
    )


def _lost_on_the_way_in(trainer: Trainer) -> None:
    """Parameters on the device are those of the step before, or none where they are gathered from the host."""
    storage = trainer.buckets.storage
    copy_in = storage.copy_in
    storage.copy_in = (  # type: ignore[method-assign]
        lambda tensor, host, name: copy_in(torch.empty_like(tensor) if "parameters" in name else tensor, host, name)
    )


def _not_delayed(trainer: Trainer) -> None:
    """The update is made at once."""
    delayed = trainer.delayed
    assert delayed is not None
    keep = delayed.keep

    def keep_and_settle(rate: float) -> None:
        keep(rate)
        with trainer.mesh.recorder.aside():
            delayed.settle()

    delayed.keep = keep_and_settle  # type: ignore[method-assign]


def _delayed_twice(trainer: Trainer) -> None:
    """The update reads the gradients that this step has written instead of the outstanding ones."""
    delayed = trainer.delayed
    assert delayed is not None
    start, finish = delayed.start, delayed.finish
    for bucket in trainer.buckets.buckets:
        for piece in bucket.pieces:
            piece.outstanding = piece.gradients

    def start_late() -> None:
        start()
        finish()

    delayed.start, delayed.finish = lambda: None, start_late  # type: ignore[method-assign]


def _one_document(batch: MicroBatch) -> MicroBatch:
    return replace(batch, lengths=(len(batch.tokens),))


def _own_token_index(batch: MicroBatch) -> MicroBatch:
    return replace(batch, token_index=torch.arange(len(batch.tokens)))


def _same(value: Any) -> Any:
    return value


def _leave(trainer: Trainer) -> None:
    pass


@dataclass(frozen=True)
class Mutation:
    """A named defect and what it stands for: it changes the communicators, the trainer, or each micro-batch."""

    name: str
    stands_for: str
    comm: Callable[[Comm], Comm] = _same
    trainer: Callable[[Trainer], None] = _leave
    batch: Callable[[MicroBatch], MicroBatch] = _same


UNBROKEN = Mutation("", "nothing")

MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        Mutation(
            "drop-gradient-all-reduce",
            "replicas train on their own batch only",
            lambda comm: DropAllReduce(comm, "gradients"),
        ),
        Mutation("drop-first-bucket", "one bucket is never reduced", lambda comm: DropAllReduce(comm, "gradients.0")),
        Mutation(
            "local-token-count",
            "the loss is divided by the rank's own tokens",
            lambda comm: DropAllReduce(comm, "tokens"),
        ),
        Mutation("average-gradients", "gradients averaged although the loss is normalised", ScaleAllReduce),
        Mutation("reduce-twice", "a bucket is reduced twice in one step", ReduceTwice),
        Mutation("half-wire", "gradients rounded to bf16 on their way", HalfWire),
        Mutation("replica-drift", "replicas that differ in the last bit", Drift),
        Mutation("local-loss", "the reported loss is one rank's own", SwapMetrics),
        Mutation("own-seed", "ranks start from different parameters", trainer=_own_seed),
        Mutation("reduce-early", "reduction before the last micro-batch is added", trainer=_reduce_early),
        Mutation("last-micro-batch-only", "accumulation overwrites", trainer=_last_micro_batch_only),
        Mutation("decay-all", "norms and biases decay", trainer=_decay_all),
        Mutation("one-document", "attention crosses document borders", batch=_one_document),
        Mutation("own-token-index", "dropout masks depend on the layout", batch=_own_token_index),
    )
}


def _left_out(tensor: str, stands_for: str) -> Mutation:
    name = "drop-" + tensor.replace(" ", "-")
    return Mutation(name, stands_for, lambda comm: LeaveOut(comm, tensor))


TENSOR_MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        _left_out("embedding", "each rank knows its own vocabulary rows only"),
        _left_out("attention out", "heads of other ranks are not added"),
        _left_out("mlp out", "channels of other ranks are not added"),
        _left_out("attention in gradient", "the gradient of what enters attention is one rank's part"),
        _left_out("mlp in gradient", "the gradient of what enters the MLP is one rank's part"),
        _left_out("attention in again", "weight gradients from the rank's own tokens instead of all"),
        _left_out("mlp in again", "weight gradients from the rank's own tokens instead of all"),
        _left_out("loss maximum", "each rank subtracts its own maximum before exponentials are summed"),
        _left_out("loss denominator", "softmax over the rank's own vocabulary rows"),
        _left_out("loss target", "ranks that do not hold the target take its logit for the maximum"),
        _left_out("head gradient", "the gradient of the head's input is one rank's part"),
        _left_out("norm", "each rank clips by the norm of what it holds"),
        Mutation(
            "drop-tp-gradients",
            "norm weights, row biases and what is held whole inside the region train on a part of the tokens or heads",
            lambda comm: LeaveOut(comm, "gradients"),
        ),
        Mutation("bias-before-the-sum", "a row-parallel bias added by every rank", trainer=_bias_before_the_sum),
        Mutation("norm-counts-copies", "replicated parameters counted tp times in the norm", trainer=_norm_counts_copies),
    )
}
"""Those that need tp > 1."""


PIPELINE_MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        Mutation("lose-activations", "a stage computes on what never arrived", lambda comm: LoseSends(comm, "activations")),
        Mutation(
            "lose-activation-gradients",
            "stages before the last get no gradient",
            lambda comm: LoseSends(comm, "activation_gradients"),
        ),
        Mutation("swap-micro-batches", "stages take the micro-batches in different orders", trainer=_other_order),
        Mutation(
            "drop-tied-gradients",
            "the copies of a tied weight are trained by one of its uses each",
            lambda comm: OwnPart(comm, "tied", "gradients"),
        ),
        Mutation("stage-norm", "each stage clips by its own norm", lambda comm: OwnPart(comm, "pp", "norm")),
        Mutation("forget-deferred", "weight gradients put off by B never come", trainer=_forget_deferred),
    )
}
"""Those that need pp > 1: the tied one a tied head on another rank than the embedding, the last a schedule with W."""


def left_out_over(axis: str, name: str, tensor: str, stands_for: str) -> Mutation:
    return Mutation(name, stands_for, lambda comm: LeaveOut(comm, tensor, axis))


ZERO_MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        left_out_over(
            "dp_shard", "drop-reduce-scatter", "gradients", "each rank updates its shard by its own batch only"
        ),
        left_out_over("dp_shard", "drop-parameter-gather", "parameters", "each rank takes its own shard for all"),
        left_out_over("dp_shard", "drop-shard-norm", "norm", "each rank clips by the norm of its own shard"),
        left_out_over("dp_replicate", "drop-replica-sum", "gradients", "replicas of shards train apart"),
        Mutation("others-shard", "shards are gathered in another order than they are cut", OthersShard),
        Mutation("borders-left-out", "shards are shown side by side without what lies between their pages", BordersLeftOut),
        Mutation("dirty-padding", "what a shard is padded with counts", trainer=_gradients_of_the_last_step),
        Mutation("last-reduction-only", "shards of micro-batches overwritten", trainer=_last_reduction_only),
        Mutation("never-freed", "a unit computes with the parameters of an earlier step", trainer=_never_freed),
    )
}
"""Those that need sharded data parallelism (each a layout that has what it breaks)."""

OFFLOAD_MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        Mutation("overwritten-on-host", "accumulation on the host overwrites", trainer=_overwritten_on_the_host),
        Mutation("drop-copy-out", "the host updates with gradients that never came", trainer=_lost_on_the_way_out),
        Mutation("drop-copy-in", "the device computes with parameters that never came", trainer=_lost_on_the_way_in),
        Mutation("not-delayed", "a delayed update is made at once", trainer=_not_delayed),
        Mutation("delayed-into-the-next", "an update reads what the step beside it writes", trainer=_delayed_twice),
    )
}
"""Those that need ``offload``, the last two ``delayed_update`` too."""


def known_mutations() -> dict[str, Mutation]:
    """Every mutation by its name."""
    from shardwright.verify.mutate_context import CONTEXT_MUTATIONS  # these are made of what is here
    from shardwright.verify.mutate_experts import EXPERT_MUTATIONS
    from shardwright.verify.mutate_values import PLACE_MUTATIONS, VALUE_MUTATIONS

    known = MUTATIONS | TENSOR_MUTATIONS | PIPELINE_MUTATIONS | ZERO_MUTATIONS | OFFLOAD_MUTATIONS
    return known | CONTEXT_MUTATIONS | VALUE_MUTATIONS | PLACE_MUTATIONS | EXPERT_MUTATIONS


def find_mutation(name: str) -> Mutation:
    """The mutation of that name; raises `ConfigError` with the known ones."""
    known = known_mutations()
    if name not in known:
        raise ConfigError(f"mutation {name!r} is not known; {did_you_mean(name, known)}")
    return known[name]
