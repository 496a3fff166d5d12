"""Peaks of devices, from their makers' tables.  Peaks are dense: without structured sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.cluster._parts import Devices, LinkTier

_TERA = 1e12
_GIGA = 1e9



@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """What a maker says of one part, and of the usual node around it."""

    memory_gigabytes: int
    """As sold: 10⁹ bytes.  The driver shows a little more."""
    memory_gigabytes_per_second: float
    teraflops: Mapping[str, float]
    scale_up_gigabytes_per_second: float
    """One way, of one device, inside its node."""
    scale_out_gigabytes_per_second: float
    """One way, of one device's share of the node's network cards."""
    source: str


DEVICES: Mapping[str, DeviceKind] = {
    "a100": DeviceKind(
        memory_gigabytes=80,
        memory_gigabytes_per_second=2039,
        teraflops={"fp64": 9.7, "fp32": 19.5, "bf16": 312, "fp16": 312},
        scale_up_gigabytes_per_second=300,
        scale_out_gigabytes_per_second=25,
        source="NVIDIA A100 80GB SXM datasheet; DGX A100: 8 × 200 Gb/s",
    ),
    "h100": DeviceKind(
        memory_gigabytes=80,
        memory_gigabytes_per_second=3350,
        teraflops={"fp64": 34, "fp32": 67, "bf16": 989, "fp16": 989, "fp8": 1979},
        scale_up_gigabytes_per_second=450,
        scale_out_gigabytes_per_second=50,
        source="NVIDIA H100 SXM datasheet (its figures with sparsity halved); DGX H100: 8 × 400 Gb/s",
    ),
    "h200": DeviceKind(
        memory_gigabytes=141,
        memory_gigabytes_per_second=4800,
        teraflops={"fp64": 34, "fp32": 67, "bf16": 989, "fp16": 989, "fp8": 1979},
        scale_up_gigabytes_per_second=450,
        scale_out_gigabytes_per_second=50,
        source="NVIDIA H200 SXM datasheet (its figures with sparsity halved); DGX H200: 8 × 400 Gb/s",
    ),
    "b200": DeviceKind(
        memory_gigabytes=180,
        memory_gigabytes_per_second=8000,
        teraflops={"fp64": 37, "fp32": 75, "bf16": 2250, "fp16": 2250, "fp8": 4500},
        scale_up_gigabytes_per_second=900,
        scale_out_gigabytes_per_second=50,
        source="NVIDIA HGX B200 datasheet, an eighth of the board; DGX B200: 8 × 400 Gb/s",
    ),
    "mi300x": DeviceKind(
        memory_gigabytes=192,
        memory_gigabytes_per_second=5300,
        teraflops={"fp64": 81.7, "fp32": 163.4, "bf16": 1307, "fp16": 1307, "fp8": 2610},
        scale_up_gigabytes_per_second=448,
        scale_out_gigabytes_per_second=50,
        source="AMD Instinct MI300X datasheet; usual nodes of 8 with 8 × 400 Gb/s",
    ),
}

HOST_CORES_PER_DEVICE = 16
HOST_GIGABYTES_PER_DEVICE = 256
"""Host of a node that is known by its accelerators only: what the makers' own 8-device nodes have, rounded down."""

CPU_CORE_GIGABYTES = 4
CPU_CORE_TERAFLOPS = {"fp64": 0.04, "fp32": 0.08}
"""A server core with AVX2 at 2.5 GHz: 2.5e9 × 32 fp32 operations per cycle."""


def table_devices(kind: str, count: int, memory_bytes: int | None = None) -> Devices:
    """Return `count` devices of a kind in the table, with another memory size where the machine says so."""
    if kind == "cpu":
        peaks = {precision: teraflops * _TERA for precision, teraflops in CPU_CORE_TERAFLOPS.items()}
        size = int(CPU_CORE_GIGABYTES * _GIGA) if memory_bytes is None else memory_bytes
        return Devices(kind=kind, count=count, memory_bytes=size, peak_flops=peaks)
    part = DEVICES[kind]
    return Devices(
        kind=kind,
        count=count,
        memory_bytes=int(part.memory_gigabytes * _GIGA) if memory_bytes is None else memory_bytes,
        peak_flops={precision: teraflops * _TERA for precision, teraflops in part.teraflops.items()},
        memory_bandwidth_bytes_per_second=part.memory_gigabytes_per_second * _GIGA,
    )


def table_links(kind: str, nodes: int, devices: int) -> tuple[LinkTier, ...]:
    """Return the usual tiers: inside a node, and between nodes.  Parts outside the table get a PCIe guess."""
    inside, between, latency = _speeds(kind)
    tiers: list[LinkTier] = []
    if devices > 1:
        tiers.append(
            LinkTier(
                name="memory" if kind == "cpu" else "scale_up",
                devices=devices,
                latency_seconds=latency,
                bandwidth_bytes_per_second=inside,
                spread=0.5 if kind not in DEVICES else 0.3,
            )
        )
    if nodes > 1:
        tiers.append(
            LinkTier(
                name="network",
                devices=nodes * devices,
                latency_seconds=2e-5,
                bandwidth_bytes_per_second=between,
                spread=0.3,
            )
        )
    return tuple(tiers)


def _speeds(kind: str) -> tuple[float, float, float]:
    """Bytes per second inside a node and between nodes, and seconds of latency inside a node."""
    if kind == "cpu":
        # Ranks on one host speak through its memory, those on several through 10 Gb/s; guesses until measured.
        return 2 * _GIGA, 1.25 * _GIGA, 5e-5
    part = DEVICES.get(kind)
    if part is None:
        return 16 * _GIGA, 12.5 * _GIGA, 1e-5
    return part.scale_up_gigabytes_per_second * _GIGA, part.scale_out_gigabytes_per_second * _GIGA, 5e-6
