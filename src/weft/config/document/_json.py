"""JSON from files that nobody vouches for: read within bounds, and every member checked before it is used.

What JSON has not (NaN, infinity), what readers take in different ways (the same name twice, lone halves of characters)
and what is only there to exhaust a reader (nesting, size, digits) is refused.  Every error names file and member.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from weft.errors import WeftError, did_you_mean

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""Values that JSON can hold."""
LARGEST_JSON_BYTES = 64 << 20
LARGEST_COUNT = 1 << 62
_DEEPEST = 64

T = TypeVar("T")


def read_plain_file(path: Path, error: type[WeftError], advice: str, *, most_bytes: int = LARGEST_JSON_BYTES) -> bytes:
    """Return the content of a plain file: no link is followed, no pipe or device waited for.

    Raises:
        WeftError: of class `error`: there is none, or it is larger than `most_bytes`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{path} is no plain file. {advice}")
            if status.st_size > most_bytes:
                raise error(f"{path} has {status.st_size:,} bytes, and at most {most_bytes:,} are read. {advice}")
            return file.read(status.st_size)  # room for `most_bytes` would be taken at once
    except OSError as problem:
        if path.is_symlink():
            raise error(f"{path} is a symbolic link, where only plain files belong. {advice}") from None
        raise error(f"{path} cannot be read: {problem.strerror}. {advice}") from None


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object whose members are taken by name and kind."""

    path: Path
    """Path of the file, for messages."""
    error: type[WeftError]
    advice: str
    """The last sentence of every message: the change to make to a file that is not as it should be."""
    values: dict[str, Any]
    place: str = ""
    """Place of this object in the file: `indexes[2].`"""

    @classmethod
    def parse(cls, path: Path, content: bytes, error: type[WeftError], advice: str) -> JsonObject:
        """Read a file's content.

        Raises:
            WeftError: of class `error`: it is no JSON object, or one that only hostile files hold.
        """
        try:
            values = json.loads(
                content, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer
            )
            _check_depth(values)
        except (ValueError, RecursionError) as problem:
            raise error(f"{path} is not readable as JSON ({str(problem)[:200]}). {advice}") from None
        if not isinstance(values, dict):
            raise error(f"{path} should hold an object, but holds a {type(values).__name__}. {advice}")
        return cls(path, error, advice, cast("dict[str, Any]", values))

    def fail(self, name: str, expected: str) -> WeftError:
        """Return the error about one member."""
        value = self.values.get(name)
        shown = f"is {_shown(value)}" if name in self.values else "is missing"
        return self.error(f"{self.path}: {self.place}{name} {shown}, but should be {expected}. {self.advice}")

    def only(self, names: Collection[str], optional: Collection[str] = ()) -> None:
        """Refuse members that are none of these names, and the lack of any that is not optional."""
        for name in self.values:
            if name not in names and name not in optional:
                hint = did_you_mean(name, names)
                raise self.error(f"{self.path}: {self.place}{name[:80]!r} belongs to no such file.{hint} {self.advice}")
        for name in names:
            if name not in self.values:
                raise self.fail(name, "there")

    def text(self, name: str, pattern: str = r"(?s).{0,4096}", expected: str = "a text") -> str:
        """Return a text that `pattern` fits as a whole."""
        value = self.values.get(name)
        if type(value) is not str or not re.fullmatch(pattern, value, re.ASCII) or not _is_encodable(value):
            raise self.fail(name, expected)
        return value

    def count(self, name: str, *, least: int = 0, most: int = LARGEST_COUNT) -> int:
        """Return a whole number from `least` to `most`."""
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= most:
            end = f" to {most:,}" if most < LARGEST_COUNT else ""
            raise self.fail(name, f"a whole number from {least}{end}")
        return value

    def number(self, name: str, *, least: float = -math.inf, most: float = math.inf) -> float:
        """Return a finite number from `least` to `most`."""
        value = self.values.get(name)
        if type(value) not in (int, float) or not least <= cast(float, value) <= most or not _fits(value):
            raise self.fail(name, f"a number from {least:g} to {most:g}")
        return float(cast(float, value))

    def counts(self, name: str, *, longest: int) -> list[int]:
        """Return a list of whole numbers from 0, of at most `longest`."""
        values = self.items(name, longest=longest)
        if any(type(value) is not int or not 0 <= value <= LARGEST_COUNT for value in values):
            raise self.fail(name, "a list of whole numbers from 0")
        return values

    def items(self, name: str, *, longest: int = 1 << 24) -> list[Any]:
        """Return a list of at most `longest` things, whatever they are."""
        items = cast("list[Any]", self._take(name, list, "a list"))
        if len(items) > longest:
            raise self.fail(name, f"a list of at most {longest:,}")
        return items

    def texts(self, name: str, *, longest: int = 1 << 16) -> list[str]:
        """Return a list of texts."""
        items = self.items(name, longest=longest)
        if any(type(item) is not str or not _is_encodable(item) for item in items):
            raise self.fail(name, "a list of texts")
        return items

    def object(self, name: str) -> JsonObject:
        """Return the object of that name."""
        values = cast("dict[str, Any]", self._take(name, dict, "an object"))
        return JsonObject(self.path, self.error, self.advice, values, f"{self.place}{name}.")

    def objects(self, name: str) -> Iterator[JsonObject]:
        """Yield the objects of a list."""
        for at, item in enumerate(self.items(name)):
            if not isinstance(item, dict):
                raise self.error(
                    f"{self.path}: {self.place}{name}[{at}] is {_shown(item)}, but should be an object. {self.advice}"
                )
            values = cast("dict[str, Any]", item)
            yield JsonObject(self.path, self.error, self.advice, values, f"{self.place}{name}[{at}].")

    def _take(self, name: str, kind: type[T], expected: str) -> T:
        value = self.values.get(name)
        if type(value) is not kind:
            raise self.fail(name, expected)
        return value


def is_plain_name(name: str) -> bool:
    """Whether a text names a file in its folder and nothing else, on every system: no separators, `..` or drives."""
    return (
        0 < len(name) <= 255
        and name not in (".", "..")
        and not any(sign in name for sign in '/\\:\0"<>|?*')
        and name.isprintable()
        and not name.endswith((" ", "."))
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice[:80]!r} stands there twice")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:80]} is too large a number")
    return value


def _integer(text: str) -> int:
    if len(text) > 40:
        raise ValueError(f"{text[:40]}… is too large a number")
    return int(text)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        inside: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inside += cast("dict[str, Any]", item).values()
            elif isinstance(item, list):
                inside += cast("list[Any]", item)
        if not (level := [item for item in inside if isinstance(item, dict | list)]):
            return
    raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _fits(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
