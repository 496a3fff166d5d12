"""Double ring: two rings in opposite directions, each with half of the tensor.

      rank 0 ══► rank 1 ══► rank 2 ══► rank 3 ══► rank 0        even parts
      rank 0 ◄── rank 1 ◄── rank 2 ◄── rank 3 ◄── rank 0        odd parts

It takes half of the ring's time for bytes where the two directions have links of their own, such as two ports, or an
axis of a torus.  On one shared port it only has twice the messages.

Source: Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus interconnects", ICS 2010, §3.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.collective import ring
from weft.collective._schedule import Line, Runs, Step, overlaid


def all_reduce_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2(n−1)α + (n−1)/n·Sβ, with β of one ring: two rings on links of their own carry half of the tensor each."""
    return ring.all_reduce_seconds(members, size_bytes / 2, latency, per_byte)


def half_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """(n−1)α + (n−1)/2n·Sβ, with β of one ring."""
    return ring.half_seconds(members, size_bytes / 2, latency, per_byte)


def all_reduce(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Two blocks per rank: 2i goes forwards, 2i + 1 backwards."""
    return [*reduce_scatter(line, blocks), *all_gather(line, blocks)]


def reduce_scatter(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """n − 1 steps, after which the rank at position i has the sums of blocks 2i and 2i + 1."""
    forwards = ring.reduce_scatter(line, blocks[::2])
    return overlaid(forwards, ring.reduce_scatter(line.backwards(), blocks[1::2][::-1]))


def all_gather(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """n − 1 steps, before which the rank at position i has blocks 2i and 2i + 1."""
    forwards = ring.all_gather(line, blocks[::2])
    return overlaid(forwards, ring.all_gather(line.backwards(), blocks[1::2][::-1]))
