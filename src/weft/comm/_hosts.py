"""Which ranks of a group share a host."""

from __future__ import annotations

import hashlib
import platform
import uuid
from pathlib import Path

import torch

from weft.comm._process import boot_id
from weft.comm.algorithms import Arrangement, near_square
from weft.comm.collectives import all_gather
from weft.comm.mesh import GroupView

_BITS = 62


def discover_nodes(view: GroupView) -> Arrangement:
    """Return the ranks of a group node by node.  Call on every rank of the group.

    Ranks share a node if their kernels have one boot id and they see the same network: between two network namespaces
    of one kernel, loopback does not reach.  Nobody's word is taken for how many ranks there are on a host.
    """
    if view.group is None:
        return Arrangement(order=(0,), nodes=(1,), shape=(1, 1), note="one rank")
    mine = torch.tensor([_host_number()], dtype=torch.int64)
    hosts = [int(number) for number in all_gather(mine, view).flatten().tolist()]
    return arrange_hosts(hosts)


def arrange_hosts(hosts: list[int]) -> Arrangement:
    """Return ranks node by node, given each one's host; nodes in the order of their first ranks."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    nodes = tuple(len(ranks) for ranks in members.values())
    alike = 1 < len(nodes) < len(hosts) and len(set(nodes)) == 1
    return Arrangement(
        order=tuple(rank for ranks in members.values() for rank in ranks),
        nodes=nodes,
        shape=(len(nodes), nodes[0]) if alike else near_square(len(hosts)),
        note="node by node, as the ranks found one another",
    )


def kernel_number() -> int:
    """Return a number that differs between kernels, and on one machine between boots; containers of one have the
    same."""
    return _number(_boot())


def _host_number() -> int:
    try:
        network = str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:  # no /proc (macOS)
        network = ""
    return _number(f"{_boot()} {network}")


def _boot() -> str:
    return boot_id() or f"{platform.node()} {uuid.getnode()}"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - _BITS)
