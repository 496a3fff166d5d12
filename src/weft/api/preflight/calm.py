"""Forwards on trial: every draw gives fixed numbers, and writes to weights are seen and taken back."""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.techniques.core._draw_net import is_draw

_SHARE = 0.75
"""Share of the range or the deviation of what is drawn."""


@contextlib.contextmanager
def on_trial(weights: Mapping[str, nn.Parameter]) -> Generator[Written]:
    """Run forwards and losses without draws, words and traces: generators and `weights` are as before at the end.

    Yields what was written to weights, known at the end.
    """
    written = Written(weights)
    states = random.getstate(), np.random.get_state()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            torch.random.fork_rng(devices={p.device for p in weights.values() if p.is_cuda}),
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
            _Calm(written),
        ):
            warnings.simplefilter("ignore")
            yield written
    finally:
        written.take_back()
        random.setstate(states[0])
        np.random.set_state(states[1])


class Written:
    """Which weights were written to; they are kept from before the first write."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self.names: set[str] = set()
        self._weights = weights
        self._storages = {_storage(parameter): name for name, parameter in weights.items()}
        self._data = {name: parameter.data for name, parameter in weights.items()}
        self._kept: dict[str, Tensor] = {}

    def about_to_write(self, tensor: Tensor) -> None:
        name = self._storages.get(_storage(tensor))
        if name is not None and name not in self._kept:
            self._kept[name] = self._data[name].clone()
            self.names.add(name)

    def take_back(self) -> None:
        with torch.no_grad():
            for name, before in self._data.items():
                if self._weights[name].data_ptr() != before.data_ptr():  # given another tensor: `weight.data = …`
                    self._weights[name].data = before
                    self.names.add(name)
            for name, values in self._kept.items():
                self._data[name].copy_(values)
        self._kept.clear()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # meta storages have no address


class _Calm(TorchDispatchMode):
    """Answers draws with fixed numbers, the same for every sample, and says what is about to be written to."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self._written = written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for leaf in tree_leaves(value):
                        if isinstance(leaf, Tensor):
                            self._written.about_to_write(leaf)
        return _fixed(func, args, given) if is_draw(func, args, given) else func(*args, **given)


def _fixed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    kwargs = {**kwargs, "generator": None} if "generator" in kwargs else kwargs
    if name == "native_dropout":  # a rate that changes from forward to forward shows
        return args[0] * (1.0 + float(args[1])), torch.ones_like(args[0], dtype=torch.bool)
    if name == "randperm":  # one that moves every sample
        return func(*args, **kwargs).sort(descending=True)[0]
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    result = func(*args, **kwargs)
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            with torch.no_grad():
                leaf.fill_(_value(name, leaf, given))
    return result


def _value(name: str, drawn: Tensor, given: Mapping[str, Any]) -> float:
    if name.startswith("bernoulli"):
        return 1.0
    if drawn.is_floating_point() or drawn.is_complex():
        low, high = (given.get(each) for each in (("mean", "std") if "normal" in name else ("from", "to")))
        low, high = (each if isinstance(each, int | float) else other for each, other in ((low, 0.0), (high, 1.0)))
        return low + _SHARE * (high if "normal" in name else high - low)
    low = given.get("low", given.get("from", 0))
    return float(low) if isinstance(low, int) else 0.0
