"""Names of modules that differ in numbers only."""

from __future__ import annotations

from collections.abc import Iterator


def glob_of(name: str) -> str:
    """`blocks.3.attention` → `blocks.*.attention`."""
    return next(globs_of(name))


def globs_of(name: str) -> Iterator[str]:
    """Globs for alike places, widest first: all numbers open, only the first, none."""
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    for open_ in (numbers, numbers[:1], []):
        yield ".".join("*" if at in open_ else part for at, part in enumerate(parts))
