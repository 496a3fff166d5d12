"""What a plan wants to lie together, tier by tier of the network, and what it costs where it does not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weft.config.cluster import Cluster, LinkTier
from weft.model.profile import Profile
from weft.planning.price._predict import CostModel
from weft.techniques.cost_terms import DATASHEET, Calibration, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedBlock:
    """Neighbouring ranks that should lie inside one unit of a link tier, with the step's time in three placements."""

    tier: str
    level: int
    """Tiers between that and a node."""
    tier_devices: int
    """Devices that one unit of the tier has."""
    num_devices: int
    """Devices of the block."""
    axes: tuple[str, ...]
    """Axes of the mesh with more than one rank that lie inside a block as a whole, the outermost first."""
    whole_seconds: float
    """Time of a step where every block lies inside its tier."""
    split_seconds: float
    """The same where each block is split in two."""
    scattered_seconds: float
    """The same where no two nodes of a block lie together."""


def price_blocks(
    profile: Profile, cluster: Cluster, layout: Layout, *, calibration: Calibration = DATASHEET
) -> tuple[PricedBlock, ...]:
    """Return the blocks of a layout, the smallest first: one for each tier between a node and the whole network inside
    which whole axes fit.  Empty where the cluster has no such tier, or the layout is smaller than one node.

    A block is the largest product of trailing axes that fits the tier: ranks are numbered along the mesh's axes, the
    last one fastest, so that they are neighbours.

    Raises:
        PlanError: the layout does not fit the model or the cluster.
    """
    node = max(node.devices.count for node in cluster.nodes)
    blocks: list[PricedBlock] = []
    whole = 0.0
    between = [tier for tier in cluster.links[:-1] if tier.devices > node]
    for level, tier in enumerate(between):
        size, axes = _block(layout, tier.devices)
        if size <= node or size % node or (blocks and blocks[-1].num_devices == size):
            continue
        whole = whole or _seconds(profile, cluster, layout, calibration)
        halves = size // 2 if size // 2 >= node else node
        blocks.append(
            PricedBlock(
                tier=tier.name,
                level=level,
                tier_devices=tier.devices,
                num_devices=size,
                axes=axes,
                whole_seconds=whole,
                split_seconds=_seconds(profile, _narrowed(cluster, tier, halves, node), layout, calibration),
                scattered_seconds=_seconds(profile, _narrowed(cluster, tier, node, node), layout, calibration),
            )
        )
    return tuple(blocks)


def _block(layout: Layout, devices: int) -> tuple[int, tuple[str, ...]]:
    """The largest product of trailing axes that fits, and these axes.  Where not all of an axis fits, a divisor of it
    that does takes part, too: its neighbours talk most along it."""
    size, axes = 1, list[str]()
    for axis in reversed(layout.order):
        ranks = int(getattr(layout, axis))
        if size * ranks > devices:
            part = max(each for each in range(1, ranks + 1) if ranks % each == 0 and size * each <= devices)
            return size * part, tuple(axes)
        size *= ranks
        if ranks > 1:
            axes.insert(0, axis)
    return size, tuple(axes)


def _narrowed(cluster: Cluster, tier: LinkTier, devices: int, node: int) -> Cluster:
    """The cluster as ranks see it whose tier joins so many of them only; the rest goes through the next tier."""
    links: list[LinkTier] = []
    for each in cluster.links:
        if each.devices <= node or each.devices > tier.devices:
            links.append(each)
        elif min(each.devices, devices) > (links[-1].devices if links else 1):
            links.append(each.joining(min(each.devices, devices)))
    return replace(cluster, links=tuple(links))


def _seconds(profile: Profile, cluster: Cluster, layout: Layout, calibration: Calibration) -> float:
    seconds = CostModel(profile, cluster, calibration=calibration).predict(layout, exact=True).time.total
    assert math.isfinite(seconds)
    return seconds
