"""Layouts as rows of a table, with what they would cost; the unpriced many, of which the best are priced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

from weft.config.plan import Recompute
from weft.planning.search._bounds import Floats
from weft.planning.search._space import Space
from weft.planning.search._splits import CandidateTable, Ints, Splits
from weft.techniques.cost_terms import Layout
from weft.techniques.pipeline.schedules import Schedule
from weft.techniques.zero.settings import ReduceEvery, stage_of

REDUCE_EVERY: tuple[ReduceEvery, ...] = get_args(ReduceEvery)
"""Words of `Layout.reduce_every`."""


class RecomputeLevel(NamedTuple):
    """How much is computed again: all blocks like `light`, and as many as needed like `heavy`."""

    light: Recompute
    heavy: Recompute


def levels_of(space: Space) -> tuple[RecomputeLevel, ...]:
    """Return the levels of a space, mixed ones last."""
    words = space.recomputes
    plain = [RecomputeLevel(word, word) for word in words]
    if not space.per_block_recompute:
        return tuple(plain)
    return (*plain, *(RecomputeLevel(words[a], words[b]) for a in range(len(words)) for b in range(a + 1, len(words))))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRows(CandidateTable):
    """Layouts of a group of splits, with their bounds."""

    splits: Splits
    case: Ints
    """Position of the scheme and arrangement in `GroupCosts.bases`."""
    schedule: Ints
    """Position in `Space.schedules`."""
    chunks: Ints
    zero: Ints
    shard: Ints
    least_shard: Ints
    """Ranks over which ZeRO-3 shards, at most and at least: all divisors of the data ranks between them are one row."""
    every: Ints
    """Position in `REDUCE_EVERY`."""
    seconds: Floats
    """Time of a step, at least: with the least recomputation and offloading that may fit, and the best of all
    buckets."""

    def __len__(self) -> int:
        return len(self.seconds)

    def layout(self, row: int, base: Layout, space: Space) -> Layout:
        """Return one row as a layout with as little computed again and offloaded as the space has; `base` has what its
        group shares."""
        splits, shard = self.splits, int(self.shard[row])
        schedule: Schedule = space.schedules[self.schedule[row]]
        return replace(
            base,
            pipeline=int(splits.pipeline[row]),
            replicate=int(splits.data[row]) // shard,
            shard=shard,
            zero=stage_of(int(self.zero[row])),
            reduce_every=REDUCE_EVERY[self.every[row]],
            uneven=bool(splits.uneven[row]),
            schedule=schedule,
            chunks=int(self.chunks[row]),
            microbatches=int(splits.microbatches[row]),
            recompute=levels_of(space)[0].light,
            offload=space.usual_offload,
        )
