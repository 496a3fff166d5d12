"""Pictures of a plan: where the time goes, what fills each stage, the schedule, and who sits where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.config.cluster import Cluster
from weft.config.plan import Axis, MeshPlan, axis_coordinates
from weft.errors import PlanError
from weft.formatting import format_memory, format_number, time_unit
from weft.planning.explain._text import memory_parts, waterfall
from weft.planning.price import Prediction, ScheduleSpan
from weft.techniques.cost_terms import Layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = ("waterfall", "memory", "timeline", "map")
_GIBI = 2**30
_INK, _LIGHT = "#1f3a4d", "#c9d6df"
_COLOURS = ("#1f5f8b", "#d97b29", "#5a9e6f", "#b5485d", "#7a6aa8", "#8c8c8c", "#c2a83e", "#4aa3a3")
_ACTIONS: Mapping[str, str] = {
    "forward": "#5b8db8",
    "backward": "#d97b29",
    "input_backward": "#e3a05f",
    "weight_backward": "#9c6b3a",
    "send": "#8c8c8c",
    "reduce": "#7a6aa8",
    "optimizer": "#5a9e6f",
}
_MOST_ROWS = 64
"""Ranks and devices beyond which a picture shows the first ones and says so."""


def draw(name: str, path: str | Path, prediction: Prediction, layout: Layout, cluster: Cluster) -> None:
    """Write one of `PICTURES` to a .png, .svg or .pdf file.

    `timeline` needs a prediction with spans (`CostModel.predict(layout, spans=True)`).

    Raises:
        PlanError: matplotlib is not installed, or the file cannot be written or has another ending.
    """
    assert name in PICTURES, name
    drawers: Mapping[str, Callable[[Axes], None]] = {
        "waterfall": lambda axes: _waterfall(axes, prediction),
        "memory": lambda axes: _memory(axes, prediction),
        "timeline": lambda axes: _timeline(axes, prediction.spans),
        "map": lambda axes: _map(axes, layout, cluster),
    }
    size = {"timeline": (13.0, 1.4 + 0.28 * min(_MOST_ROWS, layout.pipeline)), "map": (12.0, 5.0)}.get(name, (9.0, 4.6))
    figure, axes = _new_figure(size)
    drawers[name](axes)
    figure.tight_layout()
    try:
        figure.savefig(str(path), dpi=120)
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be drawn to: {error}. Name a .png, .svg or .pdf file you may write.") from None


def _new_figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError("Pictures need matplotlib. Install it: pip install 'weft[plots]'.") from None
    figure = Figure(figsize=size)
    return figure, figure.add_subplot()


def _waterfall(axes: Axes, prediction: Prediction) -> None:
    """Bars that stand on one another, from the ideal on the left to the whole step on the right."""
    steps = waterfall(prediction.time)
    unit, scale = time_unit(prediction.time.total)
    bottom = 0.0
    for index, (_, seconds) in enumerate(steps):
        height = seconds * scale
        axes.bar(index, height, bottom=bottom, color=_INK if index == 0 else _COLOURS[1], width=0.7)
        axes.text(index, bottom + max(height, 0), format_number(height), ha="center", va="bottom", fontsize=8)
        bottom += height
    axes.bar(len(steps), bottom, color=_COLOURS[0], width=0.7)
    axes.text(len(steps), bottom, format_number(bottom), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(steps) + 1), [*(word.replace(" ", "\n") for word, _ in steps), "step"], fontsize=8)
    axes.set_ylabel(f"{unit} per step")
    axes.set_title(f"From the ideal to {format_number(bottom)} {unit} (± {prediction.spread * 100:.0f} %)")
    _tidy(axes)


def _memory(axes: Axes, prediction: Prediction) -> None:
    """One bar per pipeline rank, by kind, under the line of what a device has."""
    stages = prediction.stages
    bottoms = [0.0] * len(stages)
    names = [name for name, _ in memory_parts(stages[0].kinds)]
    rows = [[dict(memory_parts(stage.kinds))[name] for stage in stages] for name in names]
    rows += [[stage.reserved - stage.kinds.allocated for stage in stages], [s.device - s.reserved for s in stages]]
    for index, (name, sizes) in enumerate(zip([*names, "fragmentation", "communicators"], rows, strict=True)):
        if max(sizes) <= 0:
            continue
        heights = [size / _GIBI for size in sizes]
        colour = _COLOURS[index] if index < len(_COLOURS) else _LIGHT
        axes.bar([stage.rank for stage in stages], heights, bottom=bottoms, label=name, color=colour, width=0.8)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    usable = prediction.usable_bytes / _GIBI
    axes.axhline(usable, color=_COLOURS[3], linewidth=1.2)
    line = format_memory(prediction.usable_bytes)
    axes.text(len(stages) - 0.5, usable, line, ha="right", va="bottom", fontsize=8, color=_COLOURS[3])
    if len(stages) <= _MOST_ROWS:
        axes.set_xticks([stage.rank for stage in stages])
    axes.set(xlabel="pipeline rank", ylabel="GiB at the peak", title="Memory of each stage")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    _tidy(axes)


def _timeline(axes: Axes, spans: Sequence[ScheduleSpan]) -> None:
    """One row per pipeline rank; a box per action, with its microbatch where there is room."""
    assert spans, "a timeline needs a prediction with spans"
    unit, scale = time_unit(max(span.stop for span in spans))
    shown = [span for span in spans if span.rank < _MOST_ROWS]
    end = max(span.stop for span in shown)
    for span in shown:
        left, width = span.start * scale, (span.stop - span.start) * scale
        shade = 1.0 if span.chunk == 0 else 0.55
        axes.barh(
            span.rank, width, left=left, height=0.86, color=_ACTIONS.get(span.kind, _LIGHT), alpha=shade,
            edgecolor="white", linewidth=0.3,
        )  # fmt: skip
        if span.stop - span.start > end / 90 and span.microbatch >= 0:
            axes.text(left + width / 2, span.rank, str(span.microbatch), ha="center", va="center", fontsize=6)
    ranks = max(span.rank for span in shown) + 1
    cut = "" if ranks == max(span.rank for span in spans) + 1 else f" (the first {ranks})"
    axes.set(xlabel=unit, ylabel="pipeline rank", title=f"One step of every pipeline rank{cut}")
    axes.set_ylim(ranks - 0.4, -0.6)
    handles = [_patch(_ACTIONS[kind]) for kind in _ACTIONS if any(span.kind == kind for span in shown)]
    words = [kind.replace("_", " ") for kind in _ACTIONS if any(span.kind == kind for span in shown)]
    axes.legend(handles, words, frameon=False, fontsize=8, ncols=len(words), loc="lower right", bbox_to_anchor=(1, 1))
    _tidy(axes)


def _map(axes: Axes, layout: Layout, cluster: Cluster) -> None:
    """Devices of the first nodes as squares: coloured by stage, labelled with their place on the other axes."""
    mesh = MeshPlan(
        pipeline=layout.pipeline, replicate=layout.replicate, shard=layout.shard, context=layout.context,
        tensor=layout.tensor, order=layout.order,
    )  # fmt: skip
    per_node = cluster.nodes[0].devices.count
    shown = min(layout.world_size, max(per_node, _MOST_ROWS - _MOST_ROWS % per_node))
    for rank in range(shown):
        place = axis_coordinates(mesh, rank)
        column, row = rank % per_node, rank // per_node
        axes.add_patch(_square(column, row, _COLOURS[place["pipeline"] % len(_COLOURS)]))
        axes.text(column + 0.47, row + 0.47, _place(place, layout), ha="center", va="center", fontsize=6, color="white")
    rows = -(-shown // per_node)
    axes.set_xlim(-0.1, per_node)
    axes.set_ylim(rows, -0.1)
    axes.set_yticks([row + 0.47 for row in range(rows)], [f"node {row}" for row in range(rows)], fontsize=7)
    axes.set_xticks([])
    left = "" if shown == layout.world_size else f": the first {shown} of {layout.world_size:,} devices"
    axes.set_title(f"Who sits where{left} (colour: pipeline rank)")
    for side in axes.spines.values():
        side.set_visible(False)


def _place(place: Mapping[Axis, int], layout: Layout) -> str:
    short: tuple[tuple[str, Axis], ...] = (
        ("p", "pipeline"), ("r", "replicate"), ("s", "shard"), ("c", "context"), ("t", "tensor"),
    )  # fmt: skip
    words = [f"{letter}{place[axis]}" for letter, axis in short if getattr(layout, axis) > 1]
    return "\n".join([" ".join(words[:2]), " ".join(words[2:])]).strip() or "0"


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour)


def _square(column: int, row: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column, row), 0.94, 0.94, facecolor=colour, linewidth=0)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
