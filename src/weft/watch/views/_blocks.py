"""What a page is made of: blocks that the dashboard draws, the terminal view prints and the report keeps.

A page is a JSON object with `id`, `title` and `blocks`.  Every block has `kind`, `title`, `says` (a sentence on what it
shows) and, unless it is a text itself, `table`: the same figures as cells that are ready to print.  What is not known
is None in data and "–" in a table, and never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.formatting import format_number

Block = dict[str, Any]
Page = dict[str, Any]

UNKNOWN = "–"
_DIGITS = 3


class TableColumn(NamedTuple):
    """One column: a heading with its unit, and cells."""

    name: str
    cells: Sequence[str]
    is_number: bool = False
    """Whether cells are aligned at the right."""


def text(name: str, cells: Iterable[object]) -> TableColumn:
    """Return a column of words."""
    return TableColumn(name, [UNKNOWN if cell is None or cell == "" else str(cell) for cell in cells])


def number(
    name: str, values: Iterable[float | None], *, digits: int = _DIGITS, unit: str = "", least_decimals: int = 0
) -> TableColumn:
    """Return a column of numbers with one and the same number of decimals: `digits` significant ones of the largest."""
    known = list(values)
    sizes = [abs(value) for value in known if value is not None and math.isfinite(value)]
    largest = max(sizes, default=0.0)
    whole = not unit and all(float(size).is_integer() for size in sizes)
    decimals = 0 if whole else max(0, digits - 1 - (math.floor(math.log10(largest)) if largest else 0))
    decimals = min(max(decimals, least_decimals), 6)
    # Zero is added so that what rounds to nothing has no sign.
    cells = [
        f"{round(value, decimals) + 0.0:,.{decimals}f}" if value is not None and math.isfinite(value) else UNKNOWN
        for value in known
    ]
    return TableColumn(f"{name} ({unit})" if unit else name, cells, True)


def index(name: str, values: Iterable[int]) -> TableColumn:
    """Return a column of numbers that name something, such as ranks."""
    return TableColumn(name, [str(value) for value in values], True)


def seconds(name: str, values: Iterable[float | None]) -> TableColumn:
    """Return a column of times, all in the unit of the largest."""
    known = list(values)
    unit, scale = time_scale(known)
    return number(name, _scaled(known, scale), unit=unit, least_decimals=1)


def memory(name: str, values: Iterable[float | None]) -> TableColumn:
    """Return a column of sizes in memory, all in the unit of the largest."""
    known = list(values)
    unit, scale = memory_scale(known)
    return number(name, _scaled(known, scale), unit=unit)


def percent(name: str, shares: Iterable[float | None]) -> TableColumn:
    """Return a column of shares (0 to 1) in percent."""
    return number(name, _scaled(shares, 100.0), digits=2, unit="%")


def table(columns: Sequence[TableColumn]) -> dict[str, Any]:
    """Return a table: `columns` with `name` and `number`, and `rows` of cells."""
    return {
        "columns": [{"name": column.name, "number": column.is_number} for column in columns],
        "rows": [list(row) for row in zip(*(column.cells for column in columns), strict=True)],
    }


def block(kind: str, title: str, says: str, shown: dict[str, Any] | None = None, **data: Any) -> Block:
    """Return a block; `shown` is its table."""
    return {"kind": kind, "title": title, "says": says, **({} if shown is None else {"table": shown}), **data}


def note(title: str, says: str) -> Block:
    """Return a block that is one sentence: why nothing can be drawn."""
    return block("note", title, says)


def figure(name: str, value: str, about: str = "") -> dict[str, str]:
    """Return one large number of a block of `figures`."""
    return {"name": name, "value": value, "about": about}


def lines(
    title: str,
    says: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: str = "",
    level: tuple[str, float] | None = None,
    marks: Sequence[Mapping[str, Any]] = (),
    x_name: str = "step",
) -> Block:
    """Return lines over steps; `level` is a horizontal one, `marks` (`x`, `label`) are vertical.

    Values are in `unit`, which the caller has scaled them to.  The table has at most 50 of the steps.
    """
    stride = max(1, -(-len(x) // 50))
    places = range((len(x) - 1) % stride, len(x), stride) if len(x) else range(0)
    columns = [number(x_name, [x[place] for place in places])]
    columns += [
        number(name, [values[place] for place in places], digits=4, unit=unit) for name, values in series.items()
    ]
    data = [{"name": name, "values": [rounded(value) for value in values]} for name, values in series.items()]
    shown = None if level is None else {"name": level[0], "value": rounded(level[1])}
    return block("lines", title, says, table(columns), x=list(x), x_name=x_name, series=data, unit=unit, level=shown,
                 marks=list(marks))  # fmt: skip


def bars(
    title: str, says: str, row_name: str, rows: Sequence[str], parts: Mapping[str, Sequence[float | None]], *,
    unit: str, total: str = "total", links: Sequence[Mapping[str, str]] = (),
) -> Block:  # fmt: skip
    """Return stacked horizontal bars: one per row, each of `parts` (name → value of every row), in `unit`.

    `links` are options of the page, by row, that a row leads to.
    """
    sums = [_sum([values[place] for values in parts.values()]) for place in range(len(rows))]
    columns = [text(row_name, rows)]
    columns += [number(name, values, unit=unit) for name, values in parts.items()]
    columns += [number(total, sums, unit=unit)] if len(parts) > 1 and total else []
    data = [{"name": name, "values": [rounded(value) for value in values]} for name, values in parts.items()]
    return block("bars", title, says, table(columns), rows=list(rows), parts=data, unit=unit,
                 totals=[rounded(value) for value in sums], links=list(links))  # fmt: skip


def choice(name: str, title: str, options: Sequence[tuple[str, str]], value: str) -> dict[str, Any]:
    """Return one control of a page: the option `name` of its address, and what it may be."""
    return {"name": name, "title": title, "options": [list(option) for option in options], "value": value}


def controls(*choices: dict[str, Any]) -> Block:
    """Return a page's controls."""
    return block("controls", "", "", choices=[each for each in choices if len(each["options"]) > 1])


def chosen(options: Mapping[str, str], name: str, allowed: Iterable[str], default: str) -> str:
    """Return an option of the page's address where it is one of those allowed."""
    value = options.get(name, default)
    return value if value in set(allowed) else default


def rounded(value: float | None) -> float | None:
    """Return five significant digits, which pictures need; None for what is not finite."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def time_scale(values: Iterable[float | None]) -> tuple[str, float]:
    """Return the unit of times, and how many of it are a second."""
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)
    return ("s", 1.0) if largest >= 1 else ("ms", 1e3) if largest >= 1e-3 or largest == 0 else ("µs", 1e6)


def memory_scale(values: Iterable[float | None]) -> tuple[str, float]:
    """Return the unit of sizes in memory, and how many of it are a byte."""
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest >= 0.1 * scale:
            return unit, 1 / scale
    return "B", 1.0


def signed_percent(share: float) -> str:
    """Return `+12 %`."""
    return f"{format_number(100 * share, 2, signed=True)} %"


def plural(count: int, what: str) -> str:
    """Return `1 step` or `3 steps`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _scaled(values: Iterable[float | None], scale: float) -> list[float | None]:
    return [value * scale if value is not None and math.isfinite(value) else None for value in values]


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) if known else None
