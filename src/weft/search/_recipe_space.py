"""What may be chosen for a recipe's own model."""

from __future__ import annotations

from dataclasses import replace

from weft.cluster import Cluster
from weft.plan import ModelFacts, Plan, check_given
from weft.profile import Profile
from weft.recipe import Recipe
from weft.search._pins import pinned
from weft.search._space import Space, space_of
from weft.techniques.context.limits import recipe_problem
from weft.techniques.contract import Case
from weft.techniques.expert.limits import model_problem, plan_problem
from weft.techniques.tensor.grid_limits import forms_grid
from weft.techniques.tensor.grid_limits import model_problem as grid_problem


def recipe_space(
    recipe: Recipe, profile: Profile, facts: ModelFacts, cluster: Cluster, given: Plan, *, runnable_only: bool = False
) -> Space:
    """Return what can be chosen for a recipe's model; nothing is in it that the model cannot be cut or split into.

    Args:
        profile: of this recipe's model, from its numbers (`profile_of`) or from the built model.
        facts: of the same, which say why something is not there.
        given: settings that the user has fixed (its `origins`).

    Raises:
        PlanError: a given setting can stand in no plan for this model.
    """
    check_given(given, recipe, facts)
    batch = recipe.batch.global_batch_size
    space = space_of(profile, cluster, global_batch_size=batch, permit=recipe.permit, runnable_only=runnable_only)
    if recipe.model.split:
        space = replace(space, tensors=(1,))  # what a table of one's own divides, only building the model tells
    if runnable_only and (recipe_problem(recipe) or facts.no_context or given.compute.compile):
        space = replace(space, contexts=(1,))
    if runnable_only:
        schemes = [s for s in space.tensor_schemes if s == "1d" or _has_grid(s, Case(given, recipe, facts, None))]
        space = replace(space, tensor_schemes=tuple(schemes))
        experts = [n for n in space.experts if n == 1 or _shares_experts(n, Case(given, recipe, facts, None))]
        space = replace(space, experts=tuple(experts))
    space = pinned(space, given)
    if "1d" not in space.tensor_schemes:  # then heads and features are cut by the side of a grid alone
        numbers = space.tensors if "mesh.tensor" in given.origins else range(2, cluster.num_devices + 1)
        sizes, schemes = facts.divisible or {}, space.tensor_schemes
        grids = tuple(n for n in numbers if any(forms_grid(each, n, sizes, facts.hidden_size) for each in schemes))
        space = replace(space, tensors=grids or space.tensors)
    return space


def _has_grid(scheme: str, case: Case) -> bool:
    """Whether the tensor ranks of the model may form a grid, beside what the user has fixed."""
    return not grid_problem(case, is_cube=scheme == "3d") and not case.plan.compute.compile


def _shares_experts(ranks: int, case: Case) -> bool:
    """Whether so many ranks may share out the experts of the model, beside what the user has fixed."""
    case = replace(case, plan=replace(case.plan, mesh=replace(case.plan.mesh, expert=ranks)))
    return case.facts.num_experts is not None and not model_problem(case) and not plan_problem(case)
