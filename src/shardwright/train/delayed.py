"""The delayed update: the optimizer works on the last step's gradients while this step computes (Ren et al. 2021, section 5.2).

With g(w) the gradient of a step at parameters w, and u(w, g) the optimizer's update::

    plain     w[t+1] = u(w[t], g(w[t]))            delayed   w[t+1] = u(w[t], g(w[t-1])), one step later, from the warm-up on

The first delayed step changes no parameter. The learning rate, the clipping and the decision on gradients that are not finite
are those of the step that the gradients come from. Before an evaluation or a checkpoint what is outstanding is made up for,
so a run that is resumed goes on like one that was not stopped.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from shardwright.parallel.data import GradientBuckets
from shardwright.train.optim import FlatOptimizer


class DelayedUpdate:
    """Updates masters in host memory from the ``outstanding`` gradients, in a thread that runs beside forward and backward.

    Its bits do not depend on when the thread runs: nothing else reads or writes what it works on.
    """

    def __init__(self, optimizer: FlatOptimizer, buckets: GradientBuckets) -> None:
        self.optimizer, self.buckets = optimizer, buckets
        self.rate: float | None = None
        """Learning rate of the gradients that are outstanding; None: there are none."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="delayed-update")
        self._running: Future[None] | None = None

    def start(self) -> None:
        """Begin to update the masters, if gradients are outstanding."""
        if self.rate is not None:
            self._running = self._thread.submit(self.optimizer.update, self.rate)
            self.rate = None

    def finish(self) -> None:
        """Wait for the update and hand the masters to the compute parameters of all ranks."""
        if self._running is not None:
            self._running.result()
            self._running = None
        self.optimizer.publish()

    def keep(self, rate: float) -> None:
        """This step's gradients are outstanding from now on."""
        for bucket in self.buckets.buckets:
            for piece in bucket.pieces:
                assert piece.outstanding is not None
                piece.gradients, piece.outstanding = piece.outstanding, piece.gradients
        self.rate = rate

    def settle(self) -> None:
        """Make up for what is outstanding; all ranks must call."""
        if self.rate is not None:
            self.start()
            self.finish()
