"""Unequal devices get unequal shares of the batch, so that all are done at the same time: exact."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from weft.errors import PlanError


def unequal_shares(
    microbatches: int, seconds_per_microbatch: Sequence[float], fixed_seconds: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return microbatches of each data rank, at least 1 each, so that the slowest rank is as fast as can be.

    Exact: giving every microbatch to the rank that is done first with it makes the largest of fixed seconds + share ×
    seconds least; the ranks start from shares that no best solution goes below.  Of equals the earlier rank gets it.

    Args:
        fixed_seconds: of each rank, whatever its share: filling a pipeline, the optimizer; none by default.

    Raises:
        PlanError: fewer microbatches than ranks.
    """
    ranks, seconds = len(seconds_per_microbatch), seconds_per_microbatch
    fixed = [0.0] * ranks if fixed_seconds is None else fixed_seconds
    if microbatches < ranks:
        raise PlanError(
            f"{microbatches} microbatches cannot be shared among {ranks} data ranks: each needs one. "
            f"Use microbatches of fewer samples, or at most {microbatches} data ranks."
        )
    shares = _floor_shares(microbatches, seconds, fixed)
    queue = [(fixed[rank] + (shares[rank] + 1) * seconds[rank], rank) for rank in range(ranks)]
    heapq.heapify(queue)
    for _ in range(microbatches - sum(shares)):
        _, rank = heapq.heappop(queue)
        shares[rank] += 1
        heapq.heappush(queue, (fixed[rank] + (shares[rank] + 1) * seconds[rank], rank))
    return tuple(shares)


def _floor_shares(microbatches: int, seconds: Sequence[float], fixed: Sequence[float]) -> list[int]:
    """Shares that the best ones do not go below: those of ranks that all end together, and 1 for the slowest.

    Ranks that one microbatch keeps busy beyond that end are set aside, one after another, with their 1; the others
    share what is left.
    """
    shares = [1] * len(seconds)
    others = sorted(range(len(seconds)), key=lambda rank: fixed[rank] + seconds[rank])
    left = microbatches
    speed = sum(1 / seconds[rank] for rank in others)
    ahead = sum(fixed[rank] / seconds[rank] for rank in others)
    while others and fixed[others[-1]] + seconds[others[-1]] > (left + ahead) / speed:
        slowest = others.pop()
        speed -= 1 / seconds[slowest]
        ahead -= fixed[slowest] / seconds[slowest]
        left -= 1
    for rank in others:
        end = (left + ahead) / speed
        shares[rank] = max(1, int((end - fixed[rank]) / seconds[rank] * (1 - 1e-9)))
    return shares
