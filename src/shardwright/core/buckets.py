"""How gradients are packed into buckets: a pure function of the specs, so the plan and the run cannot disagree.

One group per (axes to reduce over, axes that shard, axis that ZeRO cuts over); inside a group, units in reverse order of
use (the last used is ready first), cut into buckets of at most ``bucket_mb``. Inside a bucket the decayed parameters come
first, so that each bucket has one decayed and one undecayed range, and neighbours of one unit stay neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

Group = tuple[tuple[str, ...], tuple[str, ...], bool, str]
Key = tuple[Group, tuple[str, ...]]


@dataclass(frozen=True)
class Member:
    """One trainable parameter as the buckets see it. ``units``: every unit that uses it (a tied weight has two)."""

    name: str
    shape: tuple[int, ...]
    units: tuple[str, ...]
    decay: bool
    reduce_axes: tuple[str, ...]
    shard_axes: tuple[str, ...] = ()
    """Axes whose ranks hold different slices: the global norm is summed over these only."""
    copy: bool = False
    """A further copy of a weight tied across pipeline ends: its square is counted where the embedding is."""
    shard_over: str = "dp_shard"
    """The axis over which sharded data parallelism cuts its state; ``edp_shard`` for experts."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def group(self) -> Group:
        """Parameters of one group share every rule, so they may share a bucket."""
        return self.reduce_axes, self.shard_axes, self.copy, self.shard_over


@dataclass(frozen=True)
class BucketPlan:
    """Names and offsets of one bucket. ``[0, num_decayed)`` decays, ``[num_decayed, numel)`` does not."""

    name: str
    reduce_axes: tuple[str, ...]
    members: tuple[Member, ...]
    offsets: tuple[int, ...]
    num_decayed: int
    numel: int
    shard_axes: tuple[str, ...] = ()
    copy: bool = False
    shard_over: str = "dp_shard"

    @property
    def units(self) -> frozenset[str]:
        return frozenset(unit for member in self.members for unit in member.units)

    @cached_property
    def unit_names(self) -> tuple[str, ...]:
        """The units in the order in which their parameters lie."""
        return tuple(dict.fromkeys(unit for member in self.members for unit in member.units))

    @property
    def gather_name(self) -> str:
        """The name of its parameters in messages."""
        return self.name.replace("gradients", "parameters")

    def padded(self, num_shards: int) -> int:
        """Elements of the bucket when it is cut into equal shards."""
        return -(-self.numel // num_shards) * num_shards


def plan_buckets(
    members: Iterable[Member],
    unit_order: Sequence[str],
    bucket_mb: float,
    element_bytes: int = 4,
    *,
    by_unit: bool = False,
    prefix: str = "gradients",
) -> list[BucketPlan]:
    """Buckets in the order in which they become ready during backward.

    ``unit_order`` lists the units in order of use. A parameter is ready when the earliest unit that uses it is done
    (backward reaches it last). A parameter larger than ``bucket_mb`` MiB gets a bucket of its own. ``by_unit``: what the
    same units use is one bucket, whatever its size (it is gathered as one). ``prefix`` begins the buckets' names.
    """
    place = {unit: index for index, unit in enumerate(unit_order)}
    limit = max(1, int(bucket_mb * 2**20 / element_bytes))

    def key(member: Member) -> Key:
        return member.group, member.units if by_unit else ()

    ordered = sorted(members, key=lambda m: -min(place[unit] for unit in m.units))  # stable: order inside a unit stays
    open_members: dict[Key, list[Member]] = {}
    closed: list[tuple[int, list[Member]]] = []

    def close(group: Key) -> None:
        members = open_members.pop(group)
        closed.append((min(place[unit] for member in members for unit in member.units), members))

    for member in ordered:
        filled = sum(m.numel for m in open_members.get(key(member), []))
        if filled and filled + member.numel > limit and not by_unit:
            close(key(member))
        open_members.setdefault(key(member), []).append(member)
    for group in list(open_members):
        close(group)
    closed.sort(key=lambda item: -item[0])
    return [_bucket(f"{prefix}.{index}", members) for index, (_, members) in enumerate(closed)]


def _bucket(name: str, group: list[Member]) -> BucketPlan:
    members = [m for m in group if m.decay] + [m for m in group if not m.decay]
    offsets, end = [], 0
    for member in members:
        offsets.append(end)
        end += member.numel
    decayed = sum(m.numel for m in members if m.decay)
    reduce_axes, shard_axes, copy, shard_over = members[0].group
    return BucketPlan(name, reduce_axes, tuple(members), tuple(offsets), decayed, end, shard_axes, copy, shard_over)
