"""The plan's TOML as a JSON Schema, made from the dataclasses, so that other systems can read and write plans."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from weft.config.document import describe_fields
from weft.config.plan._plan import Plan

SCHEMA_VERSION = 1
"""Rises when a plan that was valid is no longer, or means something else."""
_SCALARS: Mapping[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a plan file's tables, with the meaning and the default of each setting.

    It says what can be written; whether a plan fits a recipe, `check_plan` says.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"weft-plan-{SCHEMA_VERSION}",
        "title": "Weft plan",
        "description": "How to split a recipe over a cluster. A plan never changes the mathematics.",
        "version": SCHEMA_VERSION,
        **_table(Plan),
    }


def _table(cls: type[Any]) -> dict[str, Any]:
    hints, described = get_type_hints(cls), describe_fields(cls)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.metadata.get("in_document", True):
            entry = _entry(hints[field.name])
            if field.default is not dataclasses.MISSING and field.default is not None:
                entry["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
            if field.name in described:
                entry["description"] = described[field.name]
            properties[field.name] = entry
    table: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    if cls is not Plan and cls.__doc__:
        table["description"] = " ".join(cls.__doc__.split())
    return table


def _entry(hint: Any) -> dict[str, Any]:
    """The schema of one type: a table, a word, a number, a list, or one of several."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _table(hint)
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, parts = get_origin(hint), get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if origin is tuple:
        return {"type": "array", "items": _entry(parts[0])}
    if origin in (typing.Union, types.UnionType):
        choices = [_entry(part) for part in parts if part is not type(None)]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}
    raise AssertionError(f"no JSON type for {hint}")
