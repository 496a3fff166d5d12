"""The cluster of a job on several hosts."""

from __future__ import annotations

from dataclasses import replace

from weft.config.cluster._cluster import Cluster
from weft.config.cluster._links import LinkTier

_ASSUMED_LATENCY_SECONDS = 50e-6
_ASSUMED_BANDWIDTH = 1.25e9
"""Bytes per second between hosts whose network nobody has described: 10 Gbit/s, for the planner alone."""


def cluster_of_hosts(own: Cluster, described: Cluster | None, num_hosts: int, num_devices: int) -> Cluster:
    """Return a cluster of so many hosts with so many devices each: as a pool describes them, or all like this one."""
    known = own if described is None else described
    per_node, total = known.nodes[0].devices.count, num_hosts * num_devices
    node = replace(known.nodes[0], count=num_hosts)
    node = replace(node, devices=replace(node.devices, count=num_devices))
    links: list[LinkTier] = []
    for tier in known.links:
        if tier.devices == per_node:
            devices = num_devices
        elif tier.devices < per_node:
            devices = min(tier.devices, num_devices)
        elif described is not None:
            # A tier that joins more devices than there are joins those that there are.
            devices = min(tier.devices // per_node * num_devices, total)
        else:
            continue
        if devices > (links[-1].devices if links else 1):
            links.append(tier.joining(devices))
    if num_hosts > 1 and (not links or links[-1].devices < total):
        between = LinkTier(
            name="between hosts",
            devices=total,
            latency_seconds=_ASSUMED_LATENCY_SECONDS,
            bandwidth_bytes_per_second=_ASSUMED_BANDWIDTH,
            spread=0.5,
        )
        links.append(between)
    return replace(known, nodes=(node,), links=tuple(links))
