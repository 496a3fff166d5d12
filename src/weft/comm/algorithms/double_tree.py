"""Double tree: two binary trees over the same ranks, each with half of the tensor, in small pieces.

    7 ranks; ranks that are leaves of one tree are inner nodes of the other

           3                   2               first half: the left tree; second half: the right one
         /   \\               /   \\
        1     5             0     4            pieces go up, summed on the way, and down again;
       / \\   / \\           / \\   / \\           while one goes up, others go down
      0   2 4   6         6   1 3   5

A single pipelined binary tree leaves half of its ranks, the leaves, without anything to send; the second tree gives
them their work.  As fast as a ring for bytes and as a tree for latency, which makes it the way for many ranks.

Every message has a tick: in a tree of height H a node d levels below the root sends piece p up at tick H − d + p, and
what the root has summed goes down one level per tick.  The two trees share the ticks.

Source: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 2009, §3 and §4; as in NCCL since 2.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.comm.algorithms._cost import TREE_SHARE, log_steps, power_below
from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step, timed

_Action = tuple[int, Send | Receive]


def all_reduce_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2⌈log₂n⌉α + 2Sβ/0.92: two trees; a rank is a leaf in one of them; small pieces (Sanders et al., §4; NCCL)."""
    return 2 * log_steps(members) * latency + 2 * size_bytes * per_byte / TREE_SHARE


def broadcast_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """⌈log₂n⌉α + Sβ/0.92: two trees in small pieces (Sanders et al., §3; NCCL)."""
    return log_steps(members) * latency + size_bytes * per_byte / TREE_SHARE


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a position stands in a tree of positions."""

    parent: int | None
    children: tuple[int, ...]
    depth: int
    """Levels below the root."""


def spot(position: int, members: int) -> Spot:
    """Return the place of a position in the binary tree in which positions lie from left to right.

    Even positions are leaves; the root splits off the largest power of two that fits on its left.
    """
    # Descend as in a binary search, counting from 1: at each level the root of [low, high] splits off the largest power
    # of two on its left, which makes the left side a full tree and bounds the height by ⌊log₂ n⌋.
    low, high, parent, depth = 1, members, None, 0
    while True:
        here = low - 1 + power_below(high - low + 1)
        if here == position + 1:
            break
        parent, depth = here, depth + 1
        low, high = (low, here - 1) if position + 1 < here else (here + 1, high)
    left = [low - 1 + power_below(here - low)] if here > low else []
    right = [here + power_below(high - here)] if here < high else []
    return Spot(None if parent is None else parent - 1, tuple(child - 1 for child in [*left, *right]), depth)


def height(members: int) -> int:
    """Levels of that tree below its root."""
    return members.bit_length() - 1


def all_reduce(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """An even number of blocks: the first half goes through one tree, piece by piece, the rest through the other."""
    half = len(blocks) // 2
    top = height(len(line))
    actions: list[_Action] = []
    for is_second, pieces in ((False, blocks[:half]), (True, blocks[half:])):
        tree = _Tree(len(line), is_second)
        actions += [*_up(line, tree, pieces), *_down(line, tree, pieces, top)]
    return timed(actions, "trees")


def broadcast(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Send from the first of the line, which feeds the roots of two trees over all others."""
    half = len(blocks) // 2
    below = len(line) - 1
    if below == 0:
        return []
    rest = Line(line.ranks[1:], line.position - 1)
    actions: list[_Action] = []
    for is_second, pieces in ((False, blocks[:half]), (True, blocks[half:])):
        tree = _Tree(below, is_second)
        for index, piece in enumerate(pieces):
            if line.position == 0:
                actions.append((index, Send(rest.ranks[tree.root], piece)))
            elif rest.position == tree.root:
                actions.append((index, Receive(line.ranks[0], piece)))
        if line.position > 0:
            actions += _down(rest, tree, pieces, 1)
    return timed(actions, "trees")


@dataclass(frozen=True, slots=True)
class _Tree:
    """One of the two trees: where in it the positions of the line stand.

    In the second one leaves of the first become inner nodes: an even number of positions is turned around; an odd one
    moves on by one, since turning would keep even positions even.
    """

    members: int
    is_second: bool

    def place(self, position: int) -> int:
        """Position in the tree of a position on the line."""
        if not self.is_second:
            return position
        return self.members - 1 - position if self.members % 2 == 0 else (position + 1) % self.members

    def position(self, place: int) -> int:
        """Position on the line of a position in the tree."""
        if not self.is_second:
            return place
        return self.members - 1 - place if self.members % 2 == 0 else (place - 1) % self.members

    @property
    def root(self) -> int:
        """Position on the line of the root."""
        return self.position(power_below(self.members) - 1)


def _family(line: Line, tree: _Tree) -> tuple[Spot, int | None, list[int]]:
    """This rank's spot, and the ranks of its parent and children."""
    n = len(line)
    here = spot(tree.place(line.position), n)
    parent = None if here.parent is None else line.ranks[tree.position(here.parent)]
    return here, parent, [line.ranks[tree.position(child)] for child in here.children]


def _up(line: Line, tree: _Tree, pieces: Sequence[Runs]) -> Iterator[_Action]:
    """Pieces towards the root: a rank at depth d sends piece p at tick (height − d) + p."""
    here, parent, children = _family(line, tree)
    tick = height(len(line)) - here.depth
    for index, piece in enumerate(pieces):
        for child in children:
            yield tick - 1 + index, Receive(child, piece, reduce=True)
        if parent is not None:
            yield tick + index, Send(parent, piece)


def _down(line: Line, tree: _Tree, pieces: Sequence[Runs], start: int) -> Iterator[_Action]:
    """Pieces from the root, which sends the first at tick `start`."""
    here, parent, children = _family(line, tree)
    for index, piece in enumerate(pieces):
        if parent is not None:
            yield start + here.depth - 1 + index, Receive(parent, piece)
        for child in children:
            yield start + here.depth + index, Send(child, piece)
