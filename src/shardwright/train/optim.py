"""Optimizers over flat ranges, learning-rate schedules, and clipping by the global norm.

AdamW (Loshchilov and Hutter 2019) and SGD with momentum, both with decoupled decay, run as PyTorch's fused kernels over
each bucket's two flat ranges; norms and biases do not decay. State is fp32 (fp64 for fp64) and has the shape of the
range, so a checkpoint reads it by the bucket's index.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import OptimConfig
from shardwright.errors import CheckpointError
from shardwright.parallel.bucket import Bucket, FlatRange, Piece
from shardwright.parallel.data import GradientBuckets


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of optimizer step ``step`` (0-based) of ``num_steps``: linear warm-up, then the named schedule.

    ``cosine`` (Loshchilov and Hutter 2017) and ``linear`` fall to ``min_lr_ratio`` at the end; ``wsd`` (warm-up, stable,
    decay; Hu et al. 2024) stays and falls linearly in the last ``decay_fraction`` of the steps.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(1, num_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    low = config.min_lr_ratio
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))
    if config.schedule == "linear":
        return config.lr * (1 - (1 - low) * done)
    decayed = max(0.0, (done - (1 - config.decay_fraction)) / config.decay_fraction)
    return config.lr * (1 - (1 - low) * decayed)


class FlatOptimizer:
    """Updates every bucket's master ranges from its gradient ranges; ``kinds`` names the state it keeps.

    A state is one flat tensor for each of ``pieces``, in the place of its master.
    """

    def __init__(self, config: OptimConfig, buckets: Sequence[Bucket]) -> None:
        self.config, self.buckets = config, buckets
        self.step_count = 0
        self.kinds = ("exp_avg", "exp_avg_sq") if config.name == "adamw" else ("momentum",)
        self.pieces: list[tuple[Bucket, Piece]] = [(bucket, piece) for bucket in buckets for piece in bucket.pieces]
        self.state: dict[str, list[Tensor]] = {
            kind: [torch.zeros_like(piece.master) for _, piece in self.pieces] for kind in self.kinds
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of all ranges; each bucket's master is published to the compute parameters as soon as it is updated."""
        self.step_count += 1
        published, pieces = [], iter(range(len(self.pieces)))
        for bucket in self.buckets:
            for piece in bucket.pieces:
                self._update_piece(next(pieces), piece.gradients, lr)
            published.append(bucket.publish())
        for work in published:
            work.wait()

    @torch.no_grad()
    def update(self, lr: float) -> None:
        """One update of all masters from the outstanding gradients; the parameters see it at :meth:`publish`."""
        self.step_count += 1
        for index, (_, piece) in enumerate(self.pieces):
            assert piece.outstanding is not None
            self._update_piece(index, piece.outstanding, lr)

    @torch.no_grad()
    def publish(self) -> None:
        """Hand the masters to the compute parameters of all ranks."""
        for work in [bucket.publish() for bucket in self.buckets]:
            work.wait()

    def _update_piece(self, index: int, gradients: Tensor, lr: float) -> None:
        bucket, piece = self.pieces[index]
        update = self._adamw if self.config.name == "adamw" else self._sgd
        for flat in bucket.ranges(piece, gradients):
            update(flat, [self.state[kind][index][flat.part] for kind in self.kinds], lr)

    def _adamw(self, flat: FlatRange, state: list[Tensor], lr: float) -> None:
        config = self.config
        device = flat.master.device
        torch._fused_adamw_(
            [flat.master],
            [flat.gradient],
            [state[0]],
            [state[1]],
            [],
            [torch.tensor(float(self.step_count), device=device)],
            lr=lr,
            beta1=config.betas[0],
            beta2=config.betas[1],
            weight_decay=config.weight_decay if flat.decay else 0.0,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
        )

    def _sgd(self, flat: FlatRange, state: list[Tensor], lr: float) -> None:
        """v = mu v + g; w = w - lr (v + decay w): the decay stays out of the momentum."""
        momentum = state[0].mul_(self.config.momentum).add_(flat.gradient)
        if flat.decay and self.config.weight_decay:
            flat.master.mul_(1 - lr * self.config.weight_decay)
        flat.master.add_(momentum, alpha=-lr)

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """State kind -> parameter name -> a tensor of its shape (and ``master`` where it is apart from the parameters).

        Views, or put together from the ranks' shards; then all ranks must call.
        """
        named = {
            kind: {
                name: view
                for bucket, parts in self.by_bucket(flats)
                for name, view in bucket.views(bucket.gathered(parts))
            }
            for kind, flats in self.state.items()
        }
        if any(bucket.has_master for bucket in self.buckets):
            named["master"] = {name: view for bucket in self.buckets for name, view in bucket.named("master").items()}
        return named

    def by_bucket(self, flats: Sequence[Tensor]) -> Iterator[tuple[Bucket, list[Tensor]]]:
        """Each bucket and what ``flats``, one for each piece, has of it."""
        rest = iter(flats)
        for bucket in self.buckets:
            yield bucket, [next(rest) for _ in bucket.pieces]

    def _flats(self) -> dict[str, list[Tensor]]:
        """What a checkpoint fills, by kind: this rank's part of each bucket."""
        masters = {"master": [piece.master for _, piece in self.pieces]}
        return self.state | (masters if any(bucket.has_master for bucket in self.buckets) else {})

    @torch.no_grad()
    def load(self, state: dict[str, dict[str, Tensor]], step_count: int) -> None:
        """Fill from :meth:`named_state` of any bucket plan; strict in kinds and names."""
        mine = self._flats()
        if state.keys() != mine.keys():
            raise CheckpointError(
                f"the checkpoint holds optimizer state {sorted(state)} but {self.config.name} needs {sorted(mine)}; "
                "resume with the same optimizer and precision, or start a new run from its weights (train.init_from)"
            )
        names = {member.name for bucket in self.buckets for member in bucket.plan.members}
        for kind, flats in mine.items():
            missing = names ^ state[kind].keys()
            if missing:
                raise CheckpointError(f"optimizer state {kind} does not match the trained parameters: {sorted(missing)[:5]}")

            def write(name: str, view: Tensor, given: dict[str, Tensor] = state[kind]) -> None:
                view.copy_(given[name])

            for bucket, parts in self.by_bucket(flats):
                bucket.fill(parts, write)
        self.step_count = step_count

    def memory(self, *, hosted: bool | None = None) -> int:
        """Persistent bytes of the state, masters not included; ``hosted``: in host memory, on the device (None: both)."""
        wanted = [hosted is None or piece.hosted is hosted for _, piece in self.pieces]
        return sum(flat.nbytes for flats in self.state.values() for flat, want in zip(flats, wanted, strict=True) if want)


