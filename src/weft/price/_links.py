"""Which links the groups of each axis use, and how long a collective among them takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from weft.cluster import Cluster
from weft.plan import Axis
from weft.price._calibration import Calibration
from weft.price._layout import Layout

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
GroupName = Literal["tensor", "context", "expert", "pipeline", "data", "shard", "replicate", "expert_data"]


class Group(NamedTuple):
    """Ranks that speak with one another."""

    size: int
    members: tuple[int, ...]
    """Of one group, in a dense block of each tier's devices, innermost first."""


def groups_of(cluster: Cluster, layout: Layout) -> dict[GroupName, Group]:
    """Return the groups of every axis.  `data` holds context too: both add up gradients of the same weights."""
    order: list[Axis] = [axis for axis in layout.order if axis != "expert"]
    expert, rest = _borrowed(order, layout)
    sets: dict[GroupName, dict[Axis, int]] = {
        "tensor": {"tensor": layout.tensor},
        "context": {"context": layout.context},
        "pipeline": {"pipeline": layout.pipeline},
        "data": {"replicate": layout.replicate, "shard": layout.shard, "context": layout.context},
        "shard": {"shard": layout.shard, "context": layout.context},
        "replicate": {"replicate": layout.replicate},
        "expert": expert,
        "expert_data": rest,
    }
    return {name: _group(cluster, layout, order, sizes) for name, sizes in sets.items()}


def _borrowed(order: Sequence[Axis], layout: Layout) -> tuple[dict[Axis, int], dict[Axis, int]]:
    """What the expert axis takes of context, shard and replicate, innermost first, and what is left."""
    taken: dict[Axis, int] = {}
    rest: dict[Axis, int] = {}
    wanted = layout.expert
    lenders: list[Axis] = [axis for axis in reversed(order) if axis in ("context", "shard", "replicate")]
    if layout.expert > layout.data * layout.context:
        lenders.append("tensor")
    for axis in lenders:
        size = int(getattr(layout, axis))
        part = math.gcd(size, wanted)
        taken[axis], rest[axis] = part, size // part
        wanted //= part
    return taken, rest


def _group(cluster: Cluster, layout: Layout, order: Sequence[Axis], sizes: dict[Axis, int]) -> Group:
    members = [1.0] * len(cluster.links)
    stride = 1
    for axis in reversed(order):
        for index, tier in enumerate(cluster.links):
            members[index] *= min(sizes.get(axis, 1), max(1.0, tier.devices / stride))
        stride *= int(getattr(layout, axis))
    size = math.prod(sizes.values())
    return Group(size, tuple(max(1, min(size, int(count))) for count in members))


def collective_seconds(
    cluster: Cluster, calibration: Calibration, kind: CollectiveKind, size_bytes: float, group: Group
) -> float:
    """Return the seconds of one collective over `size_bytes`: the whole result of a gather, the whole input otherwise.

    A ring: each rank sends its part n−1 times (twice of an all-reduce), over the slowest links that the group crosses;
    ranks of one node share out what leaves it.
    """
    if group.size < 2 or size_bytes <= 0:
        return 0.0
    seconds, inside = 0.0, 1
    latency, slowest = 0.0, math.inf
    for index, tier in enumerate(cluster.links):
        members = group.members[index] if index < len(cluster.links) - 1 else group.size
        if members > inside:
            rails = 1 if kind in ("send", "all_to_all") else inside
            speed = tier.bandwidth_bytes_per_second * rails / calibration.link_slowdown(index)
            slowest = min(slowest, speed)
            latency += tier.latency_seconds * math.log2(members / inside) * (2 if kind == "all_reduce" else 1)
            inside = members
    times = {"all_reduce": 2.0 * (group.size - 1) / group.size, "send": 1.0, "broadcast": 1.0}
    seconds = size_bytes * times.get(kind, (group.size - 1) / group.size) / slowest
    return seconds + latency
