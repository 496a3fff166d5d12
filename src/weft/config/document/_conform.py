"""Values against the annotations of a frozen dataclass: the same strictness from TOML, from `--set` and from Python."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from weft.config.document._text import Path, dotted, format_short, format_value
from weft.errors import BadSetting, WeftError, did_you_mean

HIDDEN: Mapping[str, bool] = {"in_document": False}
"""`field(metadata=HIDDEN)`: a field that is no setting: neither read nor written."""

_LARGEST_WHOLE = 2**63
"""Largest integer that is accepted: no count is larger, and sums and products below it stay finite numbers."""


class TypeMismatch(Exception):
    """A value that is not of the annotated type."""

    def __init__(self, path: Path, value: Any, problem: str) -> None:
        super().__init__(problem)
        self.path, self.value, self.problem = path, value, problem


def problem_error(error: type[WeftError], path: Path, value: Any, problem: str) -> WeftError:
    """Return the error for a setting whose value is wrong: `batch.size = 0 must be at least 1.`"""
    shown = format_short(value)
    return error(f"{dotted(path)} = {shown} {problem}", setting=BadSetting(path, shown, problem))


def conform(owner: Any, error: type[WeftError]) -> None:
    """Check every field of a dataclass instance against its annotation, for use in `__post_init__`.

    Whole numbers become floats where floats are annotated, and lists become tuples; nothing else is converted.

    Raises:
        WeftError: of class `error`, when a value has another type or is not one of the choices.
    """
    hints = hints_of(type(owner))
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        try:
            conformed = conform_value(hints[field.name], value, (field.name,))
        except TypeMismatch as mismatch:
            raise problem_error(error, mismatch.path, mismatch.value, mismatch.problem) from None
        if conformed is not value:
            object.__setattr__(owner, field.name, conformed)


@functools.cache
def hints_of(kind: type[Any]) -> dict[str, Any]:
    """Annotations of a class, evaluated once: doing so takes longer than all checks."""
    return get_type_hints(kind)


def is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def conform_value(hint: Any, value: Any, path: Path) -> Any:
    """Return `value` as `hint` wants it, or raise `TypeMismatch`."""
    origin = get_origin(hint)
    if is_union(hint):
        return _conform_union(get_args(hint), value, path)
    if origin is Literal:
        return _conform_choice(get_args(hint), value, path)
    if origin is tuple:
        return _conform_tuple(get_args(hint), value, path)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _conform_mapping(get_args(hint)[1], value, path)
    return _conform_plain(hint, value, path)


def _conform_plain(hint: Any, value: Any, path: Path) -> Any:
    if isinstance(value, int) and abs(value) >= _LARGEST_WHOLE:
        raise TypeMismatch(path, value, f"is not {describe(hint)} of 64 bits, as TOML has. Write a smaller one.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    # bool is a subclass of int in Python: `true` is no number.
    is_right = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    if not is_right or (isinstance(value, float) and math.isnan(value)):
        raise TypeMismatch(path, value, f"is not {describe(hint)}.{_hint_at(hint, value)}")
    return value


def _hint_at(hint: Any, value: Any) -> str:
    """Return the change to make for common slips of spelling."""
    if hint is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return f" Write {value.lower()}, without quotes."
    if hint in (int, float) and isinstance(value, str):
        try:
            return f" Write {format_value(hint(value))}, without quotes."
        except ValueError:
            return ""
    if hint is int and isinstance(value, float) and value.is_integer():
        return f" Write {int(value)}."
    if hint is str and isinstance(value, int | float):
        return f' Write "{format_value(value)}", in quotes.'
    return ""


def _conform_choice(choices: tuple[Any, ...], value: Any, path: Path) -> Any:
    for choice in choices:
        # 1 == True == 1.0: the type must be the choice's, too.
        if type(choice) is type(value) and choice == value:
            return choice
    listed = ", ".join(format_value(choice) for choice in choices)
    reason = f"is not {listed}." if len(choices) == 1 else f"is not one of {listed}."
    names = [choice for choice in choices if isinstance(choice, str)]
    if isinstance(value, str):
        reason += did_you_mean(value, names) or _unquoted(value, choices)
    raise TypeMismatch(path, value, reason)


def _unquoted(value: str, choices: tuple[Any, ...]) -> str:
    return next((f" Write {choice}, without quotes." for choice in choices if str(choice) == value), "")


def _conform_tuple(parts: tuple[Any, ...], value: Any, path: Path) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        single = format_short(value)
        raise TypeMismatch(path, value, f"is not {_describe_tuple(parts)}. Write [{single}].")
    items: list[Any] = list(typing.cast("list[Any]", value))
    if len(parts) == 2 and parts[1] is Ellipsis:
        hints = [parts[0]] * len(items)
    elif len(parts) != len(items):
        raise TypeMismatch(path, items, f"has {len(items)} values where {len(parts)} are needed.")
    else:
        hints = list(parts)
    pairs = enumerate(zip(hints, items, strict=True))
    conformed = tuple(conform_value(hint, item, (*path, index)) for index, (hint, item) in pairs)
    # The same object where nothing was converted, so that equal plans share their parts.
    same = isinstance(value, tuple) and all(new is old for new, old in zip(conformed, items, strict=True))
    return typing.cast("tuple[Any, ...]", value) if same else conformed


def _conform_mapping(hint: Any, value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeMismatch(path, value, "is not a table of settings.")
    items = typing.cast("Mapping[Any, Any]", value)
    return {str(key): conform_value(hint, item, (*path, str(key))) for key, item in items.items()}


def _conform_union(hints: tuple[Any, ...], value: Any, path: Path) -> Any:
    if value is None and type(None) in hints:
        return None
    real = [hint for hint in hints if hint is not type(None)]
    failures: list[TypeMismatch] = []
    for hint in real:
        try:
            return conform_value(hint, value, path)
        except TypeMismatch as mismatch:
            failures.append(mismatch)
    if value == "none" and len(real) < len(hints):
        return None
    # One error of the alternatives explains most: the one whose outer form the value has.
    for hint, failure in zip(real, failures, strict=True):
        if len(real) == 1 or _is_meant(hint, value):
            raise failure
    raise TypeMismatch(path, value, f"is neither {' nor '.join(describe(hint) for hint in real)}.")


def _is_meant(hint: Any, value: Any) -> bool:
    """Whether a value has the outer form of `hint`, so that what is wrong with it is best said in those terms."""
    origin = get_origin(hint)
    return (origin is tuple and isinstance(value, list | tuple)) or (origin is Literal and isinstance(value, str))


def describe(hint: Any) -> str:
    """Return a type in plain words, for error messages."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if hint in words:
        return words[hint]
    if is_union(hint):
        return " or ".join(describe(part) for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(format_value(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return _describe_tuple(get_args(hint))
    return "a table of settings"


def _describe_tuple(parts: tuple[Any, ...]) -> str:
    if len(parts) == 2 and parts[1] is Ellipsis:
        plural = {int: "whole numbers", float: "numbers", str: "texts"}
        return f"a list of {plural.get(parts[0], describe(parts[0]))}"
    return f"a list of {len(parts)} values"
