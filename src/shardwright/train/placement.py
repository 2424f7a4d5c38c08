"""What ranks must hold alike, and what they must hold between them, looked at while a run goes on (``--check replicas``).

Every rank reports which part of each parameter, master and optimizer moment it holds, with a fingerprint of the bits;
which range of each bucket it updates; and which samples it has read. All ranks then look at all reports:

- parts of the same tensor are equal bit for bit, or disjoint, and together they are the whole tensor;
- the shards of a bucket follow one another and end where it ends;
- ranks that differ in tp, cp or pp only read the same samples, replicas read different ones.

For debugging: each check gathers the state of ZeRO and compares a number for each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod

from shardwright.core.layout import Layout
from shardwright.core.specs import Spec
from shardwright.errors import PlacementError
from shardwright.parallel.data import fingerprint
from shardwright.train.data import MicroBatch
from shardwright.train.step import Trainer

Ranges = tuple[tuple[int, int], ...]
SHOWN = 3


@dataclass(frozen=True)
class Part:
    """One rank's part of one tensor: (first, one past the last) along each dim, and a number for its bits."""

    where: Ranges
    shape: tuple[int, ...]
    bits: int


@dataclass(frozen=True)
class Shard:
    """The range of a bucket that a rank updates. ``ranks``: those that share the bucket."""

    ranks: tuple[int, ...]
    first: int
    stop: int
    size: int


@dataclass
class Holdings:
    """What one rank holds. ``tensors``: kind (parameters, master, a moment) -> parameter -> its part."""

    tensors: dict[str, dict[str, Part]] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


def check_placement(trainer: Trainer, batches: Sequence[MicroBatch], step: int) -> None:
    """Look at everything after 0-based ``step`` on ``batches``; all ranks must call. Raises `PlacementError` on all."""
    recorder = trainer.mesh.recorder
    with recorder.aside():
        every = trainer.mesh.world.gather_objects(_holdings(trainer, batches))
    problems = find_problems(trainer.layout, trainer.model.specs, every)
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise PlacementError(f"step {step + 1}: {'; '.join(problems[:SHOWN])}{more}; run verify with this layout")


def _holdings(trainer: Trainer, batches: Sequence[MicroBatch]) -> Holdings:
    specs, place = trainer.model.specs, trainer.mesh.coordinates
    kinds = {"parameter": trainer.named_parameters(), "master": trainer.buckets.named("master")}
    held = Holdings()
    for kind, tensors in (kinds | trainer.optimizer.named_state()).items():
        held.tensors[kind] = {
            name: Part(_ranges(specs[name], trainer.layout, place), tuple(tensor.shape), fingerprint(tensor.contiguous()))
            for name, tensor in tensors.items()
        }
    for bucket in trainer.buckets.buckets:
        ranks = bucket.shard.ranks if bucket.zero else (trainer.mesh.rank,)
        held.shards[bucket.name] = Shard(ranks, bucket.own.start, bucket.own.stop, bucket.num_elements)
    held.samples = tuple(sample for batch in batches for sample in batch.samples)
    held.tokens = tuple(fingerprint(batch.tokens) for batch in batches)
    return held


def _ranges(spec: Spec, layout: Layout, place: Mapping[str, int]) -> Ranges:
    return tuple((part.start, part.stop) for part in spec.slices(layout, place))


# -- what is wrong -----------------------------------------------------------------------------------------


def find_problems(layout: Layout, specs: Mapping[str, Spec], every: Sequence[Holdings]) -> list[str]:
    """What must not be, in the holdings of all ranks, in words; empty if all is well."""
    kinds = sorted({kind for held in every for kind in held.tensors})
    problems = [line for kind in kinds for line in _tensor_problems(layout, specs, kind, every)]
    return problems + _shard_problems(every) + _sample_problems(layout, every)


def _tensor_problems(
    layout: Layout, specs: Mapping[str, Spec], kind: str, every: Sequence[Holdings]
) -> list[str]:
    problems, parts = list[str](), dict[str, dict[Ranges, tuple[int, Part]]]()
    for rank, held in enumerate(every):
        for name, part in held.tensors.get(kind, {}).items():
            wanted = tuple(stop - first for first, stop in part.where)
            if part.shape != wanted:
                problems.append(f"{kind} {name} has shape {part.shape} on rank {rank}, its part of the tensor is {wanted}")
            first, known = parts.setdefault(name, {}).setdefault(part.where, (rank, part))
            if known.bits != part.bits:
                axes = _differing(layout, first, rank)
                problems.append(f"{kind} {name} differs between ranks {first} and {rank}, which must hold the same ({axes})")
    for name, found in parts.items():
        problems += _cover_problems(kind, specs[name], found)
    if kind == "parameter":
        problems += [f"no rank holds parameter {name}" for name in specs if name not in parts]
    return problems


def _cover_problems(kind: str, spec: Spec, parts: Mapping[Ranges, tuple[int, Part]]) -> list[str]:
    """Parts of one tensor are boxes: disjoint, and as large together as the tensor."""
    problems = []
    for (one, (first, _)), (other, (second, _)) in combinations(parts.items(), 2):
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True)):
            problems.append(f"{kind} {spec.name}: the parts of ranks {first} and {second} overlap")
    held = sum(prod(stop - first for first, stop in part) for part in parts)
    if held < spec.numel:
        problems.append(f"{kind} {spec.name}: all ranks together hold {held} of its {spec.numel} elements")
    return problems


def _shard_problems(every: Sequence[Holdings]) -> list[str]:
    """Shards of a bucket follow one another from its first element to its last."""
    problems = []
    for rank, held in enumerate(every):
        for name, shard in held.shards.items():
            if rank != shard.ranks[0]:
                continue
            end = 0
            for other in shard.ranks:
                theirs = every[other].shards.get(name)
                if theirs is None or theirs.size != shard.size or theirs.first != end:
                    problems.append(f"{name}: the shard of rank {other} does not begin where the one before it ends, at {end}")
                    break
                end = theirs.stop
            else:
                if end != shard.size:
                    problems.append(f"{name}: the shards of ranks {shard.ranks} end at {end} of {shard.size}")
    return problems


def _sample_problems(layout: Layout, every: Sequence[Holdings]) -> list[str]:
    problems, first_of = list[str](), dict[int, int]()
    for rank, held in enumerate(every):
        replica = layout.grid.coordinates(rank)["dp"]
        first = first_of.setdefault(replica, rank)
        if (held.samples, held.tokens) != (every[first].samples, every[first].tokens):
            problems.append(
                f"ranks {first} and {rank} belong to one replica ({_differing(layout, first, rank)}) and read other samples"
            )
    for (_, one), (_, other) in combinations(sorted(first_of.items()), 2):
        if shared := set(every[one].samples) & set(every[other].samples):
            problems.append(f"ranks {one} and {other} are different replicas and both read sample {min(shared)}")
    return problems


def _differing(layout: Layout, one: int, other: int) -> str:
    """The axes on which two ranks differ."""
    here, there = layout.grid.coordinates(one), layout.grid.coordinates(other)
    return ", ".join(axis for axis in here if here[axis] != there[axis])
