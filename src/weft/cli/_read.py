"""Reads a recipe and a plan from files, `auto` and `--set`, for several commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.config.cluster import Cluster
    from weft.config.plan import ModelFacts, Plan
    from weft.config.recipe import Recipe
    from weft.model.description import Description
    from weft.planning.search import PlanChoice as Chosen
    from weft.run.launch.launcher import ForkServer


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A recipe with the plan that it is going to be trained under."""

    recipe: Recipe
    plan: Plan
    reasons: Mapping[str, str]
    """Dotted key → why the plan has this value; empty for a plan that was given."""
    facts: ModelFacts
    cluster: Cluster
    note: str
    """Advice that would make predictions better; empty if nothing was predicted or nothing is missing."""
    is_tight: bool = False
    """Whether the plan was chosen here and needs so much memory that a trial should show whether it fits."""


def read_choice(
    recipe_path: Path,
    plan_path: str,
    overrides: Iterable[str],
    processes: int | None,
    cluster: str | None = None,
    *,
    trials: bool = False,
    fork_server: ForkServer | None = None,
    described: Description | None = None,
    learned: bool = True,
) -> PlannedRun:
    """Read a recipe and its plan, choose the plan when it is `auto`, and check that both fit.

    With `trials`, a few steps decide between plans that predictions cannot tell apart, where that pays, and a plan that
    may not find memory is marked.  `fork_server` forks the processes that do.  `described`: the recipe's model,
    where that is known already.  `learned`: whether recorded runs of this machine correct predictions.

    Raises:
        WeftError: RecipeError, PlanError or ClusterError for what is wrong with them.
    """
    from weft.config.cluster import known_machine, resolve_cluster
    from weft.config.plan import Plan, apply_overrides, complete_plan, load_plan, over_ranks
    from weft.config.recipe import load_recipe
    from weft.model.description import facts_of
    from weft.planning.learned import NOTHING_LEARNED, learned_here
    from weft.planning.search import choose_plan
    from weft.run.launch import RankInfo, threads_of_user
    from weft.techniques.check import check_plan
    from weft.techniques.cost_terms import DATASHEET

    texts = list(overrides)
    of_plan = [text for text in texts if text.startswith("plan.")]
    recipe, pins = apply_overrides(load_recipe(recipe_path), Plan(), texts)
    facts, note, tight = facts_of(recipe), "", False
    if cluster is None:
        known = known_machine()
        machine, note = known.cluster, known.note
    else:
        machine = resolve_cluster(cluster)
    reasons: Mapping[str, str] = {}
    if plan_path == "auto":
        described = described or describe_recipe(recipe)
        facts, profile = described.facts, described.profile
        known_runs = learned_here(machine) if learned and RankInfo.from_environment() is None else NOTHING_LEARNED
        calibration = known_runs.calibration(DATASHEET)
        choice = choose_plan(recipe, machine, facts, processes, profile=profile, pins=pins, calibration=calibration)
        if trials and choice.rivals:
            choice = _tried(recipe, machine, choice, of_plan, fork_server)
        tight = trials and choice.is_tight
        plan, reasons = choice.plan, choice.reasons
        notes = [note, known_runs.note] if choice.rivals else []
        note = "; ".join(text for text in (*described.notes, *notes) if text)
    else:
        plan, note = load_plan(plan_path), ""
    _, plan = apply_overrides(recipe, plan, of_plan)
    if plan_path != "auto" and recipe.model.reference is None and plan.mesh.tensor * plan.mesh.pipeline > 1:
        facts = (described or describe_recipe(recipe)).facts  # how it splits, only looking at it tells
    if plan_path != "auto":
        accelerators = machine.num_accelerators if cluster is None else None
        plan = over_ranks(plan, processes, num_accelerators=accelerators)
    plan, reasons = complete_plan(plan, recipe, reasons, threads_of_user(), is_chosen=plan_path == "auto")
    check_plan(plan, recipe, facts, processes)
    return PlannedRun(recipe, plan, reasons, facts, machine, note, tight and "microbatch.size" not in plan.origins)


def describe_recipe(recipe: Recipe) -> Description:
    """Return the description of a recipe's model.  One that only building it describes, and of which nothing was kept,
    is built on the meta device, which imports torch.

    Raises:
        RecipeError: the model cannot be built.
    """
    from weft.model.description import description_of, stored

    known = description_of(recipe) or stored(recipe)
    if known is not None:
        return known
    from weft.api import describe_recipe as describe_by_building

    return describe_by_building(recipe)


def _tried(
    recipe: Recipe, machine: Cluster, choice: Chosen, of_plan: Iterable[str], fork_server: ForkServer | None
) -> Chosen:
    from weft.api import decide_by_trials
    from weft.config.plan import apply_overrides

    texts = list(of_plan)
    rivals = tuple(
        replace(rival, plan=apply_overrides(recipe, rival.plan, texts)[1])
        for rival in choice.rivals
        if rival.plan is not None
    )
    return decide_by_trials(recipe, replace(choice, rivals=rivals), machine, log=print, fork_server=fork_server)
