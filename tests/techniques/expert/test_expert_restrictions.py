"""Which models and plans share out experts: what is planned, listed by the search and built says the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weft.analysis.facts import facts_of_blueprint
from weft.config.cluster import parse_cluster_spec
from weft.config.plan import (
    ComputePlan,
    DataParallelPlan,
    ExpertParallelPlan,
    MemoryPlan,
    MeshPlan,
    MicrobatchPlan,
    Plan,
)
from weft.config.recipe import AdapterRecipe, BatchRecipe, DecoderShape, ModelRecipe, OptimizerRecipe, Recipe, RunRecipe
from weft.errors import PlanError
from weft.model.build import build_model
from weft.model.description import facts_of, profile_of
from weft.planning.search import recipe_space
from weft.techniques.check import check_plan, runnability
from weft.techniques.registry import check_no_loop, unsupported_in_script

SHAPE = DecoderShape(
    num_layers=2, hidden_size=32, num_heads=4, vocabulary_size=32, sequence_length=64, num_experts=6, top_k=2
)


def recipe_of(model: ModelRecipe | None = None, **optimizer: Any) -> Recipe:
    model = model or ModelRecipe(reference="decoder", shape=SHAPE)
    return Recipe(
        model=model,
        batch=BatchRecipe(global_batch_size=12),
        optimizer=OptimizerRecipe(**optimizer),
        run=RunRecipe(steps=1),
    )


def plan_of(expert: int = 2, *, shard: int = 2, per_step: int | tuple[int, ...] = 3, **parts: Any) -> Plan:
    given: dict[str, Any] = {"data_parallel": DataParallelPlan(zero=1)} | parts
    mesh, microbatch = MeshPlan(shard=shard, expert=expert), MicrobatchPlan(size=2, per_step=per_step)
    return Plan(mesh=mesh, microbatch=microbatch, **given)


PLAIN = ModelRecipe(reference="decoder", shape=replace(SHAPE, num_experts=0))
ADAPTED = ModelRecipe(reference="decoder", shape=SHAPE, adapter=AdapterRecipe(rank=2, targets=("query",)))
REFUSED: dict[str, tuple[Recipe, Plan, str]] = {
    "dense": (recipe_of(PLAIN), plan_of(), "a decoder has no mixtures that ranks can take apart"),
    "indivisible": (recipe_of(), plan_of(4, shard=4), "does not divide 6, the experts of a mixture.\nUse 1, 2, 3 or 6"),
    "no room": (recipe_of(), plan_of(3), "does not divide shard × context = 2, from which experts borrow"),
    "adapters": (recipe_of(ADAPTED), plan_of(), "cannot be had with model.adapter"),
    "lamb": (recipe_of(name="lamb"), plan_of(), 'cannot be had with optimizer.name = "lamb"'),
    "shares": (recipe_of(), plan_of(per_step=(4, 2)), "cannot join unequal shares of microbatches"),
    "compiled": (
        recipe_of(),
        plan_of(compute=ComputePlan(compile=True)),
        "has not been proven with mixtures of experts",
    ),
    "offloaded": (recipe_of(), plan_of(memory=MemoryPlan(offload="optimizer")), "what waits elsewhere in memory"),
    "gathers from nobody": (
        recipe_of(),
        plan_of(1, expert_parallel=ExpertParallelPlan(exchange="all_gather")),
        'plan.expert_parallel.exchange = "all_gather" has no effect with mesh.expert = 1.\nUse "all_to_all"',
    ),
    "named": (
        recipe_of(),
        plan_of(data_parallel=DataParallelPlan(zero=1, algorithm="ring")),
        'cannot join data_parallel.algorithm = "ring"',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_change_to_make(name: str) -> None:
    recipe, plan, message = REFUSED[name]
    with pytest.raises(PlanError) as refusal:
        check_plan(plan, recipe, facts_of(recipe))
    assert message in str(refusal.value)
    assert any(change in str(refusal.value) for change in ("Use 1", "Use false", 'Use "all_to_all"'))


def test_what_fits_is_no_longer_only_predictable() -> None:
    recipe = recipe_of()
    check_plan(plan_of(), recipe, facts_of(recipe))
    assert runnability(plan_of()) == []
    with pytest.raises(PlanError, match="cannot be had in a loop of one's own"):
        check_no_loop(plan_of())
    assert any("no exchange of tokens" in reason for reason in unsupported_in_script(plan_of()))


def listed(recipe: Recipe, given: Plan | None = None) -> tuple[int, ...]:
    """Expert ranks that the search considers on twelve processes."""
    profile = profile_of(recipe)
    assert profile is not None
    cluster = parse_cluster_spec("12xcpu")
    return recipe_space(recipe, profile, facts_of(recipe), cluster, given or Plan()).experts


def test_a_search_considers_what_can_be_run() -> None:
    assert listed(recipe_of()) == (1, 2, 3, 6)
    assert listed(recipe_of(PLAIN)) == (1,)
    assert listed(recipe_of(name="adafactor")) == (1,)
    assert listed(recipe_of(), Plan(compute=ComputePlan(compile=True))) == (1,)


@pytest.mark.parametrize("model", [None, PLAIN], ids=["mixture", "dense"])
def test_what_a_shape_tells_is_what_the_model_shows(model: ModelRecipe | None) -> None:
    recipe = recipe_of(model)
    built = facts_of_blueprint(build_model(recipe), recipe)
    assert facts_of(recipe).num_experts == built.num_experts == recipe.model.shape.num_experts  # type: ignore[union-attr]
