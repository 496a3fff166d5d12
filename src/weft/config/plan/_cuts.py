"""Cut blocks into stages: exact, without torch, so that the planner and the runner cut alike."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

_ROUNDING = 1 + 1e-12
"""Sums of the same costs in another order differ by so much."""


def balanced_cuts(block_costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the first block of each later stage, so that the slowest stage is as fast as can be.

    `block_costs` is [stem, block 0, …, tail] in any unit, none below 0.  Stem and tail count with the first and the
    last stage; every stage has at least one block, so there must be as many blocks as stages.  Among equally fast
    slowest stages the most even cut wins (smallest sum of squares), and among those one with light early stages, which
    hold the activations of most microbatches.

    Exact: the slowest stage is found by trying limits, each of which either works or names the next larger limit that
    could; the sum of squares by a dynamic programme over the cuts that keep the limit.  Where all blocks cost the same,
    giving each to the lightest stage makes both least.
    """
    blocks = block_costs[1:-1]
    assert 1 <= num_stages <= len(blocks), f"{num_stages} stages of {len(blocks)} blocks"
    if max(blocks) <= min(blocks) * _ROUNDING:
        return _equal_blocks(block_costs, num_stages)
    costs = _Costs(block_costs, num_stages)
    return _most_even(costs, _least_limit(costs) * _ROUNDING)


def _equal_blocks(block_costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cuts of blocks that cost the same; of equally light stages the later one gets the block."""
    stem, each, tail = block_costs[0], block_costs[1], block_costs[-1]
    loads = [each] * num_stages
    loads[0] += stem
    loads[-1] += tail
    blocks = [1] * num_stages
    queue = [(load, -stage) for stage, load in enumerate(loads)]
    heapq.heapify(queue)
    for _ in range(len(block_costs) - 2 - num_stages):
        load, place = queue[0]
        heapq.heapreplace(queue, (load + each, place))
        blocks[-place] += 1
    return tuple(accumulate(blocks[:-1]))


class _Costs:
    """Costs of runs of blocks."""

    def __init__(self, block_costs: Sequence[float], num_stages: int) -> None:
        self.num_blocks = len(block_costs) - 2
        self.num_stages = num_stages
        self.before = [0.0, *accumulate(block_costs[1:-1])]
        """Sums over all blocks before each, and over all."""
        self.ends = [0.0] * num_stages
        """The cost that each stage has besides blocks."""
        self.ends[0] += block_costs[0]
        self.ends[-1] += block_costs[-1]

    def of(self, stage: int, start: int, end: int) -> float:
        return self.before[end] - self.before[start] + self.ends[stage]

    def first_end(self, stage: int, limit: float) -> int:
        """Blocks that the stages up to this one must have at least, if all later ones keep a limit."""
        rest = (self.num_stages - 1 - stage) * limit
        least = self.before[-1] + self.ends[-1] - rest
        return bisect_left(self.before, least - 1e-9 * abs(limit)) if rest else 0

    def last_end(self, stage: int) -> int:
        """Blocks that the stages up to this one may have at most: each later stage needs one."""
        return self.num_blocks - (self.num_stages - 1 - stage)


def _least_limit(costs: _Costs) -> float:
    """The cost of the slowest stage when it is as fast as can be."""
    # Bisection over the limit. `_fill` also returns the next limit at which anything changes and the slowest stage that
    # was reached, so both ends jump to costs that occur and the search ends.
    whole = costs.before[-1] + sum(costs.ends)
    low, high = whole / costs.num_stages, whole
    while low < high / _ROUNDING:
        middle = (low + high) / 2
        slowest, following = _fill(costs, middle)
        if slowest <= middle * _ROUNDING:
            high = slowest
        else:
            low = following
    return high


def _fill(costs: _Costs, limit: float) -> tuple[float, float]:
    """Fill stage after stage up to a limit.  Return the slowest stage, and the least limit that fills otherwise."""
    start, slowest, following = 0, 0.0, math.inf
    for stage in range(costs.num_stages):
        last_end = costs.last_end(stage)
        end = costs.num_blocks if stage == costs.num_stages - 1 else start + 1
        # Greedy: a stage takes as many blocks as fit, which leaves the fewest to later ones. If this does not fit, no
        # cut does.
        highest = limit + costs.before[start] - costs.ends[stage]
        end = max(end, min(last_end, bisect_right(costs.before, highest) - 1))
        cost = costs.of(stage, start, end)
        slowest = max(slowest, cost)
        if cost > limit:
            following = min(following, cost)
        if end < last_end:
            following = min(following, costs.of(stage, start, end + 1))
        start = end
    return slowest, following


def _most_even(costs: _Costs, limit: float) -> tuple[int, ...]:
    """Return, of the cuts whose stages keep the limit, those with the smallest sum of squares."""
    # Dynamic programming over (stage, end): of all ways to end a stage at a block only the one with the least sum of
    # squares can be part of the best.
    reached: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    steps: list[dict[int, tuple[float, int]]] = []
    for stage in range(costs.num_stages):
        following: dict[int, tuple[float, int]] = {}
        first_end = costs.num_blocks if stage == costs.num_stages - 1 else costs.first_end(stage, limit)
        last_end = costs.last_end(stage)
        for start, (squares, _) in sorted(reached.items()):
            less = costs.before[start] - costs.ends[stage]
            for end in range(max(first_end, start + 1), last_end + 1):
                cost = costs.before[end] - less
                if cost > limit:
                    break
                # The sum of all stages is given, so the least sum of squares is the most even cut.
                total = squares + cost * cost
                if end not in following or total < following[end][0]:
                    following[end] = (total, start)
        steps.append(following)
        reached = following
    cuts: list[int] = []
    end = costs.num_blocks
    for step in reversed(steps):
        end = step[end][1]
        cuts.append(end)
    return tuple(reversed(cuts[:-1]))
