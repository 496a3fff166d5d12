"""Draws the blocks of a page with characters.  What has no drawing of its own here is shown by its table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from weft.watch.views import Block, Page

ACCENT = "cyan"
_LEVELS = {"serious": "bold red", "warning": "yellow"}
_MOST_ROWS = 16
_COLOURS = ("cyan", "blue", "yellow", "magenta", "green", "red", "white", "bright_blue", "bright_yellow")
_FILLS = "█▓▒░▞▚▤▦▧"
"""Parts of a bar differ by pattern, too: colours alone not everybody tells apart."""
_STEPS = " ▁▂▃▄▅▆▇█"
_SHADES = " ·░▒▓█"
_PLOT_ROWS = 6


def render_page(page: Page, width: int) -> RenderableType:
    """Return a page for a terminal that is so many characters wide."""
    drawn: list[RenderableType] = []
    for block in page["blocks"]:
        lines = list(_drawn(block, width))
        if lines:
            drawn += [*lines, Text("")]
    return Group(*drawn)


def _drawn(block: Block, width: int) -> Iterator[RenderableType]:
    """Yield title, sentence and drawing of a block."""
    kind = str(block["kind"])
    if kind == "controls":  # choices of a page in the browser
        return
    if kind == "banner":
        yield Panel(Text(str(block["says"])), title=str(block["title"]), title_align="left",
                    border_style=_LEVELS.get(str(block.get("level")), "yellow"))  # fmt: skip
        return
    yield Text(str(block["title"]), style=f"bold {ACCENT}")
    if block["says"]:
        yield Text(str(block["says"]), style="default" if kind == "note" else "dim")
    draw = _DRAWINGS.get(kind)
    if draw is not None:
        yield from draw(block, width)
    elif "table" in block:
        yield _table(block["table"])


def _table(shown: Mapping[str, Any], most: int = _MOST_ROWS) -> RenderableType:
    """Return the table of a block, cut after some rows."""
    drawn = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    for column in shown["columns"]:
        drawn.add_column(str(column["name"]), justify="right" if column["number"] else "left")
    for row in shown["rows"][:most]:
        drawn.add_row(*(Text(str(cell)) for cell in row))
    left = len(shown["rows"]) - most
    return Group(drawn, Text(f"… {left} more rows", style="dim")) if left > 0 else drawn


def _verdicts(block: Block, width: int) -> Iterator[RenderableType]:
    for verdict in block["verdicts"]:
        unknown = verdict["kind"] == "unknown"
        body = Text(str(verdict["title"]), style="default" if unknown else "bold")
        if verdict["cost"]:
            body.append(f"\n{verdict['cost']}, {verdict['confidence']} confidence", style="not bold yellow")
        for line in verdict["evidence"]:
            body.append(f"\n· {line}", style="not bold dim")
        if verdict["next"]:
            body.append(f"\n→ {verdict['next']}", style=f"not bold {ACCENT}")
        yield Panel(body, border_style="dim" if unknown else "yellow", box=box.ROUNDED)


def _figures(block: Block, width: int) -> Iterator[RenderableType]:
    grid = Table.grid(padding=(0, 3), expand=False)
    figures: Sequence[Mapping[str, str]] = block["figures"]
    per_row = max(1, min(len(figures), width // 26))
    for _ in range(per_row):
        grid.add_column(max_width=max(20, width // per_row - 3))
    for first in range(0, len(figures), per_row):
        chosen = figures[first : first + per_row]
        cells = [
            Text.assemble((figure["name"], "dim"), "\n", (figure["value"], "bold"), "\n", (figure["about"], "dim"))
            for figure in chosen
        ]
        grid.add_row(*cells, *([Text("")] * (per_row - len(cells))))
    yield grid


def _lines(block: Block, width: int) -> Iterator[RenderableType]:
    """Draw each series as a plot of its own, with its least and most value."""
    unit = f" {block['unit']}" if block["unit"] else ""
    room = max(16, min(width - 20, 120))
    for series in block["series"]:
        values = _fitted(series["values"], room)
        known = [value for value in values if value is not None]
        if not known:
            continue
        low, high = min(known), max(known)
        plot = _plot(values, low, high)
        labels = [f"{high:,.4g}{unit}", *[""] * (_PLOT_ROWS - 2), f"{low:,.4g}{unit}"]
        if len(block["series"]) > 1:
            yield Text(str(series["name"]), style="dim")
        for label, row in zip(labels, plot, strict=True):
            yield Text.assemble((f"{label:>16} ", "dim"), (row, ACCENT))
    if block["x"]:
        first, last = f"{block['x_name']} {block['x'][0]:,}", f"{block['x'][-1]:,}"
        drawn = min(room, len(block["x"]))
        yield Text(" " * 17 + first + last.rjust(max(1, drawn - len(first))), style="dim")
    if block.get("level"):
        yield Text(f"{'':17}{block['level']['name']}: {block['level']['value']:,.4g}{unit}", style="dim")


def _fitted(values: Sequence[float | None], most: int) -> list[float | None]:
    """Return means of neighbours, so that a series has at most so many values."""
    if len(values) <= most:
        return list(values)
    fitted: list[float | None] = []
    for place in range(most):
        part = values[place * len(values) // most : (place + 1) * len(values) // most]
        known = [value for value in part if value is not None]
        fitted.append(sum(known) / len(known) if known else None)
    return fitted


def _plot(values: Sequence[float | None], low: float, high: float) -> list[str]:
    """Return rows of characters, the highest first, in which every value is a column."""
    span = (high - low) or 1.0
    heights = [None if value is None else (value - low) / span * (8 * _PLOT_ROWS - 1) + 1 for value in values]
    rows: list[str] = []
    for row in range(_PLOT_ROWS - 1, -1, -1):
        filled = (0 if height is None else min(8, max(0, math.floor(height - 8 * row))) for height in heights)
        rows.append("".join(_STEPS[level] for level in filled))
    return rows


def _bars(block: Block, width: int) -> Iterator[RenderableType]:
    """Draw stacked bars, of which the longest fills the room."""
    names, parts, totals = block["rows"], block["parts"], block["totals"]
    label = min(24, max((len(str(name)) for name in names), default=0))
    against: Sequence[float | None] = block.get("against") or [None] * len(names)
    room = max(12, min(width - label - (32 if any(against) else 16), 100))
    longest = max((total for total in totals if total is not None), default=0.0) or 1.0
    for place, name in list(enumerate(names))[:_MOST_ROWS]:
        bar = Text(f"{str(name)[:label]:>{label}} ", style="dim")
        for number, part in enumerate(parts):
            value = part["values"][place]
            long = round(room * value / longest) if value is not None else 0
            bar.append(_FILLS[number % len(_FILLS)] * long, style=_COLOURS[number % len(_COLOURS)])
        total = totals[place]
        bar.append(" –" if total is None else f" {total:,.4g} {block['unit']}", style="dim")
        bar.append("" if against[place] is None else f", plan {against[place]:,.4g}", style="dim")
        yield bar
    if len(names) > _MOST_ROWS:
        yield Text(f"… {len(names) - _MOST_ROWS} more rows", style="dim")
    key = Text()
    for number, part in enumerate(parts):
        if any(part["values"]):
            key.append(f"{_FILLS[number % len(_FILLS)]}\N{NO-BREAK SPACE}", style=_COLOURS[number % len(_COLOURS)])
            key.append(f"{part['name']}".replace(" ", "\N{NO-BREAK SPACE}") + "   ", style="dim")
    yield key


def _heat(block: Block, width: int) -> Iterator[RenderableType]:
    """Draw a row of shades for each rank: the darkest is the highest value."""
    low, high = float(block["low"] or 0.0), float(block["high"] or 0.0)
    span = (high - low) if high > low else 1.0
    label = min(20, max((len(str(name)) for name in block["rows"]), default=0))
    room = max(16, min(width - label - 2, 140))
    for name, values in list(zip(block["rows"], block["values"], strict=True))[: 2 * _MOST_ROWS]:
        row = Text(f"{str(name)[:label]:>{label}} ", style="dim")
        for value in _fitted(values, room):
            share = None if value is None else min(1.0, max(0.0, (value - low) / span))
            shade = "?" if share is None else _SHADES[round(share * (len(_SHADES) - 1))]
            row.append(shade, style="red" if share is not None and share > 0.8 else ACCENT)
        yield row
    left = len(block["rows"]) - 2 * _MOST_ROWS
    if left > 0:
        yield Text(f"… {left} more rows", style="dim")
    yield Text(f"{_SHADES[1]} {low:,.4g} {block['unit']} … {_SHADES[-1]} {high:,.4g} {block['unit']}", style="dim")


def _gantt(block: Block, width: int) -> Iterator[RenderableType]:
    """Draw a row for each lane: the colour is the kind of work, the digit its microbatch."""
    label = min(20, max((len(str(lane["name"])) for lane in block["lanes"]), default=0))
    room, end = max(20, width - label - 2), float(block["end"] or 1.0)
    for lane in block["lanes"][:_MOST_ROWS]:
        cells = [(" ", "default")] * room
        # Those that hold others come first, so that what is inside of them is drawn over them.
        for kind, start, stop, microbatch in sorted(lane["spans"], key=lambda span: span[1] - span[2]):
            first, last = int(start / end * room), max(int(start / end * room) + 1, int(stop / end * room))
            sign = str(microbatch)[-1] if microbatch >= 0 else _FILLS[kind % len(_FILLS)]
            style = f"black on {_COLOURS[kind % len(_COLOURS)]}" if microbatch >= 0 else _COLOURS[kind % len(_COLOURS)]
            cells[first:last] = [(sign, style)] * (min(last, room) - first)
        row = Text(f"{str(lane['name'])[:label]:>{label}} ", style="dim")
        for sign, style in cells[:room]:
            row.append(sign, style=style)
        yield row
    key = Text()
    for kind, title in enumerate(block["kinds"]):
        key.append(f"{_FILLS[kind % len(_FILLS)]}\N{NO-BREAK SPACE}", style=_COLOURS[kind % len(_COLOURS)])
        key.append(str(title).replace(" ", "\N{NO-BREAK SPACE}") + "   ", style="dim")
    yield key


def _texts(block: Block, width: int) -> Iterator[RenderableType]:
    for part in block["texts"]:
        yield Panel(Text(str(part["text"])), title=str(part["title"]), title_align="left", border_style="dim")


_DRAWINGS: Mapping[str, Callable[[Block, int], Iterator[RenderableType]]] = {
    "verdicts": _verdicts,
    "figures": _figures,
    "lines": _lines,
    "bars": _bars,
    "heat": _heat,
    "gantt": _gantt,
    "texts": _texts,
}
