"""Mutations of layers with experts: their exchanges, what routers know of other ranks, and where expert gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwright.comm.base import Comm, Work
from shardwright.comm.record import RecordComm
from shardwright.core.ledger import BucketTiming
from shardwright.model.context import Context
from shardwright.train.step import Trainer
from shardwright.verify.mutate import Mutation, left_out_over
from shardwright.verify.mutate_comms import ForwardingComm
from shardwright.verify.routing import routers_of


class _LoseRows(ForwardingComm):
    """Rows that an all-to-all of this name brings from other ranks are lost, in forward (``F``) or in backward (``B``)."""

    def __init__(self, inner: Comm, tensor: str, phase: str) -> None:
        super().__init__(inner)
        self.tensor, self.phase = tensor, phase

    def all_to_all_start(
        self, output: Tensor, tensor: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], *, name: str
    ) -> Work:
        work = super().all_to_all_start(output, tensor, send_sizes, receive_sizes, name=name)
        if name == self.tensor and isinstance(self.inner, RecordComm) and self.inner.recorder.current == self.phase:
            work.wait()
            for source, rows in enumerate(output.split(list(receive_sizes))):
                if source != self.rank:
                    rows.zero_()
            return Work()
        return work


def _experts_by_ep(trainer: Trainer) -> None:
    """Expert gradients are multiplied by ep, as if tokens had come from one rank of it only."""
    finish = trainer.buckets.finish

    def finish_and_scale() -> list[BucketTiming]:
        timings = finish()
        for bucket in trainer.buckets.buckets:
            if bucket.plan.shard_over == "edp_shard":
                for gradients in trainer.buckets.reduced(bucket):
                    gradients.mul_(trainer.mesh.ep.size)
        return timings

    trainer.buckets.finish = finish_and_scale  # type: ignore[method-assign]


def _own_tokens_in_routers(trainer: Trainer) -> None:
    """The auxiliary loss is divided by the tokens of the data-parallel rank."""
    balancer = trainer.balancer
    assert balancer is not None
    begin = balancer.begin
    balancer.begin = lambda num_tokens: begin(num_tokens // trainer.layout.dp)  # type: ignore[method-assign]


def _worst_experts(trainer: Trainer) -> None:
    """Every router takes the experts that score least."""
    for router in routers_of(trainer.model).values():

        def worst(choice: Tensor, context: Context, choose: Any = router.choose) -> tuple[Tensor, Tensor]:
            return choose(-choice, context)[0], choice

        router.choose = worst  # type: ignore[method-assign]


def _count_again(trainer: Trainer) -> None:
    """Choices are counted in every forward, the recomputed ones too."""
    balancer = trainer.balancer
    assert balancer is not None
    done = balancer.forward_done

    def counted(unit: str, m: int, microbatch: Any, *, again: bool) -> None:
        done(unit, m, microbatch, again=False)

    balancer.forward_done = counted  # type: ignore[method-assign]


def _lost_rows(tensor: str, phase: str, stands_for: str) -> Mutation:
    name = f"lose-{tensor.replace(' ', '-')}" + ("-gradient" if phase == "B" else "")
    return Mutation(name, stands_for, lambda comm: _LoseRows(comm, tensor, phase))


EXPERT_MUTATIONS = {
    mutation.name: mutation
    for mutation in (
        _lost_rows("dispatch", "F", "experts get the tokens of their own rank only"),
        _lost_rows("combine", "F", "outputs of other ranks' experts do not come back"),
        _lost_rows("combine", "B", "experts learn from the tokens of their own rank only"),
        _lost_rows("dispatch", "B", "what experts on other ranks say about a token's gradient is lost"),
        _lost_rows("dispatch weights", "F", "experts on other ranks weigh with nothing"),
        _lost_rows("dispatch weights", "B", "routers learn nothing of experts on other ranks"),
        left_out_over("edp", "drop-expert-gradients", "gradients", "copies of an expert train apart"),
        left_out_over("edp_shard", "drop-expert-scatter", "gradients", "shards of an expert train apart"),
        left_out_over("edp_shard", "drop-expert-gather", "parameters", "a rank takes its shard of an expert for all of it"),
        left_out_over("ep", "drop-expert-norm", "norm", "each rank clips by the norm of its own experts"),
        left_out_over("edp_shard", "drop-expert-shard-norm", "norm", "each rank clips by the norm of its shard of experts"),
        left_out_over("stage", "own-choices", "choices of experts", "each rank balances its own tokens"),
        left_out_over("tp_cp", "own-part-of-sequence", "choices of experts", "each rank balances its part of a sequence"),
        left_out_over("tp_cp", "own-capacity", "choices", "each rank fills experts by its own tokens"),
        left_out_over("tp_cp", "own-scores", "scores", "each rank ranks experts by its own tokens"),
        left_out_over("world", "own-report", "routers", "each rank moves its biases by its own tokens"),
        Mutation("experts-by-ep", "expert gradients ep times too large", trainer=_experts_by_ep),
        Mutation("own-tokens-in-routers", "the auxiliary loss weighs more with more replicas", trainer=_own_tokens_in_routers),
        Mutation("worst-experts", "tokens go to the experts that score least", trainer=_worst_experts),
        Mutation("count-again", "recomputed choices counted twice", trainer=_count_again),
    )
}
"""Those that need experts, most of them on several ranks (each a layout that has what it breaks)."""
