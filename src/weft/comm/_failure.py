"""What can go wrong with a group of ranks that look after one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class ErrorCode(IntEnum):
    """What can go wrong with a group, as the shared-memory engine numbers it."""

    NONE = 0
    DIED = 1
    DEADLINE = 2
    ABORTED = 3
    MISMATCH = 4
    LEFT = 5
    CLOSED = 6


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended a group.  Ranks are positions in the group, -1 where nobody is meant."""

    code: ErrorCode
    culprit: int = -1
    reporter: int = -1
    detail: str = ""


def name_of(position: int, ranks: Sequence[int]) -> str:
    """Return how errors name the rank at a position of a group of `ranks` (global ranks)."""
    return f"rank {ranks[position]}" if 0 <= position < len(ranks) else "another rank"
