"""The parts of a cluster: nodes and their devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.config.cluster._measured import Measured
from weft.config.document import Rules
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
    """Memory of one device."""
    peak_flops: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    """Precision → dense floating-point operations per second of one device."""
    memory_bandwidth_bytes_per_second: float | None = None
    """Bandwidth of one device to its own memory."""
    measured_flops: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    """Precision → floating-point operations per second of the best matrix product measured on one device."""
    price_per_hour: float | None = None
    """Price of one device, in any currency; None: unknown, and plans cannot be ranked by cost."""
    measured: Measured | None = None
    """Measurements by `weft probe`; None: nothing was measured."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 1, "count", "memory_bytes")
        _RULES.above_zero(self, "memory_bandwidth_bytes_per_second", "price_per_hour")
        for name in ("peak_flops", "measured_flops"):
            for precision, flops in getattr(self, name).items():
                if not flops > 0:
                    raise _RULES.refuse(self, name, "must be above 0.", precision)


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
