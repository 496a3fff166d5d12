"""Seconds of many pipelines at once, at least: what `weft.planning.price` says of their schedules, over arrays."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from weft.planning.search._bounds import Floats
from weft.planning.search._group import PassSeconds
from weft.planning.search._options import Options
from weft.planning.search._splits import Ints
from weft.techniques.pipeline.cost import (
    ScheduleShares,
    bubble_seconds,
    last_round_seconds,
    least_share,
    shares_of_closed_form,
)
from weft.techniques.pipeline.schedules import Schedule

_NO_SECONDS = 1e-30
"""Seconds of a block whose operators are not known: more than 0, so that it can divide."""


class StageBlocks(NamedTuple):
    """Blocks of stages and ranks as `weft.config.plan.balanced_cuts` makes them, by row: exact where all blocks cost
    the same and the stem less than one; else about as many."""

    first: Floats
    """Blocks of the first stage, and of any but the last at least."""
    last: Floats
    """Blocks of the last stage."""
    extras: Floats
    """How many of the stages before the last have one block more than the first; they are the later ones."""
    first_rank: Floats
    last_rank: Floats
    full_rank: Ints
    """The rank that, of the ranks between with the most blocks, holds them longest."""
    more: Floats
    """How many more these have than the first stage's as often as they have stages."""

    @property
    def most(self) -> Floats:
        """Blocks of the fullest stage but the last."""
        return np.where(self.extras > 0, self.first + 1, self.first)


def stage_blocks(blocks: int, options: Options, passes: PassSeconds) -> StageBlocks:
    """Return how many blocks stages have when each block goes to the lightest stage, of equally light ones the later.

    The last stage begins with the tail, so it gets its k-th block when each of the others has as many as outweigh the
    tail and k - 1 blocks.
    """
    p, v = options.splits.pipeline, options.chunks
    stages = np.asarray(p * v, dtype=np.float64)
    others = np.maximum(stages - 1, 1)
    # The tail stands for `behind` blocks: the last stage gets its first block when each other stage has as many.
    block = np.maximum(passes.block, _NO_SECONDS)
    behind = np.ceil(passes.tail / block - 1e-9)
    behind_first = np.ceil((passes.tail - passes.stem) / block - 1e-9)
    # Counting backwards from the last stage: k blocks there mean at least behind + k - 1 on the others.
    waiting = blocks + (others - 1) * (1.0 - behind) + (1.0 - behind_first)
    last = np.clip(np.floor(waiting / stages), 1.0, blocks - stages + 1)
    usual = passes.alike & (passes.stem < passes.block)
    last = np.where(usual, last, 1.0)
    least = np.floor(blocks / stages)
    first = np.where(usual, np.floor((blocks - last) / others), np.where(passes.stem < passes.block, least, 1.0))
    extras = np.where(usual, blocks - last - first * others, 0.0)
    # Ranks have stages r, r + p, …; or, folded, r and 2p - 1 - r.
    # Remaining blocks go to the later stages, because of equally light ones the later is taken.
    from_stage = stages - 1 - extras
    chunks_before = np.maximum(0.0, np.ceil((from_stage - p + 1) / p))
    of_first = v * first + np.maximum(0.0, v - np.ceil(from_stage / p))
    of_last = (v - 1) * first + np.maximum(0.0, v - 1 - chunks_before) + last
    folded_last = 2 * first + (p - 1 >= from_stage) + (p >= from_stage)
    of_first = np.where(options.joined_ends, first + last, of_first)
    of_last = np.where(options.joined_ends, folded_last, of_last)
    first, last = (np.where(stages == 1, blocks, count) for count in (first, last))
    of_first, of_last = (np.where(p == 1, blocks, count) for count in (of_first, of_last))
    chunk, rank = np.divmod(from_stage.astype(np.int64), p)
    is_last = rank == p - 1
    full_rank = np.where(extras > 0, np.where(is_last, np.maximum(p - 2, 0), rank), 0)
    more = np.where(extras > 0, v - chunk - is_last, 0.0)
    folds = options.joined_ends & (p > 1)
    both = from_stage <= p - 1
    # Folded, the second stage of a later rank waits longer, and so do its additional blocks.
    # Rank r of a folded pipeline has stages r and 2p - 1 - r.
    mirrored = np.where(extras > 0, 2 * p - 1 - from_stage, 1)
    full_rank = np.where(folds, np.where(both, from_stage, mirrored), full_rank).astype(np.int64)
    more = np.where(folds, np.where(both, 2.0, np.minimum(extras, 1.0)), more)
    return StageBlocks(first, last, extras, of_first, of_last, full_rank, more)


