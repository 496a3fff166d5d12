"""How slow this machine is just now, so that limits in seconds mean the same everywhere."""

from __future__ import annotations

import time

_REFERENCE_SECONDS = 0.055
"""Of the loop below, on a core of a desktop of 2024 that does nothing else."""
_REPEATS = 5


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
