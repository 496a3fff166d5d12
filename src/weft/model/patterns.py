"""Globs over dotted names, and what to say when one matches nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from weft.errors import RecipeError, did_you_mean


def require_matches(setting: str, pattern: str, names: Iterable[str], what: str) -> list[str]:
    """Return the names that match `pattern`.

    Raises:
        RecipeError: none matches; suggests the closest name, with `*` for indices.
    """
    known = list(names)
    matches = [name for name in known if fnmatchcase(name, pattern)]
    if matches:
        return matches
    globs = dict.fromkeys([generalised(name) for name in known] + known)
    shown = ", ".join(list(globs)[:6])
    hint = did_you_mean(pattern, globs) or f" Names are like {shown}."
    raise RecipeError(f'{setting}: "{pattern}" matches no {what} of the model, so it would do nothing.{hint}')


def generalised(name: str) -> str:
    """`layers.3.mlp` → `layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
