"""What machines a job was given, compared with what its plan asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.config.cluster import Cluster, LinkTier
from weft.formatting import format_percent, format_seconds
from weft.run.hosts.roster import unit_of
from weft.run.places.contract import GangBlock


def num_whole(block: GangBlock, topologies: Sequence[tuple[str, ...]]) -> int:
    """Return how many of a gang's blocks lie inside one unit of their tier.

    Args:
        topologies: where each machine lies, in the order of the ranks: block after block.
    """
    return sum(len(units) == 1 for units in _units(block, topologies))


def placement_lines(blocks: Sequence[GangBlock], topologies: Sequence[tuple[str, ...]]) -> list[str]:
    """Say for each tier how many blocks were asked for and how many are whole, and what that is predicted to cost.
    Empty where the place does not say where machines lie, or nothing was asked."""
    if not all(topologies):
        return []
    lines: list[str] = []
    for block in blocks:
        units = list(_units(block, topologies))
        whole = sum(len(each) == 1 for each in units)
        line = f"placed    {whole} of {len(units)} blocks of {block.num_nodes} lie in one {block.tier}"
        if whole < len(units):
            # A step waits for its slowest block.
            halves = all(len(each) <= 2 for each in units)
            seconds = block.split_seconds if halves else block.scattered_seconds
            more = format_percent(100 * (seconds / block.whole_seconds - 1))
            line += f"; predicted up to {format_seconds(seconds)} per step (+{more})"
        lines.append(line)
    return lines


def granted(cluster: Cluster, topologies: Sequence[tuple[str, ...]]) -> Cluster:
    """Return a pool's cluster as a job sees it that was given these machines, for the planner.

    A tier joins so many machines as all groups of neighbouring ranks of that size have in one of its units: a step
    waits for its slowest group.

    Args:
        topologies: where each machine lies, in the order of the ranks.
    """
    if not all(topologies):
        return cluster
    per_node, links, level = cluster.nodes[0].devices.count, list[LinkTier](), 0
    for tier in cluster.links[:-1]:
        devices = tier.devices
        if devices > per_node:
            devices = _num_together(topologies, level, devices // per_node) * per_node
            level += 1
        if devices > (links[-1].devices if links else 1):
            links.append(tier.joining(devices))
    return replace(cluster, links=(*links, *cluster.links[-1:]))


def _num_together(topologies: Sequence[tuple[str, ...]], level: int, most: int) -> int:
    """The largest group of machines, of at most so many, of which each lies in one unit of a tier."""
    units = [unit_of(path, level) for path in topologies]

    def is_whole(size: int) -> bool:
        return all(len(set(units[start : start + size])) == 1 for start in range(0, len(units), size))

    return next(size for size in range(most, 0, -1) if is_whole(size))


def _units(block: GangBlock, topologies: Sequence[tuple[str, ...]]) -> Iterator[set[tuple[str, ...]]]:
    """The units of the tier on which each block lies."""
    for start in range(0, len(topologies), block.num_nodes):
        paths = topologies[start : start + block.num_nodes]
        yield {unit_of(path, block.level) for path in paths}
