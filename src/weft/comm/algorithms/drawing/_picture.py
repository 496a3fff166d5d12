"""A collective as a picture: a panel per round, in which ranks lie as the algorithm sees them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.comm.algorithms.double_tree import spot
from weft.comm.algorithms.drawing._rounds import Drawing, Flight
from weft.errors import CollectiveError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 64
"""Ranks that a picture can show, at most."""
_MOST_PANELS = 12
_COLUMNS = 4
_INK, _LIGHT = "#1f3a4d", "#e4ebf0"
_COLOURS = ("#1f5f8b", "#d97b29", "#5a9e6f", "#b5485d", "#7a6aa8", "#8c8c8c", "#c2a83e", "#4aa3a3")
_Point = tuple[float, float]


def draw_rounds(drawing: Drawing, path: str | Path) -> None:
    """Write the rounds to a .png, .svg or .pdf file: the first eleven and the last, where there are more than twelve.

    An arrow is a message; its colour says which part it carries, dark ones carry several.

    Raises:
        CollectiveError: more than 64 ranks, matplotlib is not installed, or the file cannot be written.
    """
    n = drawing.arrangement.members
    if n > MOST_RANKS:
        raise CollectiveError(f"{n} ranks do not fit in a picture: use {MOST_RANKS} or fewer, or the text.")
    rounds = list(enumerate(drawing.rounds, start=1))
    shown = rounds if len(rounds) <= _MOST_PANELS else [*rounds[: _MOST_PANELS - 1], rounds[-1]]
    shown = shown or [(0, [])]  # one rank: nothing to send
    points = _points(drawing)
    rows = math.ceil(len(shown) / _COLUMNS)
    columns = math.ceil(len(shown) / rows)
    width, height = _extent(points)
    panel = 3.3
    figure = _new_figure((columns * panel, rows * (panel * min(1.0, max(0.45, height / width)) + 0.45) + 0.75))
    for place, (number, flights) in enumerate(shown):
        axes = figure.add_subplot(rows, columns, place + 1)
        _panel(axes, drawing, points, flights)
        phases = ", ".join(dict.fromkeys(flight.phase for flight in flights))
        axes.set_title(f"{number} of {len(rounds)}: {phases}", fontsize=8, color=_INK)
    figure.suptitle(_headline(drawing), fontsize=11, color=_INK)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    try:
        figure.savefig(str(path), dpi=110)
    except (OSError, ValueError) as error:
        raise CollectiveError(
            f"{path} cannot be drawn to: {error}. Name a .png, .svg or .pdf file you may write."
        ) from None


def _headline(drawing: Drawing) -> str:
    name = f"{drawing.algorithm} {drawing.collective}".replace("_", " ")
    return (
        f"{name}: {drawing.arrangement.members} ranks, {len(drawing.rounds)} rounds, "
        f"a rank sends up to {drawing.most_sent:.3g} × the buffer"
    )


def _new_figure(size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CollectiveError("Pictures need matplotlib. Install it: pip install 'weft[plots]'.") from None
    return Figure(figsize=size)


def _panel(axes: Axes, drawing: Drawing, points: Mapping[int, _Point], flights: Sequence[Flight]) -> None:
    _nodes(axes, drawing, points)
    pairs = {(flight.source, flight.target) for flight in flights}
    radius = 0.19
    for flight in flights:
        (x0, y0), (x1, y1) = points[flight.source], points[flight.target]
        length = math.hypot(x1 - x0, y1 - y0)
        bend = _bend(_kind(drawing), length, (flight.target, flight.source) in pairs)
        dx, dy = (x1 - x0) / length * radius, (y1 - y0) / length * radius
        colour = _COLOURS[flight.runs[0][0] % len(_COLOURS)] if _is_one_part(flight) else _INK
        axes.annotate(
            "", (x1 - dx, y1 - dy), (x0 + dx, y0 + dy),
            arrowprops={
                "arrowstyle": "-|>", "color": colour, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0,
                "connectionstyle": f"arc3,rad={bend}", "mutation_scale": 9,
            },
        )  # fmt: skip
    for rank, (x, y) in points.items():
        axes.plot([x], [y], "o", markersize=13 if len(points) <= 16 else 9, color="white", markeredgecolor=_INK)
        axes.text(x, y, str(rank), ha="center", va="center", fontsize=7 if len(points) <= 16 else 5, color=_INK)
    xs, ys = [x for x, _ in points.values()], [y for _, y in points.values()]
    axes.set_xlim(min(xs) - 0.45, max(xs) + 0.45)
    axes.set_ylim(min(ys) - 0.45, max(ys) + 0.45)
    axes.set_aspect("equal")
    axes.set_axis_off()


def _bend(kind: str, length: float, has_answer: bool) -> float:
    """How far an arrow leaves the straight line: to pass other ranks on it, and the arrow that goes the other way."""
    if length > 1.6 and kind in ("torus", "hierarchical"):
        return 0.42
    return 0.18 if has_answer or (length > 1.0 and kind in ("tree", "double_tree")) else 0.0


def _is_one_part(flight: Flight) -> bool:
    return len(flight.runs) == 1 and flight.runs[0][1] - flight.runs[0][0] == 1


def _kind(drawing: Drawing) -> str:
    return drawing.algorithm.partition("+")[0]


def _extent(points: Mapping[int, _Point]) -> _Point:
    xs, ys = [x for x, _ in points.values()], [y for _, y in points.values()]
    return max(xs) - min(xs) + 0.9, max(ys) - min(ys) + 0.9


def _points(drawing: Drawing) -> dict[int, _Point]:
    """Where ranks lie: a grid, nodes as rows, a tree, or a circle."""
    place, n = drawing.arrangement, drawing.arrangement.members
    order = place.order
    kind = _kind(drawing)
    if kind == "torus":
        columns = place.shape[1]
        return {rank: (index % columns * 1.0, -(index // columns) * 1.0) for index, rank in enumerate(order)}
    if kind == "hierarchical":
        starts = [sum(place.nodes[:index]) for index in range(len(place.nodes))]
        return {
            order[start + within]: (float(within), -1.3 * row)
            for row, (start, size) in enumerate(zip(starts, place.nodes, strict=True))
            for within in range(size)
        }
    if kind == "tree":
        root = list(order).index(drawing.schedules[0].root)
        turned = [order[(root + index) % n] for index in range(n)]
        return {rank: (index * 0.8, -index.bit_count() * 1.1) for index, rank in enumerate(turned)}
    if kind == "double_tree":
        return {rank: (index * 0.8, -spot(index, n).depth * 1.1) for index, rank in enumerate(order)}
    radius = max(0.8, n * 0.16)
    return {
        rank: (radius * math.sin(2 * math.pi * index / n), radius * math.cos(2 * math.pi * index / n))
        for index, rank in enumerate(order)
    }


def _nodes(axes: Axes, drawing: Drawing, points: Mapping[int, _Point]) -> None:
    """A pale box behind the ranks of each node."""
    if _kind(drawing) != "hierarchical":
        return
    from matplotlib.patches import FancyBboxPatch

    start = 0
    for size in drawing.arrangement.nodes:
        x, y = points[drawing.arrangement.order[start]]
        axes.add_patch(
            FancyBboxPatch(
                (x - 0.25, y - 0.25), size - 0.5, 0.5, boxstyle="round,pad=0.15", facecolor=_LIGHT, linewidth=0
            )
        )
        start += size
