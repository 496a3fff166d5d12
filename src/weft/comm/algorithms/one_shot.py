"""One-shot: every rank sends its whole tensor to every other, and all add up for themselves.

      rank 0   a ─► 1, 2, 3        then each has a, b, c, d and computes
      rank 1   b ─► 0, 2, 3        ((a + b) + c) + d
      rank 2   c ─► 0, 1, 3
      rank 3   d ─► 0, 1, 2

One step, and n/2 times the bytes of a ring: the way for the smallest tensors on a few ranks.  All add in the order of
ranks, not of arrival, so that all get the same bits.

Source: the all-to-all broadcast with local reduction of Thakur, Rabenseifner, Gropp, "Optimization of collective
communication operations in MPICH", 2005, §3.4; "one-shot" as GPU libraries name it.
"""

from __future__ import annotations

from weft.comm.algorithms._cost import issue_seconds
from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step


def all_reduce_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """α + (n−2)o + (n−1)Sβ: every rank sends its whole tensor to every other."""
    return latency + issue_seconds(members, latency) + (members - 1) * size_bytes * per_byte


def broadcast_seconds(members: int, size_bytes: float, latency: float, per_byte: float) -> float:
    """α + (n−2)o + (n−1)Sβ: the root sends everything to every other."""
    return all_reduce_seconds(members, size_bytes, latency, per_byte)


def all_reduce(line: Line, block: Runs) -> list[Step]:
    """One step in which all send to all."""
    peers = range(1, len(line))
    if not peers:
        return []
    sends = tuple(Send(line.at(k), block) for k in peers)
    return [Step("exchange", sends, tuple(Receive(line.at(-k), block, reduce=True) for k in peers))]


def broadcast(line: Line, block: Runs) -> list[Step]:
    """One step in which the first of the line sends to all others."""
    if line.position > 0:
        return [Step("broadcast", receives=(Receive(line.ranks[0], block),))]
    sends = tuple(Send(peer, block) for peer in line.ranks[1:])
    return [Step("broadcast", sends=sends)] if sends else []
