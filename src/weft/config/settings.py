"""How a setting of a plan is declared: once, with all that is generic about it."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_KNOB = "knob"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Facts of a setting that search, questions and explanations need beside its type and its meaning."""

    layout: str = ""
    """The setting's field in a flat layout (`weft.techniques.cost_terms.Layout`), where that has another name."""
    space: str = ""
    """The values of a space (`weft.planning.search.Space`) that it is chosen from; empty: the search does not choose
    it."""
    asked: tuple[str, ...] = ()
    """Names by which `--why-not` knows it; empty: it cannot be asked for."""
    free: bool = False
    """Whether no price depends on it."""
    follows: str = ""
    """The dotted setting that it follows from, so that a search cannot be given it alone."""
    axis: str = ""
    """Axis of the mesh without whose ranks only the default has a meaning."""
    narrows: tuple[str, ...] = ()
    """Flags of a space that are off where the setting is given."""
    explained: bool = False
    """Whether explanations say what its next best other value would cost."""


def setting(default: Any, **knob: Any) -> Any:
    """Return a field of a dataclass of settings with a default and a `Knob`."""
    return field(default=default, metadata={_KNOB: Knob(**knob)})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredSetting:
    """A setting where it stands in a plan."""

    section: str
    name: str
    hint: Any
    """The setting's type, evaluated."""
    default: Any
    knob: Knob

    @property
    def key(self) -> str:
        """Dotted, as a plan file and `--set` spell it."""
        return f"{self.section}.{self.name}"

    @property
    def layout(self) -> str:
        return self.knob.layout or self.name

    def of(self, plan: Any) -> Any:
        """Return the value of the setting in a plan."""
        return getattr(getattr(plan, self.section), self.name)

    def set(self, plan: Any, value: Any) -> Any:
        """Return a plan that says so."""
        return dataclasses.replace(
            plan, **{self.section: dataclasses.replace(getattr(plan, self.section), **{self.name: value})}
        )


def declared(plan: type[Any], hints: Mapping[str, Any]) -> Iterator[DeclaredSetting]:
    """Yield the settings of all sections of a plan, in their order.  `hints`: the types of its sections."""
    for section in fields(plan):
        kind = hints[section.name]
        if not dataclasses.is_dataclass(kind):
            continue
        types = typing.get_type_hints(kind)
        for field_ in fields(kind):
            yield DeclaredSetting(
                section=section.name,
                name=field_.name,
                hint=types[field_.name],
                default=field_.default,
                knob=field_.metadata.get(_KNOB, Knob()),
            )


def choices_of(hint: Any) -> Iterator[Any]:
    """Yield the values of a literal type, those inside of unions and tuples too."""
    for part in typing.get_args(hint):
        if typing.get_origin(hint) is typing.Literal:
            yield part
        else:
            yield from choices_of(part)


def check_parts(section: Any) -> None:
    """Let every part that a section of a plan inherits check its own settings (`check_settings`)."""
    for part in reversed(type(section).__mro__):
        check = vars(part).get("check_settings")
        if check is not None:
            check(section)
