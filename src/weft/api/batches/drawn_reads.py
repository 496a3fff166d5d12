"""What reading a sample draws from the generators of torch, Python and numpy: nothing, or what the sample's place says.

A read that draws is seeded by the place of its sample in the stream, so that the sample looks the same on every rank
and after every resume.  To seed three generators and put them back takes 35 µs, as much as many a read; whether a read
has drawn at all is seen from them afterwards, once for a whole batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

T = TypeVar("T")


@contextmanager
def seeded(seed: int, position: int) -> Generator[None]:
    """Seed the generators that augmentation draws from by the sample's place in the stream, and put them back."""
    key = (seed * 1_000_003 + position) % 2**63
    states = _states()
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)
    try:
        yield
    finally:
        _put_back(states)


class DrawnReads:
    """Whether what is read draws: looked at in every batch until it has, but for data that are known not to."""

    def __init__(self, *read: Any) -> None:
        """`read`: data sets and collate functions."""
        self.draw = False
        self._look = not all(map(_is_still, read))

    def tried(self, read: Callable[[], T]) -> T | None:
        """Return what `read` returns, or None where it has drawn: the generators are put back then."""
        if not self._look:
            return read()
        before = _states()
        found = read()
        if _are(before):
            return found
        self.draw = True
        _put_back(before)
        return None


_States = tuple[torch.Tensor, Any, tuple[Any, ...]]


def _is_still(read: Any) -> bool:
    """Whether something of torch's own draws nothing for certain."""
    if type(read) is Subset:
        return _is_still(read.dataset)
    if type(read) is ConcatDataset:
        return all(map(_is_still, read.datasets))
    return type(read) in (TensorDataset, list, tuple) or read is default_collate


def _states() -> _States:
    return torch.get_rng_state(), random.getstate(), cast(tuple[Any, ...], np.random.get_state())


def _are(before: _States) -> bool:
    states = _states()
    same_numpy = all(np.array_equal(one, other) for one, other in zip(before[2], states[2], strict=True))
    return torch.equal(before[0], states[0]) and before[1] == states[1] and same_numpy


def _put_back(states: _States) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(cast(Any, states[2]))
