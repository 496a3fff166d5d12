"""What several commands share: a recipe and a plan from files, `auto`, and `--set`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import PlanError

if TYPE_CHECKING:
    from weft.cluster import Cluster
    from weft.plan import ModelFacts, Plan
    from weft.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe with the plan that it is going to be trained under."""

    recipe: Recipe
    plan: Plan
    reasons: Mapping[str, str]
    """Dotted key → why the plan has this value; empty for a plan that was given."""
    facts: ModelFacts
    cluster: Cluster


def read_choice(
    recipe_path: Path, plan_path: str, overrides: Iterable[str], processes: int | None, cluster: str | None = None
) -> Choice:
    """Read a recipe and its plan, choose the plan when it is `auto`, and check that both fit.

    Raises:
        WeftError: RecipeError, PlanError or ClusterError for what is wrong with them.
    """
    from weft.cluster import resolve_cluster
    from weft.plan import Plan, apply_overrides, auto_plan, check_plan, facts_of, load_plan
    from weft.recipe import load_recipe

    texts = list(overrides)
    of_plan = [text for text in texts if text.startswith("plan.")]
    recipe, _ = apply_overrides(load_recipe(recipe_path), Plan(), [text for text in texts if text not in of_plan])
    facts, machine = facts_of(recipe), resolve_cluster(cluster)
    reasons: Mapping[str, str] = {}
    if plan_path == "auto":
        _, given = apply_overrides(recipe, Plan(), of_plan)
        plan, reasons = auto_plan(recipe, machine, facts, _data_ranks(given, machine, processes))
        plan, reasons = _share_cores(plan, reasons, given, machine)
    else:
        plan = load_plan(plan_path)
    _, plan = apply_overrides(recipe, plan, of_plan)
    check_plan(plan, recipe, facts, processes)
    return Choice(recipe, plan, reasons, facts, machine)


def _share_cores(
    plan: Plan, reasons: Mapping[str, str], given: Plan, machine: Cluster
) -> tuple[Plan, Mapping[str, str]]:
    """Share the cores over all ranks, those of the axes that `--set` has given too."""
    world = plan.mesh.data * given.mesh.pipeline * given.mesh.context * given.mesh.tensor
    threads = max(1, machine.num_cores // world)
    if machine.has_accelerators or threads >= plan.compute.threads_per_rank:
        return plan, reasons
    told = {"compute.threads_per_rank": f"{machine.num_cores} cores over {world} processes"}
    return replace(plan, compute=replace(plan.compute, threads_per_rank=threads)), {**reasons, **told}


def _data_ranks(given: Plan, machine: Cluster, processes: int | None) -> int | None:
    """How many data ranks are left for `auto` to choose, when `--set` has given axes that split the model.

    Raises:
        PlanError: those axes do not divide the processes.
    """
    mesh = given.mesh
    model_ranks = mesh.pipeline * mesh.context * mesh.tensor
    if model_ranks == 1:
        return processes
    if processes is None:
        return max(1, machine.num_devices // model_ranks)
    if processes % model_ranks:
        raise PlanError(
            f"--processes {processes} is no multiple of the {model_ranks} ranks that pipeline {mesh.pipeline} ×"
            f" context {mesh.context} × tensor {mesh.tensor} (from --set) need."
            f" Use --processes {max(1, processes // model_ranks) * model_ranks}."
        )
    return processes // model_ranks
