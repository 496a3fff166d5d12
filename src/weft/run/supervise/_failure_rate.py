"""How often a run fails: what the interval of its snapshots follows from."""

from __future__ import annotations

import time

from weft.run.launch import FAILURE_SECONDS

_ASSUMED_FAILURES = 0.1


class FailureRate:
    """Estimates the mean time between failures of one run.

    A run begins with the assumption of one failure in `FAILURE_SECONDS`, which counts as a tenth of one that was seen:
    where one has come the next is near.  This is the mean of a gamma distribution of rates (A. Gelman et al., "Bayesian
    Data Analysis", section 2.6).  With the weight of a whole failure, a run that lost a rank each minute repeated 8
    steps of a second after each of its first six.
    """

    def __init__(self) -> None:
        """Begin to measure now."""
        self._began = time.monotonic()
        self._num_failures = 0

    def count(self) -> None:
        """A failure has come."""
        self._num_failures += 1

    @property
    def mean_seconds(self) -> float:
        """The mean time between failures, in seconds."""
        passed = time.monotonic() - self._began
        return (_ASSUMED_FAILURES * FAILURE_SECONDS + passed) / (_ASSUMED_FAILURES + self._num_failures)
