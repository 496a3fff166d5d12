"""Hierarchical: inside each node first, then across nodes with a share of the bytes, then inside again.

    2 nodes × 3 ranks, parts a to c

      inside    node 0: rank 0 sums a, rank 1 sums b, rank 2 sums c; node 1: likewise ranks 3, 4, 5
      across    rank 0 ◄ a ► 3      rank 1 ◄ b ► 4      rank 2 ◄ c ► 5        three all-reduces side by side
      inside    ranks 0, 1, 2 hand their sums around; ranks 3, 4, 5 likewise

Each byte crosses between nodes as rarely as possible, and all ranks of a node use the network at once, each for its own
column: rank k of every node, which on a rail network share a switch.  The way where links between nodes are much slower
than those inside.

Reduce-scatter and all-gather are the halves of this.  A broadcast goes to one rank of each node and then down a tree
inside.  In an all-to-all ranks first hand each column of their node what is for that column of any node; then columns
exchange it, in one message for a whole node.  For that nodes count as several of one size that divides them all.

Nodes may be of unequal size.  There are as many columns as the smallest node has ranks; the other ranks of larger nodes
hand in what they have and are handed the result.  Inside a node all ranks talk to all (`direct`); across, any algorithm
does that defines the collective: by default a ring, a tree for broadcasts, and `direct` for an all-to-all.  Where the
ranks of a node share memory, their part (but of an all-to-all) needs no messages: `Inside` says of each level what they
send one another, or sum and hand around there, before and after the same messages across.

Source: Horovod's hierarchical all-reduce (Sergeev and Del Balso, 2018, arXiv 1802.05799); Jain and Sabharwal, "Optimal
bucket algorithms for large MPI collectives on torus interconnects", ICS 2010, for one level after the other; the
all-to-all: Rajbhandari et al., "DeepSpeed-MoE", ICML 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from weft.comm.algorithms import direct, tree
from weft.comm.algorithms._cost import issue_seconds
from weft.comm.algorithms._schedule import Line, NodeRound, Receive, Runs, Send, Step, chained, joined, mirrored

OuterCost = Callable[[int, float, float, float], float]
"""Prices a collective across nodes: (nodes, bytes, latency, per_byte) → seconds."""
Outer = Callable[[Line, Sequence[Runs]], list[Step]]
"""Does it: over one rank of each node, with as many blocks as it needs.  A broadcast's line begins with the root."""
_INSIDE, _ACROSS = "inside the node", "across nodes"


def all_reduce_seconds(
    nodes: Sequence[int],
    size_bytes: float,
    inside: tuple[float, float],
    across: tuple[float, float],
    outer: OuterCost,
) -> float:
    """2[α + (g−2)o + (g−1)/g·Sβ] inside + an all-reduce of S/g across m nodes; g: ranks of the smallest node.

    `inside` and `across` are (latency, per_byte) of the two kinds of links; `outer` prices the all-reduce across.
    In a node of k > g ranks the g owners take in more, (k−1)/g·Sβ, and hand it out to as many.
    """
    crossing = outer(len(nodes), size_bytes / min(nodes), *across) if len(nodes) > 1 else 0.0
    return 2 * _inner_seconds(nodes, size_bytes, inside) + crossing


def _inner_seconds(nodes: Sequence[int], size_bytes: float, inside: tuple[float, float]) -> float:
    """Return the seconds of summing to the columns' owners, or spreading from them, in the largest node."""
    columns, largest = min(nodes), max(nodes)
    latency, per_byte = inside
    if largest == 1:
        return 0.0
    return latency + issue_seconds(largest, latency) + (largest - 1) / columns * size_bytes * per_byte