def pipeline_seconds(
    schedules: tuple[Schedule, ...],
    blocks: int,
    hop: Floats,
    options: Options,
    passes: PassSeconds,
    waits: Floats | float,
    held: StageBlocks | None = None,
) -> Floats:
    """Return seconds from the first forward to the last backward, at least.

    Args:
        hop: seconds from a stage to the next.
        waits: seconds that every rank waits in each microbatch besides.
        held: `stage_blocks` of the same, where they are known.
    """
    p, v, m = options.splits.pipeline, options.chunks, options.splits.microbatches
    held = held or stage_blocks(blocks, options, passes)
    # Every bound below is of a different kind of rank; the step is as long as the largest of them.
    whole = passes.all_blocks + waits * p
    hop_here = np.where(p > 1, hop, 0.0)
    fullest = _full_rank(blocks, held, options, passes, waits)
    # Under 1F1B a step is one microbatch through all ranks, and m - 1 more through the slowest.
    slowest = np.maximum(np.maximum(whole / p, _last_rank(held, options, passes)), fullest)
    hops = 2.0 * (p * v - 1) * hop_here
    # Under 1F1B a rank waits for its neighbour in every microbatch; GPipe sends them one behind the other.
    answered = np.array([name != "gpipe" for name in schedules])[options.schedule]
    plain = whole + hops + (m - 1) * np.maximum(slowest, whole / p + answered * 2.0 * hop_here * (p - 1) / p)
    late = np.where(options.splits_backward, passes.weight, 0.0)
    # The first microbatch passes all stages, and the others follow it through one.
    passing = (whole - late) * (1.0 + (m - 1) / (p * v)) + np.where(m < p, late / (p * v), 0.0)
    bubble, last_round = _bubbles(schedules, options, passes)
    chunked = np.maximum(np.maximum(m * slowest + bubble, passing), last_round) + hops
    # Of unequal stages schedules as played fall short by as much as the mean is below the slowest; see `least_share`.
    mean = whole / (p * v)
    balance = mean / np.maximum(mean, _slowest_stage(blocks, held, options, passes, waits))
    shares = _shares(schedules, 1 << int(p.max(initial=1)).bit_length())[:, options.schedule, p]
    share = least_share(ScheduleShares(*shares), balance, p, m)
    seconds = np.where(options.is_plain, plain, chunked) * share
    before = held.full_rank
    deferred_weights = (before + 1) * held.most * passes.block_weight
    ahead = _ahead(schedules, options, passes, passes.block, before * held.first, deferred_weights)
    busy = m * fullest + np.where(passes.alike & (p > 2), ahead, 0.0)
    busy = np.maximum(busy, _busy_ranks(schedules, blocks, held, hop_here, options, passes, waits))
    busy = np.maximum(busy, _busy_in_the_mean(schedules, blocks, held, options, passes, waits))
    return np.where(p == 1, m * whole, np.maximum(seconds, busy))


@functools.cache
def _shares(schedules: tuple[Schedule, ...], pipelines: int) -> Floats:
    """`shares_of_closed_form` of pipelines of fewer ranks than `pipelines`, [share, schedule, ranks]."""
    return np.array([[shares_of_closed_form(name, p) for p in range(pipelines)] for name in schedules]).transpose(
        2, 0, 1
    )


