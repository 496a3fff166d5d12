"""Peaks of devices, from their makers' tables, as `devices.toml` holds them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.config.cluster._links import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A maker's figures of one device, and the usual node around it."""

    memory_gibibytes: int
    """Memory as sold: the label says GB and means GiB (a driver shows 79.6 GiB of an H100 of 80 "GB")."""
    memory_gigabytes_per_second: float
    teraflops: Mapping[str, float]
    """Precision → data-sheet peak."""
    measured_teraflops: Mapping[str, float] = field(default_factory=dict[str, float])
    """Precision → best matrix product that anyone measured on it (stas00/ml-engineering, accelerator benchmarks)."""
    scale_up_gigabytes_per_second: float
    """Bandwidth one way of one device inside its scale-up domain, in GB/s."""
    scale_up: Topology = "switch"
    scale_up_domain: int = 1
    """Devices that scale-up links join even where nodes are smaller: 72 in an NVL72 rack, a pod of TPUs."""
    torus_axes: int = 0
    in_network: bool = False
    """Whether its scale-up switches add up what passes through them (NVLink SHARP)."""
    scale_out_gigabytes_per_second: float
    """Bandwidth one way of one device's share of the node's network cards, in GB/s."""
    words: tuple[str, ...]
    """Words that all stand in the driver's name of the device."""
    source: str


def _read(text: str) -> Mapping[str, DeviceKind]:
    tables: dict[str, dict[str, Any]] = tomllib.loads(text)
    return {name: DeviceKind(words=tuple(fields.pop("words")), **fields) for name, fields in tables.items()}


DEVICES: Mapping[str, DeviceKind] = _read((Path(__file__).parent / "devices.toml").read_text(encoding="utf-8"))
"""Every kind of device by its name in `devices.toml`."""

ALIASES: Mapping[str, str] = {
    "v100-32gb": "v100",
    "a100-80gb": "a100",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
}
"""Longer names of kinds in the table."""
