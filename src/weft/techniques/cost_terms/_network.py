"""A cluster's links as levels that arithmetic can work on: blocks of slots inside blocks of slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weft.config.cluster import Cluster, CollectiveTime, LinkTier, table_links

LevelTopology = Literal["switch", "fully_connected", "ring", "double_ring"]


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One way of joining equal units: a tier, or one axis of a torus."""

    tier: int
    """Position in `Cluster.links`."""
    name: str
    unit: int
    """Slots of a unit."""
    slots: int
    """Slots that it joins.  A slot is the place of a device, whether it has failed or not."""
    topology: LevelTopology
    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes per second of one device while all send."""
    alone: float
    """The same while its neighbours are silent."""
    is_torus: bool
    is_rails: bool
    in_network: bool
    is_inside: bool
    """Whether all that it joins are of one node."""
    start: float
    """Seconds, once per collective."""
    slowdown: float
    """Communication inside training over the same alone."""
    measured: tuple[CollectiveTime, ...]

    @property
    def circle(self) -> int:
        """Units that it joins."""
        return self.slots // self.unit


def levels_of(cluster: Cluster, slowdowns: Sequence[float], density: int) -> tuple[Level, ...]:
    """Return the levels, innermost first; the last one has no end.

    Args:
        slowdowns: by tier; the last stands for all further ones.
        density: ranks in one slot.
    """
    node = max(node.devices.count for node in cluster.nodes) * density
    levels: list[Level] = []
    unit = 1
    links = cluster.links or table_links(cluster.kinds[0], 1, 2)  # several ranks on the only core
    for index, tier in enumerate(links):
        slots = tier.devices * density
        if index == len(links) - 1:
            slots = max(slots, cluster.num_nodes * node)
        if slots > node:
            slots = math.ceil(slots / node) * node  # whole nodes, those with failed devices too
        slowdown = slowdowns[min(index, len(slowdowns) - 1)] if slowdowns else 1.0
        levels += _levels_of_tier(index, tier, unit, max(slots, unit), slowdown, node)
        unit = max(slots, unit)
    return tuple(levels)


def _levels_of_tier(index: int, tier: LinkTier, unit: int, slots: int, slowdown: float, node: int) -> list[Level]:
    """Levels of a tier, one or an axis of a torus each; `node` counts slots of a node."""
    bandwidth = tier.bandwidth_bytes_per_second / slowdown
    alone = (tier.alone_bytes_per_second or tier.bandwidth_bytes_per_second) / slowdown
    if tier.topology == "torus":
        axes = len(tier.shape)
        sizes = [unit * math.prod(tier.shape[axis:]) for axis in range(axes)]
        bounds = [*zip([*sizes[1:], unit], sizes, strict=True)]
        return [
            _level(index, tier, *bound, bandwidth / axes, alone / axes, slowdown, node) for bound in reversed(bounds)
        ]
    return [_level(index, tier, unit, slots, bandwidth / tier.oversubscription, alone, slowdown, node)]


def _level(
    index: int, tier: LinkTier, unit: int, slots: int, bandwidth: float, alone: float, slowdown: float, node: int
) -> Level:
    topology: LevelTopology = "switch"
    if tier.topology == "torus":
        topology = "double_ring"
    elif tier.topology in ("fully_connected", "ring", "double_ring"):
        topology = tier.topology
    return Level(
        tier=index,
        name=tier.name,
        unit=unit,
        slots=slots,
        topology=topology,
        latency=tier.latency_seconds,
        bandwidth=bandwidth,
        alone=max(alone, bandwidth),
        is_torus=tier.topology == "torus",
        is_rails=tier.topology == "rails",
        in_network=tier.in_network,
        is_inside=slots <= node,
        start=tier.start_seconds,
        slowdown=slowdown,
        measured=tier.measured,
    )


def slot_numbers(cluster: Cluster) -> tuple[int, ...] | None:
    """Return the slot of each device, or None where devices fill all slots in order."""
    counts = [node.devices.count for node in cluster.nodes for _ in range(node.count)]
    largest = max(counts)
    if all(count == largest for count in counts[:-1]):
        return None
    return tuple(index * largest + place for index, count in enumerate(counts) for place in range(count))
