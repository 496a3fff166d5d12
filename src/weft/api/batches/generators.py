"""The generators of torch, Python and NumPy: seeded for the read of a sample, kept while a loader is looked at, saved.

A read that draws is seeded by the place of its sample in the stream, so that the sample looks the same on every rank
and after every resume.  To seed three generators and put them back takes 35 µs, as much as many a read; whether a read
has drawn at all is seen from them afterwards, once for a whole batch.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

T = TypeVar("T")
_States = tuple[torch.Tensor, Any, tuple[Any, ...]]
_DEPTH = 4
"""A loader's batch sampler's sampler's generator; a data set's Subset's data set's generator."""


# ── reads ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
        _restore(states)


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
        result = read()
        if _are(before):
            return result
        self.draw = True
        _restore(before)
        return None


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


def _restore(states: _States) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(cast(Any, states[2]))


# ── a loader's, and those of the process ──────────────────────────────────────────────────────────────────────────────


@contextmanager
def generators_kept(loader: object) -> Generator[None]:
    """Look at a loader, and put its generators and the process's back: the training draws what one process draws."""
    states, own = _states(), [(generator, _state(generator)) for generator in _generators(loader, _DEPTH, set())]
    try:
        yield
    finally:
        _restore(states)
        for generator, state in own:
            _give(generator, state)


def states_of(loader: object, device: torch.device) -> str:
    """Return where all generators stand that a loader or its loop draws from, as text for another rank or a save."""
    return json.dumps([*map(_saved, _of_process(device)), *own_states(loader)])


def take_states(loader: object, device: torch.device, text: str) -> None:
    """Put the same generators where `states_of` has found them."""
    _take([*_of_process(device), *_generators(loader, _DEPTH, set())], json.loads(text))


def own_states(loader: object) -> list[Any]:
    """Return where the loader's own generators stand, beside those of the process."""
    return [_saved(generator) for generator in _generators(loader, _DEPTH, set())]


def take_own_states(loader: object, states: Sequence[Any]) -> None:
    """Put the loader's own where `own_states` has found them.  Raises `ValueError` where they are others."""
    _take([*_generators(loader, _DEPTH, set())], states)


def process_states(device: torch.device) -> dict[str, Any]:
    """Return where the generators of the process stand, by name."""
    return {name: _saved(each) for name, each in zip(_names(device), _of_process(device), strict=True)}


def take_process_states(device: torch.device, states: Mapping[str, Any]) -> None:
    """Put them where `process_states` has found them, perhaps on another kind of device."""
    known = [
        (each, states[name]) for name, each in zip(_names(device), _of_process(device), strict=True) if name in states
    ]
    _take([name for name, _ in known], [state for _, state in known])


def _generators(held: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Generators among the attributes of an object and of theirs."""
    if id(held) in seen:
        return
    # Objects refer to each other in circles: each is looked at once, to a limited depth.
    seen.add(id(held))
    if isinstance(held, torch.Generator | random.Random | np.random.Generator | np.random.RandomState):
        yield held
    elif depth:
        for value in [*getattr(held, "__dict__", {}).values()]:
            yield from _generators(value, depth - 1, seen)


def _names(device: torch.device) -> list[str]:
    return ["torch", *([] if device.type == "cpu" else [device.type]), "python", "numpy"]


def _of_process(device: torch.device) -> list[Any]:
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    own = [] if module is None else [module.default_generators[device.index or 0]]
    # What the functions of `random` and `numpy.random` are bound to.
    return [torch.default_generator, *own, getattr(random, "_inst"), getattr(np.random.mtrand, "_rand")]  # noqa: B009


# ── one generator ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _state(generator: Any) -> Any:
    match generator:
        case random.Random():
            return generator.getstate()
        case np.random.Generator():
            return generator.bit_generator.state
        case _:  # torch's, and NumPy's older kind
            return generator.get_state()


def _give(generator: Any, state: Any) -> None:
    match generator:
        case random.Random():
            generator.setstate(state)
        case np.random.Generator():
            cast(Any, generator.bit_generator).state = state
        case torch.Generator() if isinstance(state, np.ndarray):
            generator.set_state(torch.from_numpy(state))
        case _:
            generator.set_state(state)


def _saved(generator: Any) -> Any:
    """The state of a generator as JSON."""
    return _written(_state(generator))


def _take(generators: Sequence[Any], saved: Sequence[Any]) -> None:
    for generator, state in zip(generators, saved, strict=True):
        _give(generator, _read(state))


def _written(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return {"array": base64.b64encode(value.tobytes()).decode(), "dtype": str(value.dtype)}
    if isinstance(value, Mapping):
        return {name: _written(item) for name, item in cast(Mapping[str, Any], value).items()}
    return [_written(item) for item in cast(Sequence[Any], value)] if isinstance(value, tuple) else value


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        entries = cast(dict[str, Any], value)
        if entries.keys() == {"array", "dtype"}:
            return np.frombuffer(base64.b64decode(entries["array"]), dtype=entries["dtype"]).copy()
        return {name: _read(value) for name, value in entries.items()}
    return tuple(_read(item) for item in cast(list[Any], value)) if isinstance(value, list) else value
