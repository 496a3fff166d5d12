"""From a recipe to a blueprint with a split table: the model's own, or a proposed one where the recipe wants that."""

from __future__ import annotations

from weft.models import Blueprint, build_model
from weft.plan import Plan
from weft.recipe import Recipe


def build_blueprint(recipe: Recipe, plan: Plan | None = None) -> Blueprint:
    """Return the recipe's model; with `model.propose_split`, what no rule covers is split as its graph allows.

    A model that says nothing of its blocks is looked at for them, where the plan needs to know (none: any plan may).
    Every rank proposes the same, for the analysis depends on the recipe alone.

    Raises:
        RecipeError: the model cannot be built, or not be described.
    """
    blueprint = build_model(recipe)
    if plan is None or _needs_blocks(plan):
        _look_for_a_cut(blueprint)
    if recipe.model.propose_split:
        # Ranks do without the analysis of graphs and the profiles it makes, thousands of lines, unless they need it.
        from weft.describe import propose_split

        proposal = propose_split(blueprint)
        proposal.apply_to(blueprint)
        modules = sum(proposed.rule.divides for proposed in proposal.rules)
        said = (
            f"the split table of {modules} rules was proposed by analysis of the graph (model.propose_split); run"
            " `weft check` before you rely on it"
            if proposal.splits
            else "the graph shows nothing that could be split (model.propose_split): data and ZeRO plans only"
        )
        blueprint.notes = (*blueprint.notes, said)
    elif not blueprint.splits and recipe.model.factory is not None:
        said = "no split table: data and ZeRO plans only. `weft describe` shows what could be split"
        blueprint.notes = (*blueprint.notes, said)
    return blueprint


def _needs_blocks(plan: Plan) -> bool:
    """Whether something of the plan works block by block."""
    gathers = plan.data_parallel.shards_weights and plan.mesh.shard > 1
    return plan.mesh.pipeline > 1 or plan.memory.recomputes or plan.compute.compile or gathers


def _look_for_a_cut(blueprint: Blueprint) -> None:
    """Where nothing says where a model may be cut into stages, see whether its forward does."""
    if blueprint.cut is not None or blueprint.no_stages:
        return
    from weft.describe import find_cut  # as above

    found = find_cut(blueprint)
    if isinstance(found, str):
        blueprint.no_stages = found
    else:
        blueprint.cut, blueprint.block_costs = found
