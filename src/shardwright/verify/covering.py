"""Covering sets: few assignments that together show every pair of values of every two factors.

The greedy construction of AETG (Cohen, Dalal, Fredman, Patton 1997, section 2): each assignment is grown from a pair that
is not yet covered, each further factor takes the value that covers most new pairs, and of a few candidates the best is
kept. Factors may depend on others (a schedule needs pp > 1): where one does not apply it is absent, and covers nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Any

Assignment = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
CANDIDATES = 6
"""Assignments that are grown for each one that is kept."""
ROOTS_TRIED = 40
"""Roots among which a candidate begins with the best."""


def _always(assignment: Mapping[str, Any]) -> bool:
    return True


@dataclass(frozen=True)
class Factor:
    """One choice. The first value is what is taken where nothing is to be shown.

    ``applies`` looks at the roots of an assignment. A ``root`` applies if the roots before it say so; others depend on it.
    """

    name: str
    values: tuple[Any, ...]
    applies: Callable[[Mapping[str, Any]], bool] = _always
    root: bool = False


@dataclass(frozen=True)
class CoveringSet:
    """``assignments`` cover every pair but those ``refused``, for the reason given there."""

    assignments: list[Assignment]
    num_pairs: int
    refused: dict[Pair, str]


class Cover:
    """Computes a covering set. ``refusal`` says why an assignment cannot be, None if it can; it is asked once for each."""

    def __init__(self, factors: Sequence[Factor], refusal: Callable[[Assignment], str | None], seed: int = 0) -> None:
        self._factors, self._ask = list(factors), refusal
        self._by_name = {factor.name: factor for factor in factors}
        self._rng = random.Random(seed)
        self._answers: dict[tuple[tuple[str, Any], ...], str | None] = {}

    def compute(self, required: Iterable[Assignment] = (), least: int = 0) -> CoveringSet:
        """Assignments with each of ``required`` in one of them, where that can be, and every pair; at least ``least``."""
        refused: dict[Pair, str] = {}
        wanted: dict[Pair, None] = {}
        for pair in self._all_pairs():
            reason = self._pair_refusal(pair)
            if reason is None:
                wanted[pair] = None
            elif reason:
                refused[pair] = reason
        left, kept = dict(wanted), list[Assignment]()

        def keep(assignment: Assignment | None) -> bool:
            if assignment is None or assignment in kept:
                return False
            kept.append(assignment)
            for pair in pairs_of(assignment):
                left.pop(pair, None)
            return True

        for fixed in required:
            if not any(fixed.items() <= other.items() for other in kept):
                keep(self._best(fixed, left))
        while left:
            pair = self._rng.choice(list(left))
            if not keep(self._best(dict(pair), left)) or pair in left:
                refused[pair] = "no assignment was found that has it"
                left.pop(pair, None)
        for _ in range(20 * least):
            if len(kept) >= least:
                break
            keep(self._grow({}, left))
        return CoveringSet(kept, len(wanted), refused)

    # -- what can be ---------------------------------------------------------------------------------------

    @cached_property
    def _roots(self) -> list[Assignment]:
        """Every assignment of the root factors that can be, with the first value of all others."""
        found: list[Assignment] = [{}]
        for factor in self._factors:
            if factor.root:
                found = [
                    {**root, factor.name: value} if factor.applies(root) else root
                    for root in found
                    for value in (factor.values if factor.applies(root) else (None,))
                ]
        return [root for root in found if self.refusal(root) is None]

    def refusal(self, assignment: Assignment) -> str | None:
        """Why this assignment, with the first value of every other factor that it leaves out, cannot be."""
        first = {factor.name: factor.values[0] for factor in self._factors if not factor.root and factor.applies(assignment)}
        full = first | assignment
        key = tuple(sorted(full.items()))
        if key not in self._answers:
            self._answers[key] = self._ask(full)
        return self._answers[key]

    def _all_pairs(self) -> list[Pair]:
        found = []
        for one, other in combinations(self._factors, 2):
            found += [((one.name, a), (other.name, b)) for a, b in product(one.values, other.values)]
        return found

    def _pair_refusal(self, pair: Pair) -> str | None:
        """None if the pair can be; empty if it has no meaning (a factor without its condition); else the reason."""
        reason = ""
        for root in self._consistent(dict(pair)):
            found = self.refusal({**root, **dict(pair)})
            if found is None:
                return None
            reason = found
        if reason:
            return reason
        roots = {name: value for name, value in pair if self._by_name[name].root}
        return (self.refusal(roots) or "") if len(roots) == len(pair) else ""

    def _consistent(self, fixed: Assignment) -> list[Assignment]:
        roots = {name for name in fixed if self._by_name[name].root}
        others = [self._by_name[name] for name in fixed if name not in roots]
        return [
            root
            for root in self._roots
            if all(name in root and root[name] == fixed[name] for name in roots)
            and all(factor.applies(root) for factor in others)
        ]

    # -- growing -------------------------------------------------------------------------------------------

    def _best(self, fixed: Assignment, left: Mapping[Pair, None]) -> Assignment | None:
        grown = [found for _ in range(CANDIDATES) if (found := self._grow(fixed, left)) is not None]
        return max(grown, key=lambda found: _gain(found, left), default=None)

    def _grow(self, fixed: Assignment, left: Mapping[Pair, None]) -> Assignment | None:
        roots = self._consistent(fixed)
        if not roots:
            return None
        tried = self._rng.sample(roots, min(ROOTS_TRIED, len(roots)))
        usable = [root for root in tried if self.refusal({**root, **fixed}) is None]
        if not usable:
            usable = [root for root in roots if self.refusal({**root, **fixed}) is None][:1]
        if not usable:
            return None
        chosen: Assignment = {**max(usable, key=lambda root: _gain({**root, **fixed}, left)), **fixed}
        factors = [factor for factor in self._factors if factor.name not in chosen and not factor.root]
        self._rng.shuffle(factors)
        for factor in factors:
            if factor.applies(chosen):
                chosen[factor.name] = self._value(factor, chosen, left)
        return {factor.name: chosen[factor.name] for factor in self._factors if factor.name in chosen}

    def _value(self, factor: Factor, chosen: Assignment, left: Mapping[Pair, None]) -> Any:
        """The value that covers most new pairs among those that can be; the first one always can."""
        values = list(factor.values)
        self._rng.shuffle(values)
        values.sort(key=lambda value: -_gain_of(factor.name, value, chosen, left))
        can = (value for value in values if self.refusal({**chosen, factor.name: value}) is None)
        return next(can, factor.values[0])


def pairs_of(assignment: Assignment) -> set[Pair]:
    """Every pair of (factor, value) in an assignment, in the order of the assignment."""
    return set(combinations(assignment.items(), 2))


def _gain(assignment: Assignment, left: Mapping[Pair, None]) -> int:
    return sum(pair in left or pair[::-1] in left for pair in combinations(assignment.items(), 2))


def _gain_of(name: str, value: Any, chosen: Assignment, left: Mapping[Pair, None]) -> int:
    mine = (name, value)
    return sum((mine, other) in left or (other, mine) in left for other in chosen.items())
