"""Run the schedules of all ranks on symbols instead of bytes: is the result right, who waits, what does it cost?

Every part of every rank holds a number that says what it is: for sums the set of ranks that are in it, as bits; else
where it comes from.  A sum that counts a rank twice, a part that is sent before it is there, a message that nobody
takes and a circle of waiting ranks are all found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from weft.comm.algorithms import Runs, Schedule, Step

ISSUE_SHARE = 0.25
"""Share of a latency after which a rank can issue one more message of a step."""
LinkSeconds = Callable[[int, int], tuple[float, float]]
"""(from, to) → seconds of a message, and of each byte."""


class ScheduleError(AssertionError):
    """A schedule does not do what its collective promises."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A message on its way from one rank to another."""

    source: int
    target: int
    runs: Runs
    """Parts, as the sender knows them."""
    phase: str
    num_bytes: float
    sent: float
    """Second at which its step began at the sender."""
    arrived: float


@dataclass(frozen=True, slots=True)
class Playback:
    """What ranks sent to others, and how long it took."""

    flights: tuple[Flight, ...]
    """Every message, in the order of arrival."""

    messages: tuple[int, ...]
    """Sent, by rank."""
    bytes_sent: tuple[float, ...]
    """Bytes that each rank sends."""
    steps: int
    """Steps of the rank that has most."""
    seconds: float
    """Time until the last rank is done."""


@dataclass(slots=True)
class _Rank:
    moves: Schedule
    parts: list[int]
    at: int = 0
    has_sent: bool = False
    """Whether the sends of the step that it is in are on their way."""
    clock: float = 0.0
    drained: float = 0.0
    """When the sends of this step have left."""
    port: float = 0.0
    """When the receiving side is free."""
    messages: int = 0
    bytes_sent: float = 0.0

    @property
    def step(self) -> Step | None:
        return self.moves.steps[self.at] if self.at < len(self.moves.steps) else None


@dataclass(frozen=True, slots=True)
class _Message:
    values: list[int]
    port_seconds: float
    """Time that its bytes keep a port busy."""
    arrival: float
    """Arrival of its last byte, if the receiver's port is free."""


@dataclass(slots=True)
class _World:
    ranks: list[_Rank]
    edges: tuple[int, ...]
    link: LinkSeconds
    has_one_port: bool
    step_seconds: float
    flights: list[Flight] = field(default_factory=list[Flight])
    wires: dict[tuple[int, int], deque[_Message]] = field(default_factory=dict[tuple[int, int], "deque[_Message]"])


def simulate(
    schedules: Sequence[Schedule],
    num_bytes: int,
    *,
    link: LinkSeconds | None = None,
    has_one_port: bool = True,
    step_seconds: float = 0.0,
) -> Playback:
    """Play the schedules of all ranks, by rank, of a buffer of so many bytes, and check what comes out.

    A message arrives its latency after it was sent, and its bytes pass the ports of both ends one after another;
    further messages of a step are issued a quarter of a latency apart.  That is what the cost formulas assume.

    Args:
        link: what links cost; by default nothing.
        has_one_port: whether a rank sends to all peers, and receives from all, through one port; else each pair of
            ranks has a link of its own.
        step_seconds: that a step takes at least, also of a rank that only sends.

    Raises:
        ScheduleError: a rank does not end with what the collective promises, or messages do not meet.
    """
    edges = schedules[0].bounds(num_bytes)
    ranks = [_Rank(moves, list(_before(moves))) for moves in schedules]
    world = _World(ranks, edges, link or (lambda source, target: (0.0, 0.0)), has_one_port, step_seconds)
    waiting = True
    while waiting:
        waiting, moved = False, False
        for rank in ranks:
            while rank.step is not None and _advance(world, rank):
                moved = True
            waiting = waiting or rank.step is not None
        if waiting and not moved:
            raise ScheduleError(f"ranks wait for one another: {_stuck(ranks)}")
    lost = [pair for pair, messages in world.wires.items() if messages]
    if lost:
        raise ScheduleError(f"messages that nobody takes, from and to ranks {lost[:4]}")
    for rank in ranks:
        _check(rank)
    return Playback(
        flights=tuple(sorted(world.flights, key=_arrival)),
        messages=tuple(rank.messages for rank in ranks),
        bytes_sent=tuple(rank.bytes_sent for rank in ranks),
        steps=max(len(rank.moves.steps) for rank in ranks),
        seconds=max(rank.clock for rank in ranks),
    )


def _arrival(flight: Flight) -> tuple[float, int, int]:
    return flight.arrived, flight.source, flight.target


