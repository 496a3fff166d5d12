"""Operators of ranks that were profiled."""

from __future__ import annotations

from weft.formatting import format_seconds
from weft.watch.profiles import RankProfile, compare
from weft.watch.run_record import RunRecord
from weft.watch.views._blocks import Block, bars, number, rounded, table, text, time_scale

_MOST_OPERATORS = 16
_MOST_RANKS = 4


def profile_block(record: RunRecord) -> Block | None:
    """Return the operators of the newest profile, the first rank's beside the last one's; None where there is none."""
    shown = record.profiles[:_MOST_RANKS]
    if not shown:
        return None
    rows = compare(shown)[:_MOST_OPERATORS]
    names = [name for name, _ in rows]
    times = [[None if cell is None else cell.seconds for cell in row] for _, row in rows]
    unit, scale = time_scale([max((cell for row in times for cell in row if cell is not None), default=0.0)])
    first, last = shown[0], shown[-1]
    scaled = [[None if cell is None else cell * scale for cell in row] for row in times]
    title = f"Operators of rank {first.rank}"
    made = bars(
        title,
        _says(shown, times, names),
        "operator",
        names,
        {"own time": [row[0] for row in scaled]},
        unit=unit,
        total="",
    )
    calls = [max((cell.calls for cell in row if cell is not None), default=0.0) for _, row in rows]
    columns = [
        text("operator", names),
        *(number(f"rank {each.rank}", [row[at] for row in scaled], unit=unit) for at, each in enumerate(shown)),
        number("calls per step", calls),
    ]
    made |= {"table": table(columns), "key": "operators"}
    if last is first:
        return made
    return made | {"against": [rounded(row[-1]) for row in scaled]}


def _says(shown: list[RankProfile], times: list[list[float | None]], names: list[str]) -> str:
    first, last = shown[0], shown[-1]
    begin, end = first.steps
    says = f"Own time per step in {f'step {begin}' if begin == end else f'steps {begin} to {end}'}, which the profiler"
    says += f" has made longer ({format_seconds(first.step_seconds)} per step)."
    if last is first or not times:
        return says
    more = (times[0][0] or 0.0) - (times[0][-1] or 0.0)
    than = f"{format_seconds(abs(more))} per step {'more' if more >= 0 else 'less'} than on rank {last.rank}"
    return f"{says} The line in a bar is rank {last.rank}. The largest difference: {names[0]} takes {than}."
