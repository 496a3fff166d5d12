"""Devices, nodes and links as the device table knows them."""

from __future__ import annotations

import math
import re

from weft.config.cluster._links import LinkTier
from weft.config.cluster._parts import Devices, Node
from weft.config.cluster._table import DEVICES

_TERA = 1e12
_GIGA = 1e9

_GIBI = 2**30
_VISIBLE = 0.99
"""Share of the memory as sold that drivers show: 79.2 to 80 GiB of an A100 of 80, 79.6 of an H100, 140.4 of an H200
of 141."""

HOST_CORES_PER_DEVICE = 16
HOST_GIBIBYTES_PER_DEVICE = 256
"""Host of a node that is known by its accelerators only: what the makers' own 8-device nodes have, rounded down."""

CPU_CORE_GIBIBYTES = 4
CPU_CORE_TERAFLOPS = {"fp64": 0.04, "fp32": 0.08}
"""A server core with AVX2 at 2.5 GHz: 2.5e9 × 32 fp32 operations per cycle."""

# Read off the collectives of vTrain's A100 tables: 40 µs to start any of them, 2.7 µs per hop of a ring.
_START_SECONDS = 4e-5
_SCALE_UP_LATENCY_SECONDS = 2.7e-6
# A hop between nodes over RDMA: NCCL's tuning table has 2.7, 4 and 14 µs, by protocol.
_NETWORK_LATENCY_SECONDS = 5e-6


def find_kind(label: str) -> str | None:
    """Return the kind in the table that a driver's or a paper's name for a device means, such as `A100-SXM4-40GB`."""
    words = set(re.findall(r"[a-z0-9]+", label.lower()))
    fitting = [kind for kind, part in DEVICES.items() if words.issuperset(part.words)]
    return max(fitting, key=lambda kind: len(DEVICES[kind].words), default=None)


def sold_bytes(gibibytes: float) -> int:
    """Return what programs see of an accelerator's memory as sold, in GiB."""
    return int(gibibytes * _GIBI * _VISIBLE)


def table_devices(kind: str, count: int, memory_bytes: int | None = None) -> Devices:
    """Return `count` devices of a kind in the table, with another memory size where the machine says so."""
    if kind == "cpu":
        peaks = {precision: teraflops * _TERA for precision, teraflops in CPU_CORE_TERAFLOPS.items()}
        size = CPU_CORE_GIBIBYTES * _GIBI if memory_bytes is None else memory_bytes
        return Devices(kind=kind, count=count, memory_bytes=size, peak_flops=peaks)
    part = DEVICES[kind]
    return Devices(
        kind=kind,
        count=count,
        memory_bytes=sold_bytes(part.memory_gibibytes) if memory_bytes is None else memory_bytes,
        peak_flops={precision: teraflops * _TERA for precision, teraflops in part.teraflops.items()},
        memory_bandwidth_bytes_per_second=part.memory_gigabytes_per_second * _GIGA,
        measured_flops={precision: teraflops * _TERA for precision, teraflops in part.measured_teraflops.items()},
    )


def table_node(kind: str, nodes: int, devices: int, *, name: str = "node") -> Node:
    """Return `nodes` nodes that are known by their devices."""
    devices_of_kind = table_devices(kind, devices)
    if kind == "cpu":
        return Node(
            name=name,
            count=nodes,
            cores=devices,
            memory_bytes=devices * devices_of_kind.memory_bytes,
            devices=devices_of_kind,
        )
    memory = devices * HOST_GIBIBYTES_PER_DEVICE * _GIBI
    return Node(
        name=name, count=nodes, cores=devices * HOST_CORES_PER_DEVICE, memory_bytes=memory, devices=devices_of_kind
    )


def table_links(kind: str, nodes: int, devices: int) -> tuple[LinkTier, ...]:
    """Return the usual tiers: inside a scale-up domain, and between domains; of unknown parts a guess, PCIe."""
    total = nodes * devices
    joined = min(total, max(devices, _domain(kind, devices)))
    tiers: list[LinkTier] = []
    if joined > 1:
        tiers.append(_scale_up(kind, joined))
    if total > joined:
        tiers.append(_network(kind, total))
    return tuple(tiers)


def _domain(kind: str, devices: int) -> int:
    """Devices of one scale-up domain, whole nodes."""
    domain = DEVICES[kind].scale_up_domain if kind in DEVICES else 1
    return domain // devices * devices


def _scale_up(kind: str, joined: int) -> LinkTier:
    part = DEVICES.get(kind)
    if part is None:
        # Ranks on one host speak through its memory; unknown accelerators through PCIe.  Guesses until measured.
        name, speed, latency = ("memory", 2.0, 5e-5) if kind == "cpu" else ("scale_up", 16.0, 1e-5)
        return LinkTier(
            name=name,
            devices=joined,
            latency_seconds=latency,
            bandwidth_bytes_per_second=speed * _GIGA,
            spread=0.5,
        )
    is_torus = part.scale_up == "torus"
    return LinkTier(
        name="scale_up",
        devices=joined,
        latency_seconds=_SCALE_UP_LATENCY_SECONDS,
        bandwidth_bytes_per_second=part.scale_up_gigabytes_per_second * _GIGA,
        spread=0.3,
        topology=part.scale_up,
        shape=torus_shape(joined, part.torus_axes) if is_torus else (),
        in_network=part.in_network,
        start_seconds=_START_SECONDS,
    )


def _network(kind: str, total: int) -> LinkTier:
    part = DEVICES.get(kind)
    if part is None:
        speed, latency, start = (1.25, 2e-5, 0.0) if kind == "cpu" else (12.5, 2e-5, _START_SECONDS)
    else:
        speed, latency, start = part.scale_out_gigabytes_per_second, _NETWORK_LATENCY_SECONDS, _START_SECONDS
    return LinkTier(
        name="network",
        devices=total,
        latency_seconds=latency,
        bandwidth_bytes_per_second=speed * _GIGA,
        spread=0.3,
        start_seconds=start,
    )


def torus_shape(devices: int, axes: int) -> tuple[int, ...]:
    """Return `axes` sizes as equal as they can be, largest first, with product `devices`."""
    shape: list[int] = []
    rest = devices
    for left in range(axes, 0, -1):
        root = round(rest ** (1 / left))
        size = max((d for d in range(1, root + 1) if rest % d == 0), default=1) if left > 1 else rest
        shape.append(size)
        rest //= size
    return tuple(sorted(shape, reverse=True)) if math.prod(shape) == devices else (devices,)
