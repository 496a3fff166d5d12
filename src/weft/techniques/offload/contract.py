"""Offloading: what it cannot join, what it costs, its words.

Source: Ren et al., "ZeRO-Offload" (arXiv 2101.06840); to disks Rajbhandari et al., "ZeRO-Infinity" (arXiv 2104.07857).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final

from weft.config.plan import Plan
from weft.techniques.contract import Ablation, Case, Technique
from weft.techniques.offload.settings import DISK_BYTES_PER_SECOND, OffloadSettings


def _without(plan: Plan) -> Plan:
    return replace(plan, memory=plan.memory.kept_on_device())


@final
class Offloading(Technique):
    """A second, slower memory of a device: its host's, or a disk."""

    name = "offloading"
    part = OffloadSettings
    ablations = (Ablation("offloading", _without),)

    def runs(self, plan: Plan) -> bool:
        return plan.memory.offloads

    def unrunnable(self, plan: Plan) -> Iterator[str]:
        if plan.memory.offloads:
            from weft.techniques.offload.limits import conflicts  # where something waits elsewhere

            yield from conflicts(plan)

    def check_model(self, case: Case) -> None:
        if case.plan.memory.offloads_activations and (reason := case.facts.why_not("blocks")):
            raise case.refuse(("memory", "offload"), f'works block by block: {reason}.\nUse "none".')

    def problems(self, settings: OffloadSettings, *, on_cores: bool) -> Iterator[str]:
        if settings.offloads_to_host and on_cores:
            from weft.techniques.offload.limits import nowhere_to_go

            yield nowhere_to_go(settings)

    def update_seconds(self, settings: OffloadSettings, state_bytes: float) -> float:
        """Everything is read and written once, and the update itself hides behind that."""
        if not (settings.offloads_optimizer and settings.offloads_to_disk):
            return 0.0
        return 2.0 * state_bytes / DISK_BYTES_PER_SECOND

    def unsupported_by_others(self, settings: OffloadSettings) -> Iterator[str]:
        if settings.offloads_activations:
            yield "offloaded activations"
        elif settings.offloads_to_disk:
            yield "optimizer states on a disk"

    def lighter_settings(self, settings: OffloadSettings) -> Iterator[str]:
        if not settings.offloads:
            yield "offload=optimizer"

    def describe(self, settings: OffloadSettings) -> Iterator[str]:
        if settings.offloads:
            yield f"offload {settings.offload}" + (" to disk" if settings.offloads_to_disk else "")

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
        if plan.memory.offloads:
            yield f'plan.memory.offload = "{plan.memory.offload}": the script offloads nothing. Use "none".'

    def needs_loop(self, plan: Plan) -> Iterator[str]:
        if plan.memory.offloads:
            from weft.techniques.offload.limits import no_loop  # as above

            yield no_loop(plan)
