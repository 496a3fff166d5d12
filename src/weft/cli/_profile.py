"""`weft profile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.watch.profiles import RankProfile

_MOST_ROWS = 15
_NAME_WIDTH = 44


def profile(run: Path, /, *, ranks: str = "suspects", steps: int = 3) -> None:
    """Profile some steps of a training that runs.

    Ranks run torch.profiler for their next steps, and go on. Printed is what each operator took; the traces stay in the
    run's folder.

    Parameters
    ----------
    run
        Folder of the run.
    ranks
        `suspects`, which are those that hold the run back and one healthy rank beside them; `all`; or numbers such as
        0,3.
    steps
        Steps to profile, 1 to 100.
    """
    from weft.watch.profile_run import profile_run, ranks_to_profile
    from weft.watch.run_record import RunRecord

    record = RunRecord(run)
    try:
        chosen = ranks_to_profile(record, ranks)
        named = ", ".join(map(str, chosen.ranks))
        print(
            f"profile   {steps} steps of rank{'s' if len(chosen.ranks) > 1 else ''} {named} ({chosen.why})", flush=True
        )
        found = profile_run(record, chosen.ranks, steps)
    finally:
        record.close()
    missing = sorted(set(chosen.ranks) - {each.rank for each in found})
    if missing:
        print(f"note      nothing came from rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}")
    print("\n".join(_lines(found)))


def _lines(found: Sequence[RankProfile]) -> list[str]:
    from weft.formatting import format_seconds
    from weft.watch.profiles import compare

    shown = found[:4]
    heads = [f"rank {each.rank}" for each in shown]
    lines = [
        f"steps     {first} to {last} of rank {each.rank}: {format_seconds(each.step_seconds)} per step"
        for each in shown
        for first, last in [each.steps]
    ]
    lines += ["", f"{'ms per step':{_NAME_WIDTH}}" + "".join(f"{head:>11}" for head in heads) + f"{'calls':>9}"]
    for name, times in compare(shown)[:_MOST_ROWS]:
        short = name if len(name) < _NAME_WIDTH else name[: _NAME_WIDTH - 2] + "…"
        cells = "".join("          –" if each is None else f"{1e3 * each.seconds:>11.3f}" for each in times)
        calls = max(each.calls for each in times if each is not None)
        lines.append(f"{short:{_NAME_WIDTH}}{cells}{calls:>9.4g}")
    lines += ["", *(f"trace     {each.trace}" for each in found)]
    return [*lines, "Open a trace in https://ui.perfetto.dev (the file stays in the browser), or in chrome://tracing."]
