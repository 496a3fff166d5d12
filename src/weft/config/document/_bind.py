"""Tables to frozen dataclasses and back."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

from weft.config.document._conform import TypeMismatch, conform_value, hints_of, is_union
from weft.config.document._read import Document
from weft.config.document._text import Path, dotted, format_short, format_value
from weft.errors import WeftError, did_you_mean

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Flattened:
    """Says that a field's own settings stand directly in the table around it; which class, another setting chooses.

    Put it in the field's metadata under `flattened`.
    """

    chosen_by: str
    classes: Mapping[str, type[Any]]


def bind(cls: type[T], document: Document) -> T:
    """Build `cls` from a document.

    Raises:
        WeftError: of the document's class; names file, line, dotted key, value, reason and change.
    """
    return typing.cast("T", _bind_table(cls, document.table, (), document))


def is_setting(field: dataclasses.Field[Any]) -> bool:
    return field.metadata.get("in_document", True)


def flattened_field(cls: type[Any]) -> dataclasses.Field[Any] | None:
    """Return the field of `cls` whose settings stand directly in the table, if there is one."""
    return next((field for field in dataclasses.fields(cls) if "flattened" in field.metadata), None)


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def to_table(value: Any) -> dict[str, Any]:
    """Return every setting of a dataclass as nested plain tables, such as a document holds."""
    table: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if not is_setting(field) or item is None and field.default is None:
            continue
        if "flattened" in field.metadata:
            table |= to_table(item)
        else:
            table[field.name] = _plain(item)
    return table


def _plain(value: Any) -> Any:
    if value is None:
        return "none"
    if dataclasses.is_dataclass(value):
        return to_table(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in typing.cast("tuple[Any, ...]", value)]
    if isinstance(value, Mapping):
        return dict(typing.cast("Mapping[str, Any]", value))
    return value


def _bind_table(cls: type[Any], table: Any, path: Path, document: Document) -> Any:
    if not isinstance(table, Mapping):
        problem = f"is not a table. Write [{dotted(path)}] and its settings below it."
        raise document.fail(path, format_short(table), problem)
    settings = typing.cast("Mapping[str, Any]", table)
    hints = hints_of(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if is_setting(field)}
    flat = flattened_field(cls)
    inner: dict[str, Any] = {}
    inner_class: type[Any] | None = None
    if flat is not None:
        del fields[flat.name]
        # Settings of two classes stand in one table: which inner class they belong to is itself a setting there.
        inner_class = _choose(flat.metadata["flattened"], settings, hints, path, document)
        names = {field.name for field in dataclasses.fields(inner_class)} if inner_class else set[str]()
        inner = {key: value for key, value in settings.items() if key in names}
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key in inner:
            continue
        # An unknown name is refused before a missing one: it is likely the missing one, misspelt.
        if key not in fields:
            raise _unknown(key, [*fields], flat, inner_class, path, document)
        values[key] = _bind_value(hints[key], value, (*path, key), document)
    for name, field in fields.items():
        if name not in values and is_required(field):
            raise _missing(name, path, document)
    if flat is not None and inner_class is not None:
        values[flat.name] = _bind_table(inner_class, inner, path, document)
    return _build(cls, values, path, document, flat.name if flat is not None else None)


def _choose(
    rule: Flattened, settings: Mapping[str, Any], hints: Mapping[str, Any], path: Path, document: Document
) -> type[Any] | None:
    """Return the class whose settings stand in this table too.  A wrong choice is said here: it explains the rest."""
    here = (*path, rule.chosen_by)
    try:
        choice = conform_value(hints[rule.chosen_by], settings.get(rule.chosen_by), here)
    except TypeMismatch as mismatch:
        raise document.fail(mismatch.path, format_short(mismatch.value), mismatch.problem) from None
    return rule.classes.get(choice)


def _build(cls: type[Any], values: dict[str, Any], path: Path, document: Document, flat: str | None) -> Any:
    try:
        return cls(**values)
    except WeftError as failure:
        if failure.setting is None:
            raise
        # The flattened field's name stands in no file, so it is left out of the path.
        inside = failure.setting.path[1:] if failure.setting.path[0] == flat else failure.setting.path
        raise document.fail((*path, *inside), failure.setting.value, failure.setting.problem) from None


def _bind_value(hint: Any, value: Any, path: Path, document: Document) -> Any:
    """Bind the dataclasses inside `value`; everything else is left to the `__post_init__` around it."""
    options = [part for part in get_args(hint) if part is not type(None)] if is_union(hint) else [hint]
    for option in options:
        if dataclasses.is_dataclass(option):
            return _bind_table(typing.cast("type[Any]", option), value, path, document)
        parts = get_args(option)
        if get_origin(option) is tuple and parts and dataclasses.is_dataclass(parts[0]):
            return _bind_list(typing.cast("type[Any]", parts[0]), value, path, document)
    return value


def _bind_list(cls: type[Any], value: Any, path: Path, document: Document) -> tuple[Any, ...]:
    first = next(field.name for field in sorted(dataclasses.fields(cls), key=lambda f: not is_required(f)))
    if not isinstance(value, list):
        example = format_value(value) if isinstance(value, Mapping) else f"{{ {first} = {format_short(value)} }}"
        raise document.fail(path, format_short(value), f"is not a list of tables. Write {path[-1]} = [{example}].")
    items = typing.cast("list[Any]", value)
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            problem = f"is not a table. Write {{ {first} = {format_short(item)} }}."
            raise document.fail((*path, index), format_short(item), problem)
    return tuple(_bind_table(cls, item, (*path, index), document) for index, item in enumerate(items))


def _unknown(
    key: str,
    names: list[str],
    flat: dataclasses.Field[Any] | None,
    inner_class: type[Any] | None,
    path: Path,
    document: Document,
) -> WeftError:
    if inner_class is not None:
        names = [*names, *(field.name for field in dataclasses.fields(inner_class))]
    if flat is not None:
        rule: Flattened = flat.metadata["flattened"]
        owners = [
            choice for choice, cls in rule.classes.items() if key in {field.name for field in dataclasses.fields(cls)}
        ]
        if owners:
            listed = ", ".join(format_value(owner) for owner in owners)
            return document.fail((*path, key), None, f"is a setting only with {rule.chosen_by} = {listed}.")
    where = dotted(path) if path else f"a {document.noun}"
    listed = did_you_mean(key, names) or f" {where} has {', '.join(names)}."
    return document.fail((*path, key), None, f"is not a setting.{listed}")


def _missing(name: str, path: Path, document: Document) -> WeftError:
    table = dotted(path)
    where = f"Add it to [{table}]" if path else f"Add a table [{name}]"
    return document.fail((*path, name), None, f"is missing. {where}.")
