"""Rank arithmetic: how the ranks of a run are laid out over the mesh axes.

World order, innermost (fastest links) first: ``tp, cp, dp, pp`` (default) or ``tp, cp, pp, dp``. Expert
layers see the ``tp*cp*dp`` ranks of one pipeline stage a second time, as ``(edp, ep)`` with ``ep``
innermost: ``ep`` is not a further factor of the world size.

>>> grid = RankGrid(tp=2, dp=2, pp=2)
>>> grid.coordinates(5)
{'tp': 1, 'cp': 0, 'dp': 0, 'pp': 1}
>>> grid.groups(("dp",))
((0, 2), (1, 3), (4, 6), (5, 7))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

AXES = ("tp", "cp", "dp", "pp")
"""The factors of the world size."""

ORDERS: Mapping[str, tuple[str, ...]] = {
    "tp-cp-dp-pp": ("tp", "cp", "dp", "pp"),
    "tp-cp-pp-dp": ("tp", "cp", "pp", "dp"),
}

COMPOSITE_AXES: Mapping[str, tuple[str, ...]] = {
    "dp_cp": ("cp", "dp"),
    "tp_cp": ("tp", "cp"),
    "stage": ("tp", "cp", "dp"),
    "world": ("tp", "cp", "dp", "pp"),
}
"""Axes that are used as one group: ``dp_cp`` holds the same dense slice, ``tp_cp`` has the tokens of the same sequences
(with sequence parallelism), ``stage`` is one pipeline stage."""


@dataclass(frozen=True)
class RankGrid:
    """Degrees of every axis, with the maps between a rank, its coordinates and its groups."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    order: str = "tp-cp-dp-pp"
    dp_replicate: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage: ``tp*cp*dp``, the ranks that ``(edp, ep)`` folds."""
        return self.tp * self.cp * self.dp

    @property
    def edp(self) -> int:
        return self.stage_size // self.ep

    @property
    def dp_shard(self) -> int:
        """Ranks over which sharded data parallelism cuts its state: those of ``dp_cp``, or of one replica among them."""
        return self.dp * self.cp // self.dp_replicate

    @property
    def edp_shard(self) -> int:
        """The same for expert parameters: the ranks of ``edp``, or of one replica among them."""
        return self.edp // self.dp_replicate

    @property
    def edp_replicate(self) -> int:
        return self.dp_replicate

    def degree(self, axis: str) -> int:
        """Ranks along an axis, a composite axis, ``ep``, ``edp``, or ``dp`` or ``edp`` with ``_shard`` or ``_replicate``."""
        if axis in COMPOSITE_AXES:
            return prod(self.degree(part) for part in COMPOSITE_AXES[axis])
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of ``rank`` on each of the four axes."""
        found: dict[str, int] = {}
        for axis in ORDERS[self.order]:
            rank, found[axis] = divmod(rank, self.degree(axis))
        return {axis: found[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The inverse of :meth:`coordinates`; a missing axis counts as 0."""
        rank, stride = 0, 1
        for axis in ORDERS[self.order]:
            rank += coordinates.get(axis, 0) * stride
            stride *= self.degree(axis)
        return rank

    def stage_ranks(self, pp: int) -> tuple[int, ...]:
        """The ranks of pipeline rank ``pp``, tp innermost, then cp, then dp."""
        return tuple(
            self.rank({"tp": tp, "cp": cp, "dp": dp, "pp": pp})
            for dp, cp, tp in product(range(self.dp), range(self.cp), range(self.tp))
        )

    def index_in_stage(self, rank: int) -> int:
        """The place of ``rank`` among the ranks of its pipeline stage: tp innermost, then cp, then dp."""
        place = self.coordinates(rank)
        return place["tp"] + self.tp * (place["cp"] + self.cp * place["dp"])

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ only along ``axes``; inside a group the first axis is innermost."""
        others = [axis for axis in AXES if axis not in axes]
        groups = []
        for fixed in product(*(range(self.degree(axis)) for axis in reversed(others))):
            base = dict(zip(reversed(others), fixed, strict=True))
            members = product(*(range(self.degree(axis)) for axis in reversed(axes)))
            groups.append(
                tuple(self.rank({**base, **dict(zip(reversed(axes), member, strict=True))}) for member in members)
            )
        return tuple(sorted(groups, key=min))

    def axis_groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of an axis by name (a mesh axis, a composite axis, or what :meth:`degree` knows), ranks ascending."""
        return _axis_groups(self, axis)

    def _groups_of(self, axis: str) -> tuple[tuple[int, ...], ...]:
        if axis in ("ep", "edp"):
            return self._folded_groups(axis)
        if axis == "tied":
            return self._end_groups()
        if axis in ("dp_shard", "dp_replicate", "edp_shard", "edp_replicate"):
            return self._replica_groups(axis)
        parts = COMPOSITE_AXES.get(axis, (axis,))
        return self.groups(tuple(part for part in ORDERS[self.order] if part in parts))

    def _end_groups(self) -> tuple[tuple[int, ...], ...]:
        """First and last rank of each pipeline, which may both hold a tied weight; the ranks between are alone."""
        groups: list[tuple[int, ...]] = []
        for ranks in self.groups(("pp",)):
            first, *between = ranks
            ends = (first, between.pop()) if between else (first,)
            groups += [tuple(sorted(ends)), *((rank,) for rank in between)]
        return tuple(sorted(groups, key=min))

    def _replica_groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """``dp_cp`` (or ``edp``) cut into ``dp_replicate`` runs of neighbours (``*_shard``), or the ranks at one place of
        each run."""
        groups: list[tuple[int, ...]] = []
        whole, _, part = axis.partition("_")
        for ranks in self.axis_groups("dp_cp" if whole == "dp" else whole):
            each = len(ranks) // self.dp_replicate
            runs = [ranks[start : start + each] for start in range(0, len(ranks), each)]
            groups += runs if part == "shard" else [tuple(place) for place in zip(*runs, strict=True)]
        return tuple(sorted(groups, key=min))

    def _folded_groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        groups: list[tuple[int, ...]] = []
        for stage in range(self.pp):
            ranks = self.stage_ranks(stage)
            rows = [ranks[start : start + self.ep] for start in range(0, len(ranks), self.ep)]
            groups += rows if axis == "ep" else [tuple(column) for column in zip(*rows, strict=True)]
        return tuple(groups)


@lru_cache(maxsize=128)
def _axis_groups(grid: RankGrid, axis: str) -> tuple[tuple[int, ...], ...]:
    """`RankGrid.axis_groups`, remembered: a dry run of every stage asks for the same groups of many thousand ranks."""
    return grid._groups_of(axis)
