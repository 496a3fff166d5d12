"""`weft plan validate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from weft.errors import DataError

if TYPE_CHECKING:
    from weft.published import Report


def validate(
    file: Path,
    /,
    *,
    mode: Literal["datasheet", "fitted"] = "fitted",
    json: Path | None = None,
    cross_validate: Annotated[bool, Parameter(negative=())] = False,
    few_shot: int = 0,
) -> None:
    """Predict published runs, and say how far the predictions lie from what was measured.

    Parameters
    ----------
    file
        CSV file of runs: one line each, with its layout and what was measured.
    mode
        What predictions know: data sheets alone, or the constants that ship with Weft. Neither learns from FILE.
    json
        File to write the predictions to: a list of row, step_time_s, peak_mem_gib and refused.
    cross_validate
        With --mode fitted: fit anew for each family of rows, on all other families of FILE.
    few_shot
        So many rows of each family set one scalar for it; they are not scored.
    """
    from weft.published import dump_forecasts, report_of
    from weft.published import validate as run

    validation = run(file, mode, cross_validate=cross_validate, few_shot=few_shot)
    if json is not None:
        try:
            json.write_text(dump_forecasts(validation))
        except OSError as error:
            raise DataError(f"{json} cannot be written: {error.strerror}. Name a file you may write.") from None
    _show(report_of(validation))


def _show(report: Report) -> None:
    """Print a table that suits the terminal, or columns of plain text."""
    if sys.stdout.isatty():
        _show_rich(report)
        return
    print(report.title)
    rows = [report.header, *report.table]
    widths = [max(len(row[place]) for row in rows) for place in range(len(report.header))]
    for row in rows:
        name, *figures = (
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join((name, *figures)).rstrip())
    print("\n".join(report.lines))


def _show_rich(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=report.title, title_justify="left", header_style="bold")
    for place, name in enumerate(report.header):
        table.add_column(name, justify="right" if place else "left", no_wrap=not place)
    for place, row in enumerate(report.table):
        table.add_row(*row, style="bold" if place == len(report.table) - 1 else None)
    console = Console()
    console.print(table)
    for line in report.lines:
        console.print(line, highlight=False, markup=False)
