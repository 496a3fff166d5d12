"""The links between devices: one tier of the network."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from weft.config.document import Rules
from weft.errors import ClusterError

Topology = Literal["switch", "fully_connected", "ring", "double_ring", "tree", "torus", "rails"]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send"]

_RULES = Rules(ClusterError)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """How long one collective took on these links, as `weft probe` measured it."""

    kind: Collective
    members: int
    groups: int = 1
    """Groups of this size on the same links that worked at the same time."""
    size_bytes: int
    """Size of the whole tensor, as `weft.planning.price.collective_seconds` counts it."""
    seconds: float
    """Median of the slowest member."""
    spread: float = 0.0
    """Half of the distance from the first to the third quartile, as a share of the median."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 2, "members")
        _RULES.at_least(self, 1, "groups", "size_bytes")
        _RULES.above_zero(self, "seconds")
        _RULES.at_least(self, 0, "spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTier:
    """One level of the network: how groups of `devices` devices, packed densely, reach one another.

    A tier joins *units*: the groups of the tier before it, or single devices in the first.
    """

    name: str
    devices: int
    """Largest number of devices that this level joins: 8 for the links inside a node of 8."""
    latency_seconds: float
    """Time of an empty message from one device to another."""
    bandwidth_bytes_per_second: float
    """One way, of one device through all its links of this tier, while all its neighbours send too."""
    spread: float = 0.0
    """Share by which the bandwidth is uncertain: 0.2 is plus or minus a fifth."""
    topology: Topology = "switch"
    """switch: any unit to any other at full speed; fully_connected: a link of its own to every other unit, each with an
    equal share of the bandwidth; ring: one link to the next unit; double_ring: one link each way, with half of the
    bandwidth; torus: a double ring along each axis of `shape`; tree: a switch whose uplinks carry the bandwidth divided
    by `oversubscription`; rails: devices at the same place in their units share a switch, others go through their
    unit."""
    shape: tuple[int, ...] = ()
    """Units along each axis of a torus, the axis of neighbouring units last."""
    oversubscription: float = 1.0
    """Bandwidth of the devices of a tree's unit together, over the bandwidth of its uplink; at least 1."""
    alone_bytes_per_second: float | None = None
    """One way, of one device while its neighbours are silent, where a unit's devices share its network cards."""
    in_network: bool = False
    """Whether its switches add up what passes through them (NVLink SHARP, InfiniBand SHARP)."""
    start_seconds: float = 0.0
    """Once per collective: launching it and agreeing to begin."""
    measured: tuple[CollectiveTime, ...] = ()
    """Times that `weft probe` measured; they are used before any formula."""

    def __post_init__(self) -> None:
        _RULES.types(self)
        _RULES.at_least(self, 2, "devices")
        _RULES.at_least(self, 0, "latency_seconds", "start_seconds")
        _RULES.above_zero(self, "bandwidth_bytes_per_second", "oversubscription", "alone_bytes_per_second")
        _RULES.between(self, 0, 1, "spread")
        _RULES.at_least(self, 1, "oversubscription")
        self._check_shape()
        if self.oversubscription != 1.0 and self.topology != "tree":
            problem = f'is a setting of topology = "tree" only, and this tier is a {self.topology}. Remove it.'
            raise _RULES.refuse(self, "oversubscription", problem)
        alone = self.alone_bytes_per_second
        if alone is not None and alone < self.bandwidth_bytes_per_second:
            problem = f"is less than bandwidth_bytes_per_second = {self.bandwidth_bytes_per_second:g}: leave it out."
            raise _RULES.refuse(self, "alone_bytes_per_second", problem)

    def joining(self, devices: int) -> LinkTier:
        """Return the same tier where it joins so many devices.  Of a torus with fewer the shape is not known."""
        shape = self.shape if devices >= self.devices else ()
        topology = "switch" if self.shape and not shape else self.topology
        return replace(self, devices=devices, shape=shape, topology=topology)

    def _check_shape(self) -> None:
        for index, size in enumerate(self.shape):
            if size < 1:
                raise _RULES.refuse(self, "shape", "is too small: use 1 or more.", index)
        if self.topology == "torus" and not self.shape:
            raise _RULES.refuse(self, "shape", f"is empty: give the axes of the torus, such as [{self.devices}].")
        if self.shape and self.topology != "torus":
            problem = f'is a setting of topology = "torus" only, and this tier is a {self.topology}. Remove it.'
            raise _RULES.refuse(self, "shape", problem)
        if self.shape and self.devices % math.prod(self.shape):
            problem = f"has {math.prod(self.shape)} units, which do not divide devices = {self.devices}."
            raise _RULES.refuse(self, "shape", problem)
