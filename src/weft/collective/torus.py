"""Torus: rings along the rows and the columns of a grid, both at once.

    2 × 3 ranks

      0 ─► 1 ─► 2 ─► 0        first half of the tensor:   rows, columns, columns, rows
      │    │    │             second half:                columns, rows, rows, columns
      3 ─► 4 ─► 5 ─► 3
      (columns are rings, too)

A half is reduced and scattered along one axis, its a-th part along the other, and gathered back the same ways.  While
one half uses the links of the rows the other uses those of the columns, so that none are idle; and rings of a and b
ranks take turns in 2(max(a, b) − 1) steps where one ring of a·b needs a·b − 1, for each half of an all-reduce.

Source: Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus interconnects", ICS 2010, §4.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.collective import ring
from weft.collective._schedule import Line, Runs, Step, joined, overlaid


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


def _seconds(steps: int, size_bytes: float, latency: float, per_byte: float) -> float:
    return steps * (latency + size_bytes * per_byte)


def all_reduce(line: Line, shape: tuple[int, int], blocks: Sequence[Runs]) -> list[Step]:
    """Two blocks per rank; positions lie row by row."""
    return [*reduce_scatter(line, shape, blocks), *all_gather(line, shape, blocks)]


def reduce_scatter(line: Line, shape: tuple[int, int], blocks: Sequence[Runs]) -> list[Step]:
    """After it the rank at position i has the sums of blocks 2i and 2i + 1."""
    first, second = _phases(line, shape, blocks)
    return [
        *_named(overlaid(*(ring.reduce_scatter(*leg) for leg in first)), "reduce-scatter, first axis"),
        *_named(overlaid(*(ring.reduce_scatter(*leg) for leg in second)), "reduce-scatter, second axis"),
    ]


def all_gather(line: Line, shape: tuple[int, int], blocks: Sequence[Runs]) -> list[Step]:
    """Before it the rank at position i has blocks 2i and 2i + 1."""
    first, second = _phases(line, shape, blocks)
    return [
        *_named(overlaid(*(ring.all_gather(*leg) for leg in second)), "all-gather, second axis"),
        *_named(overlaid(*(ring.all_gather(*leg) for leg in first)), "all-gather, first axis"),
    ]


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
