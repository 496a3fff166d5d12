"""Fragments of Python with conditions, put together to one script.

A fragment is a file in `templates/` whose text is Python but for three marks:

- a line that ends in `#: words` stays if all words hold;
- lines between `#: if words` and `#: else` or `#: end` stay if all words hold, those after `#: else` if not;
- `{{name}}` stands for a value.

A word is a flag, `!flag` for one that is not set, or `one|other`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

_LINE_LENGTH = 120
_MARK = re.compile(r"\s*#: (?P<words>.+)$")
_VALUE = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, slots=True)
class Composer:
    """Renders fragments for one script."""

    flags: Collection[str]
    """Those that hold."""
    known: Collection[str]
    """All that a fragment may ask for; another one is a slip of the pen (AssertionError)."""
    values: Mapping[str, str]

    def render(self, fragment: str) -> str:
        """Return a fragment's text with its conditions decided and its values filled in."""
        text = (files("weft.interop.eject") / "templates" / f"{fragment}.py.in").read_text("utf-8")
        return _VALUE.sub(lambda match: self.values[match[1]], "\n".join(self._kept(text.splitlines())))

    def _kept(self, lines: Iterable[str]) -> Iterator[str]:
        open_conditions: list[bool] = []
        for line in lines:
            mark = _MARK.search(line)
            if mark is None:
                if all(open_conditions):
                    yield line
                continue
            words = mark["words"].split()
            if line.strip() != mark[0].strip():
                if all(open_conditions) and self._holds(words):
                    yield line[: mark.start()]
            elif words[0] == "if":
                open_conditions.append(self._holds(words[1:]))
            elif words == ["else"]:
                open_conditions[-1] = not open_conditions[-1]
            else:
                assert words == ["end"], line
                open_conditions.pop()
        assert not open_conditions, "a condition has no end"

    def _holds(self, words: Iterable[str]) -> bool:
        return all(any(self._is_set(choice) for choice in word.split("|")) for word in words)

    def _is_set(self, flag: str) -> bool:
        name = flag.removeprefix("!")
        assert name in self.known, f"no flag is called {name}"
        return (name in self.flags) != flag.startswith("!")


def join(header: str, imports: str, sections: Iterable[str]) -> str:
    """Return one script: the header, those of the imports that the sections use, and the sections two lines apart."""
    body = "\n\n\n".join(text for section in sections if (text := section.strip("\n")))
    return f"{header}\n\n{prune_imports(imports, body)}\n\n{body}\n"


def prune_imports(imports: str, body: str) -> str:
    """Return the import statements without the names that `body` does not use; groups stay apart."""
    # By the syntax tree: a name in a comment or a string is no use of it.
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    groups = ["\n".join(_pruned(group, used)) for group in imports.strip().split("\n\n")]
    return "\n\n".join(group for group in groups if group)


def _place(statement: ast.stmt) -> tuple[bool, str]:
    """Return the sort key of an import in its group: plain imports first, then by module."""
    return (True, statement.module or "") if isinstance(statement, ast.ImportFrom) else (False, "")


def _pruned(group: str, used: Collection[str]) -> Iterator[str]:
    for statement in sorted(ast.parse(group).body, key=_place):
        assert isinstance(statement, ast.Import | ast.ImportFrom)
        kept = [name for name in statement.names if (name.asname or name.name.partition(".")[0]) in used]
        if not kept:
            continue
        names = [f"{name.name} as {name.asname}" if name.asname else name.name for name in kept]
        if isinstance(statement, ast.Import):
            yield from (f"import {name}" for name in names)
            continue
        line = f"from {statement.module} import {', '.join(names)}"
        if len(line) > _LINE_LENGTH:
            line = f"from {statement.module} import (\n{''.join(f'    {name},{chr(10)}' for name in names)})"
        yield line
