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
    node = replace(known.nodes[0], count=num_hosts)
    node = replace(node, devices=replace(node.devices, count=num_devices))
    total, links = num_hosts * num_devices, tuple(tier for tier in known.links if tier.devices <= num_devices)
    if num_hosts > 1 and described is not None:
        for tier in known.links:
            # A tier that joins more devices than there are joins those that there are.
            if tier.devices > num_devices and (not links or links[-1].devices < total):
                links = (*links, replace(tier, devices=min(tier.devices, total)))
    if num_hosts > 1 and (not links or links[-1].devices < total):
        between = LinkTier(
            name="between hosts",
            devices=total,
            latency_seconds=_ASSUMED_LATENCY_SECONDS,
            bandwidth_bytes_per_second=_ASSUMED_BANDWIDTH,
            spread=0.5,
        )
        links = (*links, between)
    return replace(known, nodes=(node,), links=links)
