"""Pictures of a run for papers and slides, a file each: what the pages of `weft watch` draw, with the same figures.

Nothing is computed here.  Every picture is drawn from a block of a page, and its title is what the page says.  This is
the one file that needs matplotlib; it draws on `Figure` objects, and leaves pyplot and its settings alone.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from weft.errors import LaunchError
from weft.files import written_aside
from weft.formatting import format_number
from weft.watch.run_record import RunRecord
from weft.watch.views import Block, page_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PlotFormat = Literal["svg", "png", "pdf"]

_INK, _SOFT, _GRID = "#15191c", "#525b62", "#e4e8ea"
_SHADES = ("#0b6b73", "#6fabb0", "#bcd8da", "#525b62", "#98a2a8", "#d2d8db")
"""The accent colour, two lighter shades of it, and three greys: apart in print without colours, too."""
_PLACES = {"hidden": 2, "outside of phases": 5, "activations, process and the rest": 5}
"""Places of parts that stand back; others take a colour each in their order."""
_WIDTH_INCHES, _LINES_INCHES, _ROW_INCHES = 6.6, 2.7, 0.27
_MARGIN_INCHES = 0.1
_TITLE_LETTERS, _LINE_INCHES, _LEGEND_COLUMNS = 98, 0.17, 3
_DOTS_PER_INCH = 200


class Picture(NamedTuple):
    """One picture: the block of a page that it shows."""

    name: str
    """Name of its file, without the ending."""
    page: str
    title: str
    """Title of the block."""
    label: str
    """What its values are; the block has their unit."""
    begins_at_zero: bool = True


PICTURES: Sequence[Picture] = (
    Picture("loss", "training", "Loss", "loss", begins_at_zero=False),
    Picture("step-time", "overview", "Step time", "time per step"),
    Picture("states", "ranks", "States of each rank", "time per step"),
    Picture("tokens", "training", "Tokens per second", "tokens per second"),
    Picture("memory", "memory", "Memory by kind, fullest rank of each stage", "memory of a rank"),
    Picture("communication", "communication", "Exposed and hidden, by axis", "time per step"),
    Picture("plan", "plan", "Plan and measurement, by term", "time per step"),
)
"""All pictures, in their order."""
_BESIDE = {"Loss": "Validation loss"}
"""Block whose lines are drawn into the picture of another one."""


class DrawnPictures(NamedTuple):
    """What `write_plots` has done."""

    paths: Sequence[Path]
    """Files that were written."""
    missing: dict[str, str]
    """Why, by the names of the pictures that were not: the run has no data for them."""


def write_plots(record: RunRecord, folder: Path, kind: PlotFormat = "svg") -> DrawnPictures:
    """Write every picture of a run that there is data for, into a folder that is made where it is missing.

    Raises:
        LaunchError: matplotlib is not installed, or the folder cannot be written to.
    """
    _need_matplotlib()
    pages = {name: page_of(record, name)["blocks"] for name in {picture.page for picture in PICTURES}}
    paths: list[Path] = []
    missing: dict[str, str] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in PICTURES:
            blocks = {block["title"]: block for block in pages[picture.page]}
            shown = blocks.get(picture.title)
            if shown is None or not _has_data(shown):
                notes = [block["says"] for block in blocks.values() if block["kind"] == "note"]
                missing[picture.name] = notes[0] if notes else "The run has no such figures."
                continue
            path = folder / f"{picture.name}.{kind}"
            _save(picture_of(picture, shown, blocks.get(_BESIDE.get(picture.title, ""))), path, kind, record.name)
            paths.append(path)
    except OSError as error:
        raise LaunchError(
            f"{folder} cannot be written to: {error.strerror or error}. Name a folder you may write."
        ) from None
    return DrawnPictures(paths, missing)


def picture_of(picture: Picture, shown: Block, beside: Block | None = None) -> Figure:
    """Return the figure of a block of lines or bars; `beside` are further lines over the same steps."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # A number stays beside its unit.
    title = textwrap.wrap(re.sub(r"(?<=\d) (?=[%\w]{1,3}\b)", "\N{NO-BREAK SPACE}", shown["says"]), _TITLE_LETTERS)
    height = _LINES_INCHES
    if shown["kind"] == "bars":
        height = 0.75 + _ROW_INCHES * len(shown["rows"]) + _LINE_INCHES * (1 + len(_parts_of(shown)) // _LEGEND_COLUMNS)
    margins = ConstrainedLayoutEngine(w_pad=_MARGIN_INCHES, h_pad=0.6 * _MARGIN_INCHES)
    size = (_WIDTH_INCHES, height + _LINE_INCHES * len(title))
    figure = Figure(size, layout=margins, facecolor="white")
    figure.suptitle("\n".join(title), x=_MARGIN_INCHES / _WIDTH_INCHES, ha="left", fontsize=9, color=_INK,
                    linespacing=1.3, parse_math=False)  # fmt: skip
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_SOFT)
    axes.tick_params(labelsize=8, colors=_SOFT, length=3)
    axes.set_axisbelow(True)
    if shown["kind"] == "lines":
        _draw_lines(axes, picture, shown, beside)
    else:
        _draw_bars(axes, picture, shown)
    return figure


