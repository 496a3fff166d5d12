"""Settings of offloading: what waits elsewhere between two uses, and where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from weft.config.document import Rules
from weft.config.settings import setting
from weft.errors import PlanError

Offload = Literal["none", "optimizer", "activations", "parameters", "optimizer+activations", "parameters+activations"]
OffloadTo = Literal["host", "disk"]
_RULES = Rules(PlanError)
DISK_BYTES_PER_SECOND = 1.5e9
"""Reads and writes together, of a rank's share of an NVMe drive: rather low than high (`benchmarks/offload.py`)."""


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """The part of `memory` that is about host memory."""

    offload: Offload = setting("none", space="offloads", asked=("offload",), explained=True)
    """What waits elsewhere until it is needed.  `optimizer`: masters, where they are not the weights themselves, and
    optimizer states.  `activations`: what the backward of the model's blocks needs of their forward.  `parameters`:
    ZeRO-3's shards of weights and gradients, and what `optimizer` says."""
    offload_to: OffloadTo = setting("host", follows="memory.offload")
    """Where it waits: in the memory of the host, for devices that have their own, or on a disk."""
    offload_folder: str = ""
    """Folder on the disk of `offload_to = "disk"`, existing or new; empty: the run's folder.  Its files have no
    name and end with their rank: checkpoints hold what they hold."""

    def check_settings(self) -> None:
        if self.offload_to != "host" and not self.offloads:
            problem = 'has no effect with offload = "none". Remove it, or use offload = "optimizer".'
            raise _RULES.refuse(self, "offload_to", problem)
        if self.offload_folder and self.offload_to != "disk":
            problem = f'has no effect with offload_to = "{self.offload_to}". Remove it, or use "disk".'
            raise _RULES.refuse(self, "offload_folder", problem)

    @property
    def offloads(self) -> bool:
        """Whether anything waits elsewhere."""
        return self.offload != "none"

    @property
    def offloads_to_disk(self) -> bool:
        """Whether it waits on a disk, and not in the memory of the host."""
        return self.offload_to == "disk"

    @property
    def offloads_to_host(self) -> bool:
        """Whether anything waits in the memory of the host, which is a device's own where the device is its cores."""
        return self.offloads and not self.offloads_to_disk

    def kept_on_device(self) -> Self:
        """Return the same with nothing elsewhere."""
        return replace(self, offload="none", offload_to="host", offload_folder="")

    @property
    def offloads_optimizer(self) -> bool:
        """Whether masters and optimizer states live elsewhere."""
        return self.offloads_parameters or "optimizer" in self.offload

    @property
    def offloads_parameters(self) -> bool:
        """Whether shards of weights and their gradients live elsewhere."""
        return "parameters" in self.offload

    @property
    def steps_on_host(self) -> bool:
        """Whether prices take it that the cores of the host step what lives in its memory, as ZeRO-Offload does."""
        return self.offloads_to_host and self.offloads_optimizer

    @property
    def offloads_activations(self) -> bool:
        """Whether what the backward of blocks needs waits elsewhere."""
        return offloads_activations(self.offload)


def offloads_activations(offload: Offload) -> bool:
    """Whether a value of `memory.offload` lets what backward needs wait elsewhere."""
    return offload.endswith("activations")
