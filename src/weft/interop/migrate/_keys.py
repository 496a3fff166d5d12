"""Keys of another system's configuration.  Each one is obeyed, translated, or refused by name."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, cast

from weft.errors import did_you_mean

KeyOutcome = Literal["obeyed", "translated", "refused"]

AUTO = "auto"
"""The value that transformers fills in from TrainingArguments before DeepSpeed sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKey:
    """One key of a configuration."""

    outcome: KeyOutcome
    says: str = ""
    """A sentence on the key: its meaning here if obeyed or translated; if refused, the reason and what to write."""
    to: str = ""
    """Dotted setting that takes the value, translated by `becomes`; empty if Weft needs none."""
    takes: tuple[type, ...] = ()
    """Permitted types of a value; empty: any."""
    choices: tuple[Any, ...] = ()
    """Permitted values, if they are few; empty: any."""
    least: int | None = None
    """Smallest value."""
    becomes: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """Value → that of the setting."""
    harmless: tuple[Any, ...] = ()
    """Values with which a refused key asks for nothing, so that it may stay."""
    filled: Any = None
    """Default of TrainingArguments, which an `auto` stands for; None: `auto` is no value of this key."""
    joins: bool = False
    """Whether it makes settings together with other keys, which say where these come from."""
    wants: str = ""
    """Argument of TrainingArguments that an `auto` stands for; empty if it is the model's hidden size or a constant."""
    instead: str = "Weft's own choice stands for it"
    """Clause on the value that replaces an `auto` without a default."""


@cache
def keys_of(system: str) -> Mapping[str, ForeignKey]:
    """Return every key of a system's configuration by its dotted name, as data/SYSTEM.toml has them."""
    text = (resources.files("weft.interop.migrate") / "data" / f"{system}.toml").read_text(encoding="utf-8")
    outcomes = {"by_itself": "translated", "joined": "translated"}
    return {
        name: _key(table, cast(KeyOutcome, outcomes.get(kind, kind)), joins=kind == "joined")
        for kind, keys in tomllib.loads(text).items()
        for name, table in keys.items()
    }


def _key(table: Mapping[str, Any], outcome: KeyOutcome, *, joins: bool) -> ForeignKey:
    entries = dict(table)
    types = tuple(kind for word in entries.pop("takes", ()) for kind in _TYPES[word])
    becomes = dict(entries.pop("becomes", ()))
    lists = {name: tuple(entries.pop(name, ())) for name in ("choices", "harmless")}
    return ForeignKey(outcome=outcome, joins=joins, takes=types, becomes=becomes, **lists, **entries)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "flag": (bool,),
    "whole number": (int,),
    "number": (int, float),
    "text": (str,),
    "list": (list,),
    "table": (dict,),
}


@dataclass(slots=True)
class MigratedSettings:
    """The settings, notes and refusals collected while a configuration is read."""

    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    """Dotted key without the noun → value."""
    recipe: dict[str, Any] = field(default_factory=dict[str, Any])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    """Dotted key with its noun → the comment beside it."""
    notes: list[str] = field(default_factory=list[str])
    """Sentences on keys that have no setting in a plan or a recipe."""
    problems: list[str] = field(default_factory=list[str])
    """Refusals, each by the key's name."""

    def set(self, to: str, value: Any, reason: str) -> None:
        """Set a dotted key with its noun."""
        noun, _, key = to.partition(".")
        table = self.plan if noun == "plan" else self.recipe
        if key in table and table[key] != value:
            self.problems.append(
                f"{reason}: {to} would be {value!r}, and something else says {table[key]!r} ({self.reasons[to]})."
                " Leave one of the two."
            )
        table[key] = value
        self.reasons[to] = reason

    def refuse(self, key: str, why: str) -> None:
        """Note a refusal by the key's name."""
        self.problems.append(f"{key}: {why}")