def _draw_lines(axes: Axes, picture: Picture, shown: Block, beside: Block | None) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    for series, colour in zip(shown["series"], _SHADES, strict=False):
        axes.plot(shown["x"], _with_nan(series["values"]), color=colour, linewidth=1.2, label=series["name"])
    if beside is not None:
        for series in beside["series"]:
            axes.plot(beside["x"], _with_nan(series["values"]), color=_INK, linewidth=0.9, marker="o", markersize=3.5,
                      label=series["name"])  # fmt: skip
    if shown["level"] is not None:
        axes.axhline(shown["level"]["value"], color=_INK, linewidth=0.9, linestyle=(0, (4, 3)),
                     label=shown["level"]["name"])  # fmt: skip
    for mark in shown["marks"]:
        axes.axvline(mark["x"], color=_SOFT, linewidth=0.8, linestyle=":")
        axes.annotate(mark["label"], (mark["x"], 1), xycoords=("data", "axes fraction"), xytext=(3, -2), va="top",
                      textcoords="offset points", fontsize=7, color=_SOFT, parse_math=False)  # fmt: skip
    if picture.begins_at_zero:
        axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if picture.begins_at_zero and axes.get_ylim()[1] >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_xlabel(shown["x_name"], fontsize=8, color=_INK)
    axes.set_ylabel(_with_unit(picture.label, shown), fontsize=8, color=_INK)
    _add_legend(axes)


def _draw_bars(axes: Axes, picture: Picture, shown: Block) -> None:
    rows = range(len(shown["rows"]))
    lefts = [0.0] * len(rows)
    for at, part in enumerate(_parts_of(shown)):
        widths = [value or 0.0 for value in part["values"]]
        colour = _SHADES[_PLACES.get(part["name"], at % len(_SHADES))]
        axes.barh(rows, widths, 0.72, lefts, color=colour, edgecolor="white", linewidth=0.6, label=part["name"])
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    plans = {row: value for row, value in enumerate(shown.get("against", ())) if value is not None}
    if plans:
        for colour, width, label in (("white", 3.6, None), (_INK, 1.6, "plan")):
            axes.plot(list(plans.values()), list(plans), linestyle="none", marker="|", markersize=16, color=colour,
                      markeredgewidth=width, label=label)  # fmt: skip
    for row, total in enumerate(shown["totals"]):
        end = max(lefts[row], plans.get(row, 0.0))
        axes.annotate("–" if total is None else format_number(total), (end, row), xytext=(5, 0),
                      textcoords="offset points", va="center", fontsize=7.5, color=_SOFT)  # fmt: skip
    axes.set_yticks(rows, shown["rows"], parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=_INK)
    axes.grid(axis="x", color=_GRID, linewidth=0.7)
    axes.set_xlabel(_with_unit(picture.label, shown), fontsize=8, color=_INK)
    if all(name[:1].isdigit() for name in shown["rows"]):
        axes.set_ylabel(shown["table"]["columns"][0]["name"], fontsize=8, color=_INK)
    _add_legend(axes)


def _parts_of(shown: Block) -> list[dict[str, Any]]:
    """Return the parts of which there is any."""
    return [part for part in shown["parts"] if any(part["values"])]


def _has_data(shown: Block) -> bool:
    if shown["kind"] == "lines":
        return any(value is not None for series in shown["series"] for value in series["values"])
    return shown["kind"] == "bars" and bool(_parts_of(shown))


def _with_unit(label: str, shown: Block) -> str:
    return f"{label} ({shown['unit']})" if shown["unit"] else label


def _with_nan(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _add_legend(axes: Axes) -> None:
    """Name what is drawn below the picture, unless it is one thing, which the label of the axis names."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        order = sorted(range(len(labels)), key=lambda at: labels[at] == "plan")
        legend = axes.figure.legend(
            [handles[at] for at in order], [labels[at] for at in order], loc="outside lower left", frameon=False,
            ncols=_LEGEND_COLUMNS, fontsize=8, handlelength=1.4, columnspacing=1.6, markerscale=0.6, labelcolor=_INK,
        )  # fmt: skip
        for text in legend.get_texts():
            text.set_parse_math(False)


def _save(figure: Figure, path: Path, kind: PlotFormat, name: str) -> None:
    # A run may have any name that a folder may have; XML has no control characters.
    about: dict[str, Any] = {"Title": "".join(each if each.isprintable() else "?" for each in name)}
    if kind == "svg":
        about["Date"] = None
    with written_aside(path) as aside:
        figure.savefig(aside, format=kind, dpi=_DOTS_PER_INCH, metadata=about)


def _need_matplotlib() -> None:
    try:
        import_module("matplotlib.figure")
    except ImportError:
        raise LaunchError('Pictures need matplotlib. Install it: pip install "weft[plots]"') from None
