"""Handing out a rank's part of the shared memory, piece by piece."""

from __future__ import annotations

import threading
from collections import deque

_PAGE = 4096


def whole_pages(num_bytes: int) -> int:
    """Return what a piece of `num_bytes` takes."""
    return -(-max(num_bytes, 1) // _PAGE) * _PAGE


class Arena:
    """First-fit allocation of `num_bytes`, counted from 0; pieces begin at pages, and free neighbours join.

    `give_back` may be called at any moment, by the garbage collector also in the middle of `take`: it takes no lock.
    """

    def __init__(self, num_bytes: int) -> None:
        self._free = [(0, num_bytes)]
        self._taken: dict[int, int] = {}
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> int | None:
        """Return where a piece of at least `num_bytes` begins; None when no free stretch is as long."""
        size = whole_pages(num_bytes)
        with self._lock:
            self._settle()
            for index, (start, length) in enumerate(self._free):
                if length >= size:
                    rest = [(start + size, length - size)] if length > size else []
                    self._free[index : index + 1] = rest
                    self._taken[start] = size
                    return start
        return None

    def give_back(self, start: int) -> None:
        """Free a piece that `take` returned."""
        self._returned.append(start)

    def _settle(self) -> None:
        """Count in what has been given back.  Holding the lock."""
        while self._returned:
            start = self._returned.popleft()
            merged: list[tuple[int, int]] = []
            for at, length in sorted([*self._free, (start, self._taken.pop(start))]):
                if merged and sum(merged[-1]) == at:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((at, length))
            self._free = merged

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            self._settle()
            return sum(self._taken.values())