def _advance(world: _World, rank: _Rank) -> bool:
    """Do what can be done of the step that a rank is in; whether that was anything."""
    step = rank.step
    assert step is not None
    moved = not rank.has_sent
    if moved:
        _send(world, rank, step)
        rank.has_sent = True
    me = rank.moves.rank
    wanted: dict[int, int] = {}
    for receive in step.receives:
        wanted[receive.peer] = wanted.get(receive.peer, 0) + 1
    if any(len(world.wires.get((peer, me), ())) < count for peer, count in wanted.items()):
        return moved
    _take(world, rank, step)
    rank.at += 1
    rank.has_sent = False
    return True


def _send(world: _World, rank: _Rank, step: Step) -> None:
    me, issued = rank.moves.rank, 0
    busy: dict[int, float] = {}
    for send in step.sends:
        values = [rank.parts[part] for part in _parts(send.runs)]
        if not all(values):
            raise ScheduleError(f"rank {me} sends parts {send.runs} to {send.peer} before it has them")
        size = sum(world.edges[stop] - world.edges[first] for first, stop in send.runs)
        wire = world.wires.setdefault((me, send.peer), deque())
        if send.peer == me:
            wire.append(_Message(values, 0.0, rank.clock))
            continue
        latency, per_byte = world.link(me, send.peer)
        port = -1 if world.has_one_port else send.peer
        free = busy.get(port, rank.clock)
        wait = issued * ISSUE_SHARE * latency if world.has_one_port else 0.0
        busy[port] = free + size * per_byte
        wire.append(_Message(values, size * per_byte, busy[port] + wait + latency))
        world.flights.append(Flight(me, send.peer, send.runs, step.phase, size, rank.clock, wire[-1].arrival))
        rank.messages, rank.bytes_sent, issued = rank.messages + 1, rank.bytes_sent + size, issued + 1
    rank.drained = max(busy.values(), default=rank.clock)


def _take(world: _World, rank: _Rank, step: Step) -> None:
    me, end = rank.moves.rank, max(rank.clock + world.step_seconds, rank.drained)
    found = [(receive, world.wires[receive.peer, me].popleft()) for receive in step.receives]
    taken: set[int] = set()
    for receive, message in found:
        parts = list(_parts(receive.runs))
        if len(parts) != len(message.values):
            raise ScheduleError(f"rank {me} awaits {receive.runs} from {receive.peer}, who sends {len(message.values)}")
        for part, value in zip(parts, message.values, strict=True):
            if receive.reduce and rank.parts[part] & value:
                raise ScheduleError(f"rank {me} adds a rank to part {part} that is in it already")
            if not receive.reduce and part in taken:
                raise ScheduleError(f"rank {me} gets part {part} twice in a step")
            rank.parts[part] = rank.parts[part] | value if receive.reduce else value
            taken.add(part)
    for _, message in sorted(found, key=lambda item: item[1].arrival):
        passed = message.arrival
        if world.has_one_port and message.port_seconds:
            passed = max(message.arrival, rank.port + message.port_seconds)
            rank.port = passed
        end = max(end, passed)
    rank.clock = end


def _parts(runs: Runs) -> Iterator[int]:
    for first, stop in runs:
        yield from range(first, stop)


def _before(moves: Schedule) -> Iterator[int]:
    """What a rank begins with, by part; 0 is nothing."""
    n, me, each = moves.members, moves.rank, moves.parts_per_member
    for part in range(moves.num_parts):
        if moves.collective in ("all_reduce", "reduce_scatter"):
            yield 1 << me
        elif moves.collective == "all_gather":
            yield 1 + me if part // each == me else 0
        elif moves.collective == "broadcast":
            yield int(me == moves.root)
        else:
            yield 1 + me * n + part // each


def _check(rank: _Rank) -> None:
    moves = rank.moves
    n, me, each = moves.members, moves.rank, moves.parts_per_member
    for part, value in enumerate(rank.parts):
        wanted = (1 << n) - 1
        if moves.collective == "reduce_scatter" and part // each != me:
            continue
        if moves.collective == "all_gather":
            wanted = 1 + part // each
        elif moves.collective == "broadcast":
            wanted = 1
        elif moves.collective == "all_to_all":
            wanted = 1 + part // each * n + me
        if value != wanted:
            raise ScheduleError(f"rank {me} ends with {value:#x} in part {part} instead of {wanted:#x}")


def _stuck(ranks: Sequence[_Rank]) -> str:
    waiting = [rank for rank in ranks if rank.step is not None]
    return "; ".join(
        f"rank {rank.moves.rank} in step {rank.at} ({rank.step.phase}) for {[r.peer for r in rank.step.receives]}"
        for rank in waiting[:4]
        if rank.step is not None
    )
