"""Bruck: circles with jumps of 1, 2, 4, …, for any number of ranks.

    all-gather, 5 ranks: what rank 0 has after each step (block i began on rank i)

      start                             0
      from rank 1, to rank 4            0 1
      from rank 2, to rank 3            0 1 2 3
      from rank 4, to rank 1            0 1 2 3 4       the last step moves only what is missing

    all-to-all, 8 ranks: a block for the rank d places on travels by the binary digits of d

      d = 5 = 101₂     1 on in the first step, rests in the second, 4 on in the third

⌈log₂n⌉ steps, whatever n is.  The all-gather moves no byte twice; run backwards it is a reduce-scatter, and the two
make an all-reduce without folding.  The all-to-all hands half of the buffer on in each step: more bytes and fewer
messages than sending directly, which is right for short tensors and many ranks.

Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", IEEE TPDS 1997, §3 and §4; the reduce-scatter: Träff, "Optimal, non-pipelined reduce-scatter
and allreduce algorithms", 2024 (arXiv 2410.14234).
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm.algorithms._cost import log_steps
from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step, chained, joined, turned_around


def all_reduce_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2⌈log₂n⌉α + 2(n−1)/n·Sβ: a reduce-scatter and an all-gather for any n (Träff 2024)."""
    return 2 * half_seconds(members, size_bytes, latency, per_byte)


def half_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """⌈log₂n⌉α + (n−1)/n·Sβ (Bruck et al., §4)."""
    return log_steps(members) * latency + (members - 1) / members * size_bytes * per_byte


def all_to_all_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """L(α + Sβ/2): half of the parts move 1, 2, 4, … ranks on (Bruck et al., 1997)."""
    return log_steps(members) * (latency + size_bytes / 2 * per_byte)


def all_reduce(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Reduce-scatter, then all-gather; one block per rank."""
    return [*reduce_scatter(line, blocks), *all_gather(line, blocks)]


def all_gather(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """⌈log₂n⌉ steps, before which the rank at position i has block i."""
    return [
        Step("all-gather", (Send(line.at(-jump), mine),), (Receive(line.at(jump), theirs),))
        for jump, mine, theirs in _jumps(line, blocks)
    ]


def reduce_scatter(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """⌈log₂n⌉ steps, after which the rank at position i has the sum of block i."""
    return [
        Step("reduce-scatter", (Send(line.at(jump), theirs),), (Receive(line.at(-jump), mine, reduce=True),))
        for jump, mine, theirs in reversed(_jumps(line, blocks))
    ]


def all_to_all(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Send block j to the rank at position j, which finds it as its block i: in place.

    At a rank that stands at i, what travels d places in all rests in slot i + d at every stop; so what is sent on and
    what comes take the same slots.  At the end the slots i + d and i − d change places.
    """
    n, i = len(line), line.position

    def slot(distance: int) -> Runs:
        return blocks[(i + distance) % n]

    steps: list[Step] = []
    for level in range(log_steps(n)):
        jump = 1 << level
        moving = chained(slot(distance) for distance in range(n) if distance & jump)
        steps.append(Step("jump", (Send(line.at(jump), moving),), (Receive(line.at(-jump), moving),)))
    return [*steps, *turned_around(line, blocks)]


def _jumps(line: Line, blocks: Sequence[Runs]) -> list[tuple[int, Runs, Runs]]:
    """(jump, blocks from this rank on, blocks from the rank a jump on), with as many blocks as are missing."""
    n, i = len(line), line.position
    jumps: list[tuple[int, Runs, Runs]] = []
    for level in range(log_steps(n)):
        jump = 1 << level
        count = min(jump, n - jump)
        mine = joined(blocks[(i + k) % n] for k in range(count))
        jumps.append((jump, mine, joined(blocks[(i + jump + k) % n] for k in range(count))))
    return jumps
