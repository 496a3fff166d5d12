"""Seconds of many pipelines at once, at least: what `weft.price` says of their schedules, over arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.plan import SPLIT_BACKWARD, Schedule
from weft.price import LONG, shares_of_closed_form
from weft.search._bounds import Floats
from weft.search._group import Passes
from weft.search._options import Options


class StageBlocks(NamedTuple):
    """Blocks of stages as `weft.plan.balanced_cuts` makes them, by row: exact where all blocks cost the same and the
    stem less than one; else about as many."""

    first: Floats
    """Of the first stage, and of any but the last at least."""
    most: Floats
    """Of the fullest of all but the last."""
    last: Floats
    extras: Floats
    """Of the stages before the last, how many have one block more than the first; they are the later ones."""


def stage_blocks(blocks: int, options: Options, passes: Passes) -> StageBlocks:
    """Return how many blocks stages have when each block goes to the lightest stage, of equally light ones the later.

    The last stage begins with the tail, so it gets its k-th block when each of the others has as many as outweigh the
    tail and k - 1 blocks.
    """
    stages = np.asarray(options.splits.pipeline * options.chunks, dtype=np.float64)
    others = np.maximum(stages - 1, 1)
    behind = np.ceil(passes.tail / passes.block - 1e-9)
    last = np.clip(np.floor((blocks + (stages - 1) * (1.0 - behind)) / stages), 1.0, blocks - stages + 1)
    usual = passes.alike & (passes.stem < passes.block)
    last = np.where(stages == 1, blocks, np.where(usual, last, 1.0))
    least = np.floor(blocks / stages)
    first = np.where(usual, np.floor((blocks - last) / others), np.where(passes.stem < passes.block, least, 1.0))
    extras = np.where(usual, blocks - last - first * others, 0.0)
    return StageBlocks(first, np.where(extras > 0, first + 1, first), last, extras)


def pipeline_seconds(
    schedules: tuple[Schedule, ...], blocks: int, hop: Floats, options: Options, passes: Passes, waits: Floats | float
) -> Floats:
    """Return seconds from the first forward to the last backward, at least.

    Args:
        hop: seconds from a stage to the next.
        waits: seconds that every rank waits in each microbatch besides.
    """
    p, v, m = options.splits.pipeline, options.chunks, options.splits.microbatches
    held = stage_blocks(blocks, options, passes)
    whole = passes.whole + waits * p
    hop_here = np.where(p > 1, hop, 0.0)
    slowest = np.maximum(whole / p, _last_rank(held, options, passes))
    hops = 2.0 * (p * v - 1) * hop_here
    # Under 1F1B a rank waits for its neighbour in every microbatch; GPipe sends them one behind the other.
    answered = np.array([name != "gpipe" for name in schedules])[options.schedule]
    plain = whole + hops + (m - 1) * np.maximum(slowest, whole / p + answered * 2.0 * hop_here * (p - 1) / p)
    late = np.where(options.splits_backward, passes.weight, 0.0)
    # The first microbatch passes all stages, and the others follow it through one.
    passing = (whole - late) * (1.0 + (m - 1) / (p * v)) + np.where(m < p, late / (p * v), 0.0)
    chunked = np.maximum(m * slowest + _waits(schedules, options, passes), passing)
    chunked = np.maximum(chunked, _last_rounds(schedules, options, passes)) + hops
    # Of unequal stages schedules as played fall short by as much as the mean is below the slowest; see `least_share`.
    mean = whole / (p * v)
    balance = mean / np.maximum(mean, _slowest_stage(blocks, held, options, passes))
    equal, long = np.array([shares_of_closed_form(name) for name in schedules])[options.schedule].T
    share = equal * balance
    share = np.where(m >= LONG * p, np.maximum(share, long), share)
    sure = _busy_ranks(blocks, held, hop_here, options, passes, waits)
    found = np.where(options.is_plain, np.maximum(plain * share, sure), chunked * share)
    return np.where(p == 1, m * whole, found)


def _slowest_stage(blocks: int, held: StageBlocks, options: Options, passes: Passes) -> Floats:
    """Seconds of one microbatch on the slowest stage; unequal blocks may be cut however they are."""
    exact = np.maximum(held.most * passes.block, held.last * passes.block + passes.tail)
    exact = np.maximum(exact, held.first * passes.block + passes.stem)
    least = -(-blocks // (options.splits.pipeline * options.chunks)) * passes.least_block
    return np.where(passes.alike, exact, np.maximum(least, passes.tail + passes.least_block))


def _last_rank(held: StageBlocks, options: Options, passes: Passes) -> Floats:
    """Seconds of one microbatch on the rank that has the head."""
    v = options.chunks
    each = np.where(passes.alike, passes.block, passes.least_block)
    folded = (held.first + held.last) * each + passes.stem + passes.tail
    return np.where(options.joined_ends, folded, ((v - 1) * held.first + held.last) * each + passes.tail)


def _busy_ranks(
    blocks: int, held: StageBlocks, hop: Floats, options: Options, passes: Passes, waits: Floats | float
) -> Floats:
    """Seconds of a rank's own work on all microbatches, with the forwards and backwards that the first and the last
    microbatch take in the ranks before it: no order of whole passes is shorter.  Of the last rank, and of the last of
    those with the most blocks.  Where blocks are unequal, of stages cut as well as can be for this bound: then every
    rank's is as long as the others'."""
    p, m = options.splits.pipeline, options.splits.microbatches
    before = np.maximum(p - 2, 0)
    each = passes.block + waits * p / blocks
    last = held.last * passes.block + passes.tail
    ahead = (blocks - held.last) * each + passes.stem
    behind_last = m * last + ahead + 2.0 * (p - 1) * hop
    behind_most = m * held.most * each + ahead - held.most * each + 2.0 * before * hop
    evened = (passes.whole + waits * p) / (1.0 - (1.0 - 1.0 / m) ** p)
    return np.where(passes.alike, np.maximum(behind_last, behind_most), evened)


def _waits(schedules: tuple[Schedule, ...], options: Options, passes: Passes) -> Floats:
    """The bubbles of `weft.plan.bubble_seconds`."""
    p = options.splits.pipeline
    stages = p * options.chunks
    forward, inputs, weight = (part / stages for part in (passes.forward, passes.input, passes.weight))
    waits = (p - 1) * (forward + inputs + weight)
    for index, name in enumerate(schedules):
        if name == "zbv":
            split = (p - 1) * np.maximum(np.maximum(forward, inputs), weight)
        elif name in SPLIT_BACKWARD:
            split = (p - 1) * np.maximum(0.0, forward + inputs - weight)
        else:
            continue
        waits = np.where(options.schedule == index, split, waits)
    return waits


def _last_rounds(schedules: tuple[Schedule, ...], options: Options, passes: Passes) -> Floats:
    """`weft.plan.last_round_seconds`, over arrays."""
    p, v, m = options.splits.pipeline, options.chunks, options.splits.microbatches
    last = (m - 1) % p + 1
    before = (m - last) * v + last - 1
    forward, inputs, weight = (part / (p * v) for part in (passes.forward, passes.input, passes.weight))
    seconds = (p - 1 + m * v) * forward + before * (inputs + weight)
    found = np.zeros_like(seconds)
    for index, name in enumerate(schedules):
        here = options.schedule == index
        if name == "interleaved_1f1b":
            found = np.where(here, seconds + p * v * (inputs + weight), found)
        elif name == "interleaved_zero_bubble":
            owed = np.minimum(p - 1, before) * weight
            found = np.where(here, seconds - owed + p * v * inputs + weight, found)
    return found
