"""Reads a rank's samples of a batch, and draws for each what its place says: the same on every number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from weft.api.batches.batch_shape import taken_apart
from weft.api.batches.generators import DrawnReads, seeded


class SampleRequest(NamedTuple):
    """The samples of a global batch by their indices, and which of them a rank is to have."""

    indices: Sequence[Any]
    first: int
    """Place of the batch's first sample among those of all passes."""
    start: int
    stop: int


@final
class KeyedReader:
    """A data set and its collate function in one, as torch's loader calls them, in workers too.

    Data that draw nothing are read as they are.  Those that do are read with the generators seeded by each sample's
    place, which are put back; where the collate function draws, it is given the whole batch on every rank.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int, *, alone: bool) -> None:
        """`alone`: whether this rank has all samples."""
        self._dataset, self._collate, self._seed, self._alone = dataset, collate, seed, alone
        self._reads, self._collates = DrawnReads(dataset), DrawnReads(collate)
        self.collates_full_batch = False
        """Whether the collate function draws, or looks at the whole batch, and is given the whole on every rank."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, asked: SampleRequest) -> SampleRequest:
        """Leave the reading to the collating, which knows whether it needs the other ranks' samples."""
        return asked

    def __call__(self, asked: SampleRequest) -> Any:
        rows, whole = _rows(asked), (0, len(asked.indices))
        start, stop = whole if self.collates_full_batch else rows
        samples = self._samples(asked, start, stop)
        batch = None if self._collates.draw else self._collates.tried(lambda: [self._collate(samples)])
        if batch is None:
            self.collates_full_batch = not self._alone
            samples = samples if self._alone or (start, stop) == whole else self._samples(asked, *whole)
            with seeded(self._seed, asked.first):
                batch = [self._collate(samples)]
        if not self.collates_full_batch or rows == whole:
            return batch[0]
        fields, shape = taken_apart(batch[0])
        return shape.restored({name: value[slice(*rows)] for name, value in fields.items()})

    def _samples(self, asked: SampleRequest, start: int, stop: int) -> list[Any]:
        indices = asked.indices[start:stop]
        if not self._reads.draw and (items := self._reads.tried(lambda: self._items(indices))) is not None:
            return items
        samples: list[Any] = []
        for place, index in enumerate(indices, asked.first + start):
            with seeded(self._seed, place):
                samples += self._items([index])
        return samples

    def _items(self, indices: Sequence[Any]) -> list[Any]:
        fetch = getattr(self._dataset, "__getitems__", None)
        return list(fetch(indices)) if fetch else [self._dataset[index] for index in indices]


def _rows(asked: SampleRequest) -> tuple[int, int]:
    """Return the samples of one rank; the first sample stands in where it has none."""
    return (asked.start, asked.stop) if asked.start < asked.stop else (0, 1)
