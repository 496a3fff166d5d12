"""Torus: rings along the rows and the columns of a grid, both at once.

    2 × 3 ranks

      0 ─► 1 ─► 2 ─► 0        first half of the tensor:   rows, columns, columns, rows
      │    │    │             second half:                columns, rows, rows, columns
      3 ─► 4 ─► 5 ─► 3
      (columns are rings, too)

A half is reduced and scattered along one axis, its a-th part along the other, and gathered back the same ways.  While
one half uses the links of the rows the other uses those of the columns, so that none are idle; and rings of a and b
ranks take turns in 2(max(a, b) − 1) steps where one ring of a·b needs a·b − 1, for each half of an all-reduce.  An
all-to-all takes the same two ways: first to the right column, then to the right row, and the other half the other way.

    broadcast from 0, 3 × 3 ranks: pieces of each half down a tree of its own

      0 ──► 1 ──► 2       first half: along the root's row, down the other columns, and around to the root's column,
            ▼     ▼       5 to 3 and 8 to 6 over the links that close the rows
      3 ◄╌  4     5 ╌►    second half: the same with rows and columns exchanged
            ▼     ▼
      6 ◄╌  7     8 ╌►    The trees have no link in common: each has all of its links for half of the tensor.

Source: Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus interconnects", ICS 2010, §4;
the broadcast, trees without common links on a mesh: Watts and van de Geijn, "A pipelined broadcast for multidimensional
meshes", Parallel Processing Letters 5(2), 1995.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.comm.algorithms import ring
from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step, chained, joined, overlaid, timed


def all_reduce_seconds(shape: tuple[int, int], size_bytes: float, latency: float, per_byte: float) -> float:
    """2[(a−1)(α + S/2a·β) + (b−a)(α + S/2b·β) + (b−1)(α + S/2ab·β)] for a ≤ b, with β of one axis's links.

    In the first phase the shorter axis moves the longer parts and is done before the other; in the second all parts are
    alike.  A square of a × a: 4(a−1)α + (n−1)/n·Sβ, half of the bytes of a ring.
    """
    a, b = sorted(shape)
    first = _seconds(a - 1, size_bytes / 2 / a, latency, per_byte) + _seconds(
        b - a, size_bytes / 2 / b, latency, per_byte
    )
    return 2 * (first + _seconds(b - 1, size_bytes / 2 / a / b, latency, per_byte))


def all_to_all_seconds(shape: tuple[int, int], size_bytes: float, latency: float, per_byte: float) -> float:
    """2(b−1)α + (b−1)/2·Sβ for a ≤ b, with β of one axis's links: rings along both axes, one after the other.

    A square of a × a: 1/(a+1) of the bytes of a ring through all ranks.
    """
    return 2 * ring.all_to_all_seconds(max(shape), size_bytes / 2, latency, per_byte)


def broadcast_seconds(shape: tuple[int, int], size_bytes: float, latency: float, per_byte: float) -> float:
    """(a+b−1)α + S/2·β: small pieces follow one another down two trees; a single row is a chain, (n−1)α + Sβ."""
    a, b = shape
    if min(shape) == 1:
        return ring.broadcast_seconds(a * b, size_bytes, latency, per_byte)
    return (a + b - 1) * latency + size_bytes / 2 * per_byte


def _seconds(steps: int, size_bytes: float, latency: float, per_byte: float) -> float:
    return steps * (latency + size_bytes * per_byte)


def all_reduce(line: Line, shape: tuple[int, int], blocks: Sequence[Runs]) -> list[Step]:
    """Two blocks per rank; positions lie row by row."""
    return [*reduce_scatter(line, shape, blocks), *all_gather(line, shape, blocks)]


def reduce_scatter(line: Line, shape: tuple[int, int], blocks: Sequence[Runs]) -> list[Step]:
    """Leave the sums of blocks 2i and 2i + 1 with the rank at position i."""
    first, second = _phases(line, shape, blocks)
    return [
        *_named(overlaid(*(ring.reduce_scatter(*leg) for leg in first)), "reduce-scatter, first axis"),
        *_named(overlaid(*(ring.reduce_scatter(*leg) for leg in second)), "reduce-scatter, second axis"),
    ]


def all_gather(line: Line, shape: tuple[int, int], blocks: Sequence[Runs]) -> list[Step]:
    """Spread blocks 2i and 2i + 1 from the rank at position i to all."""
    first, second = _phases(line, shape, blocks)
    return [
        *_named(overlaid(*(ring.all_gather(*leg) for leg in second)), "all-gather, second axis"),
        *_named(overlaid(*(ring.all_gather(*leg) for leg in first)), "all-gather, first axis"),
    ]


def all_to_all(line: Line, shape: tuple[int, int], blocks: Sequence[Runs]) -> list[Step]:
    """Two blocks per rank: those of j go to the rank at position j, which finds them in the place of i: in place.

    On the first way what is for column y goes to the rank in that column; it lies there in the place of its sender.
    """
    a, b = shape
    x, y = divmod(line.position, b)
    row, column = line.of(x * b + k for k in range(b)), line.of(k * b + y for k in range(a))

    def ways(half: Sequence[Runs]) -> tuple[list[Step], list[Step]]:
        by_column = [chained(half[k * b + other] for k in range(a)) for other in range(b)]
        by_row = [chained(half[k * b : (k + 1) * b]) for k in range(a)]
        return ring.all_to_all(row, by_column), ring.all_to_all(column, by_row)

    (row_first, column_second), (row_second, column_first) = ways(blocks[::2]), ways(blocks[1::2])
    return [
        *_named(overlaid(row_first, column_first), "all-to-all, first axis"),
        *_named(overlaid(column_second, row_second), "all-to-all, second axis"),
    ]


def broadcast(line: Line, shape: tuple[int, int], blocks: Sequence[Runs], root: int) -> list[Step]:
    """Send from the rank at position `root`; even blocks go along its row first, odd ones along its column."""
    a, b = shape
    if min(shape) == 1:
        ranks = [*line.ranks[root:], *line.ranks[:root]]
        return ring.broadcast(Line(ranks, (line.position - root) % len(line)), blocks)
    (x, y), (root_x, root_y) = divmod(line.position, b), divmod(root, b)
    u, v = (x - root_x) % a, (y - root_y) % b

    def at(rows: int, columns: int) -> int:
        """The rank so many rows and columns on from the root."""
        return line.ranks[(root_x + rows) % a * b + (root_y + columns) % b]

    first = _tree_messages(u, v, shape, blocks[::2], at)
    second = _tree_messages(v, u, (b, a), blocks[1::2], lambda columns, rows: at(rows, columns))
    return timed([*first, *second], "broadcast")


def _tree_messages(
    u: int, v: int, shape: tuple[int, int], blocks: Sequence[Runs], at: Callable[[int, int], int]
) -> list[tuple[int, Send | Receive]]:
    """Return the messages of the rank u rows and v columns on from the root; a tick is its depth plus the piece."""
    a, b = shape
    # The root's own column is fed last, from the far column over the links that close the rows: the two trees then have
    # no link in common.
    depth = u + v if v > 0 or u == 0 else b + u
    parent = (u, v - 1) if u == 0 else (u - 1, v) if v > 0 else (u, b - 1)
    children: list[tuple[int, int]] = [(0, v + 1)] if u == 0 and v + 1 < b else []
    if v > 0 and u + 1 < a:
        children.append((u + 1, v))
    if u > 0 and v == b - 1:
        children.append((u, 0))
    actions: list[tuple[int, Send | Receive]] = []
    for index, piece in enumerate(blocks):
        if depth > 0:
            actions.append((depth + index, Receive(at(*parent), piece)))
        actions += [(depth + index + 1, Send(at(*child), piece)) for child in children]
    return actions


_Leg = tuple[Line, list[Runs]]


def _phases(line: Line, shape: tuple[int, int], blocks: Sequence[Runs]) -> tuple[list[_Leg], list[_Leg]]:
    """What each half does first and second: the row or column, and the block of each rank in it."""
    a, b = shape
    x, y = divmod(line.position, b)
    row, column = line.of(x * b + k for k in range(b)), line.of(k * b + y for k in range(a))
    rows_first, columns_first = blocks[::2], blocks[1::2]
    first = [
        (row, [joined(rows_first[k * b + y] for k in range(a)) for y in range(b)]),
        (column, [joined(columns_first[k * b : (k + 1) * b]) for k in range(a)]),
    ]
    second = [
        (column, [rows_first[k * b + y] for k in range(a)]),
        (row, [columns_first[x * b + k] for k in range(b)]),
    ]
    return first, second


def _named(steps: Sequence[Step], phase: str) -> list[Step]:
    return [Step(phase, step.sends, step.receives) for step in steps]
