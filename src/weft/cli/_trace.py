"""`weft trace`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weft.errors import LaunchError


def trace(
    run: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("trace.json.gz"),
    steps: str | None = None,
) -> None:
    """Write some steps of a run as a trace for Perfetto.

    What each rank did in them; chrome://tracing opens it, too.

    Every rank is a row with its place in the mesh, with lanes of computing, of the collectives of each axis and of
    waits; arrows follow microbatches through the stages of a pipeline. Of a long run, the newest kept steps are written
    that make up a million events.

    Parameters
    ----------
    run
        Folder of a run, live or finished.
    output
        File to write; compressed where its name ends with .gz.
    steps
        Range such as 100..120, 100.. or 120; by default all whose spans are kept.
    """
    from weft.formatting import format_bytes
    from weft.watch.run_record import RunRecord
    from weft.watch.trace import write_trace

    first, last = _range(steps)
    summary = write_trace(RunRecord(run), output, first=first, last=last)
    oldest, newest = min(summary.steps), max(summary.steps)
    taken = f"steps {oldest} to {newest}" if newest > oldest else f"step {newest}"
    print(
        f"{output}: {summary.num_events:,} events of {summary.num_ranks} ranks in {len(summary.steps)} kept steps"
        f" ({taken}), {format_bytes(output.stat().st_size)}"
    )
    if summary.left_out:
        print(f"{summary.left_out} older steps found no room; ask for them by --steps.")
    print("Open it in https://ui.perfetto.dev (the file stays in the browser), or in chrome://tracing.")


def _range(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    found = re.fullmatch(r"(\d+)(?:(\.\.)(\d*))?", text)
    if found is None:
        raise LaunchError(f"--steps {text} is no range of steps. Write 100..120, 100.. or 120.")
    first = int(found[1])
    last = int(found[3]) if found[3] else None if found[2] else first
    if last is not None and last < first:
        raise LaunchError(f"--steps {text} is empty: write {last}..{first}.")
    return first, last
