"""Parameter-server reduce: some of the ranks sum a share of the tensor each, and hand it back.

    5 ranks, 2 of them servers

      give      0, 1, 2, 3, 4 ── first half ──► server 0        0, 1, 2, 3, 4 ── second half ──► server 1
      take      server 0 ── first half ──► all                  server 1 ── second half ──► all

A broadcast is the way back: the root, which is the first server, hands the others their shares, and all servers send to
all.  With as many servers as ranks that is a scatter and a direct all-gather.

With one server this is the star of the earliest systems: two latencies, and (n−1)S bytes through one port.  With as
many servers as ranks it is `direct`.  It pays where the servers have the faster links.

Source: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014, §3; Jiang et al., "A
unified architecture for accelerating distributed DNN training in heterogeneous GPU/CPU clusters", OSDI 2020, §3 for the
number of servers.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm.algorithms import direct
from weft.comm.algorithms._cost import ISSUE_SHARE, issue_seconds
from weft.comm.algorithms._schedule import Line, Receive, Runs, Send, Step


def all_reduce_seconds(members: int, size_bytes: float, latency: float, per_byte: float, servers: int = 1) -> float:
    """2α + (min(p−1, n−2) + n − 2)o + 2(n−1)/p·Sβ with p servers among the ranks, which send and receive at once."""
    issued = min(servers - 1, max(0, members - 2)) + max(0, members - 2)
    return 2 * latency + issued * ISSUE_SHARE * latency + 2 * (members - 1) / servers * size_bytes * per_byte


def broadcast_seconds(members: int, size_bytes: float, latency: float, per_byte: float, servers: int = 1) -> float:
    """α + (n−2)o + (n−1)Sβ from one server; from p: 2α + (n + p − 4)o + (n + p − 2)/p·Sβ, p > 1."""
    spread = latency + issue_seconds(members, latency) + (members - 1) / servers * size_bytes * per_byte
    if servers == 1:
        return spread
    return spread + latency + issue_seconds(servers, latency) + (servers - 1) / servers * size_bytes * per_byte


def all_reduce(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """One block per server; the first ranks of the line are the servers."""
    owners = range(len(blocks))
    return [*direct.gather_sums(line, owners, blocks), *direct.spread_sums(line, owners, blocks)]


def broadcast(line: Line, blocks: Sequence[Runs]) -> list[Step]:
    """From the first of the line, which is the first server; one block per server."""
    i, root, servers = line.position, line.ranks[0], range(1, len(blocks))
    steps: list[Step] = []
    if i == 0 and servers:
        steps.append(Step("hand out", sends=tuple(Send(line.ranks[k], blocks[k]) for k in servers)))
    elif i in servers:
        steps.append(Step("hand out", receives=(Receive(root, blocks[i]),)))
    others = [line.at(k) for k in range(1, len(line)) if line.at(k) != root]
    sends = tuple(Send(peer, blocks[i]) for peer in others) if i < len(blocks) else ()
    owners = [k for k in range(len(blocks)) if k != i] if i > 0 else []
    receives = tuple(Receive(line.ranks[k], blocks[k]) for k in owners)
    return [*steps, Step("spread", sends, receives)] if sends or receives else steps
