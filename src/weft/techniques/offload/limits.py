"""What offloading does not go with, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.plan import Plan
from weft.techniques.offload.settings import OffloadSettings

_KEY = "plan.memory.offload"


def conflicts(plan: Plan) -> Iterator[str]:
    """Yield why the engine cannot offload as a plan has it."""
    memory, pipeline = plan.memory, plan.pipeline_parallel
    shown = f'{_KEY} = "{memory.offload}"'
    if memory.offloads_parameters:
        yield from _parameters_conflicts(plan, shown)
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


def _parameters_conflicts(plan: Plan, shown: str) -> Iterator[str]:
    """Yield what shards of weights cannot wait elsewhere with."""
    data = plan.data_parallel
    if not data.shards_weights or plan.mesh.shard * plan.mesh.context == 1:
        yield (
            f"{shown} needs weights that ZeRO-3 shares out over ranks, who gather them where they compute."
            ' Use data_parallel.zero = 3 with mesh.shard = 2 or more, or offload = "optimizer".'
        )
    if plan.mesh.pipeline > 1 or plan.microbatch.has_unequal_shares:
        with_it = "plan.mesh.pipeline > 1" if plan.mesh.pipeline > 1 else "plan.microbatch.per_step with unequal shares"
        yield (
            f"{shown} cannot join {with_it}: a rank's weights stay gathered for the whole step, and nothing would be"
            ' smaller. Use one stage and equal shares, or offload = "optimizer".'
        )
    if plan.compute.compile:
        yield f"{shown} cannot join compute.compile: hooks read shards ahead. Use compile = false."
    if data.compresses or data.replicas_step_alone:
        yield (
            f"{shown} cannot join gradients that are compressed or summed every few steps, as"
            " plan.data_parallel.compression and local_steps have them: copies stay in memory."
            ' Use offload = "optimizer".'
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
            ' Use "none", or train it by `weft train`.'
        )
    return (
        f'{shown} ends with the run that it is part of, and a loop of yours does not say when. Use "none", or train'
        " it by `weft train`."
    )
