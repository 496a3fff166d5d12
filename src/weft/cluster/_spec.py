"""Clusters by a short name: `4x8xh100`."""

from __future__ import annotations

import re

from weft.cluster._cluster import Cluster
from weft.cluster._devices import (
    CPU_CORE_GIGABYTES,
    DEVICES,
    HOST_CORES_PER_DEVICE,
    HOST_GIGABYTES_PER_DEVICE,
    table_devices,
    table_links,
)
from weft.cluster._parts import Node
from weft.errors import ClusterError, did_you_mean

_GIGA = 1e9
_SPEC_PART = re.compile(r"[^x]+?(?=x(?!$))|[^x]+x?$")
"""What stands between the x of `4x8xh100`; one at the end belongs to the device, as in mi300x."""


def parse_cluster_spec(spec: str) -> Cluster:
    """Return the cluster that `4x8xh100` (4 nodes of 8), `8xh100` (one node) or `h100` names.

    With `cpu` the number counts cores: `2x16xcpu`.  Peaks come from Weft's device table.

    Raises:
        ClusterError: when a number is missing or the device is not in the table.
    """
    *counts, kind = _SPEC_PART.findall(spec.strip().lower()) or [""]
    if len(counts) > 2 or not all(count.isdigit() and int(count) > 0 for count in counts):
        raise ClusterError(
            f'cluster = "{spec}" is neither NODESxDEVICESxKIND nor DEVICESxKIND. Write for example 4x8xh100.'
        )
    if kind != "cpu" and kind not in DEVICES:
        known = [*DEVICES, "cpu"]
        hint = did_you_mean(kind, known) or f" Known are {', '.join(known)}; describe others in a cluster file."
        raise ClusterError(f'cluster = "{spec}": {kind or "nothing"} is not in the device table.{hint}')
    numbers = [int(count) for count in counts]
    nodes, devices = numbers if len(numbers) == 2 else (1, numbers[0] if numbers else 1)
    cores, memory_bytes = _host(kind, devices)
    node = Node(count=nodes, cores=cores, memory_bytes=memory_bytes, devices=table_devices(kind, devices))
    return Cluster(nodes=(node,), links=table_links(kind, nodes, devices))


def _host(kind: str, devices: int) -> tuple[int, int]:
    """Return cores and bytes of memory of a node that is known by its devices."""
    if kind == "cpu":
        return devices, int(devices * CPU_CORE_GIGABYTES * _GIGA)
    return devices * HOST_CORES_PER_DEVICE, int(devices * HOST_GIGABYTES_PER_DEVICE * _GIGA)
