"""A schedule as rounds that a reader can follow, and as text."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

from weft.comm.algorithms._arrange import Arrangement
from weft.comm.algorithms._build import build_schedule
from weft.comm.algorithms._registry import find_algorithm
from weft.comm.algorithms._schedule import Runs, Schedule
from weft.config.cluster import Collective

_MOST_MESSAGES = 16
"""Messages in a line of text, at most."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A message on its way from one rank to another."""

    source: int
    target: int
    runs: Runs
    """Parts that it carries."""
    phase: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """A collective of all ranks, played out."""

    algorithm: str
    collective: Collective
    arrangement: Arrangement
    schedules: tuple[Schedule, ...]
    """Schedule of each rank."""
    rounds: list[list[Flight]]
    """Messages that travel at a time, if all take as long: the first that can go are the first round."""

    @property
    def most_messages(self) -> int:
        """Messages of the rank that sends most."""
        return max(Counter(flight.source for flights in self.rounds for flight in flights).values(), default=0)

    @property
    def most_sent(self) -> float:
        """What the rank sends that sends most, in buffers of equal parts."""
        parts: Counter[int] = Counter()
        for flights in self.rounds:
            for flight in flights:
                parts[flight.source] += sum(stop - first for first, stop in flight.runs)
        return max(parts.values(), default=0) / self.schedules[0].num_parts


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
    return Drawing(algorithm, collective, arrangement, schedules, _rounds(schedules))


def _rounds(schedules: Sequence[Schedule]) -> list[list[Flight]]:
    """Let every rank do its steps, of which each takes one tick, as a message does, or as long as it has to wait."""
    flights: defaultdict[int, list[Flight]] = defaultdict(list)
    arrivals: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
    """Ticks of the messages that have been sent, by sender and receiver."""
    ranks = {moves.rank: _Rank(moves) for moves in schedules}
    while any(rank.at < len(rank.moves.steps) for rank in ranks.values()):
        for me, rank in ranks.items():
            for number in count(rank.at):
                if number == len(rank.moves.steps):
                    break
                step = rank.moves.steps[number]
                if not rank.has_sent:
                    for send in step.sends:
                        if send.peer != me:
                            flights[rank.tick + 1].append(Flight(me, send.peer, send.runs, step.phase))
                        arrivals[me, send.peer].append(rank.tick + (send.peer != me))
                    rank.has_sent = True
                needed = Counter(receive.peer for receive in step.receives)
                if any(len(arrivals[peer, me]) < messages for peer, messages in needed.items()):
                    break
                came = [arrivals[receive.peer, me].popleft() for receive in step.receives]
                rank.tick = max([rank.tick + 1, *came])
                rank.at, rank.has_sent = number + 1, False
    return [sorted(flights[tick], key=attrgetter("source", "target", "runs")) for tick in sorted(flights)]


@dataclass(slots=True)
class _Rank:
    moves: Schedule
    at: int = 0
    """Number of the step that it is in."""
    has_sent: bool = False
    """Whether the messages of that step are on their way."""
    tick: int = 0
    """Tick at which that step began."""


def drawing_lines(drawing: Drawing) -> list[str]:
    """Return the drawing as text: what it is, what it costs, and who sends which parts to whom in every round."""
    method = find_algorithm(drawing.algorithm)
    n = drawing.arrangement.members
    rounds = drawing.rounds
    note = drawing.arrangement.note or "as the ranks are numbered"
    parts = drawing.schedules[0].num_parts
    lines = [
        f"{drawing.algorithm} {drawing.collective} over {_counted(n, 'rank')}, {note}",
        f"for       {method.summary}",
        f"order     {_shortened([str(rank) for rank in drawing.arrangement.order], 24, ' ')}",
        *_places(drawing),
        f"buffer    {_counted(parts, 'part')}, numbered from 0",
        f"cost      {_counted(len(rounds), 'round')}; a rank sends up to "
        f"{_counted(drawing.most_messages, 'message')} and {drawing.most_sent:.3g} × the buffer",
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
