"""ZeRO-3: parameters sharded too, gathered for a unit's forward and again for its backward (FSDP; Zhao et al. 2023).

ZeRO-3:  every state / N  |  N = dp * cp / dp_replicate ranks; one unit and what is prefetched are whole at a time
sends per step (N-1)/N of the parameter bytes for each gather (two a micro-batch, one a step with ``reshard=after_backward``)
in **all-gathers**, and (N-1)/N of the gradient bytes in **reduce-scatters**.

Parameters that are not trained are sharded and gathered like the others, in groups of their own. Autograd graphs keep the
parameter itself, never its memory, so a backward finds what was gathered for it; between, a use would give NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.comm.record import Recorder
from shardwright.parallel.flat import FlatParameters
from shardwright.schedule.gathers import Use


class UnitGatherer:
    """Gathers each unit's buckets before it is used and frees them after, as ``uses`` (of one step) says.

    ``prefetch``: gathers of so many following uses are started ahead. What is gathered and freed does not depend on it.
    Outside a step (evaluation) a unit is gathered and freed at once.
    """

    def __init__(
        self, buckets: Sequence[FlatParameters], uses: Sequence[Use], prefetch: int, recorder: Recorder
    ) -> None:
        self.buckets, self.uses, self.prefetch, self.recorder = buckets, uses, prefetch, recorder
        self._place: int | None = None

    def begin(self) -> None:
        """A step begins."""
        self._place = 0

    def acquire(self, unit: str) -> None:
        """Return when the unit's parameters are there."""
        if self._place is None:
            self._wait(self._groups(unit))
            return
        use = self.uses[self._place]
        assert use.unit == unit, f"use {self._place} is {use.unit} by the plan, not {unit}"
        self._wait(use.gather)
        self._start_ahead(self._place)

    def release(self, unit: str) -> None:
        """The unit is done with its parameters for now."""
        if self._place is None:
            self._free(self._groups(unit))
            return
        self._free(self.uses[self._place].free)
        self._place += 1
        if self._place == len(self.uses):
            self._place = None

    def _groups(self, unit: str) -> list[int]:
        return [index for index, bucket in enumerate(self.buckets) if unit in bucket.plan.units]

    def _wait(self, groups: Sequence[int]) -> None:
        for index in groups:
            self._start(index)
        for index in groups:
            self.buckets[index].finish_gather()

    def _start_ahead(self, place: int) -> None:
        """Start the gathers of the next uses, up to the first that needs again what will be freed before it."""
        for use in self.uses[place + 1 : place + 1 + self.prefetch]:
            for index in use.gather:
                if self.buckets[index].gathered_in_place:
                    return
                with self.recorder.phase(use.phase):
                    self._start(index)

    def _start(self, index: int) -> None:
        bucket = self.buckets[index]
        if bucket.full is None:
            bucket.start_gather()

    def _free(self, groups: Sequence[int]) -> None:
        for index in groups:
            self.buckets[index].free()
