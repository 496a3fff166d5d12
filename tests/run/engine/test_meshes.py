"""Clipping, norms and every optimizer through the whole engine under every kind of cut, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine_kit import ADAMW, Seen, agreed, plan_of, recipe_of, train

from weft.config.plan import Plan
from weft.config.recipe import OptimizerRecipe, Recipe
from weft.verify.numerics import TOLERANCES, assemble, compare, one_process

STEPS = 4
CLIPPED = OptimizerRecipe(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-6, max_grad_norm=0.05)
OPTIMIZERS = {
    "sgd": OptimizerRecipe(name="sgd", learning_rate=0.1, nesterov=True, weight_decay=0.1, max_grad_norm=0.5),
    "adafactor": OptimizerRecipe(name="adafactor", learning_rate=1e-2, relative_step=True, weight_decay=0.1),
    "lamb": OptimizerRecipe(name="lamb", learning_rate=1e-2, weight_decay=0.1),
    "lars": OptimizerRecipe(name="lars", learning_rate=0.5, weight_decay=0.1),
}
PAIRS = {
    "zero1": plan_of(replicate=2, zero=1),
    "zero3": plan_of(shard=2, zero=3),
    "tensor": plan_of(tensor=2),
}
FOURS = {
    "tensor pipeline": plan_of(tensor=2, pipeline=2),
    "sequence zero1": plan_of(tensor=2, replicate=2, zero=1, sequence=True),
    "pipeline zero2": plan_of(pipeline=2, replicate=2, zero=2),
    "pipeline zero3": plan_of(pipeline=2, shard=2, zero=3),
    "tensor zero3": plan_of(tensor=2, shard=2, zero=3),
    "hybrid uneven": plan_of(replicate=2, shard=2, zero=3, micro=1, shares=(3, 2, 2, 1)),
    "zbv zero1": plan_of(pipeline=2, replicate=2, zero=1, schedule="zbv", chunks=2, micro=1),
}


def run_many(jobs: dict[str, tuple[Recipe, Plan]]) -> dict[str, Seen]:
    return {name: train(recipe, plan, STEPS) for name, (recipe, plan) in jobs.items()}


def judge(expected: Seen, actual: list[Seen], name: str) -> None:
    """Norms, losses and the whole state: masters, moments, counts."""
    seen = agreed(actual)
    for ours, theirs in zip(seen.norms + seen.losses, expected.norms + expected.losses, strict=True):
        assert abs(ours - theirs) <= TOLERANCES["fp64"] * abs(theirs), name
    worst = compare(assemble([expected.state]), assemble([one.state for one in actual]))[0]
    assert worst.relative < TOLERANCES["fp64"], f"{name}: {worst}"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_clipping_and_norms_are_those_of_one_process(ranks: Any, tied: bool) -> None:
    recipe = recipe_of(optimizer=CLIPPED, tie_embeddings=tied)
    (expected,) = ranks.run(1, train, recipe, one_process(FOURS["tensor pipeline"]), STEPS)
    assert min(expected.norms) > 2 * 0.05, "every step is clipped"
    actual = ranks.run(4, run_many, {name: (recipe, plan) for name, plan in FOURS.items()})
    for name in FOURS:
        judge(expected, [one[name] for one in actual], name)


def test_every_optimizer_is_itself_under_every_cut(ranks: Any) -> None:
    recipes = {name: recipe_of(optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()}
    single = {name: (recipe, one_process(PAIRS["zero1"])) for name, recipe in recipes.items()}
    (expected,) = ranks.run(1, run_many, single)
    jobs = {f"{o} {p}": (recipe, plan) for o, recipe in recipes.items() for p, plan in PAIRS.items()}
    actual = ranks.run(2, run_many, jobs)
    for name in jobs:
        judge(expected[name.split()[0]], [one[name] for one in actual], name)


def test_a_norm_below_the_limit_changes_nothing(ranks: Any) -> None:
    plan = one_process(plan_of())
    jobs = {limit: (recipe_of(optimizer=replace(ADAMW, max_grad_norm=limit)), plan) for limit in (1e3, None)}
    (results,) = ranks.run(1, run_many, {str(limit): job for limit, job in jobs.items()})
    assert results["1000.0"].losses == results["None"].losses
