"""Find the line of each setting in a TOML text; `tomllib` reads values but forgets places."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left

from weft.config.document._text import Path

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'', re.DOTALL)
_ATOM = re.compile(r"[^,\]}#\n]+")


def locate(text: str) -> dict[Path, int]:
    """Return the line (from 1) of every table, key and list item of `text`, which must be valid TOML."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


class _Scanner:
    """Walks a text that `tomllib` has accepted, so it need not look for mistakes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self._line_ends = [match.start() for match in re.finditer("\n", text)]
        self._tables_in: dict[Path, int] = {}

    def document(self) -> None:
        table: Path = ()
        while self._peek(_BLANK):
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)

    def _peek(self, skip: re.Pattern[str]) -> str:
        """Skip what matches, and return the next character (empty at the end) without taking it."""
        match = skip.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return self.text[self.at : self.at + 1]

    def _record(self, path: Path) -> None:
        self.lines.setdefault(path, bisect_left(self._line_ends, self.at) + 1)

    def _header(self) -> Path:
        is_list = self.text.startswith("[[", self.at)
        start = self.at
        self.at += 2 if is_list else 1
        keys = self._keys()
        self.at, end = start, self.at + (2 if is_list else 1)
        path: Path = ()
        for position, key in enumerate(keys):
            path = (*path, key)
            self._record(path)
            # `[[a]]` begins a further table of the list `a`; a later `[a.b]` belongs to the last one.
            if is_list and position == len(keys) - 1:
                self._tables_in[path] = self._tables_in.get(path, -1) + 1
            if path in self._tables_in:
                path = (*path, self._tables_in[path])
                self._record(path)
        self.at = end
        return path

    def _keys(self) -> list[str]:
        keys: list[str] = []
        while True:
            self._peek(_SPACE)
            match = _STRING.match(self.text, self.at) or _BARE.match(self.text, self.at)
            if match is None:
                return keys
            self.at = match.end()
            keys.append(_unquote(match.group()))
            if self._peek(_SPACE) != ".":
                return keys
            self.at += 1

    def _pair(self, table: Path) -> None:
        start = self.at
        keys = self._keys()
        self.at, end = start, self.at
        path = table
        for key in keys:
            path = (*path, key)
            self._record(path)
        self.at = end + 1  # past "="
        self._peek(_SPACE)
        self._value(path)

    def _value(self, path: Path) -> None:
        opening = self.text[self.at : self.at + 1]
        if opening == "[":
            self._inside("]", path, is_list=True)
        elif opening == "{":
            self._inside("}", path, is_list=False)
        else:
            # Numbers, dates and booleans end at a comma, a bracket or the line.
            match = _STRING.match(self.text, self.at) or _ATOM.match(self.text, self.at)
            self.at = match.end() if match else self.at + 1

    def _inside(self, closing: str, path: Path, *, is_list: bool) -> None:
        self.at += 1
        index = 0
        while (following := self._peek(_BLANK)) and following != closing:
            if following == ",":
                self.at += 1
                continue
            if is_list:
                self._record((*path, index))
                self._value((*path, index))
                index += 1
            else:
                self._pair(path)
        self.at += 1


def _unquote(key: str) -> str:
    return next(iter(tomllib.loads(f"{key} = 0"))) if key[0] in "\"'" else key
