"""The cluster that a row describes, from the names that publishers give devices."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks.published._rows import Run
from benchmarks.published._unpredictable import Unpredictable
from weft.config.cluster import DEVICES, Cluster, LinkTier, find_kind, parse_cluster_spec, sold_bytes

_GIGA = 1e9
_GIGABIT = 1.25e8

_FULL_POWER_WATTS = {"h100": 700.0, "a100": 400.0, "h200": 700.0, "b200": 1000.0}
_USUAL_DOMAIN = 8
"""Devices that share the fast links, where neither the row nor the table says."""
_LARGEST_MACHINE = 16
_SUPERCHIP_MACHINE = 4
"""Devices of one machine of a rack-scale domain: its network cards serve these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceName:
    """What a publisher's name of a device says."""

    kind: str
    """Name in Weft's device table."""
    memory_gigabytes: float | None = None
    bandwidth_gigabytes: float | None = None
    """Bandwidth of its memory, in gigabytes per second."""
    power_watts: float | None = None


def parse_device_name(text: str) -> DeviceName | None:
    """Read `A100-SXM4-40GB`, `H100-96GB-HBM2e (500W, 2.4TB/s)`, `TPUv4` and the like; None: no such device is known."""
    label = re.sub(r"tpu[- _]*v?(?=\d)", "tpu v", text.lower())
    label = re.sub(r"(?<=\d)[- _]*(ti|pcie|sxm)", r" \1", label)
    kind = find_kind(label) or _contained(label)
    if kind is None:
        return None
    memory = re.search(r"(\d+(?:\.\d+)?) ?gi?b(?!ps|/s|it)", label)
    bandwidth = re.search(r"(\d+(?:\.\d+)?) ?tb/s", label)
    power = re.search(r"(\d{3,4}) ?w\b", label)
    return DeviceName(
        kind=kind,
        memory_gigabytes=float(memory.group(1)) if memory else None,
        bandwidth_gigabytes=float(bandwidth.group(1)) * 1000 if bandwidth else None,
        power_watts=float(power.group(1)) if power else None,
    )


def _contained(label: str) -> str | None:
    """Return the longest name in the table that stands in a label without its separators."""
    plain = re.sub(r"[^a-z0-9]", "", label)
    fitting = [kind for kind in DEVICES if re.sub(r"[^a-z0-9]", "", kind) in plain]
    return max(fitting, key=len, default=None)


def cluster_of(run: Run, devices: int) -> Cluster:
    """Return the cluster of `devices` devices that a row describes.

    Raises:
        Unpredictable: the device is unknown.
    """
    if run.device.lower().startswith("mixed:"):
        return _mixed_cluster(run, run.device[len("mixed:") :].split("+"), devices)
    name = _name(run.device)
    table = DEVICES[name.kind]
    domain = run.devices_per_node or max(_USUAL_DOMAIN, min(table.scale_up_domain, devices))
    inside = largest_divisor(devices, domain)
    between = run.between_gigabits
    cluster = named_cluster(
        name.kind,
        devices // inside,
        inside,
        memory_bytes=sold_bytes(name.memory_gigabytes or table.memory_gibibytes),
        scale_up_bytes_per_second=run.inside_gigabytes * _GIGA if run.inside_gigabytes else None,
        network_bytes_per_second=between * _GIGABIT * _machines(inside) if between else None,
    )
    # Who published a run had measured that it fits, and needed no margin.
    return replace(_as_named(cluster, name), memory_margin=0.0)


def named_cluster(
    kind: str,
    nodes: int,
    devices: int,
    *,
    memory_bytes: int | None = None,
    scale_up_bytes_per_second: float | None = None,
    network_bytes_per_second: float | None = None,
) -> Cluster:
    """Return `nodes` nodes with `devices` of a kind in the table each, and what is known better than the table.

    Args:
        memory_bytes: of one device.
        scale_up_bytes_per_second: one way, of one device.
        network_bytes_per_second: one way, of all network cards of a node together.
    """
    cluster = parse_cluster_spec(f"{nodes}x{devices}x{kind}")
    (node,) = cluster.nodes
    if memory_bytes is not None:
        node = replace(node, devices=replace(node.devices, memory_bytes=memory_bytes))

    def known(tier: LinkTier) -> LinkTier:
        if tier.name == "scale_up" and scale_up_bytes_per_second:
            return replace(tier, bandwidth_bytes_per_second=scale_up_bytes_per_second)
        if tier.name == "scale_up" or network_bytes_per_second is None:
            return tier
        # Where devices share cards, one of them alone has a whole card, or all that the node has.
        each = network_bytes_per_second / devices
        alone = min(network_bytes_per_second, tier.bandwidth_bytes_per_second)
        return replace(tier, bandwidth_bytes_per_second=each, alone_bytes_per_second=alone if alone > each else None)

    return replace(cluster, nodes=(node,), links=tuple(known(tier) for tier in cluster.links))


def _name(text: str) -> DeviceName:
    if not text:
        raise Unpredictable("gpu is empty")
    name = parse_device_name(text)
    if name is None:
        raise Unpredictable(f'gpu = "{text}" is not in the device table')
    return name


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of `number` that is not above `limit`: 64 of 128 devices share an NVL72 domain."""
    return max(size for size in range(1, min(number, limit) + 1) if number % size == 0)


def _machines(inside: int) -> float:
    """Return the machines of one scale-up domain: rows give the network of one machine."""
    return 1.0 if inside <= _LARGEST_MACHINE else inside / _SUPERCHIP_MACHINE


def _as_named(cluster: Cluster, name: DeviceName) -> Cluster:
    """Replace what the table says by what the device's name says."""
    (node,) = cluster.nodes
    parts = node.devices
    if name.bandwidth_gigabytes:
        parts = replace(parts, memory_bandwidth_bytes_per_second=name.bandwidth_gigabytes * _GIGA)
    full_power = next((watts for kind, watts in _FULL_POWER_WATTS.items() if name.kind.startswith(kind)), None)
    if name.power_watts and full_power and "hbm2e" not in name.kind:
        # Power grows with the cube of the clock near the top of the voltage curve.
        share = min(1.0, name.power_watts / full_power) ** (1 / 3)
        parts = replace(parts, peak_flops={kind: peak * share for kind, peak in parts.peak_flops.items()})
    return replace(cluster, nodes=(replace(node, devices=parts),))


def _mixed_cluster(run: Run, names: list[str], devices: int) -> Cluster:
    """Return a cluster of several kinds in equal numbers of nodes, as nearly as can be; the row does not say more."""
    inside = largest_divisor(devices, run.devices_per_node or _USUAL_DOMAIN)
    count = devices // inside
    if count < len(names):
        raise Unpredictable(f'gpu = "{run.device}" names {len(names)} kinds, but there are only {count} nodes')
    kinds = [_name(name).kind for name in names]
    shares = [count // len(names) + (place < count % len(names)) for place in range(len(names))]
    cluster = parse_cluster_spec("+".join(f"{n}x{inside}x{kind}" for n, kind in zip(shares, kinds, strict=True)))
    return replace(cluster, memory_margin=0.0)
