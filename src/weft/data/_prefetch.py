"""Read the batches of coming steps in threads of this process, while it computes.

Reading is numpy's copying and arithmetic, and waiting for storage; both let other threads run.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from weft.data._fields import Fields
from weft.data._reader import TrainReader

_STEPS_PER_WORKER = 2


class Prefetcher:
    """The batches of a data rank, `2 × workers` steps ahead.  Reading begins with the first `read`."""

    def __init__(self, reader: TrainReader, workers: int) -> None:
        self._reader = reader
        self._depth = workers * _STEPS_PER_WORKER
        # By this name the watch over random draws knows that the threads are Weft's own, and draw nothing.
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="weft-data")
        self._ahead: dict[int, Future[Fields]] = {}

    def read(self, step: int) -> Fields:
        """Return the batch of a step and begin those that follow.  Steps in order are fast; any step is right.

        Raises:
            DataError: a sample is broken.
        """
        coming = range(step, step + self._depth + 1)
        for left in [other for other in self._ahead if other not in coming]:
            self._ahead.pop(left).cancel()
        for ahead in coming:
            if ahead not in self._ahead:
                self._ahead[ahead] = self._threads.submit(self._reader.read, ahead)
        return self._ahead.pop(step).result()

    def close(self) -> None:
        """End the threads.  Harmless when repeated."""
        self._threads.shutdown(cancel_futures=True)
