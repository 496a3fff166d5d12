"""Double ring: two rings in opposite directions, each with half of the tensor.

      rank 0 ══► rank 1 ══► rank 2 ══► rank 3 ══► rank 0        even parts
      rank 0 ◄── rank 1 ◄── rank 2 ◄── rank 3 ◄── rank 0        odd parts

A broadcast sends half of the tensor down a chain each way.  In an all-to-all each block takes the shorter way; where
both are as long, each ring takes half of it.

It takes half of the ring's time for bytes where the two directions have links of their own, such as two ports, or an
axis of a torus.  On one shared port it only has twice the messages.

Source: Jain and Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus interconnects", ICS 2010, §3.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm.algorithms import ring
from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step, chained, overlaid, timed, turned_around


def all_reduce_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2(n−1)α + (n−1)/n·Sβ, with β of one ring: two rings on links of their own carry half of the tensor each."""
    return ring.all_reduce_seconds(members, size_bytes / 2, latency, per_byte)


def half_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """(n−1)α + (n−1)/2n·Sβ, with β of one ring."""
    return ring.half_seconds(members, size_bytes / 2, latency, per_byte)


def broadcast_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """(n−1)α + S/2·β, with β of one ring: small pieces follow one another down two chains."""
    return ring.broadcast_seconds(members, size_bytes / 2, latency, per_byte)


def all_to_all_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """⌊n/2⌋α + ⌊n²/4⌋/2n·Sβ, with β of one ring: about n/8·S, a quarter of a ring's bytes on each of two."""
    return members // 2 * latency + members * members // 4 / 2 / members * size_bytes * per_byte


def all_reduce(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Two blocks per rank: 2i goes forwards, 2i + 1 backwards."""
    return [*reduce_scatter(line, blocks), *all_gather(line, blocks)]


def reduce_scatter(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """n − 1 steps, after which the rank at position i has the sums of blocks 2i and 2i + 1."""
    forwards = ring.reduce_scatter(line, blocks[::2])
    # The same ring over the reversed line; its blocks are reversed too, so that the rank at i owns both of its blocks.
    return overlaid(forwards, ring.reduce_scatter(line.backwards(), blocks[1::2][::-1]))


def all_gather(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """n − 1 steps, before which the rank at position i has blocks 2i and 2i + 1."""
    forwards = ring.all_gather(line, blocks[::2])
    return overlaid(forwards, ring.all_gather(line.backwards(), blocks[1::2][::-1]))


def broadcast(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Send from the first of the line; even blocks go forwards, odd ones backwards."""
    ranks = line.ranks
    back = Line([ranks[0], *reversed(ranks[1:])], -line.position % len(line))
    return timed([*ring.chain(line, blocks[::2]), *ring.chain(back, blocks[1::2])], "chains")


def all_to_all(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Two blocks per rank: those of j go to the rank at position j, which finds them in the place of i: in place."""
    n, i = len(line), line.position

    def moving(step: int, way: int) -> Runs:
        """Return the blocks with `step` places or more to go; of those as far both ways, each ring takes one of two."""
        passing: list[Runs] = []
        for distance in range(step, n // 2 + 1):
            first = (i + way * distance) % n * 2
            both = blocks[first : first + 2]
            passing += both if 2 * distance < n else both[:1] if way > 0 else both[1:]
        return chained(passing)

    steps: list[Step] = []
    for step in range(1, n // 2 + 1):
        ahead, back = moving(step, 1), moving(step, -1)
        sends = (Send(line.at(1), ahead), Send(line.at(-1), back))
        steps.append(Step("all-to-all", sends, (Receive(line.at(-1), ahead), Receive(line.at(1), back))))
    return [*steps, *turned_around(line, blocks)]
