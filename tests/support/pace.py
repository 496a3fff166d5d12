"""Processor time as a quiet desktop would take it, so that limits in seconds mean the same everywhere."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

_REFERENCE_SECONDS = 0.055
"""Of the loop below, on a core of a desktop of 2024 that does nothing else."""
_REFERENCE_IMPORT_SECONDS = 0.11
"""Of an import of numpy on the same core."""
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


def import_slowness() -> float:
    """Return how many times longer than on the reference machine an import of numpy takes here, and at least 1.

    An import waits for the caches of the processor and of files, which a loop never leaves: a machine whose loop takes
    1.85 times as long imports 2.5 times as slowly (2 cores shared with others, 2026-11-29).
    """
    code = "import time; start = time.process_time(); import numpy; print(time.process_time() - start)"
    told = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True) for _ in range(_REPEATS)]
    return max(1.0, min(float(done.stdout) for done in told) / _REFERENCE_IMPORT_SECONDS)


def reference_seconds(
    measure: Callable[[], float], limit: float, tries: int = 8, pace: Callable[[], float] = slowness
) -> float:
    """Return the least of what `measure` takes, in seconds of the reference machine; stop at the first under `limit`.

    `pace` says how many times slower this machine is at what is measured.  It is taken on both sides of each try: a
    shared machine may change it threefold within seconds.
    """
    best = float("inf")
    for _ in range(tries):
        before = pace()
        seconds = measure()
        best = min(best, 2 * seconds / (before + pace()))
        if best < limit:
            break
    return best
