"""`weft report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weft.cli._options import write_output


def report(run: Path, /, *, output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None) -> None:
    """Write the pages of weft watch as one HTML file.

    It opens without a server or a network.

    Parameters
    ----------
    run
        Folder of the run, live or finished.
    output
        HTML file to write; by default report.html in the run's folder.
    """
    from weft.errors import LaunchError
    from weft.formatting import format_bytes
    from weft.watch.report import report_of
    from weft.watch.run_record import RunRecord

    record = RunRecord(run)
    text = report_of(record)
    record.close()
    path = output or run / "report.html"
    write_output(path, text, LaunchError)
    print(f"report    {path}   {format_bytes(len(text.encode()))}; its page “All pages” is the one to print")
