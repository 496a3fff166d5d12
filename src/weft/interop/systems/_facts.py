"""Recorded facts of a system from `data/SYSTEM.json`: its version, its arguments, and the demands of its own check."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

Value = Any
"""A value of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """The recorded facts of a system at one version."""

    system: str
    version: str
    source: str
    """Address or file from which the facts were recorded."""
    arguments: Mapping[str, Mapping[str, Value]]
    """Option → destination, type, nargs, choices, default, constant."""
    sections: Mapping[str, Mapping[str, Value]]
    """Section of a configuration → key → type in words, or its choices."""
    keys: frozenset[str]
    """Keys of a configuration at its top."""
    checks: Sequence[Mapping[str, Value]]
    """Conditions between values: `when` (optional) and `need`, triples (value, operator, value) that must hold."""

    @property
    def title(self) -> str:
        """`megatron core_v0.19.0`."""
        return f"{self.system} {self.version}"


@cache
def facts_of(system: str) -> SystemFacts:
    """Return the recorded facts of a system by name."""
    text = files("weft.interop.systems").joinpath("data", f"{system}.json").read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return SystemFacts(
        system=table["system"],
        version=table["version"],
        source=table["source"],
        arguments=table.get("arguments", {}),
        sections=table.get("sections", {}),
        keys=frozenset(table.get("keys", ())),
        checks=table["checks"],
    )


# ── arguments ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_arguments(facts: SystemFacts, words: Sequence[str]) -> tuple[dict[str, Value], list[str]]:
    """Read words as the system's own parser does: return values by destination, defaults included, and complaints."""
    values = {str(record["destination"]): record.get("default") for record in facts.arguments.values()}
    problems: list[str] = []
    place = 0
    while place < len(words):
        option, place = words[place], place + 1
        argument = facts.arguments.get(option)
        if argument is None:
            problems.append(f"{option} is no argument of {facts.title}")
            continue
        # As argparse does: an option takes words up to its number, and none that begins with two dashes.
        taken: list[str] = []
        while place < len(words) and not words[place].startswith("--") and len(taken) < _most(argument):
            taken.append(words[place])
            place += 1
        values[str(argument["destination"])] = _value(option, argument, taken, problems)
    return values, problems


def _most(argument: Mapping[str, Value]) -> float:
    nargs = argument.get("nargs", 1)
    return nargs if isinstance(nargs, int) else (1 if nargs == "?" else float("inf"))


def _value(option: str, argument: Mapping[str, Value], taken: list[str], problems: list[str]) -> Value:
    nargs = argument.get("nargs", 1)
    if nargs == 0:
        return argument.get("constant")
    if not taken and nargs not in ("*", "?"):
        problems.append(f"{option} has no value")
        return None
    values = [_typed(option, argument, word, problems) for word in taken]
    return values if nargs in ("+", "*") else (values[0] if values else argument.get("constant"))


def _typed(option: str, argument: Mapping[str, Value], word: str, problems: list[str]) -> Value:
    choices = argument.get("choices")
    if choices is not None and word not in choices:
        problems.append(f"{option} {word}: it has {', '.join(map(str, choices))}")
    read: Callable[[str], Value] = {"int": int, "float": float}.get(str(argument.get("type")), str)
    try:
        return read(word)
    except ValueError:
        problems.append(f"{option} {word} is no {argument.get('type')}")
        return None


# ── configurations ────────────────────────────────────────────────────────────────────────────────────────────────────

_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "NoneType": (type(None),),
}


def section_problems(facts: SystemFacts, section: str, table: Mapping[str, Value]) -> Iterator[str]:
    """Yield keys of a section that the system has not got, and values that are of none of its types or choices."""
    known = facts.sections[section]
    for key, value in table.items():
        kind, name = known.get(key), f"{section}.{key}"
        if kind is None:
            yield f"{name} is no setting of {facts.title}"
        elif isinstance(kind, list):
            if value not in kind:
                yield f"{name} = {value!r}: it has {', '.join(map(str, kind))}"  # pyright: ignore[reportUnknownArgumentType]
        elif not _is_of(str(kind), value):
            yield f"{name} = {value!r} is no {kind}"


def _is_of(kind: str, value: Value) -> bool:
    types = [_KINDS.get(name) for name in kind.split("|")]
    if any(members is None for members in types):
        return True  # a type of the system's own, which these facts do not describe
    # In Python True is an int, but no parser of these systems takes it for a number.
    return any(
        isinstance(value, members) and (bool in members or value is not True)
        for members in types
        if members is not None
    )


# ── conditions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def broken_checks(facts: SystemFacts, values: Mapping[str, Value]) -> Iterator[str]:
    """Yield what each check that does not hold says.

    A word of a triple that begins with `$` is a value by name; a list is a product.
    """
    for check in facts.checks:
        when, need = check.get("when", ()), check["need"]
        if all(_holds(condition, values) for condition in when) and not all(
            _holds(condition, values) for condition in need
        ):
            figures = {name: values.get(name) for name in _names([*when, *need])}
            listed = ", ".join(f"{name} = {value}" for name, value in figures.items())
            yield f"{check['says']} ({listed})"


def _names(triples: Sequence[Sequence[Value]]) -> dict[str, None]:
    words: list[Value] = [side for triple in triples for side in (triple[0], triple[2])]
    flat = [word for side in words for word in (side if isinstance(side, list) else [side])]  # pyright: ignore[reportUnknownVariableType]
    return dict.fromkeys(str(word)[1:] for word in flat if str(word).startswith("$"))


def _holds(triple: Sequence[Value], values: Mapping[str, Value]) -> bool:
    left, operator, right = _of(triple[0], values), triple[1], _of(triple[2], values)
    if operator == "==":
        return left == right
    if operator == "!=":
        return left != right
    if operator == "in":
        return left in right
    # An unset value equals nothing but None, and compares with nothing: such a condition does not hold.
    if left is None or right is None:
        return False
    return {
        "<=": lambda: left <= right,
        ">=": lambda: left >= right,
        ">": lambda: left > right,
        "divides": lambda: right % left == 0,
    }[operator]()


def _of(side: Value, values: Mapping[str, Value]) -> Value:
    if isinstance(side, list) and side and str(side[0]) == "*":  # pyright: ignore[reportUnknownArgumentType]
        product: Value = 1
        for term in side[1:]:  # pyright: ignore[reportUnknownVariableType]
            product *= _of(term, values) or 1  # an unset size means one rank
        return product
    return values.get(side[1:]) if isinstance(side, str) and side.startswith("$") else side
