"""Well-known models by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from weft.model.profile._sizes import ModelSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A published model."""

    sizes: ModelSizes
    parameters: float
    """Parameters as published: to the unit where it is no round number, else rounded as its authors did."""
    source: str


def series(source: str, traits: Mapping[str, Any], columns: str, *rows: tuple[Any, ...]) -> Iterator[KnownModel]:
    """Models with the same `traits`, which are fields of `ModelSizes`, or functions from the others to such a field.

    A row gives the name, the fields that `columns` names, and the published parameters.  Rows of several publications
    have a column `source`.
    """
    for name, *given, parameters in rows:
        sizes: dict[str, Any] = {**traits, **dict(zip(columns.split(), given, strict=True)), "name": name}
        cited = sizes.pop("source", source)
        sizes |= {key: value(sizes) for key, value in sizes.items() if callable(value)}
        yield KnownModel(sizes=ModelSizes(**sizes), parameters=parameters, source=cited)


def joined(*tables: Iterator[KnownModel]) -> Mapping[str, KnownModel]:
    """One table out of several; a name stands in one only."""
    models = [model for table in tables for model in table]
    whole = {model.sizes.name: model for model in models}
    assert len(whole) == len(models), [model.sizes.name for model in models if whole[model.sizes.name] is not model]
    return MappingProxyType(whole)
