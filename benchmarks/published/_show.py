"""A report on the terminal."""

from __future__ import annotations

import sys

from benchmarks.published._report import Report


def show(report: Report) -> None:
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
