"""Read the batches of coming steps in threads of this process, while it computes.

Reading is numpy's copying and arithmetic, and waiting for storage; both let other threads run.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

from weft.errors import DataError
from weft.run.data._fields import Fields
from weft.run.data._reader import TrainReader

_STEPS_PER_WORKER = 2
"""Steps that are read ahead, for each thread."""
STUCK_SECONDS = 360.0
"""Time after which a read that has not come back is an error: storage that hangs must not hold a run for ever."""


class Prefetcher:
    """The batches of a data rank, `2 × workers` steps ahead.  Reading begins with the first `read`."""

    def __init__(self, reader: TrainReader, workers: int, *, stuck_seconds: float = STUCK_SECONDS) -> None:
        self._reader = reader
        self._stuck_seconds = stuck_seconds
        self._depth = workers * _STEPS_PER_WORKER
        # By this name the watch over random draws knows that the threads are Weft's own, and draw nothing.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="weft-data")
        self._ahead: dict[int, Future[Fields]] = {}
        self._is_stuck = False

    def read(self, step: int) -> Fields:
        """Return the batch of a step and begin those that follow.  Steps in order are fast; any step is right.

        Raises:
            DataError: a sample is broken, or storage does not answer.
        """
        coming = range(step, step + self._depth + 1)
        # After a resume, or a jump, steps that were read ahead are of no use.
        for left in [other for other in self._ahead if other not in coming]:
            self._ahead.pop(left).cancel()
        for ahead in coming:
            if ahead not in self._ahead:
                self._ahead[ahead] = self._threads.submit(self._reader.read, ahead)
        future = self._ahead.pop(step)
        if not wait([future], self._stuck_seconds).done:
            self._is_stuck = True
            raise DataError(
                f"The samples of step {step} have been read for {self._stuck_seconds:g} s and are not there: the"
                " storage of data.train does not answer. See that its files can be read, and resume the run."
            )
        return future.result()

    def close(self) -> None:
        """End the threads; one that is stuck in its storage is left to it.  Harmless when repeated."""
        self._threads.shutdown(wait=not self._is_stuck, cancel_futures=True)
