"""Recursive doubling: ranks 1, 2, 4, … apart exchange whole tensors and both add.

    8 ranks

      step 1    0 ◄► 1     2 ◄► 3     4 ◄► 5     6 ◄► 7
      step 2    0 ◄► 2     1 ◄► 3     4 ◄► 6     5 ◄► 7
      step 3    0 ◄► 4     1 ◄► 5     2 ◄► 6     3 ◄► 7

After step k each rank has the sum over its block of 2ᵏ ranks: the fewest steps in which all can know all, each with the
whole tensor.  The way for short tensors.  Where n is no power of two, the ranks beyond it give their tensors to a
partner first and get the sum from it at the end.

In an all-gather the partners exchange what they have, which doubles.  Ranks beyond the power of two hand in their block
first and are handed all others at the end: nearly twice the bytes, where `bruck` needs none more.

Both partners add the same two tensors, and floating-point addition commutes: all ranks get the same bits.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005, §3.1 and
§4.5.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm.algorithms._cost import is_power, log_steps, power_below
from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step, joined, mirrored


def all_reduce_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """L(α + Sβ), L = log₂n: ranks 1, 2, 4, … apart exchange whole tensors; one step
    more hands the others their sum where n is no power of two."""
    steps = log_steps(members) if is_power(members) else log_steps(members) + 1
    return steps * (latency + size_bytes * per_byte)


def all_gather_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """Lα + (n−1)/n·Sβ for n = 2ᴸ: what the partners exchange doubles (Thakur et al., §3.1).

    Otherwise, with n = p + e and p = 2ᴸ: (L+2)α + (n + p − 1 + Σₖ min(2ᵏ, e))/n·Sβ, k < L; folding in and out.
    """
    power = power_below(members)
    steps, beyond = log_steps(power), members - power
    blocks = power - 1 + sum(min(1 << level, beyond) for level in range(steps)) + (members if beyond else 0)
    return (steps + 2 * (beyond > 0)) * latency + blocks / members * size_bytes * per_byte


def all_reduce(line: Line, block: Runs) -> list[Step]:
    """Exchange one block with ever farther partners."""
    power = power_below(len(line))
    folded = fold(line, block)
    if line.position >= power:
        return [*folded, *mirrored(folded, "fold out")]
    core = [
        Step("doubling", (Send(peer, block),), (Receive(peer, block, reduce=True),))
        for peer in (line.ranks[line.position ^ (1 << level)] for level in range(log_steps(power)))
    ]
    return [*folded, *core, *mirrored(folded, "fold out")]


def all_gather(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Before it the rank at position i has block i."""
    n, i, power = len(line), line.position, power_below(len(line))
    if i >= power:
        partner, others = line.ranks[i - power], joined([*blocks[:i], *blocks[i + 1 :]])
        return [
            Step("fold in", sends=(Send(partner, blocks[i]),)),
            Step("fold out", receives=(Receive(partner, others),)),
        ]

    def of(first: int, count: int) -> Runs:
        """The blocks of some positions and of those that fold into them."""
        return joined([*blocks[first : first + count], *blocks[power + first : power + first + count]])

    steps: list[Step] = []
    for level in range(log_steps(power)):
        size = 1 << level
        first, peer = i & -size, line.ranks[i ^ size]
        steps.append(Step("doubling", (Send(peer, of(first, size)),), (Receive(peer, of(first ^ size, size)),)))
    if i + power >= n:
        return steps
    beyond, k = line.ranks[i + power], i + power
    others = joined([*blocks[:k], *blocks[k + 1 :]])
    fold_in = Step("fold in", receives=(Receive(beyond, blocks[k]),))
    return [fold_in, *steps, Step("fold out", sends=(Send(beyond, others),))]


def fold(line: Line, block: Runs) -> list[Step]:
    """Add the tensors of the positions beyond the largest power of two p to those of positions 0, 1, …: p + i to i."""
    power = power_below(len(line))
    if line.position >= power:
        return [Step("fold in", sends=(Send(line.ranks[line.position - power], block),))]
    if line.position + power < len(line):
        return [Step("fold in", receives=(Receive(line.ranks[line.position + power], block, reduce=True),))]
    return []
