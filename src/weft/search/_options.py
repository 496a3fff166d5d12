"""Splits × schedules × chunks, and the ways of sharding: what can be chosen once the axes have their sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan import Schedule, chunk_limits
from weft.search._bounds import Floats
from weft.search._space import Space, chunk_choices
from weft.search._splits import Bools, Ints, Splits


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Splits, once for every schedule and number of chunks that their pipeline allows."""

    splits: Splits
    schedule: Ints
    """Position in `Space.schedules`."""
    chunks: Ints
    flight: Floats
    """Microbatches whose activations wait on the first rank, counted in all of its blocks."""
    last_flight: Floats
    """The same, on the rank that has the head."""
    joined_ends: Bools
    """Whether one rank has embedding and head."""

    def __len__(self) -> int:
        return len(self.schedule)

    def take(self, rows: Bools) -> Options:
        return Options(
            splits=self.splits.take(rows),
            schedule=self.schedule[rows],
            chunks=self.chunks[rows],
            flight=self.flight[rows],
            last_flight=self.last_flight[rows],
            joined_ends=self.joined_ends[rows],
        )


class Choices:
    """Makes options of splits of one model; keeps the schedules of each pipeline size."""

    def __init__(self, space: Space, num_blocks: int) -> None:
        self._space, self._num_blocks = space, num_blocks
        self._schedules: dict[int, tuple[Ints, Ints]] = {}

    def options(self, splits: Splits) -> tuple[Options, Ints]:
        """Return every split once for every schedule and number of chunks, and which split each is."""
        sizes, inverse = np.unique(splits.pipeline, return_inverse=True)
        choices = [self._of_pipeline(int(size)) for size in sizes]
        counts = np.array([len(schedule) for schedule, _ in choices], dtype=np.int64)
        starts = np.cumsum(counts) - counts
        each = counts[inverse]
        row = np.repeat(np.arange(len(splits)), each)
        place = starts[inverse][row] + np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each)
        schedule = np.concatenate([schedule for schedule, _ in choices])[place]
        chunks = np.concatenate([chunks for _, chunks in choices])[place]
        return self._with_flights(splits.take(row), schedule, chunks), row

    def _of_pipeline(self, pipeline: int) -> tuple[Ints, Ints]:
        """Schedules (by position) and chunks of a pipeline of so many ranks."""
        if pipeline not in self._schedules:
            pairs: list[tuple[int, int]] = [(0, 1)] if pipeline == 1 else []
            for index, name in enumerate(self._space.schedules if pipeline > 1 else ()):
                found = chunk_choices(self._space, *chunk_limits(name), self._num_blocks // pipeline)
                pairs += [(index, chunks) for chunks in found]
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
                joined[here] = name in ("zbv", "dualpipev")
        return Options(
            splits=splits, schedule=schedule, chunks=chunks, flight=flight, last_flight=last, joined_ends=joined
        )


def _in_flight(name: Schedule, p: Ints, v: Ints, m: Ints) -> tuple[Floats, Floats]:
    """Microbatches in flight on the first rank and on the head's, in all of a rank's blocks: the sums of
    `weft.price.in_flight`, over arrays."""
    if name == "gpipe":
        return m.astype(float), m.astype(float)
    if name in ("zbv", "dualpipev"):
        first = np.minimum(2 * p - (name == "zbv"), m) + np.minimum(1, m)
        return first / 2, first / 2
    if name == "interleaved_zero_bubble":
        first, end = p - 1 + (v - 1) * p + 1, (v - 1) * p + p
    else:
        first, end = (p - 1) * np.where(v == 1, 1, 2) + (v - 1) * p + 1, (v - 1) * p + 1
    return np.minimum(first / v, m), np.minimum(end / v, m)


def shardings(space: Space, splits: Splits) -> list[tuple[int, Ints]]:
    """Return ZeRO stages with the ranks over which each row is sharded; 0 where a row has no such choice.

    Without data ranks all stages are one, of which the first above 0 is taken (Weft's default).  Experts borrow their
    ranks from those that shard.
    """
    data, context, expert = splits.data, splits.context, splits.expert
    alone = data * context == 1
    default = next((zero for zero in space.zeros if zero in (1, 2)), space.zeros[0])
    found: list[tuple[int, Ints]] = []
    for zero in space.zeros:
        if zero == 3:
            found += [
                (3, np.where(alone, 1 if default == 3 else 0, np.where(shard > 1, shard, 0)))
                for shard in _shards(space, data)
            ]
        else:
            shard = np.where((expert > 1) & (zero > 0), data, 1)
            found.append((zero, np.where(alone & (zero != default), 0, shard)))
    return [(zero, np.where((np.maximum(shard, 1) * context) % expert == 0, shard, 0)) for zero, shard in found]


def _shards(space: Space, data: Ints) -> list[Ints]:
    """Ranks over which ZeRO-3 shards: those of the space, or all data ranks, of which finalists try all divisors."""
    if space.shards is not None:
        return [np.where(data % shard == 0, shard, 0) for shard in space.shards if shard > 1]
    return [data]
