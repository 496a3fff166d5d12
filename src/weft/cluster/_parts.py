"""What a cluster is made of: nodes, their devices, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.document import Rules
from weft.errors import ClusterError

_RULES = Rules(ClusterError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The accelerators of one node; of a node without any, its cores, each of which runs one rank."""

    kind: str
    """Name in Weft's device table, such as h100; cpu for cores."""
    count: int
    """Devices per node."""
    memory_bytes: int
    """Of one device."""
    peak_flops: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    """Precision → dense floating-point operations per second of one device."""
    memory_bandwidth_bytes_per_second: float | None = None
    """Of one device to its own memory."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "count", "memory_bytes")
        _RULES.above_zero(self, "memory_bandwidth_bytes_per_second")
        for precision, flops in self.peak_flops.items():
            if not flops > 0:
                raise _RULES.refuse(self, "peak_flops", "must be above 0.", precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine, or several that are alike."""

    name: str = "node"
    count: int = 1
    """Machines of this kind."""
    cores: int
    """Cores that this job may use on each."""
    memory_bytes: int
    """Host memory that this job may use on each."""
    devices: Devices

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "count", "cores", "memory_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTier:
    """One level of the network: how groups of `devices` devices, packed densely, reach one another."""

    name: str
    devices: int
    """Largest number of devices that this level joins: 8 for the links inside a node of 8."""
    latency_seconds: float
    """From one device to another, for an empty message."""
    bandwidth_bytes_per_second: float
    """One way, of one device, while all its neighbours send too."""
    spread: float = 0.0
    """Share by which the bandwidth is uncertain: 0.2 is plus or minus a fifth."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 2, "devices")
        _RULES.at_least(self, 0, "latency_seconds")
        _RULES.above_zero(self, "bandwidth_bytes_per_second")
        _RULES.between(self, 0, 1, "spread")
