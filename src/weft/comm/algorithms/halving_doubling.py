"""Halving-doubling: exchange and add halves, then quarters, …; then gather them back.

    8 ranks, 8 parts: what rank 0 has summed, and over how many ranks

      start      a1 b1 c1 d1 e1 f1 g1 h1
      ◄► rank 4  a2 b2 c2 d2                  sent e1 … h1
      ◄► rank 2  a4 b4                        sent c2 d2
      ◄► rank 1  a8                           sent b4; now every rank has one part of the sum
      ◄► rank 1, rank 2, rank 4               the same ways back, parts doubling

As few bytes as a ring in 2log₂n steps instead of 2(n−1): the way for middle and long tensors where any rank reaches any
other at full speed.  On a ring or behind thin uplinks the far exchanges of the largest halves share links.

An all-reduce over n that is no power of two folds the ranks beyond it in and out, with whole tensors.  Reduce-scatter
and all-gather need no fold: they go around a circle as in `bruck`, in as many steps and bytes as the formula says.

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur, Rabenseifner, Gropp,
"Optimization of collective communication operations in MPICH", 2005, §3.1, §3.4 and §4.5.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm.algorithms import bruck
from weft.comm.algorithms._cost import is_power, log_steps, power_below
from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step, joined, mirrored
from weft.comm.algorithms.recursive_doubling import fold


def all_reduce_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2Lα + 2(n−1)/n·Sβ: halves, quarters, … are exchanged and summed, then gathered back (Rabenseifner).

    Where n is no power of two, the ranks beyond it first hand their tensors in and get the sum at the end: + 2(α + Sβ).
    """
    power = power_below(members)
    extra = 0.0 if power == members else 2 * (latency + size_bytes * per_byte)
    return extra + 2 * half_seconds(power, size_bytes, latency, per_byte)


def half_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """⌈log₂n⌉α + (n−1)/n·Sβ: recursive halving, or doubling the other way (Thakur et al., §3.1 and §3.4).

    Bruck's variant has as many steps where n is no power of two.
    """
    return log_steps(members) * latency + (members - 1) / members * size_bytes * per_byte


def all_reduce(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """As many blocks as the largest power of two that is at most n."""
    folded = fold(line, joined(blocks))
    if line.position >= len(blocks):
        return [*folded, *mirrored(folded, "fold out")]
    core = Line(line.ranks[: len(blocks)], line.position)
    halving = _halving(core, blocks)
    return [*folded, *halving, *mirrored(halving, "doubling"), *mirrored(folded, "fold out")]


def reduce_scatter(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """⌈log₂n⌉ steps, after which the rank at position i has the sum of block i."""
    return _halving(line, blocks) if is_power(len(line)) else bruck.reduce_scatter(line, blocks)


def all_gather(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """⌈log₂n⌉ steps, before which the rank at position i has block i."""
    return mirrored(_halving(line, blocks), "doubling") if is_power(len(line)) else bruck.all_gather(line, blocks)


def _halving(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    steps: list[Step] = []
    first, stop = 0, len(blocks)
    while stop - first > 1:
        half = (stop - first) // 2
        middle = first + half
        peer = line.ranks[line.position ^ half]
        low, high = joined(blocks[first:middle]), joined(blocks[middle:stop])
        kept, sent = (low, high) if line.position < middle else (high, low)
        steps.append(Step("halving", (Send(peer, sent),), (Receive(peer, kept, reduce=True),)))
        first, stop = (first, middle) if line.position < middle else (middle, stop)
    return steps
