"""Offloading: masters and optimizer states wait elsewhere between two steps.

Source: Ren et al., "ZeRO-Offload" (arXiv 2101.06840); to disks Rajbhandari et al., "ZeRO-Infinity" (arXiv 2104.07857).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, final

from weft.config.document import Rules
from weft.config.settings import setting
from weft.errors import PlanError
from weft.techniques.contract import Case, Removal, Technique

if TYPE_CHECKING:
    from weft.config.plan import Plan

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


def _without(plan: Plan) -> Plan:
    return replace(plan, memory=plan.memory.kept_on_device())


@final
class Offloading(Technique):
    """A second, slower memory of a device: its host's, or a disk."""

    name = "offloading"
    part = OffloadSettings
    removals = (Removal("offloading", _without),)

    def runs(self, plan: Plan) -> bool:
        return plan.memory.offloads

    def unrunnable(self, plan: Plan) -> Iterator[str]:
        if plan.memory.offloads:
            from weft.techniques.offload.limits import conflicts  # where something waits elsewhere

            yield from conflicts(plan)

    def check_model(self, case: Case) -> None:
        if case.plan.memory.offloads_activations and case.facts.no_stages:
            raise case.refuse(("memory", "offload"), f'works block by block: {case.facts.no_stages}.\nUse "none".')

    def problems(self, settings: OffloadSettings, *, on_cores: bool) -> Iterator[str]:
        if settings.offloads_to_host and on_cores:
            from weft.techniques.offload.limits import nowhere_to_go

            yield nowhere_to_go(settings)

    def update_seconds(self, settings: OffloadSettings, state_bytes: float) -> float:
        """Everything is read and written once, and the update itself hides behind that."""
        if not (settings.offloads_optimizer and settings.offloads_to_disk):
            return 0.0
        return 2.0 * state_bytes / DISK_BYTES_PER_SECOND

    def elsewhere(self, settings: OffloadSettings) -> Iterator[str]:
        if settings.offloads_activations:
            yield "offloaded activations"
        elif settings.offloads_to_disk:
            yield "optimizer states on a disk"

    def lighter(self, settings: OffloadSettings) -> Iterator[str]:
        if not settings.offloads:
            yield "offload=optimizer"

    def words(self, settings: OffloadSettings) -> Iterator[str]:
        if settings.offloads:
            yield f"offload {settings.offload}" + (" to disk" if settings.offloads_to_disk else "")

    def unwritten(self, plan: Plan) -> Iterator[str]:
        if plan.memory.offloads:
            yield f'plan.memory.offload = "{plan.memory.offload}": the script offloads nothing. Use "none".'

    def needs_loop(self, plan: Plan) -> Iterator[str]:
        if plan.memory.offloads:
            from weft.techniques.offload.limits import no_loop  # as above

            yield no_loop(plan)
