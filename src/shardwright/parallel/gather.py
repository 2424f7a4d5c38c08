"""ZeRO-3: parameters sharded too, gathered for a unit's forward and again for its backward (FSDP; Zhao et al. 2023).

ZeRO-3:  every state / N  |  N = dp * cp / dp_replicate ranks; one unit and what is prefetched are whole at a time
sends per step (N-1)/N of the parameter bytes for each gather (two a micro-batch, one a step with ``reshard=after_backward``)
in **all-gathers**, and (N-1)/N of the gradient bytes in **reduce-scatters**.

Parameters that are not trained are sharded and gathered like the others, in groups of their own. Autograd graphs keep the
parameter itself, never its memory, so a backward finds what was gathered for it; between, a use would give NaN.

Ranks that share memory see each other's parts side by side (`comm/window.py`), so that a gather is only the word that they are
up to date. It counts, in the ledger and in memory by class, as if it were a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.comm.record import Recorder
from shardwright.parallel.flat import FlatParameters
from shardwright.schedule.gathers import Use, uses_ahead


class UnitGatherer:
    """Gathers each unit's buckets before it is used and frees them after, as ``uses`` (of one step) says.

    ``prefetch``: beside the use that comes next, gathers of so many following ones are started ahead: as the step begins and
    after each use, so that a rank whose next input is still to come gathers meanwhile (0: each is gathered when it is needed).
    What is gathered and freed does not depend on it. Outside a step (evaluation) a unit is gathered and freed at once.
    """

    def __init__(
        self, buckets: Sequence[FlatParameters], uses: Sequence[Use], prefetch: int, recorder: Recorder
    ) -> None:
        self.buckets, self.uses, self.prefetch, self.recorder = buckets, uses, prefetch, recorder
        self._place: int | None = None

    def begin(self) -> None:
        """A step begins; gathers start before the first input is there."""
        self._place = 0
        self._start_ahead()

    def acquire(self, unit: str) -> None:
        """Return when the unit's parameters are there."""
        if self._place is None:
            self._wait(self._groups(unit))
            return
        use = self.uses[self._place]
        assert use.unit == unit, f"use {self._place} is {use.unit} by the plan, not {unit}"
        self._wait(use.gather)

    def release(self, unit: str) -> None:
        """The unit is done with its parameters for now."""
        if self._place is None:
            self._free(self._groups(unit))
            return
        self._free(self.uses[self._place].free)
        self._place += 1
        self._start_ahead()
        if self._place == len(self.uses):
            self._place = None

    def _groups(self, unit: str) -> list[int]:
        return [index for index, bucket in enumerate(self.buckets) if unit in bucket.plan.units]

    def _wait(self, groups: Sequence[int]) -> None:
        for index in groups:
            self._start(index)
        for index in groups:
            self.buckets[index].finish_gather(before_reduction=self._place is not None)

    def _start_ahead(self) -> None:
        """Start the gathers of the next uses, up to the first that needs again what will be freed before it."""
        assert self._place is not None
        for use in uses_ahead(self.uses, self._place, self.prefetch):
            if any(self.buckets[index].gathered_in_place for index in use.gather):
                return
            with self.recorder.phase(use.phase):
                for index in use.gather:
                    self._start(index)

    def _start(self, index: int) -> None:
        bucket = self.buckets[index]
        if bucket.full is None:
            bucket.start_gather()

    def _free(self, groups: Sequence[int]) -> None:
        for index in groups:
            self.buckets[index].free()
