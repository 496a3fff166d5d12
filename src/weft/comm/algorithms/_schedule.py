"""A schedule as data: which rank sends which parts of a buffer to whom, step by step.

A buffer is cut into *parts*, numbered from 0.  In one step a rank first posts all receives, then sends parts as they
were before the step, then adds up or puts away what has come; the next step begins when all of that is done.  Whoever
moves bytes (an executor, a simulator, a drawing) needs to know nothing else about an algorithm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from weft.config.cluster import Collective


Run = tuple[int, int]
"""[first, stop) of parts."""
Runs = tuple[Run, ...]
"""Parts of one message, in the order in which they travel."""
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Send:
    """Parts that go to a peer.  A rank may send to itself: that moves parts within its buffer, and no wire is used."""

    peer: int
    """Rank within the group."""
    runs: Runs


@dataclass(frozen=True, slots=True)
class Receive:
    """Parts that come from a peer.  The k-th receive from a peer takes the k-th message that the peer sends here."""

    peer: int
    runs: Runs
    reduce: bool = False
    """Whether they are combined with what is there, or replace it.  What several peers send for one part in one step is
    combined in the order of ranks, the receiver's own part among them, so that every rank gets the same bits."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does at a time."""

    phase: str
    """Name of the phase in errors and drawings: `reduce-scatter`, `fold in`, …"""
    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeRound:
    """What the ranks of one node do in one go where they share memory, in place of the messages between them."""

    kind: Literal["sum", "spread"]
    """`sum`: parts are summed over the node and come to lie with their owner.  `spread`: they go from their owner to
    all ranks of the node."""
    regions: tuple[Runs, ...]
    """Parts that each rank of the node owns, by its position within the node; nothing where it owns none."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """All that one rank does in a collective."""

    algorithm: str
    collective: Collective
    rank: int
    members: int
    num_parts: int
    """Parts of the buffer; of reduce-scatter, all-gather and all-to-all a multiple of `members`: each region alike."""
    root: int
    """Root of a broadcast; 0 otherwise."""
    steps: tuple[Step, ...]
    before: tuple[NodeRound, ...] = ()
    """Rounds of this rank's node before all steps, where its ranks share memory; the steps are then between nodes.  All
    ranks of a node take part in all of its rounds."""
    after: tuple[NodeRound, ...] = ()
    """Rounds of this rank's node after all steps."""

    @property
    def parts_per_member(self) -> int:
        """Parts of each rank's region, where the collective has regions."""
        return self.num_parts // self.members

    def bounds(self, num_elements: int) -> tuple[int, ...]:
        """Return where parts begin in a buffer, and its length at the end: near-equal parts, the longer ones first.

        Where the collective has regions, one per rank, the buffer is cut into them first, and each then into its parts.
        """
        if self.collective in ("all_reduce", "broadcast"):
            return cut(0, num_elements, self.num_parts)
        edges = cut(0, num_elements, self.members)
        return self.bounds_of_regions(tuple(zip(edges, edges[1:], strict=False)))

    def bounds_of_regions(self, regions: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """The same for regions that the caller chose: adjacent, one per rank, in their order."""
        bounds = [regions[0][0]]
        for start, stop in regions:
            assert start == bounds[-1], "regions must stand side by side"
            bounds += cut(start, stop, self.parts_per_member)[1:]
        return tuple(bounds)


@dataclass(frozen=True, slots=True)
class Line:
    """Ranks in the order in which an algorithm takes them, and where this rank stands among them."""

    ranks: Sequence[int]
    position: int

    def __len__(self) -> int:
        return len(self.ranks)

    def at(self, distance: int) -> int:
        """Return the rank that stands so many places on, around the circle."""
        return self.ranks[(self.position + distance) % len(self.ranks)]

    def backwards(self) -> Line:
        """Return the same ranks from the last to the first."""
        return Line(self.ranks[::-1], len(self.ranks) - 1 - self.position)

    def of(self, positions: Iterable[int]) -> Line:
        """Return some of the positions, this rank's among them, as a line of their own."""
        chosen = list(positions)
        return Line([self.ranks[position] for position in chosen], chosen.index(self.position))


def cut(start: int, stop: int, parts: int) -> tuple[int, ...]:
    """Return the parts + 1 edges of near-equal parts of [start, stop), the longer ones first."""
    share, longer = divmod(stop - start, parts)
    return tuple(start + index * share + min(index, longer) for index in range(parts + 1))


def singles(first: int, count: int) -> list[Runs]:
    """Return `count` blocks of one part each."""
    return [((part, part + 1),) for part in range(first, first + count)]


def joined(blocks: Iterable[Runs]) -> Runs:
    """Return the parts of several blocks as one block, in the order of parts, in as few runs as possible."""
    return _chained(sorted(run for block in blocks for run in block))


def chained(blocks: Iterable[Runs]) -> Runs:
    """The same in the order given."""
    return _chained(run for block in blocks for run in block)


def _chained(runs: Iterable[Run]) -> Runs:
    merged: list[Run] = []
    for first, stop in runs:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((first, stop))
    return tuple(merged)


def mirrored(steps: Sequence[Step], phase: str) -> list[Step]:
    """Return steps that undo others: run backwards, each send a receive and the other way round.

    What a reduce-scatter brings together an all-gather spreads along the same ways; likewise reduce and broadcast, and
    folding in and out.
    """
    return [
        Step(
            phase,
            sends=tuple(Send(receive.peer, receive.runs) for receive in step.receives),
            receives=tuple(Receive(send.peer, send.runs) for send in step.sends),
        )
        for step in reversed(steps)
    ]


def overlaid(first: Sequence[Step], second: Sequence[Step]) -> list[Step]:
    """Return the steps of two algorithms that run side by side on different parts, one of each at a time.

    Every rank must overlay the same two, and both must keep all ranks in step; then messages still meet.
    """
    idle = Step("")
    return [
        Step(one.phase or two.phase, (*one.sends, *two.sends), (*one.receives, *two.receives))
        for one, two in zip_longest(first, second, fillvalue=idle)
    ]


def turned_around(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Return the step within one rank's buffer with which in-place all-to-alls end that carry what travels d places in
    slot i + d of the rank at i: the slots i + d and i − d change places.  As many blocks for every rank."""
    n, i, parts = len(line), line.position, len(blocks) // len(line)

    def slot(distance: int) -> Sequence[Runs]:
        first = (i + distance) % n * parts
        return blocks[first : first + parts]

    turned = [distance for distance in range(1, n) if 2 * distance != n]
    if not turned:
        return []
    me = line.at(0)
    old = chained(block for distance in turned for block in slot(distance))
    new = chained(block for distance in turned for block in slot(-distance))
    return [Step("turn", (Send(me, old),), (Receive(me, new),))]


def timed(actions: Iterable[tuple[int, Send | Receive]], phase: str) -> list[Step]:
    """Return steps from messages with the tick at which they travel; ticks without any are left out.

    A message has one tick on both of its ends.  If a rank sends at a tick only what came at earlier ones, nothing can
    block: of all messages that wait, the earliest can go.
    """
    ticks: dict[int, tuple[list[Send], list[Receive]]] = {}
    for tick, message in actions:
        sends, receives = ticks.setdefault(tick, ([], []))
        if isinstance(message, Send):
            sends.append(message)
        else:
            receives.append(message)
    # Both ends sort alike, so that several messages between two ranks at one tick meet in order.
    return [
        Step(phase, tuple(sorted(sends, key=_order)), tuple(sorted(receives, key=_order)))
        for _, (sends, receives) in sorted(ticks.items(), key=_tick)
    ]


def _order(message: Send | Receive) -> tuple[int, Runs]:
    return message.peer, message.runs


def _tick(item: tuple[int, object]) -> int:
    return item[0]
