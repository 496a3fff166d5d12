"""The reference of the command line, read from the parsers that `weft` itself uses."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from cyclopts import App

from weft.cli._main import build_app

_KINDS: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "", Path: "path"}
_BUILT_IN = ("--help", "-h", "--version")


def command_page() -> str:
    """Return the page of all commands and their options."""
    app = build_app()
    commands = list(_commands(("weft",), app))
    lines = [
        "<!-- Written by docs/make_reference.py from the parsers. Do not edit. -->",
        "",
        "# The command line",
        "",
        "`weft COMMAND --help` prints the same. Errors that you can mend are one paragraph and end with status 2"
        " ([errors](../guides/errors.md#exit-status)).",
        "",
        "| command | |",
        "|---|---|",
        *(
            f"| [`{' '.join(name)}`](#{'-'.join(name)}) | {_cell(_paragraphs(command)[0])} |"
            for name, command in commands
        ),
    ]
    for name, command in commands:
        lines += ["", f"## {' '.join(name)}", "", *_describe(name, command)]
    return "\n".join(lines) + "\n"


def _commands(name: tuple[str, ...], app: App) -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command that does something, those within commands too; not those that only say where they went."""
    for key in app:
        if key not in _BUILT_IN:
            inner = app[key]
            if inner.default_command is not None and inner.show:
                yield (*name, key), inner
            yield from _commands((*name, key), inner)


def _paragraphs(app: App) -> list[str]:
    """What a command's docstring says before its parameters."""
    text = inspect.cleandoc(inspect.getdoc(app.default_command) or "")
    return [
        " ".join(part.split()) for part in re.split(r"\n(?:Parameters|Returns|Raises)\n-+\n", text)[0].split("\n\n")
    ]


def _describe(name: tuple[str, ...], app: App) -> Iterator[str]:
    every = app.assemble_argument_collection(parse_docstring=True)
    arguments = [each for each in every if each.names[0] != "*"]  # which stands for options in a class of their own
    places = [each for each in arguments if not each.names[0].startswith("-")]
    options = [each for each in arguments if each.names[0].startswith("-")]
    usage = [*name, *(_place(each) for each in places)]
    needed = [f"{each.names[0]} {_kind(each.hint).upper()}" for each in options if each.field_info.required]
    yield from ("```text", " ".join([*usage, *needed, "[OPTIONS]" if options else ""]).strip(), "```", "")
    for paragraph in _paragraphs(app):
        yield from (paragraph, "")
    yield from ("| argument | takes | default | meaning |", "|---|---|---|---|")
    for each in (*places, *options):
        names = ", ".join(f"`{one}`" for one in each.names)
        takes = _kind(each.hint) or "–"
        yield f"| {names} | {_cell(takes)} | {_default(each)} | {_cell(each.parameter.help or '')} |"


def _place(argument: Any) -> str:
    several = argument.field_info.kind is inspect.Parameter.VAR_POSITIONAL
    word = f"{argument.names[0]}..." if several else argument.names[0]
    return word if argument.field_info.required else f"[{word}]"


def _default(argument: Any) -> str:
    if argument.field_info.required:
        return "**required**"
    value = argument.field_info.default
    return "–" if value in (None, (), False, inspect.Parameter.empty) else f"`{value}`"


def _kind(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in _KINDS:
        return _KINDS[hint]
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin in (UnionType, typing.Union):
        return " or ".join(_kind(part) for part in inner if part is not NoneType)
    if origin is tuple:
        return _kind(inner[0])
    return str(hint)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
