"""Numbers as people write them: 2T tokens, 14d, 50us, 1Gbit/s."""

from __future__ import annotations

import re

from weft.errors import WeftError

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SHORT_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = {f"{name}{unit}/s": scale / parts for name, scale in _SCALES.items() for unit, parts in (("bit", 8), ("B", 1))}


def parse_count(text: str, option: str) -> float:
    """Return the number that `2T`, `300B` or `1.5e12` says."""
    pattern = r"([\d_.,]+(?:E\d+)?)\s*([KMBGT]?)"
    return _parse(pattern, text.strip().upper(), _SCALES, option, "a number such as 300B or 2T")


def parse_duration(text: str, option: str) -> float:
    """Return the seconds that `14d`, `36h` or `90m` says."""
    return _parse(r"([\d_.,]+)\s*([smhdw])", text.strip().lower(), _UNITS, option, "a time such as 14d, 36h or 90m")


def parse_latency(text: str, option: str, *, zero: bool = False) -> float:
    """Return the seconds that `50us` or `300ms` says; 0 only with `zero`."""
    expected = "a time such as 50us or 300ms"
    return _parse(r"([\d_.,]+)\s*(ns|us|ms|s)", text.strip(), _SHORT_UNITS, option, expected, zero=zero)


def parse_rate(text: str, option: str) -> float:
    """Return the bytes per second that `1Gbit/s` or `12.5GB/s` says."""
    expected = "a rate such as 1Gbit/s or 12.5GB/s (bits or bytes: say which)"
    return _parse(r"([\d_.,]+)\s*([KMGT]?(?:bit|B)/s)", text.strip(), _RATES, option, expected)


def _parse(
    pattern: str, text: str, factors: dict[str, float], option: str, expected: str, *, zero: bool = False
) -> float:
    match = re.fullmatch(pattern, text)
    if match is not None:
        try:
            number = float(match.group(1).replace(",", "").replace("_", "")) * factors[match.group(2)]
        except ValueError:
            number = -1.0
        if number > 0 or (number == 0 and zero):
            return number
    raise WeftError(f"{option} {text} is not {expected}.")
