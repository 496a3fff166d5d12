"""Build a blueprint from a recipe with its tables: the model's own, or those that looking at it shows."""

from __future__ import annotations

from dataclasses import replace

from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.model.blueprint import Blueprint
from weft.model.build import build_model


def build_blueprint(recipe: Recipe, plan: Plan | None = None) -> Blueprint:
    """Return the recipe's model; one that says nothing of its blocks, or of how it splits, is looked at.

    That is done where the plan needs to know (none: any plan may).  `model.propose_split` says of the split otherwise:
    true looks at any model, and splits what no rule covers; false at none.  Tables of channels by hand are tried, too.
    Every rank finds the same, for the analysis depends on the recipe alone.

    Raises:
        RecipeError: the model cannot be built.
    """
    adapter = recipe.model.adapter
    bare = recipe if adapter is None else replace(recipe, model=replace(recipe.model, adapter=None))
    blueprint = build_model(bare)
    look_for_blocks(blueprint, plan)
    if plan is None or plan.mesh.context > 1:
        from weft.analysis.tokens.find_sequence import look_at_tokens  # as below

        look_at_tokens(blueprint, 1 if plan is None else plan.mesh.context)
    if plan is None or plan.mesh.expert > 1 or plan.compute.compile:
        from weft.analysis.find_experts import look_at_experts  # as below

        look_at_experts(blueprint)
    divides = plan is None or plan.mesh.tensor > 1
    if divides and (recipe.model.split or recipe.model.factory is not None) and blueprint.splits:
        from weft.analysis.tensor_split.try_table import try_table  # as below

        try_table(blueprint)
    if adapter is not None and not adapter.divides:
        _adapt_and_look(blueprint, recipe, divides=divides)
        return blueprint
    if divides and _may_split(blueprint, bare):
        from weft.analysis.blueprint._looks import look_for_a_split  # as below

        look_for_a_split(blueprint, bare)
    if adapter is not None:
        # Looked at are the model's own layers: how these adapters split follows from the layers beside them.
        from weft.model.adapters import apply_adapter

        apply_adapter(blueprint, recipe)
    return blueprint


def _adapt_and_look(blueprint: Blueprint, recipe: Recipe, *, divides: bool) -> None:
    """Put in adapters of which no rule says how they split, and look at the model that has them: what they compute with
    whole weights stays whole, and what must be whole with it."""
    from weft.model.adapters import apply_adapter, unsplit_layers_note

    apply_adapter(blueprint, recipe)
    if divides and recipe.model.propose_split is not False:
        from weft.analysis.look import look

        blueprint.vocabulary_head = None  # a rule of its own says how it splits
        look(blueprint)
        blueprint.notes = (*blueprint.notes, *unsplit_layers_note(blueprint, recipe))


def _needs_blocks(plan: Plan) -> bool:
    """Whether something of the plan works block by block."""
    gathers = plan.data_parallel.shards_weights and plan.mesh.shard * plan.mesh.context > 1
    return plan.mesh.pipeline > 1 or plan.memory.recomputes or plan.compute.compile or gathers


def look_for_blocks(blueprint: Blueprint, plan: Plan | None = None) -> None:
    """Find the blocks of a model in its forward, where nothing names them and a plan needs them. Writes into the
    blueprint where the model may be cut into stages and the cost of its parts, or why it cannot be cut.

    Enters into the blueprint where the model may be cut into stages and what its parts cost, or why it cannot be cut.
    """
    if blueprint.cut is not None or "blocks" in blueprint.limits or not (plan is None or _needs_blocks(plan)):
        return
    # Ranks do without descriptions and the analysis of graphs, thousands of lines, unless they need them.
    from weft.analysis.find_cut import find_cut

    cut = find_cut(blueprint)
    if isinstance(cut, str):
        blueprint.limit("blocks", cut)
    else:
        blueprint.cut, blueprint.block_costs = cut


def _may_split(blueprint: Blueprint, recipe: Recipe) -> bool:
    usual = not blueprint.splits and not recipe.model.split and recipe.model.reference is None
    return usual if recipe.model.propose_split is None else recipe.model.propose_split
