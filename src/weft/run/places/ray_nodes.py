"""Nodes of a Ray cluster, and which of them a gang takes: Ray knows that nodes have labels, and not what those mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.run.places.contract import Gang, GangBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """One living node of a Ray cluster."""

    number: str
    """Ray's own name for it."""
    address: str
    total: Mapping[str, float]
    """What it has, by Ray's names, such as CPU and GPU."""
    free: Mapping[str, float]
    """What of that no other job holds."""
    labels: Mapping[str, str]

    def could_hold(self, bundle: Mapping[str, float]) -> bool:
        """Whether it has what a bundle asks for, held by others or not."""
        return all(self.total.get(name, 0.0) >= number for name, number in bundle.items())

    def holds(self, bundle: Mapping[str, float]) -> bool:
        """Whether it has that now."""
        return all(self.free.get(name, 0.0) >= number for name, number in bundle.items())

    @property
    def empty(self) -> RayNode:
        """The same node without other jobs."""
        return replace(self, free=self.total)


def bundle_of(gang: Gang) -> dict[str, float]:
    """Return what one machine of a gang holds, by Ray's names: cores, and accelerators where ranks compute on those."""
    bundle = {"CPU": float(gang.num_cores or gang.num_devices)}
    if gang.accelerator:
        bundle["GPU"] = float(gang.num_devices)
    return bundle


def labelled_blocks(gang: Gang, labels: Sequence[str]) -> tuple[GangBlock, ...]:
    """Return the blocks of a gang for whose tier the pool names a label of nodes."""
    return tuple(block for block in gang.blocks if block.num_nodes > 1 and block.level < len(labels))


def choose_nodes(
    nodes: Sequence[RayNode],
    bundle: Mapping[str, float],
    count: int,
    blocks: Sequence[GangBlock],
    labels: Sequence[str],
) -> list[RayNode] | None:
    """Choose nodes that are free, so that every block lies inside one unit of its tier.

    Each block takes the unit with the least room that holds it, which leaves large rooms to large blocks.

    Args:
        blocks: those that are to lie together; sizes of larger ones are multiples of those of smaller ones.
        labels: labels that say where nodes lie, from the outside in.

    Returns:
        So many nodes, block after block; None: they are not free, or not together.
    """
    free = [node for node in nodes if node.holds(bundle)]
    return _packed(free, count, sorted(blocks, key=lambda block: block.num_nodes, reverse=True), labels)


def selectors(nodes: Sequence[RayNode], blocks: Sequence[GangBlock], labels: Sequence[str]) -> list[dict[str, str]]:
    """Return for each chosen node the labels by which Ray finds one in its place: of all tiers that a block has."""
    asked = labels[: len(labels) - min((block.level for block in blocks), default=len(labels))]
    return [{label: node.labels[label] for label in asked} for node in nodes]


def where(node: RayNode, labels: Sequence[str]) -> tuple[str, ...]:
    """Return where a node lies, from the outside in; empty where it lacks one of the labels."""
    return tuple(node.labels[label] for label in labels) if all(label in node.labels for label in labels) else ()


def _packed(
    free: Sequence[RayNode], count: int, blocks: Sequence[GangBlock], labels: Sequence[str]
) -> list[RayNode] | None:
    if not blocks:
        return list(free[:count]) if len(free) >= count else None
    block, *inner = blocks
    units: dict[tuple[str, ...], list[RayNode]] = {}
    for node in free:
        if path := where(node, labels[: len(labels) - block.level]):
            units.setdefault(path, []).append(node)
    chosen: list[RayNode] = []
    while len(chosen) < count:
        size = min(block.num_nodes, count - len(chosen))
        for path in sorted(units, key=lambda each: (len(units[each]), each)):
            if (found := _packed(units[path], size, inner, labels)) is not None:
                break
        else:
            return None
        chosen += found
        units[path] = [node for node in units[path] if node not in found]
    return chosen
