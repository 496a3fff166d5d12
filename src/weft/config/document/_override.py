"""`--set recipe.optimizer.learning_rate=1e-3`: single settings laid over a document."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import tomllib
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from weft.config.document._read import SET, Document
from weft.config.document._text import Path, dotted, format_short
from weft.errors import WeftError, did_you_mean


@dataclasses.dataclass(frozen=True, slots=True)
class Override:
    """One setting: its path below the noun, its value, and the noun."""

    noun: str
    path: Path
    value: Any


def parse_overrides(texts: Iterable[str], nouns: Sequence[str]) -> list[Override]:
    """Read `noun.key.key=value` texts.  Values are TOML; a bare word is text.

    Raises:
        WeftError: when a text is no setting, or begins with none of `nouns`.
    """
    return [_parse_override(text, nouns) for text in texts]


def lay_over(document: Document, overrides: Iterable[Override], origin: str = SET) -> Document:
    """Return the document with the overrides that are its noun's; later ones win.  `origin`: where they were given."""
    table: dict[str, Any] = copy.deepcopy(dict(document.table))
    origins = dict(document.origins)
    for override in overrides:
        if override.noun == document.noun:
            path = _place(table, override, document)
            key = dotted(path)
            for inside in [other for other in origins if other.startswith((f"{key}.", f"{key}["))]:
                del origins[inside]
            origins[key] = origin
    return dataclasses.replace(document, table=table, origins=origins)


def _place(table: dict[str, Any], override: Override, document: Document) -> Path:
    """Write the value into the nested table, and return its path with list positions as numbers."""
    here: Any = table
    path: Path = ()
    for depth, key in enumerate(override.path):
        step: Any = key
        if isinstance(here, list):
            step = _position(typing.cast("list[Any]", here), str(key), (*path, key), document)
        elif not isinstance(here, dict):
            problem = f"is a single value: it has no {dotted(override.path[depth:])}."
            raise document.fail(path, format_short(here), problem)
        path = (*path, step)
        if depth == len(override.path) - 1:
            here[step] = override.value
        elif isinstance(here, dict):
            here = typing.cast("dict[str, Any]", here).setdefault(step, {})
        else:
            here = here[step]
    return path


def _position(items: list[Any], key: str, path: Path, document: Document) -> int:
    if key.isdigit() and int(key) < len(items):
        return int(key)
    many = f"0 to {len(items) - 1}" if len(items) > 1 else "0" if items else "none"
    raise document.fail(path, None, f"does not exist: the positions in this list are {many}.")


def _parse_override(text: str, nouns: Sequence[str]) -> Override:
    key, equals, value = text.partition("=")
    example = "Write for example --set recipe.optimizer.learning_rate=1e-3"
    if not equals:
        raise WeftError(f"--set {text} gives no value. Write --set {text}=VALUE.")
    path = _parse_key(key.strip())
    if path is None:
        raise WeftError(f"--set {text}: {key!r} is not the name of a setting. {example}.")
    if path[0] not in nouns or len(path) < 2:
        begin = " or ".join(f"{noun}." for noun in nouns)
        closest = did_you_mean(str(path[0]), nouns) if len(path) > 1 else ""
        raise WeftError(f"--set {text}: settings begin with {begin}{closest or f' {example}.'}")
    return Override(str(path[0]), path[1:], _parse_value(text, value.strip()))


def _parse_key(key: str) -> Path | None:
    try:
        table = tomllib.loads(f"{key} = 0") if "\n" not in key else {}
    except tomllib.TOMLDecodeError:
        return None
    path: Path = ()
    here: Any = table
    while isinstance(here, dict) and here:
        name, here = next(iter(here.items()))
        path = (*path, name)
    return path or None


def _parse_value(text: str, value: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    if list(parsed) == ["value"] and not isinstance(parsed["value"], datetime.date | datetime.time):
        return parsed["value"]
    if value[:1] in ("[", "{", '"', "'"):
        raise WeftError(f"--set {text}: {value} is not a TOML value. Check its brackets and quotes.")
    if not value:
        raise WeftError(f"--set {text} gives no value. For empty text write ''.")
    return value
