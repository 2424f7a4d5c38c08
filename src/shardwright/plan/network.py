"""What a collective costs on a cluster whose links have levels.

Base form: T = message + latency x hops + bytes on the wire / (bandwidth x efficiency). S is the full tensor, n the ranks.

==================  ========  ==========================
verb                hops      bytes on the wire per rank
==================  ========  ==========================
all_gather          n-1       S (n-1)/n
reduce_scatter      n-1       S (n-1)/n
all_reduce, ring    2(n-1)    2 S (n-1)/n
all_reduce, tree    2 log2 n  2 S
all_to_all          1         S (n-1)/n
send                1         S
==================  ========  ==========================

A group that spans levels is split: k ranks inside a block of the inner level and n/k blocks across. Inside runs over S,
across over S/k on each of the k ranks' links (so a strided group, k = 1, sees the outer links only). Where k is some but
not all of a block, the links across reach the stack's ``part_node`` of their rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from shardwright.core.axes import COMPOSITE_AXES, ORDERS, RankGrid
from shardwright.core.cluster import RACK, Cluster, LinkLevel
from shardwright.plan.stack import Stack

CHUNKS = 8
"""Pieces of a collective over two levels that follow one another: the shorter phase shows one of them."""


@dataclass(frozen=True)
class Span:
    """How the worst group of an axis lies on the levels: ``ways[i]`` members of it meet at level i (their product: n)."""

    ways: tuple[int, ...]

    @property
    def size(self) -> int:
        size = 1
        for way in self.ways:
            size *= way
        return size

    def outermost(self) -> int | None:
        """Index of the outermost level that the group crosses; None for a group of one."""
        crossed = [index for index, way in enumerate(self.ways) if way > 1]
        return crossed[-1] if crossed else None


@lru_cache(maxsize=65536)
def group_span(grid: RankGrid, axis: str, block_sizes: tuple[int, ...]) -> Span:
    """The worst group of ``axis`` (a mesh axis, a composite axis, ``ep`` or ``edp``) on levels of ``block_sizes`` ranks."""
    offsets, bases = _first_group(grid, axis), _starts(grid, axis, block_sizes)
    ways: list[int] = []
    inner_blocks = len(offsets)
    for size in block_sizes:
        blocks = max(len({(base + offset) // size for offset in offsets}) for base in bases)
        ways.append(max(1, inner_blocks // blocks))
        inner_blocks = blocks
    if inner_blocks > 1:  # ranks beyond the last level: they meet there
        ways[-1] *= inner_blocks
    return Span(tuple(ways))


def _strides(grid: RankGrid) -> dict[str, int]:
    strides, stride = {}, 1
    for axis in ORDERS[grid.order]:
        strides[axis] = stride
        stride *= grid.degree(axis)
    return strides


def _first_group(grid: RankGrid, axis: str) -> list[int]:
    """Ranks of the group of rank 0."""
    if axis in ("ep", "edp"):
        stage = _first_group(grid, "stage")
        return stage[: grid.ep] if axis == "ep" else stage[:: grid.ep]
    strides = _strides(grid)
    parts = COMPOSITE_AXES.get(axis, (axis,))
    ranks = [0]
    for part in (name for name in ORDERS[grid.order] if name in parts):
        ranks = [rank + step * strides[part] for step in range(grid.degree(part)) for rank in ranks]
    return ranks


def _starts(grid: RankGrid, axis: str, block_sizes: tuple[int, ...]) -> list[int]:
    """First ranks of groups to look at: the first alone when every block holds whole inner groups, else some more."""
    strides, size = _strides(grid), block_sizes[0] if block_sizes else 1
    parts = ("tp", "cp", "dp") if axis in ("ep", "edp") else COMPOSITE_AXES.get(axis, (axis,))
    edges = [strides[part] for part in parts] + [strides[part] * grid.degree(part) for part in parts]
    if axis in ("ep", "edp"):
        edges.append(grid.ep)
    if all(size % edge == 0 or edge % size == 0 for edge in edges):
        return [0]
    return [
        rank
        for rank in range(min(grid.world_size, 8 * size))
        if all((rank // strides[part]) % grid.degree(part) == 0 for part in parts)
    ]


class Network:
    """Seconds of collectives on one cluster under one software stack."""

    def __init__(self, cluster: Cluster, stack: Stack) -> None:
        self.levels = cluster.levels
        self.sizes = tuple(level.size for level in cluster.levels)
        fast = [cluster.gpus_per_node, *(level.size for level in cluster.levels if level.name == RACK)]
        shares = [stack.intra if level.size <= max(fast) else stack.inter for level in cluster.levels]
        self._share = shares
        self._latency, self._message, self._part_node = stack.latency, stack.message, stack.part_node

    def span(self, grid: RankGrid, axis: str) -> Span:
        """Where the groups of ``axis`` lie."""
        return group_span(grid, axis, self.sizes)

    def link(self, span: Span) -> str:
        """Name of the outermost level that carries the group's messages; empty for a group of one."""
        index = span.outermost()
        return "" if index is None else self.levels[index].name

    def seconds(self, verb: str, num_bytes: float, span: Span) -> float:
        """Duration of one ``verb`` over a full tensor of ``num_bytes``."""
        if span.size == 1 or num_bytes <= 0:
            return 0.0
        if verb == "all_reduce":
            return self._message + self._all_reduce(num_bytes, span)
        if verb in ("all_gather", "reduce_scatter"):
            return self._message + self._gather(num_bytes, span)
        if verb == "all_to_all":
            return self._message + self._all_to_all(num_bytes, span)
        raise ValueError(f"no cost for {verb!r}")

    def send_seconds(self, num_bytes: float, distance: int) -> float:
        """One message between two ranks ``distance`` apart."""
        if not self.levels:
            return 0.0
        index = next((i for i, level in enumerate(self.levels) if distance < level.size), len(self.levels) - 1)
        return self._message + self._transfer(index, num_bytes, num_bytes, 1)

    def send_link(self, distance: int) -> str:
        """Name of the level between two ranks ``distance`` apart."""
        names = [level.name for level in self.levels if distance < level.size]
        return names[0] if names else (self.levels[-1].name if self.levels else "")

    def _transfer(self, index: int, wire: float, message: float, hops: float, inside: int = 1) -> float:
        """``inside``: ranks of the group in each of the blocks that this level joins."""
        level: LinkLevel = self.levels[index]
        rate = level.bandwidth * self._share[index] * level.efficiency_at(message)
        if index and 1 < inside < self.sizes[index - 1]:
            rate *= self._part_node
        return level.latency * self._latency * hops + wire / rate

    def _gather(self, num_bytes: float, span: Span) -> float:
        phases, piece, inside = [], num_bytes, 1
        for index, ways in enumerate(span.ways):
            if ways > 1:
                phases.append(self._transfer(index, piece * (ways - 1) / ways, piece / ways, ways - 1, inside))
            piece /= ways
            inside *= ways
        longest = max(phases)
        return longest + (sum(phases) - longest) / CHUNKS

    def _all_reduce(self, num_bytes: float, span: Span) -> float:
        index = span.outermost()
        assert index is not None
        ways = span.ways[index]
        inner = Span((*span.ways[:index], *([1] * (len(span.ways) - index))))
        scatter = self._gather(num_bytes, inner) if inner.size > 1 else 0.0
        piece = num_bytes / inner.size
        ring = self._transfer(index, 2 * piece * (ways - 1) / ways, piece / ways, 2 * (ways - 1), inner.size)
        tree = self._transfer(index, 2 * piece, piece, 2 * ceil(log2(ways)), inner.size)
        across = min(ring, tree)
        return max(2 * scatter, across) + min(2 * scatter, across) / CHUNKS

    def _all_to_all(self, num_bytes: float, span: Span) -> float:
        total, inside, phases = span.size, 1, []
        for index, ways in enumerate(span.ways):
            if ways > 1:
                share = inside * (ways - 1) / total
                phases.append(self._transfer(index, num_bytes * share, num_bytes / total, 1))
            inside *= ways
        return max(phases)
