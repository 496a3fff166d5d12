"""A plan by rule, for models of which nothing is known, and for settings that leave search nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.cluster import Cluster
from weft.errors import PlanError
from weft.plan import ModelFacts, Plan
from weft.recipe import Recipe
from weft.search._rule import auto_plan
from weft.techniques.compute.contract import THREADS


def plan_by_rule(
    recipe: Recipe, cluster: Cluster, facts: ModelFacts, processes: int | None, given: Plan
) -> tuple[Plan, Mapping[str, str]]:
    """Return the largest data-parallel split that fits beside the axes that were given, and why each setting.

    The given axes are for the caller to lay over the plan.

    Raises:
        PlanError: nothing fits, or the batch cannot be divided over the processes.
    """
    model_ranks = _model_ranks(given)
    if model_ranks > 1:
        processes = max(1, (cluster.num_devices if processes is None else processes) // model_ranks)
    plan, reasons = auto_plan(recipe, cluster, facts, processes)
    world = plan.mesh.data * model_ranks
    threads = max(1, cluster.num_cores // world)
    if model_ranks == 1 or cluster.has_accelerators or threads >= plan.compute.num_threads:
        return plan, reasons
    told = {THREADS: f"{cluster.num_cores} cores over {world} processes"}
    return replace(plan, compute=plan.compute.with_threads(threads)), {**reasons, **told}


def enough_processes(given: Plan, cluster: Cluster, processes: int | None) -> int | None:
    """Return `processes`; where none are given and given axes make up more ranks than there are devices, so many.

    Raises:
        PlanError: the given axes do not divide the processes.
    """
    model_ranks, mesh = _model_ranks(given), given.mesh
    if processes is None:
        return mesh.world_size if mesh.world_size > cluster.num_devices else None
    if processes % model_ranks:
        raise PlanError(
            f"--processes {processes} is no multiple of the {model_ranks} ranks that pipeline {mesh.pipeline} ×"
            f" context {mesh.context} × tensor {mesh.tensor} (from --set) need."
            f" Use --processes {max(1, processes // model_ranks) * model_ranks}."
        )
    return processes


def _model_ranks(given: Plan) -> int:
    return given.mesh.pipeline * given.mesh.context * given.mesh.tensor