def half_seconds(
    nodes: Sequence[int],
    size_bytes: float,
    inside: tuple[float, float],
    across: tuple[float, float],
    outer: OuterCost,
) -> float:
    """α + (g−2)o + (g−1)/g·Sβ inside + `outer`'s half of S/g across m nodes, for nodes of g ranks.

    Unequal nodes need one more message inside, for ranks beyond the smallest node's.
    """
    columns, largest = min(nodes), max(nodes)
    latency, per_byte = inside
    handed = (-(-largest // columns) - 1) / sum(nodes) * size_bytes
    extra = latency + handed * per_byte if largest > columns else 0.0
    crossing = outer(len(nodes), size_bytes / columns, *across) if len(nodes) > 1 else 0.0
    return _inner_seconds(nodes, size_bytes, inside) + crossing + extra


def broadcast_seconds(
    nodes: Sequence[int],
    size_bytes: float,
    inside: tuple[float, float],
    across: tuple[float, float],
    outer: OuterCost,
) -> float:
    """`outer`'s broadcast across m nodes, by default ⌈log₂m⌉(α + Sβ); then ⌈log₂g⌉(α + Sβ) inside the largest."""
    crossing = outer(len(nodes), size_bytes, *across) if len(nodes) > 1 else 0.0
    return crossing + tree.broadcast_seconds(max(nodes), size_bytes, *inside)


def all_to_all_seconds(
    nodes: Sequence[int],
    size_bytes: float,
    inside: tuple[float, float],
    across: tuple[float, float],
    outer: OuterCost,
) -> float:
    """α + (g−2)o + (g−1)/g·Sβ inside + `outer`'s all-to-all of S across n/g nodes; g divides the ranks of all nodes."""
    size = math.gcd(*nodes)
    inner = direct.all_to_all_seconds(size, size_bytes, *inside) if size > 1 else 0.0
    groups = sum(nodes) // size
    return inner + (outer(groups, size_bytes, *across) if groups > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class Place:
    """The node of a rank, and its position within the node."""

    line: Line
    nodes: tuple[int, ...]
    """Ranks of each node; the line goes through them one after another."""

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.nodes))

    @property
    def columns(self) -> int:
        return min(self.nodes)

    @property
    def node(self) -> int:
        return next(index for index, stop in enumerate(self.starts[1:]) if self.line.position < stop)

    @property
    def within(self) -> int:
        """Position within the node."""
        return self.line.position - self.starts[self.node]

    def inner(self) -> Line:
        """The ranks of this rank's node."""
        return self.line.of(range(self.starts[self.node], self.starts[self.node + 1]))

    def outer(self) -> Line:
        """The ranks at this rank's position in their nodes."""
        return self.line.of(start + self.within for start in self.starts[:-1])


@dataclass(frozen=True, slots=True)
class Inside:
    """One level of a rank inside its node: the messages, and the same over memory that the node's ranks share."""

    steps: list[Step]
    rounds: tuple[NodeRound, ...]


@dataclass(frozen=True, slots=True)
class Levels:
    """The three levels of a rank: inside its node, across nodes, and inside again."""

    before: Inside
    across: list[Step]
    after: Inside

    @property
    def steps(self) -> list[Step]:
        """Everything by messages."""
        return [*self.before.steps, *self.across, *self.after.steps]


_NOTHING = Inside([], ())


def all_reduce(line: Line, nodes: tuple[int, ...], columns: Sequence[Sequence[Runs]], outer: Outer) -> Levels:
    """`columns[k]` holds the blocks that `outer` needs for an all-reduce over the nodes."""
    place = Place(line, nodes)
    shares = [joined(blocks) for blocks in columns]
    # Rank k of each node owns column k, so all ranks of a node use the network at once, each with 1/columns of the
    # bytes.
    across = outer(place.outer(), columns[place.within]) if place.within < place.columns else []
    return Levels(_summed(place, shares), _named(across, _ACROSS), _spread(place, shares))


def reduce_scatter(line: Line, nodes: tuple[int, ...], blocks: Sequence[Runs], outer: Outer) -> Levels:
    """Leave the sum of the i-th of n blocks with the rank at position i."""
    place, whole = Place(line, nodes), _whole(line, blocks)
    start, size, columns = place.starts[place.node], place.nodes[place.node], place.columns
    # Over memory each rank beyond the columns gets all that is for them.
    beyond = {k: joined(whole[start + k + columns : start + size : columns]) for k in range(columns)}
    after = Inside(_hand_out(place, whole), _rounds(place, beyond) if size > columns else ())
    return Levels(_summed(place, _shares(place, whole)), _half_across(place, blocks, outer), after)


def all_gather(line: Line, nodes: tuple[int, ...], blocks: Sequence[Runs], outer: Outer) -> Levels:
    """Spread the block of each rank to all, as the reduce-scatter backwards."""
    place, whole = Place(line, nodes), _whole(line, blocks)
    start, size = place.starts[place.node], place.nodes[place.node]
    beyond = {within: whole[start + within] for within in range(place.columns, size)}
    before = Inside(mirrored(_hand_out(place, whole), _INSIDE), _rounds(place, beyond) if beyond else ())
    return Levels(before, _half_across(place, blocks, outer), _spread(place, _shares(place, whole)))


def broadcast(line: Line, nodes: tuple[int, ...], blocks: Sequence[Runs], root: int, outer: Outer) -> Levels:
    """Send from the rank at position `root` to one rank of each node, then down a tree inside each node."""
    place = Place(line, nodes)
    start, size = place.starts[place.node], nodes[place.node]
    head = _heads(place, root)[place.node]
    inner = line.of(start + (head - start + index) % size for index in range(size))
    down = _named(tree.broadcast(inner, joined(blocks)), _INSIDE)
    after = Inside(down, _rounds(place, {head - start: joined(blocks)}))
    return Levels(_NOTHING, _broadcast_across(place, blocks, root, outer), after)


def all_to_all(line: Line, nodes: tuple[int, ...], blocks: Sequence[Runs], outer: Outer) -> list[Step]:
    """Send the blocks of j to the rank at position j, which finds them in the place of i: in place.

    Inside the node what is for column y goes to its rank there, and lies in the place of its sender: so what is for one
    node lies together, and comes from one.
    """
    # Unequal nodes count as several of one size that divides them all, so that every column has one rank in each.
    size, parts = math.gcd(*nodes), len(blocks) // len(line)
    place = Place(line, (size,) * (len(line) // size))
    within, count = range(size), len(place.nodes)
    whole = _whole(line, blocks)
    by_column = [chained(whole[node * size + column] for node in range(count)) for column in within]
    by_node = [
        chained(blocks[(node * size + column) * parts + part] for column in within)
        for node in range(count)
        for part in range(parts)
    ]
    inside = _named(direct.all_to_all(place.inner(), by_column), _INSIDE)
    return [*inside, *_named(outer(place.outer(), by_node), _ACROSS)]


def _summed(place: Place, shares: Sequence[Runs]) -> Inside:
    """Leave the node's sum of each column's share with the column's rank."""
    steps = direct.gather_sums(place.inner(), range(place.columns), shares)
    return Inside(_named(steps, _INSIDE), (NodeRound("sum", _regions(place, dict(enumerate(shares)))),))


def _spread(place: Place, shares: Sequence[Runs]) -> Inside:
    """Spread each column's share from its rank to all ranks of the node."""
    steps = direct.spread_sums(place.inner(), range(place.columns), shares)
    return Inside(_named(steps, _INSIDE), _rounds(place, dict(enumerate(shares))))


def _rounds(place: Place, owned: Mapping[int, Runs]) -> tuple[NodeRound, ...]:
    return (NodeRound("spread", _regions(place, owned)),)


def _half_across(place: Place, blocks: Sequence[Runs], outer: Outer) -> list[Step]:
    """Return the steps across nodes of a reduce-scatter or all-gather.

    The first blocks of all ranks of a node count as one block there, their second blocks as another, and so on.
    """
    if place.within >= place.columns:
        return []
    num_parts = len(blocks) // len(place.line)
    kinds = [_owned(place, blocks[part::num_parts], place.within) for part in range(num_parts)]
    parts = [joined(kind[node]) for node in range(len(place.nodes)) for kind in kinds]
    return _named(outer(place.outer(), parts), _ACROSS)


def _broadcast_across(place: Place, blocks: Sequence[Runs], root: int, outer: Outer) -> list[Step]:
    heads, home = _heads(place, root), _home(place, root)
    turned = [heads[(home + index) % len(heads)] for index in range(len(heads))]
    if place.line.position not in turned:
        return []
    return _named(outer(place.line.of(turned), blocks), _ACROSS)


def _whole(line: Line, blocks: Sequence[Runs]) -> list[Runs]:
    """Return the region of each rank as one block."""
    parts = len(blocks) // len(line)
    return [joined(blocks[start : start + parts]) for start in range(0, len(blocks), parts)]


def _home(place: Place, root: int) -> int:
    """The node of the rank at position `root`."""
    return next(index for index, stop in enumerate(place.starts[1:]) if root < stop)


def _heads(place: Place, root: int) -> list[int]:
    """Return the position of each node's rank that talks to other nodes: the root, and elsewhere the first."""
    heads = [*place.starts[:-1]]
    heads[_home(place, root)] = root
    return heads


def _shares(place: Place, blocks: Sequence[Runs]) -> list[Runs]:
    """Return, for each column, the blocks of all nodes that pass through it."""
    return [
        joined(block for node in _owned(place, blocks, column) for block in node) for column in range(place.columns)
    ]


def _regions(place: Place, owned: Mapping[int, Runs]) -> tuple[Runs, ...]:
    """Return the runs that each rank of this node owns; `owned` is by position within the node."""
    return tuple(owned.get(within, ()) for within in range(place.nodes[place.node]))


def _owned(place: Place, blocks: Sequence[Runs], column: int) -> list[list[Runs]]:
    """Return the blocks that pass through a column, by node.

    They are those of the column's rank and of every `columns`-th rank beyond, in nodes larger than the smallest.
    """
    return [
        [blocks[start + within] for within in range(column, size, place.columns)]
        for start, size in zip(place.starts, place.nodes, strict=False)
    ]


def _hand_out(place: Place, blocks: Sequence[Runs]) -> list[Step]:
    """Return the steps that hand the sums of ranks beyond the columns from the columns' ranks to them."""
    start, size, columns = place.starts[place.node], place.nodes[place.node], place.columns
    if place.within >= columns:
        owner = place.line.ranks[start + place.within % columns]
        return [Step(_INSIDE, receives=(Receive(owner, blocks[place.line.position]),))]
    beyond = range(place.within + columns, size, columns)
    sends = tuple(Send(place.line.ranks[start + within], blocks[start + within]) for within in beyond)
    return [Step(_INSIDE, sends=sends)] if sends else []


def _named(steps: Sequence[Step], phase: str) -> list[Step]:
    return [Step(phase, step.sends, step.receives) for step in steps]
