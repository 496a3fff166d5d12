"""Offloading to host memory: predicted, not run yet.

Source: Ren et al., "ZeRO-Offload: democratizing billion-scale model training" (arXiv 2101.06840).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, final

from weft.techniques.contract import Technique
from weft.techniques.settings import setting

if TYPE_CHECKING:
    from weft.plan import Plan

Offload = Literal["none", "optimizer", "activations"]


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """The part of `memory` that is about host memory."""

    offload: Offload = setting("none", space="offloads", asked=("offload",), explained=True)
    """What waits in host memory."""

    @property
    def offloads(self) -> bool:
        """Whether anything waits in host memory."""
        return self.offload != "none"

    def kept_on_device(self) -> Self:
        """Return the same with nothing in host memory."""
        return replace(self, offload="none")

    @property
    def offloads_optimizer(self) -> bool:
        """Whether masters and optimizer states live in host memory, whose cores step them."""
        return self.offload == "optimizer"

    @property
    def offloads_activations(self) -> bool:
        """Whether what backward needs waits in host memory."""
        return self.offload == "activations"


@final
class Offloading(Technique):
    """Host memory as a second, slower memory of a device."""

    name = "offloading"
    part = OffloadSettings

    def unrunnable(self, plan: Plan) -> Iterator[str]:
        offload = plan.memory.offload
        if offload != "none":
            yield (
                f'plan.memory.offload = "{offload}" can be predicted but not run yet: the engine has not got'
                ' offloading. Use "none".'
            )

    def problems(self, settings: OffloadSettings, *, on_cores: bool) -> Iterator[str]:
        if settings.offloads and on_cores:
            yield (
                f'offload = "{settings.offload}" moves what a device holds to the memory of its host, and here the'
                ' devices are the host\'s cores: nothing would get smaller. Use offload = "none".'
            )

    def elsewhere(self, settings: OffloadSettings) -> Iterator[str]:
        if settings.offloads_activations:
            yield "offloaded activations"

    def lighter(self, settings: OffloadSettings) -> Iterator[str]:
        if not settings.offloads:
            yield "offload=optimizer"

    def words(self, settings: OffloadSettings) -> Iterator[str]:
        if settings.offloads:
            yield f"offload {settings.offload}"