def _slowest_stage(
    blocks: int, held: StageBlocks, options: Options, passes: PassSeconds, waits: Floats | float
) -> Floats:
    """Seconds of one microbatch on the slowest stage; unequal blocks may be cut however they are."""
    each = passes.block + waits * options.splits.pipeline / blocks
    exact = np.maximum(held.most * each, held.last * each + passes.tail)
    exact = np.maximum(exact, held.first * each + passes.stem)
    least = -(-blocks // (options.splits.pipeline * options.chunks)) * passes.least_block
    return np.where(passes.alike, exact, np.maximum(least, passes.tail + passes.least_block))


def _full_rank(blocks: int, held: StageBlocks, options: Options, passes: PassSeconds, waits: Floats | float) -> Floats:
    """Seconds of one microbatch on the rank between that has the most blocks, or on any that has more than its part.

    With waits, of a rank that has no more than its part: in an order of the axes that makes blocks slower, which may
    hide in the waits, stages are cut otherwise.
    """
    p = options.splits.pipeline
    part = -(-blocks // p)
    counted = (np.where(options.joined_ends, 2, options.chunks) * held.first + held.more) * passes.block
    alike = np.maximum(counted, part * (passes.block + waits * p / blocks))
    return np.where(passes.alike, np.where(p > 2, alike, 0.0), part * passes.least_block)


def _last_rank(held: StageBlocks, options: Options, passes: PassSeconds) -> Floats:
    """Seconds of one microbatch on the rank that has the head."""
    each = np.where(passes.alike, passes.block, passes.least_block)
    folded = held.first_rank * each + passes.stem + passes.tail
    return np.where(options.joined_ends, folded, held.last_rank * each + passes.tail)


def _busy_ranks(
    schedules: tuple[Schedule, ...],
    blocks: int,
    held: StageBlocks,
    hop: Floats,
    options: Options,
    passes: PassSeconds,
    waits: Floats | float,
) -> Floats:
    """`busy_seconds` of the last rank, and of the last of those with the most blocks, where ranks have one
    stage.  Where blocks are unequal, of such stages cut as well as can be for this bound: then every rank's is as long
    as the others'."""
    p, v, m = options.splits.pipeline, options.chunks, options.splits.microbatches
    before = np.maximum(p - 2, 0)
    each = passes.block + waits * p / blocks
    last = held.last_rank * passes.block + passes.tail
    others = np.where(v == 1, blocks - held.last, (p - 1) * held.first)
    deferred_weights = p.astype(np.float64) * np.maximum(
        held.most * passes.block_weight, _weights_of_last(blocks, held, passes)
    )
    ways = np.where(options.splits_backward, 1.0, 2.0)
    behind_last = m * last + _ahead(schedules, options, passes, each, others, deferred_weights) + ways * (p - 1) * hop
    behind_last = np.where(options.joined_ends, 0.0, behind_last)
    ahead = others * each + passes.stem
    most = np.maximum(held.most * passes.block, -(-blocks // p) * each)  # see `_full_rank`
    behind_most = m * most + ahead - held.most * each + 2.0 * before * hop
    # Stages cut so that all p ranks finish together: geometric shares, whose sum is 1 - (1 - 1/m)^p.
    evened = (passes.all_blocks + waits * p) / (1.0 - (1.0 - 1.0 / m) ** p)
    behind_most = np.where(options.is_plain, behind_most, 0.0)
    evened = np.where(options.is_plain, evened, 0.0)
    return np.where(passes.alike, np.maximum(behind_last, behind_most), evened)


def _busy_in_the_mean(
    schedules: tuple[Schedule, ...],
    blocks: int,
    held: StageBlocks,
    options: Options,
    passes: PassSeconds,
    waits: Floats | float,
) -> Floats:
    """Return the same bound in the mean over all ranks: at least one rank is not below it."""
    p, m = options.splits.pipeline, options.splits.microbatches
    before = (p - 1) / 2.0
    most = held.most * passes.block_weight
    deferred_weights = (before + 1) * most + np.maximum(0.0, _weights_of_last(blocks, held, passes) - most)
    ahead = _ahead(schedules, options, passes, passes.block, before * held.first, deferred_weights)
    return m * (passes.all_blocks / p + waits) + ahead * passes.alike


def _weights_of_last(blocks: int, held: StageBlocks, passes: PassSeconds) -> Floats:
    """Seconds of one microbatch's gradients of weights in the last stage, at most."""
    return held.last * passes.block_weight + passes.weight - blocks * passes.block_weight


def _ahead(
    schedules: tuple[Schedule, ...],
    options: Options,
    passes: PassSeconds,
    each: Floats,
    blocks: Floats,
    deferred_weights: Floats,
) -> Floats:
    """Seconds of a step for which a rank has nothing to do while the first and the last microbatch pass the `blocks`
    before it, of `each` seconds: all of them, or forwards where gradients of weights are put off that may come beside
    the others' backwards.  Under the interleaved zero bubble schedule they are put off for no more microbatches than
    there are ranks before and one more, which take `deferred_weights` seconds."""
    forward, inputs = blocks * passes.block_forward, blocks * passes.block_input
    limited = forward + np.maximum(0.0, inputs - deferred_weights)
    is_limited = np.array([name == "interleaved_zero_bubble" for name in schedules])[options.schedule]
    return np.where(options.splits_backward, np.where(is_limited, limited, forward), blocks * each)


def _bubbles(schedules: tuple[Schedule, ...], options: Options, passes: PassSeconds) -> Floats:
    """Seconds that a step takes longer than its busiest rank, and what its last round takes, of equal stages."""
    p, v, m = options.splits.pipeline, options.chunks, options.splits.microbatches
    forward, inputs, weight = (part / (p * v) for part in (passes.forward, passes.input, passes.weight))
    bubbles = np.zeros((2, len(p)))
    for index, name in enumerate(schedules):
        here = np.flatnonzero(options.schedule == index)
        if len(here):
            passes_here = forward[here], inputs[here], weight[here]
            bubbles[0, here] = bubble_seconds(name, p[here], *passes_here)
            bubbles[1, here] = last_round_seconds(name, p[here], v[here], m[here], *passes_here)
    return np.maximum(0.0, bubbles)
