"""Clusters by a short name: `4x8xh100`, `2x8xh100+4x8xa100`."""

from __future__ import annotations

import re
from dataclasses import replace

from weft.config.cluster._cluster import Cluster
from weft.config.cluster._devices import table_links, table_node
from weft.config.cluster._links import LinkTier
from weft.config.cluster._parts import Node
from weft.config.cluster._table import ALIASES, DEVICES
from weft.errors import ClusterError, did_you_mean

_MOST_DIGITS = 8

_SPEC = re.compile(r"((?:\d+x)*)(.*)")


def parse_cluster_spec(spec: str) -> Cluster:
    """Return the cluster that `4x8xh100` (4 nodes of 8), `8xh100` (one node) or `h100` names.

    With `cpu` the number counts cores: `2x16xcpu`.  `+` joins unlike nodes over the slower of their networks:
    `2x8xh100+4x8xa100`, or `7x8xh100+1x6xh100` where two devices have failed.  Peaks come from Weft's device table.

    Raises:
        ClusterError: when a number is missing or the device is not in the table.
    """
    parts = [_parse_part(spec, part) for part in spec.strip().lower().split("+")]
    if len(parts) == 1:
        nodes, devices, kind = parts[0]
        return Cluster(nodes=(table_node(kind, nodes, devices),), links=table_links(kind, nodes, devices))
    names = _names(parts)
    described = tuple(
        table_node(kind, nodes, devices, name=name) for (nodes, devices, kind), name in zip(parts, names, strict=True)
    )
    return Cluster(nodes=described, links=mixed_links(described))


def mixed_links(nodes: tuple[Node, ...]) -> tuple[LinkTier, ...]:
    """Return tiers for unlike nodes: as fast as the slowest kind's: a collective waits for its slowest member."""
    total = sum(node.count * node.devices.count for node in nodes)
    largest = max(node.devices.count for node in nodes)
    tiers: list[LinkTier] = []
    if largest > 1:
        inside = [table_links(node.devices.kind, 1, largest)[0] for node in nodes]
        slowest = min(inside, key=lambda tier: tier.bandwidth_bytes_per_second)
        tiers.append(replace(slowest, in_network=all(tier.in_network for tier in inside)))
    if total > largest:
        between = [table_links(node.devices.kind, 2 * _domain_nodes(node), node.devices.count)[-1] for node in nodes]
        slowest = min(between, key=lambda tier: tier.bandwidth_bytes_per_second)
        tiers.append(replace(slowest, devices=total))
    return tuple(tiers)


def _domain_nodes(node: Node) -> int:
    """Nodes that scale-up links may join: a network tier stands beyond them."""
    part = DEVICES.get(node.devices.kind)
    return max(1, part.scale_up_domain // node.devices.count) if part else 1


def _names(parts: list[tuple[int, int, str]]) -> list[str]:
    """A name for each part: its kind, numbered where it stands more than once."""
    kinds = [kind for _, _, kind in parts]
    return [
        kind if kinds.count(kind) == 1 else f"{kind}-{kinds[: index + 1].count(kind)}"
        for index, kind in enumerate(kinds)
    ]


def _parse_part(spec: str, part: str) -> tuple[int, int, str]:
    """Nodes, devices of each, and kind."""
    match = _SPEC.fullmatch(part.strip())
    assert match is not None, "the pattern fits every line"
    counts = [int(count[:_MOST_DIGITS]) for count in match[1].split("x") if count]
    if len(part) > 200 or any(len(count) > _MOST_DIGITS - 1 for count in match[1].split("x")):
        raise ClusterError(f'cluster = "{spec[:60]}…" is no size of a cluster. Write for example 4x8xh100.')
    kind = match[2]
    known = [*DEVICES, *ALIASES, "cpu"]
    if len(counts) > 2 or 0 in counts or (kind not in known and kind.endswith(tuple("x" + name for name in known))):
        raise ClusterError(
            f'cluster = "{spec}" is neither NODESxDEVICESxKIND nor DEVICESxKIND. Write for example 4x8xh100.'
        )
    nodes, devices = counts if len(counts) == 2 else (1, counts[0] if counts else 1)
    return nodes, devices, _known(f'cluster = "{spec}": ', kind)


def _known(before: str, kind: str) -> str:
    """Return the table's own name for a kind."""
    kind = ALIASES.get(kind, kind)
    if kind != "cpu" and kind not in DEVICES:
        known = [*DEVICES, *ALIASES, "cpu"]
        listed = ", ".join([*DEVICES, "cpu"])
        hint = did_you_mean(kind, known) or f" Known are {listed}; describe others in a cluster file."
        raise ClusterError(f"{before}{kind or 'nothing'} is not in the device table.{hint}")
    return kind
