"""A TOML text with the place of everything in it, and errors that name that place."""

from __future__ import annotations

import errno
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from weft.config.document._locate import locate
from weft.config.document._text import Path, dotted
from weft.errors import BadSetting, WeftError, did_you_mean

SET = "--set"
"""Origin of a setting given on the command line."""

_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_MOST_CHARACTERS = 4 << 20
_LONG_KEY = re.compile(r"(?<![\w.\"'-])(?:(?:[\w-]+|\"[^\"\n]*\"|'[^'\n]*')[ \t]*\.[ \t]*){32}")
"""Reading such keys takes time as the square of their length."""


@dataclass(frozen=True, slots=True)
class Document:
    """The text that one noun is made from. `origins` maps the dotted key of a setting to the place where it was given:
    `recipe.toml, line 9`, or `--set`.

    `origins` maps the dotted key of a setting to where it was given: `recipe.toml, line 9`, or `--set`.
    """

    noun: str
    """`recipe`, `cluster` or `plan`: the first word of its settings on the command line."""
    error: type[WeftError]
    table: Mapping[str, Any]
    origins: Mapping[str, str]
    name: str | None = None
    """File name for messages; None for what was built in Python."""

    def fail(self, path: Path, value: str | None, problem: str) -> WeftError:
        """Return the error about one setting, with its file and line, or with `(from --set)`."""
        return self.error(
            sentence(self.noun, BadSetting(path, value, problem), self.origin(path) or self.name),
            setting=BadSetting(path, value, problem),
        )

    def origin(self, path: Path) -> str | None:
        """Return where a setting was given; for one that was not given, where the table around it stands."""
        while path and dotted(path) not in self.origins:
            path = path[:-1]
        return self.origins.get(dotted(path))


def sentence(noun: str, setting: BadSetting, origin: str | None) -> str:
    """Return one sentence about a setting: place, dotted key, value, problem.

    From a file: `recipe.toml, line 9: batch.size = 0 is …`; otherwise `recipe.batch.size = 0 (from --set) is …`.
    """
    value = "" if setting.value is None else f" = {setting.value}"
    if origin is None or origin == SET:
        source = f" (from {SET})" if origin == SET else ""
        return f"{dotted((noun, *setting.path))}{value}{source} {setting.problem}"
    return f"{origin}: {dotted(setting.path)}{value} {setting.problem}"


def read_document(path: str | os.PathLike[str], noun: str, error: type[WeftError]) -> Document:
    """Read a TOML file.

    Raises:
        WeftError: of class `error`, when the file is missing, unreadable, not UTF-8 or not TOML.
    """
    file = FilePath(path) if isinstance(path, str | os.PathLike) else FilePath("\0")  # pyright: ignore[reportUnnecessaryIsInstance]
    if "\0" in str(file) or len(file.name) > 255:
        raise error(f"{str(path)[:80]!r} is no {noun}, and no path that one can have. Give the path of a {noun} file.")
    try:
        if file.exists() and not file.is_file() and not file.is_dir():
            raise error(f"{file} is no plain file, so it is not waited for. Give a {noun} file.")
        with file.open("rb") as stream:
            raw = stream.read(4 * _MOST_CHARACTERS + 1)
    except OSError as failure:
        raise error(_unreadable(file, noun, failure)) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        line = raw.count(b"\n", 0, failure.start) + 1
        raise error(
            f"{file}, line {line}: byte 0x{raw[failure.start]:02x} is not UTF-8 text. Save the file as UTF-8."
        ) from None
    return parse_document(text, noun, error, name=str(file))


def parse_document(text: str, noun: str, error: type[WeftError], *, name: str | None = None) -> Document:
    """Parse a TOML text; `name` stands for it in messages."""
    name = name or f"{noun}.toml"
    if len(text) > _MOST_CHARACTERS:
        raise error(f"{name} has {len(text):,} characters, and a {noun} needs no more than {_MOST_CHARACTERS:,}.")
    if long := _LONG_KEY.search(text):
        line = text.count("\n", 0, long.start()) + 1
        raise error(f"{name}, line {line}: a key of more than 32 parts, and no setting lies so deep. Remove it.")
    try:
        table = tomllib.loads(text)
        lines = locate(text.replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as failure:
        raise error(_syntax(text, name, str(failure))) from None
    except RecursionError:
        raise error(f"{name} is nested deeper than any {noun}. Remove the brackets within brackets.") from None
    except ValueError as failure:  # a whole number of thousands of digits
        raise error(f"{name} holds a number that cannot be read ({failure}). Write it shorter.") from None
    origins = {dotted(path): f"{name}, line {line}" for path, line in lines.items()}
    return Document(noun, error, table, origins, name)


def _unreadable(file: FilePath, noun: str, failure: OSError) -> str:
    if file.is_dir():
        inside = _listed(sorted(entry.name for entry in file.glob("*.toml"))) or "no .toml file"
        return f"{file} is a folder, not a {noun} file. It holds {inside}."
    if file.is_symlink() and not file.exists():
        why = "leads back to it: no file is at its end" if failure.errno == errno.ELOOP else "does not exist"
        return f"{file} is a link to {file.readlink()}, which {why}."
    if isinstance(failure, FileNotFoundError | NotADirectoryError):
        if not file.parent.is_dir():
            return f"{file} does not exist: there is no folder {file.parent}."
        names = sorted(entry.name for entry in file.parent.glob("*.toml"))
        closest = did_you_mean(file.name, names)
        listed = f" {file.parent} holds {_listed(names)}." if names and not closest else closest
        return f"{file} does not exist.{listed}"
    return f"{file} cannot be read: {failure.strerror or failure}."


def _listed(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _syntax(text: str, name: str, message: str) -> str:
    """Return tomllib's message with the place in front and the offending line behind."""
    place = _PLACE.search(message)
    reason = message[: place.start()] if place else message
    lines = text.splitlines() or [""]
    number = int(place.group(1)) if place and place.group(1) else len(lines)
    shown = lines[min(number, len(lines)) - 1].strip()
    advice = ""
    if reason == "Invalid value" and (word := re.search(r"=\s*([A-Za-z][\w./-]*)\s*(?:#.*)?$", shown)):
        advice = f' Text needs quotes: "{word.group(1)}".'
    return f"{name}, line {number}: {reason[:1].lower()}{reason[1:]}, in `{shown[:80]}`.{advice}"
