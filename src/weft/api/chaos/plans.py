"""The plans of a chaos campaign: those that are given, or those on two processes that the recipe allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.config.cluster import Cluster
from weft.config.plan import ModelFacts, Plan, complete_plan, load_plan, over_ranks
from weft.config.recipe import Recipe
from weft.errors import PlanError, WeftError
from weft.run.launch import threads_of_user
from weft.techniques.check import check_plan, check_runnable


def given_plans(recipe: Recipe | None, paths: Sequence[Path]) -> list[tuple[str, Plan]]:
    """Read plans, and check that they can run a recipe here; None: a script, whose session does it.

    Raises:
        PlanError: one cannot.
    """
    if recipe is None:
        return [(path.stem, load_plan(path)) for path in paths]
    facts = _facts(recipe)
    return [(path.stem, _complete(load_plan(path), recipe, facts)) for path in paths]


def default_plans(recipe: Recipe | None) -> list[tuple[str, Plan]]:
    """The plans on two processes, out of four unlike ones, that the recipe allows; those without a split model for the
    session of a script.

    Raises:
        PlanError: it allows none.
    """
    if recipe is None:
        return [("session data 2", Plan.ddp(replicate=2)), ("session ZeRO-3", Plan.fsdp(shard=2))]
    facts, plans, problems = _facts(recipe), list[tuple[str, Plan]](), list[str]()
    candidates = {
        "data 2": Plan.ddp(replicate=2),
        "ZeRO-3": Plan.fsdp(shard=2),
        "tensor 2": Plan.tensor(2),
        "pipeline 2": Plan.pipeline(2),
    }
    for name, plan in candidates.items():
        try:
            plans.append((name, _complete(plan, recipe, facts)))
        except WeftError as problem:
            problems.append(str(problem))
    if not plans:
        raise PlanError(f"no plan on two processes fits the recipe: {problems[0]} Give plans by --plan.")
    return plans


def _facts(recipe: Recipe) -> ModelFacts:
    return facts_of_blueprint(build_blueprint(recipe), recipe)


def _complete(plan: Plan, recipe: Recipe, facts: ModelFacts) -> Plan:
    plan = over_ranks(plan, None, num_accelerators=Cluster.detect().num_accelerators)
    plan, _ = complete_plan(plan, recipe, {}, threads_of_user(), is_chosen=False)
    check_plan(plan, recipe, facts, None)
    check_runnable(plan)
    return plan
