"""Numbers by which a module counts what may be divided: its own attributes, and those of a configuration it holds."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def numbers_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Whole numbers that a module holds: `num_heads`, and `config.num_heads` of an object that many modules share."""
    for name, value in list(vars(module).items()):
        if _is_number(value):
            yield name, value
        elif _is_configuration(value):
            for inner, number in vars(value).items():
                if _is_number(number):
                    yield f"{name}.{inner}", number


def number_of(module: nn.Module, name: str) -> Any:
    """The number of that name; None where the module has none.  Without a dot any attribute will do."""
    holder, _, inner = name.rpartition(".")
    if not holder:
        return getattr(module, inner, None)
    value = vars(module).get(holder)
    return None if value is None else vars(value).get(inner)


def set_number(module: nn.Module, name: str, number: int) -> None:
    """Set a number of a module.  Of a configuration it gets a copy of its own: other modules go on reading theirs."""
    holder, _, inner = name.rpartition(".")
    if not holder:
        object.__setattr__(module, inner, number)
        return
    own = copy.copy(vars(module)[holder])
    vars(own)[inner] = number
    object.__setattr__(module, holder, own)


@contextmanager
def localised(module: nn.Module, name: str, parts: int) -> Generator[None]:
    """Divide a number for a while."""
    top = name.partition(".")[0]
    before = vars(module)[top]
    try:
        set_number(module, name, number_of(module, name) // parts)
        yield
    finally:
        object.__setattr__(module, top, before)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_configuration(value: Any) -> bool:
    """Whether it is an object of settings, such as transformers' `config`."""
    plain = isinstance(value, nn.Module | Tensor | type) or not hasattr(value, "__dict__")
    return not plain and type(value).__name__.endswith(("Config", "Namespace", "Settings", "Args", "Arguments"))
