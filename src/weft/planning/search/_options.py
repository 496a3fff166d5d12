"""Splits × schedules × chunks, and the ways of sharding: what can be chosen once the axes have their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.planning.search._bounds import Floats
from weft.planning.search._space import Space, chunk_choices, divisors
from weft.planning.search._splits import Bools, CandidateTable, Ints, Splits
from weft.techniques.pipeline.cost import FOLDED, flights
from weft.techniques.pipeline.schedules import SPLIT_BACKWARD, Schedule, chunk_limits
from weft.techniques.zero.settings import ReduceEvery


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(CandidateTable):
    """Splits, once for every schedule and number of chunks that their pipeline allows."""

    splits: Splits
    schedule: Ints
    """Position in `Space.schedules`."""
    chunks: Ints
    flight: Floats
    """Microbatches whose activations wait on the first rank, counted in all of its blocks."""
    last_flight: Floats
    """Microbatches whose activations wait on the rank that has the head, counted the same way."""
    joined_ends: Bools
    """Whether one rank has embedding and head."""
    is_plain: Bools
    """Whether microbatches pass the ranks once, one after the other: 1F1B and GPipe."""
    splits_backward: Bools
    """Whether the schedule puts off the gradients of weights."""

    def __len__(self) -> int:
        return len(self.schedule)


class OptionMaker:
    """Makes options of splits of one model; keeps the schedules of each pipeline size."""

    def __init__(self, space: Space, num_blocks: int) -> None:
        self._space, self._num_blocks = space, num_blocks
        self._schedules: dict[int, tuple[Ints, Ints]] = {}

    def options(self, splits: Splits) -> tuple[Options, Ints]:
        """Return every split once for every schedule and number of chunks, and which split each is."""
        sizes, inverse = np.unique(splits.pipeline, return_inverse=True)
        choices = [self._of_pipeline(int(size)) for size in sizes]
        counts = np.array([len(schedule) for schedule, _ in choices], dtype=np.int64)
        # A table without a Python loop over its rows: the schedules of all pipeline sizes stand behind one
        # another in one array, and `starts` says where those of a size begin (cumulative sum of the lengths, moved by
        # one).
        starts = np.cumsum(counts) - counts
        num_options = counts[inverse]
        # Split i is repeated once for each of its `num_options[i]` schedules. Within its repetitions `place` must
        # count 0, 1, 2, …: the position in the whole table less the position where split i's repetitions begin.
        row = np.repeat(np.arange(len(splits)), num_options)
        place = (
            starts[inverse][row] + np.arange(len(row)) - np.repeat(np.cumsum(num_options) - num_options, num_options)
        )
        schedule = np.concatenate([schedule for schedule, _ in choices])[place]
        chunks = np.concatenate([chunks for _, chunks in choices])[place]
        return self._with_flights(splits.take(row), schedule, chunks), row

    def count(self, splits: Splits) -> int:
        """Return how many options some splits have."""
        sizes, counts = np.unique(splits.pipeline, return_counts=True)
        return sum(len(self._of_pipeline(int(size))[0]) * int(n) for size, n in zip(sizes, counts, strict=True))

    def _of_pipeline(self, pipeline: int) -> tuple[Ints, Ints]:
        """Schedules (by position) and chunks of a pipeline of so many ranks."""
        if pipeline not in self._schedules:
            pairs: list[tuple[int, int]] = [(0, 1)] if pipeline == 1 else []
            # Chunks are virtual stages of a rank: at most as many as it has blocks.
            for index, name in enumerate(self._space.schedules if pipeline > 1 else ()):
                choices = chunk_choices(self._space, *chunk_limits(name), self._num_blocks // pipeline)
                pairs += [(index, chunks) for chunks in choices]
            table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
            self._schedules[pipeline] = (table[:, 0], table[:, 1])
        return self._schedules[pipeline]

    def _with_flights(self, splits: Splits, schedule: Ints, chunks: Ints) -> Options:
        p, m = splits.pipeline, splits.microbatches
        flight, last, joined = np.ones(len(p)), np.ones(len(p)), p == 1
        for index, name in enumerate(self._space.schedules):
            here = (schedule == index) & (p > 1)
            if here.any():
                first, end = _in_flight(name, p[here], chunks[here], m[here])
                flight[here], last[here] = first, end
                joined[here] = name in FOLDED
        plain, split = (np.zeros(len(self._space.schedules), dtype=np.bool_) for _ in range(2))
        for index, name in enumerate(self._space.schedules):
            plain[index], split[index] = name in ("1f1b", "gpipe"), name in SPLIT_BACKWARD
        return Options(
            splits=splits,
            schedule=schedule,
            chunks=chunks,
            flight=flight,
            last_flight=last,
            joined_ends=joined,
            is_plain=plain[schedule] | (p == 1),
            splits_backward=split[schedule] & (p > 1),
        )


def _in_flight(name: Schedule, p: Ints, v: Ints, m: Ints) -> tuple[Floats, Floats]:
    """Microbatches in flight on the first rank and on the head's, in all of a rank's blocks."""
    first, least = flights(name, p, v, m, np.zeros_like(p))
    if name in FOLDED:
        # Folded, a rank has an early and a late stage, which hold the most and the fewest microbatches in flight.
        mean = (first + least) / 2.0
        return mean, mean
    return first, flights(name, p, v, m, p - 1)[0]


class ShardingOption(NamedTuple):
    """A way of sharding."""

    zero: int
    every: ReduceEvery
    """How often gradients are reduced."""
    shard: Ints
    """Ranks over which each row is sharded, at most; 0 where a row has no such choice."""
    least: Ints
    """The fewest ranks over which each row is sharded: between `least` and `shard` only bounds of the divisors are
    known."""

    def take(self, rows: Bools) -> ShardingOption:
        return self._replace(shard=self.shard[rows], least=self.least[rows])


def sharding_options(
    space: Space, options: Options, islands: Sequence[int], *, accumulates: bool
) -> list[ShardingOption]:
    """Return ZeRO stages and shards with how often gradients are reduced, where that is a choice.

    Args:
        accumulates: whether the framework's pipelines keep whole gradients until the end of a step.
        islands: devices of each tier of links: ZeRO-3's shards inside of them and across are told apart.
    """
    splits = options.splits
    # A reduction in every microbatch is a collective, so all data ranks must take the same microbatches in the same
    # order; and a schedule that puts off gradients of weights has none to reduce then.
    can = (splits.pipeline == 1) | (~options.splits_backward & ((options.chunks == 1) | ~splits.uneven))
    options_found: list[ShardingOption] = []
    rows: list[tuple[ReduceEvery, Bools]]
    for zero, shard, least in _shardings(space, splits, islands, accumulates=accumulates):
        if space.reductions is not None:
            possible = np.zeros_like(can) if zero < 2 else (splits.pipeline == 1) if zero == 2 else can
            rows: list[tuple[ReduceEvery, Bools]] = [
                (every, possible | (every != "microbatch")) for every in space.reductions
            ]
        elif zero < 3:
            rows = [("auto", np.ones_like(can))]
        else:
            several = (splits.microbatches > 1) | (splits.pipeline > 1)
            # With one microbatch, or nobody to reduce with, both ways are the same step.
            is_choice = several & (shard * splits.context > 1)
            rows = [
                ("auto", ~is_choice),
                ("step", is_choice),
                ("microbatch", is_choice & can),
            ]
        options_found += [ShardingOption(zero, every, np.where(here, shard, 0), least) for every, here in rows]
    return options_found


def _shardings(
    space: Space, splits: Splits, islands: Sequence[int], *, accumulates: bool
) -> list[tuple[int, Ints, Ints]]:
    """ZeRO stages with the ranks over which each row is sharded, at most (0 where a row has no such choice) and at
    least.  Where nothing is shared out, over data ranks or the context, all stages are
    one, of which the first above 0 is taken (Weft's default).  Experts borrow their ranks from those that shard."""
    data, context, expert = splits.data, splits.context, splits.expert
    alone, one = data * context == 1, np.ones_like(data)
    usual = next((zero for zero in space.zeros if zero in (1, 2)), space.zeros[0])
    if space.reductions == ("microbatch",):  # no choice of ZeRO-0 and 1, nor of ZeRO-2 in a pipeline
        usual = np.where((splits.pipeline == 1) & (2 in space.zeros), 2, space.zeros[-1])
    default = np.broadcast_to(usual, data.shape)
    one_shard = space.shards is None or 1 in space.shards
    shardings: list[tuple[int, Ints, Ints]] = []
    for zero in space.zeros:
        if zero < 3:
            shard = np.where((expert > 1) & (zero > 0), data, one)
            # A pipeline reduces gradients once per step, which leaves them whole: ZeRO-2 is ZeRO-1.
            same = (zero == 2) & (1 in space.zeros) & (splits.pipeline > 1) & (accumulates and space.reductions is None)
            shardings.append((zero, np.where((alone & (zero != default)) | same, 0, shard), shard))
            continue
        if one_shard:
            # Data ranks keep copies, and weights are shared out over the context alone.
            copies = ~alone & ((data == 1) | (space.replicas & (context > 1)))
            shardings.append((3, np.where(copies | (alone & (default == 3)), 1, 0), one))
        shards = _shards(space, data, islands if (expert == 1).all() else ())
        shardings += [(3, np.where(data == 1, 0, most), least) for most, least in shards]
    # Experts live on ranks that ZeRO shards over: their axis has to divide these.
    borrows = [np.maximum(shard, 1) * context % expert == 0 for _, shard, _ in shardings]
    return [
        (zero, np.where(fits, shard, 0), least) for (zero, shard, least), fits in zip(shardings, borrows, strict=True)
    ]


def _shards(space: Space, data: Ints, islands: Sequence[int]) -> list[tuple[Ints, Ints]]:
    """Ranks over which ZeRO-3 shards, at most and at least: those of the space; or all divisors of the data ranks, in
    ranges that end where an island of the cluster does, or one by one where there are no islands."""
    if space.shards is not None:
        fixed = [np.where((data % shard == 0) & (space.replicas | (data == shard)), shard, 0) for shard in space.shards]
        return [(shard, shard) for shard, size in zip(fixed, space.shards, strict=True) if size > 1]
    if not space.replicas:
        return [(data, data)]
    if not islands:
        return [(column, column) for column in _each_divisor(data)]
    # Ranges of shards end at the size of an island, where links change, and at four islands, or the least and the
    # largest divisor of a range would be far apart and its bounds loose.
    edges = sorted({1, *(size for island in islands for size in (island, 4 * island))})
    shards: list[tuple[Ints, Ints]] = []
    for above, most in zip(edges, [*edges[1:], int(data.max(initial=1))], strict=True):
        largest, least = _divisors_between(data, above, most)
        shards.append((largest, least))
    return shards


def _each_divisor(data: Ints) -> Iterator[Ints]:
    """The divisors of each number above 1, the first of all, then the second …; 0 where a number has no more."""
    numbers, rows = np.unique(data, return_inverse=True)
    each = [divisors(int(number))[1:] for number in numbers]
    for place in range(max(map(len, each), default=0)):
        yield np.array([found[place] if place < len(found) else 0 for found in each], dtype=np.int64)[rows]


def _divisors_between(data: Ints, above: int, most: int) -> tuple[Ints, Ints]:
    """The largest and the least divisor of each number above one limit and up to another; 0 where there is none."""
    largest, least = np.zeros_like(data), np.zeros_like(data)
    for number in np.unique(data):
        inside = [n for n in divisors(int(number)) if above < n <= most]
        if inside:
            largest[data == number], least[data == number] = inside[-1], inside[0]
    return largest, least
