"""The runs of a rank's shards that one step updates, and how often each parameter has been updated.

Torch leaves a parameter without a gradient alone: no decay, no momentum, and its own step count stands still.  Counts
are therefore kept by parameter, on the CPU, where asking whether they are all equal costs no wait for a device.
While they are (always, unless parameters went unused), every shard is one run and the optimizer makes one call for
all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from weft.techniques.core import CheckpointShard, Segment, Shard


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Elements [start, stop) of one shard, updated together."""

    shard: int
    start: int
    stop: int
    step: int
    """Updates of these parameters so far, this one included; 0 if the optimizer does not count."""


class StepCounts:
    """One count per segment, in the order of shards and segments."""

    def __init__(self, shards: Sequence[Shard], *, counted: bool) -> None:
        self._shards = shards
        self._increment = int(counted)
        self._places = [(index, segment) for index, shard in enumerate(shards) for segment in shard.segments]
        self.counts = torch.zeros(len(self._places), dtype=torch.int64)

    def places(self) -> Iterator[tuple[int, int, Segment]]:
        """Yield (position, shard index, segment) of every segment of this rank."""
        for position, (index, segment) in enumerate(self._places):
            yield position, index, segment

    def advance(self, skipped: Collection[str]) -> list[ShardRange]:
        """Count one update of every parameter not `skipped`, and return what to update, ascending."""
        # The usual case costs nothing by parameter: one count, and a range for each shard.
        if not skipped and self._equal():
            self.counts += self._increment
            step = int(self.counts[0]) if len(self.counts) else 0
            return [ShardRange(i, 0, s.size, step) for i, s in enumerate(self._shards) if s.segments]
        return list(self._joined(skipped))

    def _equal(self) -> bool:
        if not len(self.counts):
            return True
        low, high = torch.aminmax(self.counts)
        return bool(low == high)

    def _joined(self, skipped: Collection[str]) -> Iterator[ShardRange]:
        """Neighbours with equal counts as one run each."""
        current: ShardRange | None = None
        previous = -1
        for position, index, segment in self.places():
            if segment.layout.name in skipped:
                continue
            self.counts[position] += self._increment
            step, stop = int(self.counts[position]), segment.offset + segment.length
            # Only neighbours that lie side by side in one shard can share a call, and only with equal bias corrections.
            adjacent = current is not None and position == previous + 1
            if current is not None and adjacent and (current.shard, current.step) == (index, step):
                current = ShardRange(index, current.start, stop, step)
            else:
                if current is not None:
                    yield current
                current = ShardRange(index, segment.offset, stop, step)
            previous = position
        if current is not None:
            yield current

    def checkpoint_shards(self) -> Iterator[CheckpointShard]:
        """Yield each parameter's count as a checkpoint shard of one element; the rank that has the parameter's first
        element writes it."""
        for position, index, segment in self.places():
            layout = segment.layout
            first = segment.start == 0 and layout.split.index == 0
            yield CheckpointShard(
                name=f"optimizer/step/{layout.name}",
                shape=torch.Size(),
                tensor=self.counts[position : position + 1],
                counts=self._shards[index].counts and first,
            )
