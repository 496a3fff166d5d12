"""The systems by name, and the one way to a command that is known to be right."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.config.cluster import Cluster
from weft.config.recipe import OptimizerRecipe
from weft.errors import PlanError, did_you_mean
from weft.interop.systems._contract import DEFAULT_STEPS, Emission, SystemJob
from weft.interop.systems._system import System
from weft.interop.systems.accelerate import Accelerate
from weft.interop.systems.deepspeed import DeepSpeed
from weft.interop.systems.megatron import Megatron
from weft.interop.systems.torchtitan import Torchtitan
from weft.model.profile import ModelSizes
from weft.planning.search import Candidate, SearchResult

SYSTEMS: Mapping[str, System] = MappingProxyType(
    {"megatron": Megatron(), "torchtitan": Torchtitan(), "deepspeed": DeepSpeed(), "accelerate": Accelerate()}
)
"""Every system that plans can be emitted for."""


def find_system(name: str, option: str = "--for") -> System:
    """Return a system by name.

    Raises:
        PlanError: there is none; the message names the closest.
    """
    system = SYSTEMS.get(name)
    if system is None:
        hint = did_you_mean(name, SYSTEMS) or f" Known are {', '.join(SYSTEMS)}."
        raise PlanError(f'{option} "{name}" is no system that Weft knows.{hint}')
    return system


def job_of(
    result: SearchResult,
    candidate: Candidate,
    sizes: ModelSizes,
    *,
    optimizer: OptimizerRecipe | None = None,
    steps: int | None = None,
) -> SystemJob:
    """Return what a system is given of a candidate of a search."""
    plan, layout = candidate.plan, candidate.layout
    shares = () if plan is None else plan.microbatch.shares(layout.data)
    cuts = () if plan is None else plan.pipeline_parallel.cuts or ()
    return SystemJob(
        sizes=sizes,
        layout=layout,
        cuts=cuts if layout.pipeline > 1 else (),
        shares=tuple(shares) if len(set(shares)) > 1 else (),
        global_batch_size=result.global_batch_size,
        sequence_length=result.profile.sequence_length,
        devices_per_node=node_size(result.cluster),
        optimizer=optimizer or OptimizerRecipe(),
        steps=steps or DEFAULT_STEPS,
    )


def node_size(cluster: Cluster) -> int:
    """Devices that every node has."""
    return min(node.devices.count for node in cluster.nodes)


def emit(system: System, job: SystemJob) -> Emission:
    """Return how a system is started on a job, checked against its recorded arguments.

    Raises:
        PlanError: the system cannot run it, every reason listed; or a command came out that its own check refuses.
    """
    reasons = list(dict.fromkeys(system.refusals(job)))
    if reasons:
        listed = "\n".join(f"- {reason}" for reason in reasons)
        name = system.facts.system
        raise PlanError(
            f"{system.facts.title} cannot train {job.sizes.name} under this plan:\n{listed}\n"
            f"Use --for {name}, which searches within what it can, or --eject."
        )
    emission = system.emission(job)
    wrong = list(system.check(emission, job))
    if wrong:
        raise PlanError(
            f"{system.facts.title} would refuse the command that Weft wrote: {'; '.join(wrong)}."
            " Please report it with the command that you gave."
        )
    return emission
