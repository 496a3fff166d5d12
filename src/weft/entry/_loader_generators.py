"""The generators that a loader draws from: its own, its samplers' and its data's, and those of Python and NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_DEPTH = 4
"""A loader's batch sampler's sampler's generator; a data set's Subset's data set's generator."""


@contextmanager
def generators_kept(loader: object) -> Generator[None]:
    """Look at a loader, and put its generators back: the training draws from them what one process draws."""
    states = random.getstate(), np.random.get_state()
    put_back = [_put_back(each) for each in _generators(loader, _DEPTH, set())]
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for act in put_back:
            act()


def _generators(held: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Generators among the attributes of an object and of theirs."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
        yield held
    elif depth:
        for value in [*getattr(held, "__dict__", {}).values()]:
            yield from _generators(value, depth - 1, seen)


def _put_back(generator: Any) -> Callable[[], None]:
    match generator:
        case torch.Generator():
            state = generator.get_state()
            return lambda: _set(generator, state)
        case random.Random():
            drawn = generator.getstate()
            return lambda: generator.setstate(drawn)
        case np.random.Generator():
            bits: Any = generator.bit_generator
            kept = bits.state
            return lambda: setattr(bits, "state", kept)
        case _:
            before = generator.get_state()
            return lambda: generator.set_state(before)


def _set(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)
