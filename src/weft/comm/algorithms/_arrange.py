"""How an algorithm lies on a cluster: the order in which it takes the ranks, what counts as a node, and as a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from weft.errors import CollectiveError

if TYPE_CHECKING:
    from weft.config.cluster import Cluster, LinkTier


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Ranks of a group on the links.  Build it with `flat` or `arrange`."""

    order: Sequence[int]
    """Ranks as the algorithm takes them: neighbours on a ring side by side, nodes one after another, grids by row."""
    nodes: tuple[int, ...]
    """Ranks of each node, in that order."""
    shape: tuple[int, int]
    """Rows and columns of the grid."""
    note: str = ""
    """Why the ranks are taken in this order; for drawings."""

    def __post_init__(self) -> None:
        n = len(self.order)
        if isinstance(self.order, list):
            object.__setattr__(self, "order", tuple(self.order))  # for its hash
        if sorted(self.order) != list(range(n)):
            raise CollectiveError(f"order = {list(self.order)} must name each of the ranks 0 to {n - 1} once.")
        if sum(self.nodes) != n or min(self.nodes, default=0) < 1:
            raise CollectiveError(
                f"nodes = {list(self.nodes)} must share out all {n} ranks of the group, at least one each: "
                f"they hold {sum(self.nodes)}."
            )
        if math.prod(self.shape) != n:
            fix = "x".join(map(str, near_square(n)))
            raise CollectiveError(
                f"shape = {list(self.shape)} has {math.prod(self.shape)} places for {n} ranks: try {fix}."
            )

    @property
    def members(self) -> int:
        return len(self.order)


def flat(members: int, *, nodes: Sequence[int] = (), shape: tuple[int, int] | None = None) -> Arrangement:
    """Return ranks as they are numbered: in one node unless `nodes` says how many each has, in a near-square grid.

    Raises:
        CollectiveError: nodes or shape do not hold all members.
    """
    if members < 1:
        raise CollectiveError(f"members = {members}: a group has at least one rank.")
    grid = shape if shape is not None else near_square(members)
    return Arrangement(order=range(members), nodes=tuple(nodes) or (members,), shape=grid)


def near_square(members: int) -> tuple[int, int]:
    """Return a × b = n with a ≤ b as equal as can be; 1 × n for a prime."""
    a = next(a for a in range(math.isqrt(members), 0, -1) if members % a == 0)
    return a, members // a


def arrange(algorithm: str, cluster: Cluster) -> Arrangement:
    """Return how an algorithm takes one rank per device of a cluster.

    Rings go through a torus in snake order, so that neighbours on the ring are neighbours on the torus; everything else
    goes node by node, which keeps most of a ring and all small distances inside nodes.  Nodes are what the innermost
    tier of links joins; the grid is the torus where there is one, nodes × devices where nodes are alike.
    """
    n = cluster.num_devices
    nodes = _nodes(cluster)
    torus = next((tier for tier in cluster.links if tier.topology == "torus"), None)
    if torus is not None and torus.devices == n and math.prod(torus.shape) == n:
        a, b = math.prod(torus.shape[:-1]), torus.shape[-1]
        if algorithm in ("ring", "double_ring"):
            return Arrangement(order=snake(torus.shape), nodes=nodes, shape=(a, b), note=_snake_note(torus))
        rows = [row * b + column for row in snake(torus.shape[:-1]) for column in range(b)]
        grid = "×".join(map(str, torus.shape))
        return Arrangement(order=tuple(rows), nodes=nodes, shape=(a, b), note=f"row by row through the {grid} torus")
    alike = len(set(nodes)) == 1 and 1 < len(nodes) < n
    shape = (len(nodes), nodes[0]) if alike else near_square(n)
    note = "node by node: most neighbours share a node" if len(nodes) > 1 else "as the ranks are numbered"
    return Arrangement(order=range(n), nodes=nodes, shape=shape, note=note)


def snake(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the places of a grid so that each is one step from the one before: rows alternate in direction.

    The last and the first place are neighbours, too, where the first axis wraps around and has an even length, or where
    all axes but the first have length 1.
    """
    order: list[int] = []
    for at in product(*(range(size) for size in shape)):
        place, passed = 0, 0
        for size, index in zip(shape, at, strict=True):
            turned = size - 1 - index if passed % 2 else index
            place = place * size + turned
            passed = passed * size + index
        order.append(place)
    return tuple(order)


def _snake_note(tier: LinkTier) -> str:
    return f"in snake order through the {'×'.join(map(str, tier.shape))} torus: each next rank is one link away"


def _nodes(cluster: Cluster) -> tuple[int, ...]:
    """Devices of each machine; of a single machine the groups that its innermost links join."""
    counts = tuple(node.devices.count for node in cluster.nodes for _ in range(node.count))
    n = sum(counts)
    if len(counts) > 1 or len(cluster.links) < 2:
        return counts
    size = cluster.links[0].devices
    return tuple(min(size, n - start) for start in range(0, n, size))
