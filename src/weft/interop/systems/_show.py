"""An emission as lines of a terminal, and as a folder."""

from __future__ import annotations

import shlex
from pathlib import Path

from weft.errors import PlanError
from weft.interop.systems._contract import Emission
from weft.interop.systems._facts import SystemFacts

_SHORT_LINES = 60
_WIDTH = 110


def command_text(emission: Emission) -> str:
    """The command as a shell reads it: environment first, options on lines of their own."""
    words = [f"{name}={shlex.quote(value)}" for name, value in emission.environment.items()]
    words += [_quoted(word) for word in emission.command]
    lines, line = list[str](), ""
    for word in words:
        if line and (len(line) + len(word) > _WIDTH or (word.startswith("--") and len(line) > _WIDTH // 2)):
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return " \\\n    ".join([*lines, line])


def _quoted(word: str) -> str:
    """Words that name what the shell knows stay open to it."""
    return f'"{word}"' if word.startswith("$") else shlex.quote(word)


def emission_lines(emission: Emission, facts: SystemFacts) -> list[str]:
    """Return the command, short files, and what is different there."""
    lines = [f"for       {facts.title} ({facts.source})"]
    lines += [f"note      {note}" for note in emission.notes]
    for name, text in emission.files.items():
        if text.count("\n") <= _SHORT_LINES and not name.endswith(".py"):
            lines += ["", f"# {name}", text.rstrip("\n")]
        else:
            lines += ["", f"# {name}: {text.count(chr(10))} lines, written by --write-to FOLDER"]
    return [*lines, "", command_text(emission)]


def write_emission(emission: Emission, folder: Path) -> list[Path]:
    """Write the files and `run.sh` with the command into a folder; return what was written.

    Raises:
        PlanError: a file cannot be written.
    """
    notes = "".join(f"# {note}\n" for note in emission.notes)
    script = (
        f"#!/bin/sh\n# {emission.system} {emission.version}, written by weft plan\n{notes}{command_text(emission)}\n"
    )
    written: list[Path] = []
    for name, text in {**emission.files, "run.sh": script}.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlanError(f"--write-to {folder}: {path}: {error.strerror}. Name a folder you may write.") from None
        written.append(path)
    return written
