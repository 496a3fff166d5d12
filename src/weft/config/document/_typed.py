"""Frozen dataclasses as plain values and back by their annotations: what processes tell each other, what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from weft.config.document._conform import hints_of, is_union

T = TypeVar("T")


def plain(value: Any) -> Any:
    """Return a value as what JSON can hold.  Fields that have their default are left out."""
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in cast("list[Any]", value)]
    return str(value) if isinstance(value, PurePath) else value


def typed(cls: type[T], value: Any) -> T:
    """Return the dataclass of which `plain` made a value.

    Raises:
        KeyError, TypeError, ValueError: the value is not of this class.
    """
    return _read(cls, value)


def _read(hint: Any, value: Any) -> Any:
    """Return a field's value, of the type that its annotation names."""
    origin, parts = get_origin(hint), get_args(hint)
    if is_union(hint):
        return _read_union([part for part in parts if part is not type(None)], value, optional=type(None) in parts)
    if hint is Path:
        return Path(value)
    if dataclasses.is_dataclass(hint):
        hints = hints_of(cast("type[Any]", hint))
        return cast("Any", hint)(**{name: _read(hints[name], item) for name, item in value.items()})
    if origin is not None and origin is not Literal and issubclass(origin, Mapping):
        return {name: _read(parts[1], item) for name, item in value.items()}
    if origin is not None and origin is not Literal:  # sequences: tuple[X, …], tuple[X, Y], list[X], Sequence[X]
        each = parts[:1] * len(value) if len(parts) < 2 or parts[1] is Ellipsis else parts
        items = (_read(part, item) for part, item in zip(each, value, strict=True))
        return list(items) if origin is list else tuple(items)
    if value not in parts if origin is Literal else not (type(value) is hint or (hint is float and type(value) is int)):
        raise TypeError(f"{value!r} is no {hint}")
    return value


def _read_union(parts: list[Any], value: Any, *, optional: bool) -> Any:
    """Classes of a union are told apart by their fields."""
    if value is None and optional:
        return None
    for part in parts[:-1]:
        try:
            return _read(part, value)
        except (KeyError, TypeError):
            continue
    return _read(parts[-1], value)
