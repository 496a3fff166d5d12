"""Reads a rank's samples of a batch, and draws for each what its place says: the same on every number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast, final

import numpy as np
import torch

from weft.entry._batch_shape import taken_apart
from weft.entry._user_batches import seeded

_EARLY = 2
"""Batches that are always looked at: what draws does so from the start."""


class Asked(NamedTuple):
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
        self._draws = self._collate_draws = False
        self._read = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, asked: Asked) -> Asked:
        """Leave the reading to the collating, which knows whether it needs the other ranks' samples."""
        return asked

    def __call__(self, asked: Asked) -> Any:
        looks = self._read < _EARLY or self._read & (self._read - 1) == 0
        self._read += 1
        start, stop = (0, len(asked.indices)) if self._needs_whole else _rows(asked)
        before = _states() if looks and not self._draws else None
        samples = self._samples(asked, start, stop)
        if before is not None and _moved(before):
            self._draws = True
            samples = self._samples(asked, start, stop)
        before = _states() if looks and not self._collate_draws else None
        batch = self._collated(samples, asked)
        if before is not None and _moved(before):
            self._collate_draws = True
            return self(asked)
        if not self._needs_whole:
            return batch
        fields, shape = taken_apart(batch)
        rows = slice(*_rows(asked))
        return shape.restored({name: value[rows] for name, value in fields.items()})

    @property
    def _needs_whole(self) -> bool:
        return self._collate_draws and not self._alone

    def _samples(self, asked: Asked, start: int, stop: int) -> list[Any]:
        indices = asked.indices[start:stop]
        if not self._draws:
            return self._items(indices)
        samples: list[Any] = []
        for place, index in enumerate(indices, asked.first + start):
            with seeded(self._seed, place):
                samples += self._items([index])
        return samples

    def _items(self, indices: Sequence[Any]) -> list[Any]:
        fetch = getattr(self._dataset, "__getitems__", None)
        return list(fetch(indices)) if fetch else [self._dataset[index] for index in indices]

    def _collated(self, samples: list[Any], asked: Asked) -> Any:
        if not self._collate_draws:
            return self._collate(samples)
        with seeded(self._seed, asked.first):
            return self._collate(samples)


def _rows(asked: Asked) -> tuple[int, int]:
    """Those that a rank has; the first sample stands in where it has none."""
    return (asked.start, asked.stop) if asked.start < asked.stop else (0, 1)


_States = tuple[torch.Tensor, Any, tuple[Any, ...]]


def _states() -> _States:
    return torch.get_rng_state(), random.getstate(), cast(tuple[Any, ...], np.random.get_state())


def _moved(before: _States) -> bool:
    """Whether a generator has; it is put back then."""
    states = _states()
    same_numpy = all(np.array_equal(one, other) for one, other in zip(before[2], states[2], strict=True))
    if torch.equal(before[0], states[0]) and before[1] == states[1] and same_numpy:
        return False
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(cast(Any, before[2]))
    return True
