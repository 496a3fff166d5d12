"""Figures as people read them: thousands with commas, and never an exponent.

Whatever prints a figure for a person comes here.  Memory is told in powers of 1024 (GiB), as drivers
count it; data on disks and links in powers of 1000 (GB).
"""

from __future__ import annotations

import math

__all__ = [
    "format_bytes",
    "format_number",
    "format_memory",
    "format_percent",
    "format_seconds",
    "time_unit",
]


def format_number(value: float, digits: int = 3, *, signed: bool = False) -> str:
    """Return `0.00042`, `4.2`, `42.1` or `123,456`: `digits` significant ones behind the point, all before it.

    Zeros at the end of a fraction are left out; `signed` puts a `+` before what is not negative.
    """
    sign = "+" if signed else ""
    if not math.isfinite(value):
        return f"{value:{sign}}"
    # Rounded first: 9.996 has three digits as 10.0, not as 10.00.
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    text = f"{value:{sign},.{max(0, digits - 1 - exponent)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_seconds(seconds: float, digits: int = 3) -> str:
    """Return `5.6 s`, `412 ms` or `7.1 µs`."""
    unit, scale = time_unit(seconds)
    return f"{format_number(seconds * scale, digits)} {unit}"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit that a time is told in, and how many of it make a second."""
    return ("s", 1.0) if seconds >= 1 or seconds == 0 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)


def format_percent(percent: float) -> str:
    """Return `0.42 %`, `4.2 %`, `42 %` or `1,420 %`: two digits, and all before the point."""
    if abs(percent) >= 10:
        return f"{percent:,.0f} %"
    return f"{percent:.1f} %" if abs(percent) >= 1 else f"{format_number(percent, 2)} %"


def format_memory(size_bytes: float, digits: int = 3) -> str:
    """Return `12.6 GiB`, or `37 MiB` of what is below a tenth of a GiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= 0.1 * scale:
            return f"{format_number(size_bytes / scale, digits)} {unit}"
    return f"{format_number(size_bytes, digits)} B"


def format_bytes(size_bytes: float) -> str:
    """Return `4.7 MB`, in powers of 1000: for what lies on disks and goes over links."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{format_number(size_bytes)} {unit}"
        size_bytes /= 1000
    return f"{format_number(size_bytes)} TB"
