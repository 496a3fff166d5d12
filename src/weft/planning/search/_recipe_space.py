"""The space of plans for a recipe's own model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from weft.config.cluster import Cluster
from weft.config.plan import ModelFacts, Plan
from weft.config.recipe import Recipe
from weft.errors import PlanError
from weft.model.profile import Profile
from weft.planning.search._pins import pinned
from weft.planning.search._space import Space, space_of
from weft.techniques.check import check_given, check_plan, check_runnable
from weft.techniques.context.limits import recipe_problem
from weft.techniques.contract import Case
from weft.techniques.expert.limits import model_problem, plan_problem
from weft.techniques.tensor.mesh_2d.limits import forms_grid
from weft.techniques.tensor.mesh_2d.limits import model_problem as grid_problem


def recipe_space(recipe: Recipe, profile: Profile, facts: ModelFacts, cluster: Cluster, pins: Plan) -> Space:
    """Return what can be chosen for a recipe's model; nothing is in it that a training of the recipe would refuse.

    Axes that the model cannot have at all are left out, and whatever else stands against a plan is asked of the plan
    (`Space.refuses`).

    Args:
        profile: of this recipe's model, from its numbers (`profile_of`) or from the built model.
        facts: of the same, which say why something is not there.
        given: settings that the user has fixed (its `origins`).

    Raises:
        PlanError: a given setting can stand in no plan for this model.
    """
    check_given(pins, recipe, facts)
    space = space_of(profile, cluster, global_batch_size=recipe.batch.global_batch_size, permit=recipe.permit)
    case = Case(pins, recipe, facts, None)
    if recipe.model.split:
        space = replace(space, tensors=(1,))  # what a table of one's own divides, only building the model tells
    if recipe_problem(recipe) or facts.why_not("context"):
        space = replace(space, contexts=(1,))
    space = replace(
        space,
        tensor_schemes=tuple(scheme for scheme in space.tensor_schemes if scheme == "1d" or _has_grid(scheme, case)),
        experts=tuple(ranks for ranks in space.experts if ranks == 1 or _shares_experts(ranks, case)),
        refuses=partial(_refusal, recipe, facts),
    )
    space = pinned(space, pins)
    if "1d" not in space.tensor_schemes:  # then heads and features are cut by the side of a grid alone
        numbers = space.tensors if "mesh.tensor" in pins.origins else range(2, cluster.num_devices + 1)
        sizes, schemes = facts.divisible or {}, space.tensor_schemes
        grids = tuple(n for n in numbers if any(forms_grid(scheme, n, sizes, facts.hidden_size) for scheme in schemes))
        space = replace(space, tensors=grids or space.tensors)
    return space


def _refusal(recipe: Recipe, facts: ModelFacts, plan: Plan) -> str:
    """Return the error with which a training of the recipe refuses a plan; empty: it takes it."""
    try:
        check_runnable(plan)
        check_plan(plan, recipe, facts)
    except PlanError as refused:
        return str(refused)
    return ""


def _has_grid(scheme: str, case: Case) -> bool:
    """Whether the tensor ranks of the model may form a grid, beside what the user has fixed."""
    return not grid_problem(case, is_cube=scheme == "3d") and not case.plan.compute.compile


def _shares_experts(ranks: int, case: Case) -> bool:
    """Whether so many ranks may share out the experts of the model, beside what the user has fixed."""
    case = replace(case, plan=replace(case.plan, mesh=replace(case.plan.mesh, expert=ranks)))
    return case.facts.num_experts is not None and not model_problem(case) and not plan_problem(case)
