"""Scatter and all-gather: a broadcast of long tensors.

    4 ranks, root 0, parts a to d

      scatter      0 ─ c d ─► 2      then 0 ─ b ─► 1 and 2 ─ d ─► 3       a binomial tree that halves what it carries
      all-gather   a ring: all send on what they have

The root sends its tensor once, not log₂n times, and nobody waits for a chain to fill.

Source: Barnett, Gupta, Payne, Shuler, van de Geijn, Watts, "Interprocessor collective communication library", 1994;
Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005, §3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm.algorithms import ring
from weft.comm.algorithms._cost import log_steps
from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step, joined


def broadcast_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """(L + n − 1)α + 2(n−1)/n·Sβ: scatter, then a ring all-gather (van de Geijn; Thakur et al., §3.2)."""
    return (log_steps(members) + members - 1) * latency + 2 * (members - 1) / members * size_bytes * per_byte


def broadcast(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Send from the first of the line; one block per rank."""
    return [*_scatter(line, blocks), *ring.all_gather(line, blocks)]


def _scatter(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Hand the farther half of what one has to its first rank, from the top of the binomial tree down."""
    n, i = len(line), line.position
    steps: list[Step] = []
    for level in reversed(range(log_steps(n))):
        distance = 1 << level
        if i % (2 * distance) == 0 and i + distance < n:
            sent = joined(blocks[i + distance : min(n, i + 2 * distance)])
            steps.append(Step("scatter", sends=(Send(line.at(distance), sent),)))
        elif i % (2 * distance) == distance:
            taken = joined(blocks[i : min(n, i + distance)])
            steps.append(Step("scatter", receives=(Receive(line.at(-distance), taken),)))
    return steps
