"""Direct: every rank talks to every other at once.

    reduce-scatter, 4 ranks, 4 parts        all-gather

      rank 0   b ─► 1   c ─► 2   d ─► 3       rank 0   a ─► 1, 2, 3
      rank 1   a ─► 0   c ─► 2   d ─► 3       rank 1   b ─► 0, 2, 3
      rank 2   a ─► 0   b ─► 1   d ─► 3       rank 2   c ─► 0, 1, 3
      rank 3   a ─► 0   b ─► 1   c ─► 2       rank 3   d ─► 0, 1, 2

Two steps, and as few bytes as a ring: the way for a few ranks that are fully connected or share one switch or memory.
All send to one rank at once, which networks that are not made for it answer with contention.  Ranks begin with their
next neighbour, not all with rank 0.

Sums are made in the order of ranks, at the one owner of a part.

Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005, §3.3 and
§3.4.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm.algorithms._cost import issue_seconds
from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step, mirrored


def all_reduce_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """2(α + (n−2)o) + 2(n−1)/n·Sβ: every rank sums one part, then sends it to all (o: issuing one message, α/4)."""
    return 2 * half_seconds(members, size_bytes, latency, per_byte)


def half_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """α + (n−2)o + (n−1)/n·Sβ: every rank sends a part to every other."""
    return latency + issue_seconds(members, latency) + (members - 1) / members * size_bytes * per_byte


def all_to_all_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """α + (n−2)o + (n−1)/n·Sβ: every rank sends a part to every other (Thakur et al., §3.3, long messages)."""
    return half_seconds(members, size_bytes, latency, per_byte)


def all_reduce(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Reduce-scatter, then all-gather; one block per rank."""
    return [*reduce_scatter(line, blocks), *all_gather(line, blocks)]


def reduce_scatter(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """One step, after which the rank at position i has the sum of block i."""
    n, i = len(line), line.position
    return _one_step(
        "reduce-scatter",
        [Send(line.at(k), blocks[(i + k) % n]) for k in range(1, n)],
        [Receive(line.at(-k), blocks[i], reduce=True) for k in range(1, n)],
    )


def all_gather(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """One step, before which the rank at position i has block i."""
    n, i = len(line), line.position
    return _one_step(
        "all-gather",
        [Send(line.at(k), blocks[i]) for k in range(1, n)],
        [Receive(line.at(-k), blocks[(i - k) % n]) for k in range(1, n)],
    )


def all_to_all(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """Send block j to the rank at position j, which finds it as its block i: in place."""
    n, i = len(line), line.position
    return _one_step(
        "all-to-all",
        [Send(line.at(k), blocks[(i + k) % n]) for k in range(1, n)],
        [Receive(line.at(-k), blocks[(i - k) % n]) for k in range(1, n)],
    )


def gather_sums(line: Line, owners: Sequence[int], blocks: Sequence[Runs]) -> list[Step]:
    """One step, after which the rank at position `owners[k]` has the sum of block k over the whole line.

    Owners differ; ranks that own nothing only give.
    """
    n, i = len(line), line.position
    turned = sorted(range(len(owners)), key=lambda k: (owners[k] - i) % n)
    sends = [Send(line.ranks[owners[k]], blocks[k]) for k in turned if owners[k] != i]
    mine = [blocks[k] for k in range(len(owners)) if owners[k] == i]
    return _one_step("reduce", sends, [Receive(line.at(-k), block, reduce=True) for block in mine for k in range(1, n)])


def spread_sums(line: Line, owners: Sequence[int], blocks: Sequence[Runs]) -> list[Step]:
    """The way back of `gather_sums`: all get every block from its owner."""
    return mirrored(gather_sums(line, owners, blocks), "spread")


def _one_step(phase: str, sends: list[Send], receives: list[Receive]) -> list[Step]:
    return [Step(phase, tuple(sends), tuple(receives))] if sends or receives else []