def read_keys(
    table: Mapping[str, Any], keys: Mapping[str, ForeignKey], settings: MigratedSettings, filled: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values by dotted key that `combined` keys need, and note in `settings` what becomes of all others.

    Args:
        filled: dotted key → what stands for its `auto`.
    """
    values: dict[str, Any] = {}
    for name, raw in _flat(table, keys, settings, ()):
        key, value = keys[name], raw
        # `auto` asks transformers to fill a key in from TrainingArguments.  A key that has an `auto` of its own keeps
        # it.
        if value == AUTO and AUTO not in key.choices:
            value = _fill(name, key, settings, filled)
            if value is None:
                continue
        if key.outcome == "refused":
            # A key without a counterpart may stay as long as its value asks for nothing: a migration refuses what would
            # otherwise be lost, and nothing else.
            if not _is_harmless(value, key.harmless):
                settings.refuse(name, key.says)
            continue
        if not _fits(name, key, value, settings):
            continue
        if key.to and not key.joins:
            settings.set(key.to, key.becomes[value] if key.becomes else value, _said(name, raw, key.says))
        # A key that makes settings together with others is the reader's business, by the values that are returned.
        elif not key.joins and raw not in (None, False, {}, []):
            settings.notes.append(_said(name, raw, key.says))
        values[name] = value
    return values


def _said(name: str, given: Any, says: str) -> str:
    shown = "" if isinstance(given, Mapping) else f" = {str(given).lower() if isinstance(given, bool) else given}"
    return f"{name}{shown}" + (f": {says}" if says else "")


def _is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    if value is None or value == {} or value == []:
        return True
    if isinstance(value, Mapping) and "enabled" in value:
        return value["enabled"] is False
    # By type, too: 0 and false are equal in Python, and mean different things here.
    return any(type(value) is type(other) and value == other for other in harmless) or (
        isinstance(value, int | float) and not isinstance(value, bool) and float(value) in harmless
    )


def _fill(name: str, key: ForeignKey, settings: MigratedSettings, filled: Mapping[str, Any]) -> Any:
    for known in (name, key.wants):
        if known in filled:
            return filled[known]
    if key.filled is None:
        settings.refuse(
            name, '"auto" is filled in by transformers for some keys only, and not for this one. Write its value.'
        )
        return None
    wants = f"TrainingArguments.{key.wants}" if key.wants else "the model's hidden size"
    if key.filled == "":
        settings.notes.append(f"{name} = auto: filled from {wants}; here {key.instead}")
        return None
    if not key.wants:
        settings.notes.append(f"{name} = auto: transformers fills in {key.filled}")
        return key.filled
    settings.notes.append(
        f"{name} = auto: filled from {wants}; {key.filled} is its default. Say yours by --fill {key.wants or name}=…"
    )
    return key.filled


def _fits(name: str, key: ForeignKey, value: Any, settings: MigratedSettings) -> bool:
    """Whether a value is one that the key takes; a number such as 5e8 is a whole number, too."""
    if key.choices and value not in key.choices:
        known = ", ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in key.choices)
        settings.refuse(name, f"{value!r} is none of its values. Known are {known}.{_near(value, key.choices)}")
        return False
    # JSON has one type of number, and configurations write 5e8 for buckets.  True is no number, though Python's bool is
    # an int.
    is_whole = isinstance(value, float) and value.is_integer() and int in key.takes
    is_flag_for_number = isinstance(value, bool) and key.takes and bool not in key.takes
    if key.takes and not is_whole and (is_flag_for_number or not isinstance(value, key.takes)):
        words = " or ".join(_WORDS[kind] for kind in key.takes)
        settings.refuse(name, f"{value!r} is not {words}.")
        return False
    if key.least is not None and value < key.least:
        settings.refuse(name, f"{value} is too small. Write {key.least} or more.")
        return False
    return True


def _near(value: Any, choices: tuple[Any, ...]) -> str:
    return did_you_mean(str(value), [str(choice) for choice in choices])


_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table",
}


def _flat(
    table: Mapping[str, Any], keys: Mapping[str, ForeignKey], settings: MigratedSettings, path: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    """Yield the known keys by dotted name; refuse those that are not known."""
    for name, value in table.items():
        here = ".".join((*path, name))
        if here in keys:
            yield here, value
        elif any(known.startswith(f"{here}.") for known in keys):
            if isinstance(value, Mapping):
                yield from _flat(cast("Mapping[str, Any]", value), keys, settings, (*path, name))
            elif value is not None:
                settings.refuse(here, f"{value!r} is not a table.")
        else:
            settings.refuse(here, _unknown(name, path, keys))


def _unknown(name: str, path: tuple[str, ...], keys: Mapping[str, ForeignKey]) -> str:
    """Say that a key does not exist, and which one may be meant: beside it, or elsewhere by the same name."""
    prefix = "".join(f"{part}." for part in path)
    siblings = {key[len(prefix) :].split(".")[0] for key in keys if key.startswith(prefix)}
    elsewhere = [key for key in keys if key.rpartition(".")[2] == name]
    sections = [key.rpartition(f".{name}.")[0] + f".{name}" for key in keys if f".{name}." in key]
    place = (elsewhere or sections)[:1]
    hint = f" Did you mean {place[0]}?" if place else did_you_mean(name, siblings)
    return f"there is no such key, so that it would be ignored.{hint or ' Leave it out.'}"
