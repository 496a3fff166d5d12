"""How often a run fails: what the interval of its snapshots follows from."""

from __future__ import annotations

import time

from weft.run.launch import FAILURE_SECONDS


class FailureRate:
    """Estimates the mean time between failures of one run.

    A run begins with the assumption of one failure in `FAILURE_SECONDS`, which counts as one that was seen.  This is
    the mean of a gamma distribution of rates, whose prior has one failure in that time (A. Gelman et al., "Bayesian
    Data Analysis", section 2.6).
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
        return (FAILURE_SECONDS + time.monotonic() - self._began) / (1 + self._num_failures)