class NormWatch:
    """Judges the global gradient norm of each step before it is applied; the same on every rank, as the norm is.

    ``factor``: how many times the median of the last applied steps is too much (0: no norm is). It needs some steps first.
    """

    WINDOW, LEAST = 32, 8

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.norms: deque[float] = deque(maxlen=self.WINDOW)

    def judge(self, norm: float) -> str | None:
        """None for a step that may be applied, else why not."""
        if norm - norm != 0.0:  # inf or nan
            return f"the gradient norm is {norm}"
        if self.factor and len(self.norms) >= self.LEAST:
            middle = statistics.median(self.norms)
            if norm > self.factor * middle:
                return f"the gradient norm is {norm:.4g}, more than {self.factor:g} times the median {middle:.4g} before it,"
        self.norms.append(norm)
        return None


def global_norm(buckets: GradientBuckets, mesh: Mesh, device: torch.device | None = None) -> Tensor:
    """The norm of the full gradient, each distinct parameter counted once; a scalar, equal on every rank.

    Squares are summed over the axes that shard a parameter only (tp, or ep for experts); over pp, whose stages hold different
    parameters, all. Where gradients are shards (ZeRO), over the ranks that hold them: what a shard is padded with is zero.
    ``device``: where the scalar is on a rank that trains nothing, as all of its stages are frozen.
    """
    held = _zero_scalar(buckets, mesh, device)
    sharded, experts = held.clone(), held.clone()
    for bucket in buckets.buckets:
        if bucket.plan.copy:
            continue
        for gradients in buckets.reduced(bucket):
            square = torch.linalg.vector_norm(gradients).square().to(held.device)
            if bucket.plan.shard_over == "edp_shard":
                experts += square
            elif "tp" in bucket.plan.shard_axes:
                sharded += square
            else:
                held += square
    if buckets.has_experts:
        for comm in (mesh.ep,) if buckets.whole_gradients else (mesh.edp_shard, mesh.ep):
            if comm.size > 1:
                comm.all_reduce(experts, name="norm")
    if mesh.dp_shard.size > 1 and not buckets.whole_gradients:
        both = torch.stack([held, sharded])
        mesh.dp_shard.all_reduce(both, name="norm")
        held, sharded = both[0], both[1].clone()
    if mesh.tp.size > 1:
        mesh.tp.all_reduce(sharded, name="norm")
    total = held + sharded + experts
    if mesh.pp.size > 1:
        mesh.pp.all_reduce(total, name="norm")
    return total.sqrt()


def _zero_scalar(buckets: GradientBuckets, mesh: Mesh, device: torch.device | None) -> Tensor:
    """A zero scalar of the gradients' dtype and device, the same dtype on a rank without gradients."""
    if buckets.buckets:
        first = buckets.buckets[0].gradients
        return torch.zeros((), dtype=first.dtype, device=first.device)
    dtype = torch.float64 if mesh.layout.precision == "fp64" else torch.float32
    return torch.zeros((), dtype=dtype, device=device)


@torch.no_grad()
def clip(buckets: GradientBuckets, norm: float, limit: float) -> float:
    """Scale every gradient by limit / norm when the norm is above the limit; the factor used."""
    if limit <= 0 or norm <= limit:
        return 1.0
    factor = limit / (norm + 1e-6)
    buckets.scale(factor)
    return factor
