"""What hosts tell one another: who they are, which ranks each has in a generation, and how these ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.events.progress import Position
from weft.run.launch._report import is_secondary_or_timeout
from weft.run.launch.job_end import HOST_LOST, JobEnd, RankExit
from weft.run.launch.launcher import HostPart


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host says of itself when it joins."""

    host: str
    """Its name, for people."""
    address: str
    """Where the others reach it."""
    num_devices: int
    """Ranks that it can have: its accelerators, or its share of the processors."""
    accelerator: str = ""
    """Kind of its accelerators; empty: the ranks compute on processors."""
    version: str
    """Weft's."""
    recipe: str = ""
    """Digest of the recipe that it was started with; empty: it was started with a script."""
    script: str = ""
    """Digest of the script, and of its command line."""
    index: int = 0
    """Its number by the place that started it."""
    topology: tuple[str, ...] = ()
    """Where it lies, from the outside in, as its place names it; empty: nobody has said."""

    def difference(self, other: HostFacts) -> str:
        """Say what keeps two hosts from being in one job; empty: nothing."""
        for what in ("recipe", "script", "version", "accelerator"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                return (
                    f"host {self.host} was started with another {what} ({mine or 'none'}) than host {other.host}"
                    f" ({theirs or 'none'}). Start the same on all hosts."
                )
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A host's place in a generation."""

    member: str
    """Its name in the registry."""
    host: str
    first_rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """One generation of a job on several hosts: what each is to start."""

    number: int
    """Counted from 1 over all generations of the job, whoever led them."""
    seats: tuple[Seat, ...]
    """Seats in the order of their ranks; the first is the leader's."""
    store: str
    """Address of the store at which the ranks meet: a new one for each generation."""
    function: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    threads_per_rank: int
    stopped_timeout_seconds: float
    hang_seconds: float | None
    collective_timeout_seconds: float
    collector: str = ""
    """Where the leader collects what ranks record, and the number that the generation has there, as
    `10.0.0.1:40123/2`; empty: nowhere."""

    @property
    def world_size(self) -> int:
        return sum(seat.num_ranks for seat in self.seats)

    def seat_of(self, member: str) -> Seat | None:
        """The seat of a host; None for one that only waits."""
        return next((seat for seat in self.seats if seat.member == member), None)

    def part_of(self, seat: Seat) -> HostPart:
        """What the launcher of a host must know."""
        return HostPart(
            first_rank=seat.first_rank,
            world_size=self.world_size,
            store=self.store,
            number=self.seats.index(seat),
            num_hosts=len(self.seats),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Roster:
        """Raises `KeyError`, `TypeError` or `ValueError` where it is none."""
        values: dict[str, Any] = {**content, "seats": tuple(Seat(**seat) for seat in content["seats"])}
        return cls(**values)


def end_to_json(end: JobEnd) -> dict[str, Any]:
    """Return the end of one host's ranks as what JSON can hold."""
    return {**asdict(end), "signals": [int(number) for number in end.signals]}


def end_of_json(content: dict[str, Any]) -> JobEnd:
    """Raises `KeyError`, `TypeError` or `ValueError` where it is none."""
    cause: dict[str, Any] | None = content["cause"]
    outcomes: dict[str, dict[str, Any] | None] = content["outcomes"]
    positions: dict[str, dict[str, Any]] = content["positions"]
    read: dict[str, Any] = {
        "cause": None if cause is None else RankExit(**cause),
        "outcomes": {int(rank): None if each is None else RankExit(**each) for rank, each in outcomes.items()},
        "signals": tuple(signal.Signals(number) for number in content["signals"]),
        "positions": {int(rank): Position(**each) for rank, each in positions.items()},
    }
    return JobEnd(**{**content, **read})


def in_order(members: Mapping[str, HostFacts], blocks: Sequence[tuple[int, int]] = ()) -> dict[str, HostFacts]:
    """Return hosts in the order of their ranks: those that lie together follow one another, so that the inner axes of
    a mesh stay together.  The first stays the first: it leads, and has rank 0.

    Args:
        blocks: for each tier of links between hosts the number of hosts of a block, and how many tiers lie inside that
            one; the smallest first.  As many blocks as can be are whole: what is left over in a unit comes last.
    """
    if not members:
        return {}
    leader = next(iter(members))
    home = members[leader].topology

    def distance(item: tuple[str, HostFacts]) -> tuple[int, tuple[str, ...], int]:
        """How far from the leader, and then by name of the unit, and by number."""
        name, facts = item
        shared = 0
        for mine, its in zip(home, facts.topology, strict=False):
            if mine != its:
                break
            shared += 1
        return (-1 - len(home) if name == leader else -shared, facts.topology, facts.index)

    order = _whole_first([name for name, _ in sorted(members.items(), key=distance)], members, blocks)
    for size in (*(size for size, _ in reversed(blocks)), 1):
        # The leader's block comes to the front.  One that is not full takes hosts of the block before it.
        first = max(0, min(order.index(leader) // size * size, len(order) - size))
        order = [*order[first : first + size], *order[:first], *order[first + size :]]
    return {name: members[name] for name in order}


def _whole_first(
    order: Sequence[str], members: Mapping[str, HostFacts], blocks: Sequence[tuple[int, int]]
) -> list[str]:
    """Return hosts with those that make whole blocks in front, and in them those of the smaller blocks."""
    if not blocks:
        return list(order)
    *inner, (size, level) = blocks
    units: dict[tuple[str, ...], list[str]] = {}
    for name in order:
        units.setdefault(unit_of(members[name].topology, level), []).append(name)
    whole, rest = list[str](), list[str]()
    for names in units.values():
        number = len(names) // size * size
        packed = _whole_first(names, members, inner)
        whole += packed[:number]
        rest += packed[number:]
    return whole + _whole_first(rest, members, inner)


def unit_of(topology: tuple[str, ...], level: int) -> tuple[str, ...]:
    """Return the unit of a tier in which a host lies: 0 for the innermost tier, whose name is the last of the path."""
    return topology[: max(1, len(topology) - level)]


def seats_of(members: Mapping[str, HostFacts], world_size: int) -> tuple[Seat, ...]:
    """Share ranks out over hosts, in their order: evenly where that is possible, else as many as each can have.  A host
    that gets none is left out."""
    room = [facts.num_devices for facts in members.values()]
    even, rest = divmod(world_size, len(room))
    if not rest and even <= min(room):
        shares = [even] * len(room)
    else:
        shares, left = [], world_size
        for devices in room:
            shares.append(min(devices, left))
            left -= shares[-1]
        shares[-1] += left  # more ranks than devices: the plan was checked, so they share processors
    seats: list[Seat] = []
    first = 0
    for (member, facts), share in zip(members.items(), shares, strict=True):
        if share:
            seats.append(Seat(member=member, host=facts.host, first_rank=first, num_ranks=share))
            first += share
    return tuple(seats)


def merged(ends: Mapping[str, JobEnd], order: Sequence[str], world_size: int) -> JobEnd:
    """Return the end of a job from the ends of its hosts.  `order` names those that failed, the first in front."""
    causes = [cause for member in order if (cause := ends[member].cause) is not None]
    # What another host's loss has made of a rank says less than the loss itself, whichever was heard of first; and a
    # rank that its own host has killed, because another's had failed, says nothing.
    killed = {id(ends[member].cause) for member in order if ends[member].was_ended}

    def order_of(cause: RankExit) -> tuple[bool, bool, bool]:
        return id(cause) in killed, cause.error != HOST_LOST, is_secondary_or_timeout(cause)

    cause = min(causes, key=order_of, default=None)
    signals = tuple(dict.fromkeys(number for end in ends.values() for number in end.signals))
    return JobEnd(
        num_processes=world_size,
        outcomes={rank: outcome for end in ends.values() for rank, outcome in end.outcomes.items()},
        cause=cause,
        signals=signals,
        has_failed_rank=any(end.has_failed_rank for end in ends.values()),
        positions={rank: place for end in ends.values() for rank, place in end.positions.items()},
    )
