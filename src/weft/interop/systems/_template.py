"""Texts of files, with words to fill in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files


def filled(name: str, words: Mapping[str, str]) -> str:
    """Return `templates/NAME.py.in` with every `@WORD@` replaced."""
    text = files("weft.interop.systems").joinpath("templates", f"{name}.py.in").read_text(encoding="utf-8")
    return re.sub(r"@([A-Z]+)@", lambda match: words[match.group(1)], text)
