"""Well-known models by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from weft.errors import RecipeError, did_you_mean
from weft.profile._sizes import ModelSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A published model."""

    sizes: ModelSizes
    parameters: float
    """Parameters as published: to the unit where it is no round number, else rounded as its authors did."""
    source: str


def published(sizes: ModelSizes, parameters: float, source: str) -> tuple[str, KnownModel]:
    """An entry of a table."""
    return sizes.name, KnownModel(sizes=sizes, parameters=parameters, source=source)


def joined(*tables: Mapping[str, KnownModel]) -> Mapping[str, KnownModel]:
    """One table out of several; a name stands in one only."""
    whole: dict[str, KnownModel] = {}
    for table in tables:
        twice = whole.keys() & table.keys()
        assert not twice, twice
        whole |= table
    return MappingProxyType(whole)


def find_known(models: Mapping[str, KnownModel], name: str) -> KnownModel:
    """Look a model up, whatever the case and with `_` or spaces for `-`.

    Raises:
        RecipeError: no model of that name; the message lists the closest one and where to see all.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in models:
        return models[wanted]
    hint = did_you_mean(wanted, models) or f" The known ones are: {', '.join(models)}."
    raise RecipeError(f'model "{name}" is not one that Weft knows by name.{hint}')
