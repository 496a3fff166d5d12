"""A schedule as rounds that a reader can follow, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.cluster import Collective
from weft.collective._arrange import Arrangement
from weft.collective._build import build_schedule
from weft.collective._registry import find_algorithm
from weft.collective._schedule import Runs, Schedule
from weft.collective.drawing._simulate import Flight, Playback, simulate

_MOST_MESSAGES = 16
"""Messages in a line of text, at most."""
_PART_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class Drawing:
    """A collective of all ranks, played out."""

    algorithm: str
    collective: Collective
    arrangement: Arrangement
    schedules: tuple[Schedule, ...]
    """Schedule of each rank."""
    outcome: Playback
    num_bytes: int
    """Bytes of the buffer that was played: equal parts."""

    @property
    def rounds(self) -> list[list[Flight]]:
        """Messages that travel at a time, if all take as long: the first that can go are the first round."""
        found: dict[float, list[Flight]] = {}
        for flight in self.outcome.flights:
            found.setdefault(flight.arrived, []).append(flight)
        return [sorted(found[when], key=_ends) for when in sorted(found)]


def _ends(flight: Flight) -> tuple[int, int, Runs]:
    return flight.source, flight.target, flight.runs


def play_out(
    algorithm: str,
    collective: Collective,
    arrangement: Arrangement,
    *,
    root: int = 0,
    pieces: int = 1,
    servers: int = 1,
) -> Drawing:
    """Return the collective over all ranks of an arrangement, for drawings.

    Raises:
        CollectiveError: as `build_schedule`.
    """
    n = arrangement.members
    schedules = tuple(
        build_schedule(
            algorithm, collective, rank, n, arrangement=arrangement, root=root, pieces=pieces, servers=servers
        )
        for rank in range(n)
    )
    size = schedules[0].num_parts * _PART_BYTES
    outcome = simulate(schedules, size, link=lambda source, target: (1.0, 0.0), has_one_port=False, step_seconds=1.0)
    return Drawing(algorithm, collective, arrangement, schedules, outcome, size)


def drawing_lines(drawing: Drawing) -> list[str]:
    """Return the drawing as text: what it is, what it costs, and who sends which parts to whom in every round."""
    found = find_algorithm(drawing.algorithm)
    n, outcome = drawing.arrangement.members, drawing.outcome
    rounds = drawing.rounds
    note = drawing.arrangement.note or "as the ranks are numbered"
    parts = drawing.schedules[0].num_parts
    most = max(outcome.bytes_sent, default=0.0) / drawing.num_bytes
    lines = [
        f"{drawing.algorithm} {drawing.collective} over {_counted(n, 'rank')}, {note}",
        f"for       {found.summary}",
        f"order     {_shortened([str(rank) for rank in drawing.arrangement.order], 24, ' ')}",
        *_places(drawing),
        f"buffer    {_counted(parts, 'part')}, numbered from 0",
        f"cost      {_counted(len(rounds), 'round')}; a rank sends up to {_counted(max(outcome.messages), 'message')} "
        f"and {most:.3g} × the buffer",
        "",
    ]
    for number, flights in enumerate(rounds, start=1):
        phases = ", ".join(dict.fromkeys(flight.phase for flight in flights))
        messages = [f"{flight.source}→{flight.target} [{parts_text(flight.runs)}]" for flight in flights]
        lines.append(f"round {number:<4}{phases:<28}{_shortened(messages, _MOST_MESSAGES, '  ')}")
    return lines


def parts_text(runs: Runs) -> str:
    """`0-3 8`: parts 0 to 3, and 8."""
    return " ".join(str(first) if stop == first + 1 else f"{first}-{stop - 1}" for first, stop in runs)


def _places(drawing: Drawing) -> list[str]:
    place = drawing.arrangement
    if drawing.algorithm.startswith("hierarchical"):
        return [f"nodes     {_shortened([str(size) for size in place.nodes], 24, ' ')} ranks"]
    if drawing.algorithm == "torus":
        return [f"grid      {place.shape[0]} × {place.shape[1]}"]
    return []


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _shortened(words: Sequence[str], most: int, between: str) -> str:
    rest = len(words) - most
    return between.join(words[:most]) + (f"{between}… and {rest:,} more" if rest > 0 else "")
