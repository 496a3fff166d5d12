"""`weft report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from weft.cli._options import write_output
from weft.errors import LaunchError

if TYPE_CHECKING:
    from weft.watch.plots import PlotFormat
    from weft.watch.run_record import RunRecord


def report(
    run: Path,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    plots: Path | None = None,
    format: Literal["svg", "png", "pdf"] | None = None,
) -> None:
    """Write the pages of weft watch as one HTML file, and pictures of them for a paper or slides.

    The file opens without a server or a network.

    Parameters
    ----------
    run
        Folder of the run, live or finished.
    output
        HTML file to write; by default report.html in the run's folder.
    plots
        Folder for pictures as well, a file each: loss, step-time, states, tokens, memory, communication, plan.
    format
        With --plots: svg, which is the default, png or pdf.
    """
    if format is not None and plots is None:
        raise LaunchError(f"--format {format} is of pictures. Name a folder for them: --plots pictures.")
    from weft.formatting import format_bytes
    from weft.watch.report import report_of
    from weft.watch.run_record import RunRecord

    record = RunRecord(run)
    text = report_of(record)
    path = output or run / "report.html"
    write_output(path, text, LaunchError)
    print(f"report    {path}   {format_bytes(len(text.encode()))}; its page “All pages” is the one to print")
    if plots is not None:
        _write_pictures(record, plots, format or "svg")
    record.close()


def _write_pictures(record: RunRecord, folder: Path, kind: PlotFormat) -> None:
    from weft.watch.plots import write_plots

    drawn = write_plots(record, folder, kind)
    names = ", ".join(path.name for path in drawn.paths)
    print(f"pictures  {names} in {folder}" if names else "pictures  none")
    for reason in dict.fromkeys(drawn.missing.values()):
        left_out = ", ".join(name for name, why in drawn.missing.items() if why == reason)
        print(f"left out  {left_out}: {reason}")
