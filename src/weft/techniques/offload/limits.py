"""What offloading does not go with, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.plan import Plan
    from weft.techniques.offload.contract import OffloadSettings

_KEY = "plan.memory.offload"


def conflicts(plan: Plan) -> Iterator[str]:
    """Yield why the engine cannot offload as a plan has it."""
    memory, pipeline = plan.memory, plan.pipeline_parallel
    shown = f'{_KEY} = "{memory.offload}"'
    if memory.offloads_activations and plan.compute.compile:
        yield f"{shown} cannot join compute.compile: a compiled block keeps what it likes. Use compile = false."
    if memory.offloads_activations and plan.mesh.pipeline > 1 and pipeline.splits_backward:
        yield (
            f"{shown} cannot join {pipeline.schedule_setting}: its second pass, of the weights, needs again what has"
            ' come back for the first. Use schedule = "1f1b".'
        )
    if memory.offloads_to_host and plan.compute.device == "cpu":
        yield (
            f'{_KEY}_to = "host" moves what a device holds to the memory of its host, and with compute.device ='
            ' "cpu" ranks compute on the host\'s cores: nothing would get smaller. Use offload_to = "disk", or'
            ' offload = "none".'
        )


def nowhere_to_go(settings: OffloadSettings) -> str:
    """Return why nothing can wait in the memory of the host where devices are its cores."""
    return (
        f'offload = "{settings.offload}" moves what a device holds to the memory of its host, and here the devices are'
        ' the host\'s cores: nothing would get smaller. Use offload = "none".'
    )


def no_loop(plan: Plan) -> str:
    """Return why a loop of the user's own offloads nothing."""
    shown = f'{_KEY} = "{plan.memory.offload}"'
    if plan.memory.offloads_optimizer:
        return (
            f"{shown} needs an optimizer of Weft's own: states of yours are made by your optimizer, where it steps."
            ' Use "none", or train from a recipe with weft train.'
        )
    return (
        f'{shown} ends with the run that it is part of, and a loop of yours does not say when. Use "none", or train'
        " from a recipe with weft train."
    )
