"""The generators that a loader draws from: its own, its samplers' and its data's, and those of Python and NumPy."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

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


def states_of(loader: object, device: torch.device) -> str:
    """Return where all generators stand that a loader or its loop draws from, as text for another rank or a save."""
    own = [_state(each) for each in _generators(loader, _DEPTH, set())]
    return json.dumps([*(_state(each) for each in _of_process(device)), *own])


def take_states(loader: object, device: torch.device, text: str) -> None:
    """Put the same generators where `states_of` has found them."""
    found = [*_of_process(device), *_generators(loader, _DEPTH, set())]
    for each, state in zip(found, json.loads(text), strict=True):
        _take(each, state)


def own_states(loader: object) -> list[Any]:
    """Return where the loader's own generators stand, beside those of the process."""
    return [_state(each) for each in _generators(loader, _DEPTH, set())]


def take_own_states(loader: object, states: Sequence[Any]) -> None:
    """Put the loader's own where `own_states` has found them.  Raises `ValueError` where they are others."""
    for each, state in zip([*_generators(loader, _DEPTH, set())], states, strict=True):
        _take(each, state)


def process_states(device: torch.device) -> dict[str, Any]:
    """Return where the generators of the process stand, by name."""
    return {name: _state(each) for name, each in zip(_names(device), _of_process(device), strict=True)}


def take_process_states(device: torch.device, states: Mapping[str, Any]) -> None:
    """Put them where `process_states` has found them, perhaps on another kind of device."""
    for name, each in zip(_names(device), _of_process(device), strict=True):
        if name in states:
            _take(each, states[name])


def _names(device: torch.device) -> list[str]:
    return ["torch", *([] if device.type == "cpu" else [device.type]), "python", "numpy"]


def _of_process(device: torch.device) -> list[Any]:
    own = [] if device.type == "cpu" else [_default_of(device)]
    # What the functions of `random` and `numpy.random` are bound to.
    return [torch.default_generator, *own, getattr(random, "_inst"), getattr(np.random.mtrand, "_rand")]  # noqa: B009


def _default_of(device: torch.device) -> torch.Generator:
    module: Any = torch.get_device_module(device)
    return module.default_generators[device.index or 0]


def _state(generator: Any) -> Any:
    match generator:
        case torch.Generator():
            return _text(generator.get_state().numpy().tobytes())
        case random.Random():
            return generator.getstate()
        case np.random.Generator():
            return _plain(generator.bit_generator.state)
        case _:
            kind, words, *rest = generator.get_state()
            return [kind, _text(words.tobytes()), *rest]


def _take(generator: Any, state: Any) -> None:
    match generator:
        case torch.Generator():
            held = np.frombuffer(base64.b64decode(state), dtype=np.uint8).copy()
            generator.set_state(torch.from_numpy(held))
        case random.Random():
            version, words, gauss = state
            generator.setstate((version, tuple(words), gauss))
        case np.random.Generator():
            cast(Any, generator.bit_generator).state = _arrays(state)
        case _:
            kind, words, *rest = state
            generator.set_state((kind, np.frombuffer(base64.b64decode(words), dtype=np.uint32), *rest))


def _text(held: bytes) -> str:
    return base64.b64encode(held).decode()


def _plain(state: Any) -> Any:
    """The state of NumPy's bits, whose words may be an array."""
    if isinstance(state, Mapping):
        return {name: _plain(value) for name, value in cast(Mapping[str, Any], state).items()}
    return {"array": state.tolist(), "dtype": str(state.dtype)} if isinstance(state, np.ndarray) else state


def _arrays(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    held = cast(dict[str, Any], state)
    if held.keys() == {"array", "dtype"}:
        return np.array(held["array"], dtype=held["dtype"])
    return {name: _arrays(value) for name, value in held.items()}
