"""The cluster says where to train: nodes, devices and the links between them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from weft.config.cluster._detect import detect_machine
from weft.config.cluster._links import LinkTier
from weft.config.cluster._parts import Node
from weft.config.document import Rules, dump
from weft.errors import ClusterError

_RULES = Rules(ClusterError)
_ACCELERATOR_MARGIN, _CORE_MARGIN = 0.06, 0.04
"""See `Cluster.memory_margin`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes and links.  Devices are numbered node by node."""

    nodes: tuple[Node, ...]
    links: tuple[LinkTier, ...] = ()
    """Innermost first; the last one joins all devices."""
    memory_margin: float | None = None
    """Share of a device's memory that plans leave free, because predictions err; None: 0.06 of accelerators, where
    predicted peaks are off by 5.5 % in the mean, and 0.04 of cores, where they are by 4 %."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        if self.memory_margin is not None and not 0 <= self.memory_margin < 1:
            raise _RULES.refuse(self, "memory_margin", "must be at least 0 and below 1: it is a share of the memory.")
        if not self.nodes:
            raise _RULES.refuse(self, "nodes", "is empty. Describe at least one node, or use Cluster.detect().")
        sizes = [tier.devices for tier in self.links]
        for index, (inner, outer) in enumerate(zip(sizes, sizes[1:], strict=False), start=1):
            if outer <= inner:
                problem = f"must be more than the {inner} of the tier before it: tiers stand innermost first."
                raise _RULES.refuse(self, "links", problem, index, "devices")
        if sizes and sizes[-1] < self.num_devices:
            problem = f"leaves out devices: the last tier must join all {self.num_devices}."
            raise _RULES.refuse(self, "links", problem, len(sizes) - 1, "devices")

    @classmethod
    def detect(cls) -> Cluster:
        """Describe this machine: cores and memory that this process may use, and accelerators.  Never imports torch."""
        node, links = detect_machine()
        return cls(nodes=(node,), links=links)

    @property
    def num_nodes(self) -> int:
        return sum(node.count for node in self.nodes)

    @property
    def num_devices(self) -> int:
        return sum(node.count * node.devices.count for node in self.nodes)

    @property
    def num_cores(self) -> int:
        return sum(node.count * node.cores for node in self.nodes)

    @property
    def device_memory_bytes(self) -> int:
        """Memory of the smallest device."""
        return min(node.devices.memory_bytes for node in self.nodes)

    @property
    def usable_memory_bytes(self) -> float:
        """Return the bytes of the smallest device that plans may fill: all but the margin."""
        margin = self.memory_margin
        if margin is None:
            margin = _ACCELERATOR_MARGIN if self.has_accelerators else _CORE_MARGIN
        return (1.0 - margin) * self.device_memory_bytes

    def with_memory(self, times: float) -> Cluster:
        """Return the same with so many times the memory, of devices and of their hosts."""
        nodes = [
            replace(
                node,
                memory_bytes=int(node.memory_bytes * times),
                devices=replace(node.devices, memory_bytes=int(node.devices.memory_bytes * times)),
            )
            for node in self.nodes
        ]
        return replace(self, nodes=tuple(nodes))

    @property
    def price_per_hour(self) -> float | None:
        """Price of all devices together; None where the price of some is unknown."""
        prices = [node.devices.price_per_hour for node in self.nodes]
        counts = [node.count * node.devices.count for node in self.nodes]
        if any(price is None for price in prices):
            return None
        return sum(count * (price or 0.0) for count, price in zip(counts, prices, strict=True))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Device kinds, each once."""
        return tuple(dict.fromkeys(node.devices.kind for node in self.nodes))

    @property
    def has_accelerators(self) -> bool:
        return any(kind != "cpu" for kind in self.kinds)

    @property
    def num_accelerators(self) -> int | None:
        """Accelerators of all nodes; None where only processors compute."""
        return self.num_devices if self.has_accelerators else None

    @property
    def is_predictable(self) -> bool:
        """Whether the planner can price work on it: peaks of all devices, and links where there are several."""
        return all(node.devices.peak_flops for node in self.nodes) and (bool(self.links) or self.num_devices == 1)

    @property
    def is_runnable(self) -> bool:
        """Whether the engine can use all of it in one job today: devices must be of one kind, or all accelerators."""
        return len({kind == "cpu" for kind in self.kinds}) == 1

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that name this cluster: the same for equal descriptions, on every machine."""
        return hashlib.sha256(dump(self, everything=True, descriptions=False).encode()).hexdigest()[:12]

    @property
    def summary(self) -> str:
        """One line: `1 host, 2 cores, 23 GiB, no accelerator`."""
        hosts = f"{self.num_nodes} host" + ("s" if self.num_nodes != 1 else "")
        cores = f"{self.num_cores:,} core" + ("s" if self.num_cores != 1 else "")
        memory = f"{sum(node.count * node.memory_bytes for node in self.nodes) / 2**30:,.0f} GiB"
        counts: dict[tuple[str, int], int] = {}
        for node in self.nodes:
            if node.devices.kind != "cpu":
                key = (node.devices.kind, node.devices.memory_bytes)
                counts[key] = counts.get(key, 0) + node.count * node.devices.count
        listed = [f"{count:,} {kind} of {size / 2**30:.0f} GiB" for (kind, size), count in counts.items()]
        return f"{hosts}, {cores}, {memory}, {', '.join(listed) or 'no accelerator'}"
