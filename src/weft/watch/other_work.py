"""How much of a host's cores programs have that are no ranks of the run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

_IDLE = (3, 4)
"""Columns of `/proc/stat` in which a core did nothing: idle, and idle while a disk is waited for."""
_COLUMNS = 8
"""Those that sum to the time of a core; the ones behind repeat a part of them (proc_stat(5))."""


@final
class OtherWork:
    """Looks at the host from time to time.  Where the system is no Linux, other programs count as having nothing."""

    def __init__(self) -> None:
        self.cores = 0.0
        """Cores that other programs had between the newest two looks, of those that this process may use."""
        self._last: tuple[float, float, dict[int, float]] | None = None

    def look(self, pids: Sequence[int]) -> None:
        """Take in what has been computed since the last look.  `pids` are the ranks' processes."""
        try:
            now, busy = time.monotonic(), _busy_seconds()
            own = {pid: _own_seconds(pid) for pid in pids}
        except (OSError, ValueError, IndexError, AttributeError):
            return  # a rank has ended; or the system does not say
        if self._last is not None and now > self._last[0] and own.keys() == self._last[2].keys():
            used = sum(own.values()) - sum(self._last[2].values())
            self.cores = max(busy - self._last[1] - used, 0.0) / (now - self._last[0])
        self._last = now, busy, own


def _busy_seconds() -> float:
    """Return how long the cores of this process have computed, or were taken from this machine, since its start."""
    wanted = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    busy = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name in wanted:
            busy += sum(int(count) for place, count in enumerate(counts[:_COLUMNS]) if place not in _IDLE)
    return busy / os.sysconf("SC_CLK_TCK")


def _own_seconds(pid: int) -> float:
    """Return the time that all threads of a process have computed, and its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(fields[place]) for place in (11, 12, 13, 14)) / os.sysconf("SC_CLK_TCK")
