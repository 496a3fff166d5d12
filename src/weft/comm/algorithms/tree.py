"""Binomial tree: whole tensors are summed up to a root, and the sum is handed down again.

    reduce, 8 ranks: who sends to whom in steps 1, 2, 3; the broadcast goes the same ways back

      0 ◄─1─ 1     2 ◄─1─ 3     4 ◄─1─ 5     6 ◄─1─ 7
      0 ◄─2─────── 2            4 ◄─2─────── 6
      0 ◄─3───────────────────── 4

A rank that has received sends on in the next step, so ranks with sums double in every step: ⌈log₂n⌉ of them reach
everybody, where a tree of two children each needs about twice as many (a rank sends to one child after the other).  The
way for short tensors and many ranks; a long tensor crosses every level whole, while most of the ranks look on.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005, §3.2.
"""

from __future__ import annotations

from weft.comm.algorithms._cost import log_steps
from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step, mirrored


def all_reduce_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2⌈log₂n⌉(α + Sβ): a binomial tree sums to the root and spreads the sum (Thakur et al., §3.2)."""
    return 2 * log_steps(members) * (latency + size_bytes * per_byte)


def broadcast_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """⌈log₂n⌉(α + Sβ): a binomial tree (Thakur et al., §3.2)."""
    return log_steps(members) * (latency + size_bytes * per_byte)


def all_reduce(line: Line, block: Runs) -> list[Step]:
    """Reduce to the first of the line, then broadcast from it."""
    return [*reduce(line, block), *broadcast(line, block)]


def reduce(line: Line, block: Runs) -> list[Step]:
    """Sum a block to the first of the line."""
    steps: list[Step] = []
    for level in range(log_steps(len(line))):
        distance = 1 << level
        if line.position & distance:
            steps.append(Step("reduce", sends=(Send(line.at(-distance), block),)))
            break
        if line.position + distance < len(line):
            steps.append(Step("reduce", receives=(Receive(line.at(distance), block, reduce=True),)))
    return steps


def broadcast(line: Line, block: Runs) -> list[Step]:
    """Copy a block from the first of the line to all others."""
    return mirrored(reduce(line, block), "broadcast")
