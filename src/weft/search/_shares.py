"""Unequal devices get unequal shares of the batch, so that all are done at the same time: exact."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from weft.errors import PlanError


def unequal_shares(microbatches: int, seconds_per_microbatch: Sequence[float]) -> tuple[int, ...]:
    """Return microbatches of each data rank, at least 1 each, so that the slowest rank is as fast as can be.

    Among ranks that would be done equally early the earlier one gets more.  Exact: giving every microbatch to the rank
    that is done first with it makes the least maximum of shares × seconds; the ranks start from the shares that no
    least maximum goes below.

    Raises:
        PlanError: fewer microbatches than ranks.
    """
    ranks = len(seconds_per_microbatch)
    if microbatches < ranks:
        raise PlanError(
            f"{microbatches} microbatches cannot be shared among {ranks} data ranks: each needs one. "
            f"Use microbatches of fewer samples, or at most {microbatches} data ranks."
        )
    shares = _floor_shares(microbatches, seconds_per_microbatch)
    queue = [((shares[rank] + 1) * seconds_per_microbatch[rank], rank) for rank in range(ranks)]
    heapq.heapify(queue)
    for _ in range(microbatches - sum(shares)):
        _, rank = heapq.heappop(queue)
        shares[rank] += 1
        heapq.heappush(queue, ((shares[rank] + 1) * seconds_per_microbatch[rank], rank))
    return tuple(shares)


def _floor_shares(microbatches: int, seconds: Sequence[float]) -> list[int]:
    """Shares that the best ones do not go below: those of ranks that work for the mean time, and 1 for the slowest.

    The ranks that one microbatch keeps busy for longer than the mean of all are set aside, one after another, with
    their 1; the others share what is left.
    """
    shares = [1] * len(seconds)
    others = sorted(range(len(seconds)), key=lambda rank: seconds[rank])
    left = microbatches
    speed = sum(1 / seconds[rank] for rank in others)
    while others and seconds[others[-1]] * speed > left:
        slowest = others.pop()
        speed -= 1 / seconds[slowest]
        left -= 1
    for rank in others:
        shares[rank] = max(1, int(left / speed / seconds[rank] * (1 - 1e-9)))
    return shares
