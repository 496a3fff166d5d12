"""Processor time as a quiet desktop would take it, so that limits in seconds mean the same everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable

_REFERENCE_SECONDS = 0.055
"""Of the loop below, on a core of a desktop of 2024 that does nothing else."""
_REPEATS = 3


def slowness() -> float:
    """Return how many times longer than the reference a fixed loop takes here, and at least 1.

    Other jobs on the same core and a slower processor count alike.
    """
    times: list[float] = []
    for _ in range(_REPEATS):
        start = time.process_time()
        sum(number * number for number in range(1_000_000))
        times.append(time.process_time() - start)
    return max(1.0, min(times) / _REFERENCE_SECONDS)


def reference_seconds(measure: Callable[[], float], limit: float, tries: int = 8) -> float:
    """Return the least of what `measure` takes, in seconds of the reference machine; stop at the first under `limit`.

    The pace is taken on both sides of each try: a shared machine may change it threefold within seconds.
    """
    best = float("inf")
    for _ in range(tries):
        before = slowness()
        seconds = measure()
        best = min(best, 2 * seconds / (before + slowness()))
        if best < limit:
            break
    return best
