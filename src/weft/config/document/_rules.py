"""Checks that the nouns make of themselves when they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from weft.config.document._conform import conform, problem_error
from weft.config.document._text import format_value
from weft.errors import WeftError


@dataclass(frozen=True, slots=True)
class Rules:
    """Range checks that raise `error` about one field of `owner`; None passes all of them."""

    error: type[WeftError]

    def types(self, owner: Any) -> None:
        """Check every field against its annotation; see `conform`."""
        conform(owner, self.error)

    def refuse(self, owner: Any, name: str, problem: str, *more: str | int) -> WeftError:
        """Return the error that `owner.name` (or the item `more` of it) has `problem`."""
        value = getattr(owner, name)
        for step in more:
            value = getattr(value, step) if isinstance(step, str) and hasattr(value, step) else value[step]
        return problem_error(self.error, (name, *more), value, problem)

    def at_least(self, owner: Any, minimum: float, *names: str) -> None:
        for name in names:
            value = getattr(owner, name)
            if value is not None and not value >= minimum:
                raise self.refuse(owner, name, f"is too small: use {format_value(minimum)} or more.")

    def above_zero(self, owner: Any, *names: str) -> None:
        for name in names:
            value = getattr(owner, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise self.refuse(owner, name, "must be a finite number above 0.")

    def between(self, owner: Any, low: float, high: float, *names: str, below: bool = True) -> None:
        """Values in [low, high), or in [low, high] when `below` is False."""
        for name in names:
            value = getattr(owner, name)
            if value is None or (low <= value and (value < high or (value == high and not below))):
                continue
            end = f"below {format_value(high)}" if below else f"at most {format_value(high)}"
            raise self.refuse(owner, name, f"must be at least {format_value(low)} and {end}.")
