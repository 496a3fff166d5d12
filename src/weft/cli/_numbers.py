"""Numbers as people write them: 2T tokens, 14d."""

from __future__ import annotations

import re

from weft.errors import WeftError

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_count(text: str, option: str) -> float:
    """Return the number that `2T`, `300B` or `1.5e12` says."""
    pattern = r"([\d_.,]+(?:E\d+)?)\s*([KMBGT]?)"
    return _parse(pattern, text.strip().upper(), _SCALES, option, "a number such as 300B or 2T")


def parse_duration(text: str, option: str) -> float:
    """Return the seconds that `14d`, `36h` or `90m` says."""
    return _parse(r"([\d_.,]+)\s*([smhdw])", text.strip().lower(), _UNITS, option, "a time such as 14d, 36h or 90m")


def _parse(pattern: str, text: str, factors: dict[str, float], option: str, expected: str) -> float:
    match = re.fullmatch(pattern, text)
    if match is not None:
        try:
            number = float(match.group(1).replace(",", "").replace("_", "")) * factors[match.group(2)]
        except ValueError:
            number = 0.0
        if number > 0:
            return number
    raise WeftError(f"{option} {text} is not {expected}.")
