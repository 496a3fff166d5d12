"""Layouts as rows of a table, with what they would cost; the unpriced many, of which the best are priced."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from weft.plan import Recompute, Schedule
from weft.price import Layout
from weft.search._bounds import Floats
from weft.search._space import Space
from weft.search._splits import Bools, Ints, Splits


class Level(NamedTuple):
    """How much is computed again: all blocks like `light`, and as many as needed like `heavy`."""

    light: Recompute
    heavy: Recompute

    @property
    def is_mixed(self) -> bool:
        return self.light != self.heavy


def levels_of(space: Space) -> tuple[Level, ...]:
    """Return the levels of a space, mixed ones last."""
    words = space.recomputes
    plain = [Level(word, word) for word in words]
    if not space.per_block_recompute:
        return tuple(plain)
    return (*plain, *(Level(words[a], words[b]) for a in range(len(words)) for b in range(a + 1, len(words))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Candidates; `group` is the position of their costs."""

    splits: Splits
    group: Ints
    schedule: Ints
    """Position in `Space.schedules`."""
    chunks: Ints
    zero: Ints
    shard: Ints
    seconds: Floats
    """That no step of the row is quicker than, as the screen sees it."""

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, rows: Ints | Bools) -> Rows:
        taken = {field.name: getattr(self, field.name) for field in fields(self)}
        return Rows(**{name: value.take(rows) if name == "splits" else value[rows] for name, value in taken.items()})

    def settings(self) -> tuple[Ints, ...]:
        """Return one column for every setting."""
        splits = self.splits
        ends = (self.schedule, self.chunks, self.zero)
        return (splits.pipeline, splits.tensor, splits.context, splits.expert, splits.size, *ends)

    def layout(self, row: int, base: Layout, space: Space) -> Layout:
        """Return one row as a layout with nothing computed again; `base` has what all rows of a search share."""
        splits, shard = self.splits, int(self.shard[row])
        schedule: Schedule = space.schedules[self.schedule[row]]
        return replace(
            base,
            pipeline=int(splits.pipeline[row]),
            replicate=int(splits.data[row]) // shard,
            shard=shard,
            context=int(splits.context[row]),
            tensor=int(splits.tensor[row]),
            expert=int(splits.expert[row]),
            sequence_parallel=base.sequence_parallel and int(splits.tensor[row]) > 1,
            zero=int(self.zero[row]),
            schedule=schedule,
            chunks=int(self.chunks[row]),
            microbatch_size=int(splits.size[row]),
            microbatches=int(splits.microbatches[row]),
            recompute=space.recomputes[0],
            offload=space.offloads[0],
        )


def join(tables: list[Rows]) -> Rows:
    """Return all rows of several tables."""
    joined = {
        field.name: np.concatenate([getattr(table, field.name) for table in tables])
        for field in fields(Rows)
        if field.name != "splits"
    }
    splits = {
        field.name: np.concatenate([getattr(table.splits, field.name) for table in tables]) for field in fields(Splits)
    }
    return Rows(splits=Splits(**splits), **joined)
