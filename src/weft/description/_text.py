"""Descriptions as JSON: what has its default is left out, and alike blocks stand once."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args, get_origin

from weft.description._description import Description
from weft.profile import Block


def to_json(description: Description) -> str:
    """Return the text of a description."""
    table = _plain(description)
    kinds: dict[int, int] = {}
    stored: list[Any] = []
    for block, _ in description.profile.count_blocks():
        kinds[id(block)] = len(stored)
        stored.append(_plain(block))
    order = [kinds[id(block)] for block in description.profile.blocks]
    table["profile"]["blocks"] = []
    return json.dumps({"description": table, "kinds": stored, "order": order}, sort_keys=True)


def of_json(text: str) -> Description:
    """Return the description that `to_json` wrote: equal, and alike blocks are one object again.

    Raises:
        ValueError: the text is not that of a description.
    """
    try:
        written = json.loads(text)
        kinds = [_read(Block, kind) for kind in written["kinds"]]
        description = _read(Description, written["description"])
        blocks = tuple(kinds[index] for index in written["order"])
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as problem:
        raise ValueError(f"this is no description: {type(problem).__name__}: {problem}") from None
    return dataclasses.replace(description, profile=dataclasses.replace(description.profile, blocks=blocks))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    return [_plain(item) for item in cast("list[Any]", value)] if isinstance(value, tuple | list) else value


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(hint: Any, value: Any) -> Any:
    """What was written of a field, of the kind that its annotation says."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [part for part in parts if part is not type(None)]
        return None if value is None else _read(inner, value)
    if dataclasses.is_dataclass(hint):
        hints = _hints(hint)
        return cast("Any", hint)(**{name: _read(hints[name], item) for name, item in value.items()})
    if origin is Literal:
        good = value in parts
    elif origin is not None and issubclass(origin, Mapping):
        good = isinstance(value, dict) and all(type(item) is parts[1] for item in cast("Any", value).values())
    elif origin is not None:  # sequences: tuple[X, …], tuple[X, Y], Sequence[X]
        each = parts[:1] * len(value) if len(parts) < 2 or parts[1] is Ellipsis else parts
        return tuple(_read(part, item) for part, item in zip(each, value, strict=True))
    else:
        good = type(value) is hint or (hint is float and type(value) is int)
    if not good:
        raise TypeError(f"{value!r} is no {hint}")
    return value
