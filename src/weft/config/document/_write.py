"""Frozen dataclasses as TOML that a person likes to read: only what matters, each setting with its comment."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weft.config.document._bind import default_of, flattened_field, is_required, is_setting, to_table
from weft.config.document._text import Path, dotted, format_key, format_value

_WIDTH = 110
_WIDEST = 200
"""Width of an inline table in a list, at most: it must stand on one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class _SettingEntry:
    """One setting to write."""

    name: str
    value: Any
    comment: str
    is_unset: bool
    """None, which TOML cannot say and need not, because it is the default."""


def dump(
    value: Any,
    *,
    header: Iterable[str] = (),
    comments: Mapping[str, str] | None = None,
    everything: bool = False,
    descriptions: bool = True,
) -> str:
    """Write a dataclass as TOML; reading it back gives an equal one.

    Args:
        header: comment lines at the top.
        comments: dotted key → why it has this value; written instead of the setting's description.
        everything: also write settings that have their default value.
        descriptions: write what each setting means, from the docstring below its field.
    """
    writer = _Writer(comments or {}, everything, descriptions)
    lines = [f"# {line}" if line else "#" for line in header]
    lines += writer.table(value, ())
    return "\n".join(lines).strip("\n") + "\n"


@dataclasses.dataclass(frozen=True, slots=True)
class _Writer:
    comments: Mapping[str, str]
    everything: bool
    descriptions: bool

    def table(self, value: Any, path: Path) -> list[str]:
        """Lines of one table: its plain settings, then its tables (TOML wants this order)."""
        plain: list[str] = []
        tables: list[str] = []
        for entry in self._entries(value, path):
            here = (*path, entry.name)
            if dataclasses.is_dataclass(entry.value):
                tables += self._headed(f"[{dotted(here)}]", self.table(entry.value, here), entry.value)
            elif isinstance(entry.value, Mapping) and entry.value:
                items = typing.cast("Mapping[str, Any]", entry.value)
                tables += ["", f"[{dotted(here)}]"]
                tables += [f"{format_key(key)} = {format_value(item)}" for key, item in items.items()]
            elif _needs_tables(entry.value):
                for item in entry.value:
                    tables += self._headed(f"[[{dotted(here)}]]", self.table(item, here), None)
            else:
                plain += self._setting(entry)
        return plain + tables

    def _headed(self, title: str, lines: list[str], optional: Any) -> list[str]:
        """Lines below a title; a table with nothing to say is left out when it has a default."""
        if not lines and optional is not None and all(not is_required(f) for f in dataclasses.fields(optional)):
            return []
        starts_with_table = bool(lines) and lines[0] == ""
        return ["", title, *(lines[1:] if starts_with_table and optional is None else lines)]

    def _entries(self, value: Any, path: Path) -> Iterator[_SettingEntry]:
        described = describe_fields(type(value)) if self.descriptions else dict[str, str]()
        flat = flattened_field(type(value))
        inner = getattr(value, flat.name) if flat is not None else None
        taken = {field.name for field in dataclasses.fields(inner)} if inner is not None else set[str]()
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if not is_setting(field) or field.name in taken:
                continue
            if "flattened" in field.metadata:
                if item is not None:
                    yield from self._entries(item, path)
                continue
            changed = is_required(field) or item != default_of(field)
            if dataclasses.is_dataclass(item) or changed or self.everything:
                reason = self.comments.get(dotted((*path, field.name)))
                is_unset = item is None and field.default is None
                yield _SettingEntry(field.name, item, reason or described.get(field.name, ""), is_unset)

    def _setting(self, entry: _SettingEntry) -> list[str]:
        if entry.is_unset:
            return _comment(f"{format_key(entry.name)} is not set. {entry.comment}".rstrip())
        line = f"{format_key(entry.name)} = {_format_value(entry.value, entry.name)}"
        if not entry.comment:
            return [line]
        if "\n" not in line and len(line) + len(entry.comment) + 4 <= _WIDTH:
            return [f"{line}  # {entry.comment}"]
        return [*_comment(entry.comment), line]


def _comment(text: str) -> list[str]:
    return [f"# {part}" for part in textwrap.wrap(text, _WIDTH - 2)]


def _needs_tables(value: Any) -> bool:
    """Whether a list of dataclasses is too deep or too long for inline tables, which must stand on one line."""
    if not isinstance(value, tuple) or not value or not dataclasses.is_dataclass(value[0]):
        return False
    items = typing.cast("tuple[Any, ...]", value)
    nested = (getattr(item, field.name) for item in items for field in dataclasses.fields(item))
    if any(dataclasses.is_dataclass(part) or isinstance(part, Mapping) for part in nested):
        return True
    return any(len(format_value(to_table(item))) > _WIDEST for item in items)


def _format_value(value: Any, name: str) -> str:
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        items = [format_value(to_table(item)) for item in typing.cast("tuple[Any, ...]", value)]
        line = f"[{', '.join(items)}]"
        if len(name) + len(line) + 3 > _WIDTH:
            line = "[\n" + "".join(f"    {item},\n" for item in items) + "]"
        return line
    return format_value(value)


@functools.cache
def describe_fields(cls: type[Any]) -> Mapping[str, str]:
    """Return what each field means: the docstring below it, here or in a class that it is inherited from.  Empty where
    no source is at hand."""
    described: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            described |= _described_in(base)
    return described


def _described_in(cls: type[Any]) -> dict[str, str]:
    # Only writing needs these, and `weft --help` must not wait for them.
    import ast
    import inspect

    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    described: dict[str, str] = {}
    for statement, following in zip(body, body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            described[statement.target.id] = " ".join(following.value.value.replace("`", "").split())
    return described
