"""What is computed once and asked for again soon."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_KEPT = 50_000
"""A search among 100,000 devices computes half a million of some figures, and asks again for few of them, soon: kept
without a limit they were half of its 1.3 GB (November 2026)."""


class BoundedCache(dict[Key, Value]):
    """A dict that forgets everything when it is full."""

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= MOST_KEPT:
            self.clear()
        super().__setitem__(key, value)
