"""Refuses values that no option of any command takes: an empty word, and a fraction for a whole number.

cyclopts would take an empty word for the present folder, and 1.5 processes for 2.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from cyclopts import UNSET, App, ArgumentCollection

from weft.errors import WeftError

_MAY_BE_EMPTY = frozenset({"prompt", "arguments"})
"""Parameters of commands: a text to continue, and what belongs to a script."""


def refuse_words(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Look at what was typed, before it is converted.

    Raises:
        WeftError: it names the option, and what to write.
    """
    for argument in arguments:
        for token in argument.tokens:
            name = token.keyword or argument.name
            # A flag has an empty value and an implicit one; an option that was given "" has no implicit value.
            if not token.value and token.implicit_value is UNSET and argument.field_info.name not in _MAY_BE_EMPTY:
                more = ", or leave it out" if not argument.required else ""
                raise WeftError(f"{name} was given an empty text, which names nothing. Give it a value{more}.")
            if int in _kinds(argument.hint):
                _refuse_broken(name, token.value)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have: itself, of a union its members, of a tuple its elements."""
    inner = get_args(hint)
    return (hint, *(kind for member in inner for kind in _kinds(member)))


def _refuse_broken(name: str, value: str) -> None:
    try:
        number = float(value)
    except ValueError:
        return  # no number at all, which the conversion says
    if not math.isfinite(number):
        raise WeftError(f"{name} {value} is not a whole number. Give one such as 2.")
    if number != int(number):
        near = sorted({math.floor(number), math.ceil(number)})
        raise WeftError(f"{name} {value} is not a whole number. Give {near[0]} or {near[1]}.")
