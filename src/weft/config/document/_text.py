"""How values and keys are spelt in TOML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

Path = tuple[str | int, ...]
"""Names and list positions from the top of a document down to one setting."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
_UNDERSCORES_FROM = 100_000
_EXPONENT_FROM = 1e7


def format_key(key: str) -> str:
    """Return a key as TOML writes it, quoted only where it must be."""
    return key if _BARE_KEY.fullmatch(key) else _format_text(key)


def dotted(path: Path) -> str:
    """Return `data.train[0].weight` for `("data", "train", 0, "weight")`."""
    parts: list[str] = []
    for part in path:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        else:
            parts.append(("." if parts else "") + format_key(part))
    return "".join(parts)


def format_value(value: Any) -> str:
    """Return a value as TOML writes it, on one line; reading gives exactly the same value back."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= _UNDERSCORES_FROM else str(value)
    if isinstance(value, float):
        return _format_float(value)
    if isinstance(value, str):
        return _format_text(value)
    if isinstance(value, Mapping):
        inside = ", ".join(f"{format_key(str(key))} = {format_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    return str(value)


def format_short(value: Any, width: int = 60) -> str:
    """Return `format_value(value)` for an error message: no longer than `width` characters."""
    text = format_value(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def _format_float(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= _EXPONENT_FROM and value.is_integer():
        digits = str(abs(int(value)))
        fraction = digits[1:].rstrip("0")
        return ("-" if value < 0 else "") + digits[0] + (f".{fraction}" if fraction else "") + f"e{len(digits) - 1}"
    mantissa, _, exponent = repr(value).partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def _format_text(value: str) -> str:
    return '"' + "".join(_ESCAPES.get(c) or _escape(c) for c in value) + '"'


def _escape(character: str) -> str:
    is_control = ord(character) < 0x20 or 0x7F <= ord(character) <= 0x9F
    return f"\\u{ord(character):04x}" if is_control else character
