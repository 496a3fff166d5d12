"""What a search offers of grids of tensor ranks can be trained: it knows what stands against one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_kit import cluster_of

from weft.config.plan import Plan, parse_plan
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DecoderShape,
    EncoderShape,
    ModelRecipe,
    OptimizerRecipe,
    PermitRecipe,
    Recipe,
    RunRecipe,
)
from weft.errors import PlanError
from weft.model.description import facts_of, profile_of
from weft.planning.search import Space, recipe_space, search
from weft.techniques.check import check_given, check_plan, check_runnable
from weft.techniques.cost_terms import Layout
from weft.techniques.tensor.cost import layout_problems

RECIPE = Recipe(
    model=ModelRecipe(shape=DecoderShape(num_layers=6, hidden_size=512, num_heads=8, num_kv_heads=4)),
    batch=BatchRecipe(global_batch_size=32),
    run=RunRecipe(steps=1),
    permit=PermitRecipe(precision=("bf16",)),
)
GIVEN = {
    "2d": '[tensor_parallel]\nscheme = "2d"',
    "2.5d": '[tensor_parallel]\nscheme = "2.5d"',
    "3d": '[tensor_parallel]\nscheme = "3d"',
}
"""Scheme → the plan that asks for it; a cube asks for whole logits by itself."""
ENCODER = replace(RECIPE, model=ModelRecipe(shape=EncoderShape(num_layers=6, hidden_size=512, num_heads=8)))
OWN = replace(RECIPE, model=ModelRecipe(factory="own.models:build"))


def space_under(recipe: Recipe, given: Plan) -> Space:
    profile = profile_of(recipe) or profile_of(RECIPE)  # of a factory's model nothing but its own facts
    assert profile is not None
    return recipe_space(recipe, profile, facts_of(recipe), cluster_of("8xh100"), given)


@pytest.mark.parametrize("scheme", GIVEN)
def test_what_is_found_passes_every_check(scheme: str) -> None:
    given, profile = parse_plan(GIVEN[scheme]), profile_of(RECIPE)
    assert profile is not None
    space = replace(space_under(RECIPE, given), schedules=("1f1b", "zbv"))
    result = search(profile, cluster_of("8xh100"), global_batch_size=32, space=space, top=8)
    assert result.best
    for each in result.best:
        assert each.plan is not None
        assert each.plan.tensor_parallel.scheme == scheme
        check_runnable(each.plan)
        check_plan(each.plan, RECIPE, facts_of(RECIPE))


def test_no_grid_is_offered_where_none_can_train() -> None:
    lamb = replace(RECIPE, optimizer=OptimizerRecipe(name="lamb"))
    assert space_under(lamb, Plan()).tensor_schemes == ("1d",)
    assert space_under(RECIPE, parse_plan("[compute]\ncompile = true")).tensor_schemes == ("1d",)
    assert space_under(OWN, Plan()).tensor_schemes == ("1d",)
    assert space_under(ENCODER, Plan()).tensor_schemes == ("1d", "2d", "2.5d")
    assert space_under(RECIPE, Plan()).tensor_schemes == ("1d", "2d", "2.5d", "3d")


@pytest.mark.parametrize(
    ("recipe", "scheme", "words"),
    [
        (replace(RECIPE, optimizer=OptimizerRecipe(name="lamb")), "2d", 'cannot be had with optimizer.name = "lamb"'),
        (
            replace(RECIPE, data=DataRecipe(documents="isolated")),
            "3d",
            'cannot be had with data.documents = "isolated"',
        ),
        (ENCODER, "3d", "its attention drops probabilities"),
        (OWN, "2d", "how features meet is known only of Weft's decoder and encoder"),
    ],
    ids=["optimizer", "documents", "dropped attention", "factory"],
)
@pytest.mark.parametrize("more", ["", "[mesh]\ntensor = 8\n", "[memory]\nfused_loss = false\n"])
def test_a_scheme_that_no_plan_can_have_is_refused_before_a_search(
    recipe: Recipe, scheme: str, words: str, more: str
) -> None:
    given = parse_plan(f'{more}[tensor_parallel]\nscheme = "{scheme}"')
    with pytest.raises(PlanError, match=words):
        space_under(recipe, given)
    with pytest.raises(PlanError, match=words):
        check_given(given, recipe, facts_of(recipe))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tensor=4, tensor_scheme="2d", microbatch_size=2), ""),
        (Layout(tensor=6, tensor_scheme="2d", microbatch_size=2), "needs a square"),
        (Layout(tensor=4, tensor_scheme="2d", microbatch_size=3), "does not share out over the 2 parts"),
        (Layout(tensor=4, tensor_scheme="2d", microbatch_size=2, sequence_parallel=True), "sequence_parallel = true"),
        (Layout(tensor=4, tensor_scheme="2d", microbatch_size=2, context=2), "context = 2"),
        (Layout(tensor=8, tensor_scheme="3d", microbatch_size=4, fused_loss=True), "a fused loss"),
        (Layout(tensor=64, tensor_scheme="2d", microbatch_size=8), "cannot cut num_kv_heads = 4 into 8"),
        (Layout(tensor=4, tensor_scheme="2d", microbatch_size=2, compression="int8"), 'compression = "int8"'),
    ],
)
def test_layouts_are_refused_for_the_reasons_of_plans(layout: Layout, words: str) -> None:
    profile = profile_of(RECIPE)
    assert profile is not None
    problems = list(layout_problems(profile, layout))
    assert [words in problem for problem in problems] == ([True] if words else [])
