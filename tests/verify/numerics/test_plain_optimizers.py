"""Every optimizer that a recipe knows is held, step by step, to one that shares no code with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import pytest
from pool import RankPool

from weft.config.plan import ComputePlan, DataParallelPlan, MemoryPlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    DecoderShape,
    ModelRecipe,
    OptimizerRecipe,
    PermitRecipe,
    Recipe,
    RunRecipe,
)
from weft.model.build import build_model
from weft.run.engine.optimizers._sums import ParameterSums
from weft.run.engine.optimizers.adafactor import Adafactor
from weft.verify.numerics import (
    Comparison,
    PlainLoop,
    Trial,
    comparable,
    compare_results,
    join_trials,
    one_process,
    run_trial,
)

NAMES: tuple[str, ...] = get_args(get_type_hints(OptimizerRecipe)["name"])
STEPS = 3
TWO = Plan(
    mesh=MeshPlan(shard=2),
    data_parallel=DataParallelPlan(zero=1, bucket_bytes=2048),
    microbatch=MicrobatchPlan(size=2, per_step=1),
    memory=MemoryPlan(fused_loss=False),
    compute=ComputePlan(precision="fp64"),
)
ALONE = one_process(TWO)
OTHERS: dict[str, dict[str, Any]] = {
    "adafactor": {"relative_step": True},
    "lamb": {"decay_one_dimensional": True},
    "lars": {"decay_one_dimensional": True, "max_grad_norm": None},
    "sgd": {"nesterov": True},
    "adamw": {"epsilon": 1e-3},
}


def recipe_of(name: str, **settings: Any) -> Recipe:
    shape = DecoderShape(
        num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=2, ffn_size=12, vocabulary_size=16, sequence_length=5
    )
    return Recipe(
        model=ModelRecipe(reference="decoder", shape=shape),
        data=DataRecipe(train=(DataSource(source="synthetic"),)),
        batch=BatchRecipe(global_batch_size=4),
        optimizer=OptimizerRecipe(name=name, learning_rate=1e-2, weight_decay=0.1, **settings),  # type: ignore[arg-type]
        run=RunRecipe(steps=STEPS, seed=3),
        permit=PermitRecipe(precision=("fp64",)),
    )


def trial(recipe: Recipe, plan: Plan, breakage: str | None = None) -> Trial:
    if breakage is None:
        return run_trial(recipe, plan, lambda: build_model(recipe), steps=STEPS)
    with _broken(breakage):
        return run_trial(recipe, plan, lambda: build_model(recipe), steps=STEPS)


def _broken(what: str) -> Any:
    if what == "norms of a shard":
        return patch.object(ParameterSums, "total", lambda self, sums: sums)
    if what == "wrong norms":
        return patch.object(ParameterSums, "total", lambda self, sums: sums**1.1)
    if what == "bias correction":
        return patch.object(Adafactor, "_weight", lambda self, position: 0.5)
    raise AssertionError(what)


def against_plain(recipe: Recipe, breakage: str | None = None) -> tuple[Comparison, int]:
    actual = join_trials([trial(recipe, ALONE, breakage)], ALONE)
    loop = PlainLoop(recipe=recipe, plan=ALONE, label_range=None)
    expected = loop.run(build_model(recipe), actual.initial)
    return compare_results(expected, comparable(actual, loop.steps), precision="fp64"), loop.steps


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_proves_its_steps(name: str):
    for settings in ({}, OTHERS[name]):
        comparison, steps = against_plain(recipe_of(name, **settings))
        assert steps == STEPS
        assert comparison.is_equal, comparison.mismatches[:3]
        assert comparison.largest["weight"] <= 1e-10  # weights after the steps are compared, not first gradients alone


@pytest.mark.parametrize(
    ("name", "breakage"),
    [("lamb", "wrong norms"), ("lars", "wrong norms"), ("adafactor", "wrong norms"),
     ("adafactor", "bias correction")],
)  # fmt: skip
def test_a_wrong_rule_is_seen_in_one_process(name: str, breakage: str):
    settings = {"relative_step": True} if name == "adafactor" else {}
    comparison, _ = against_plain(recipe_of(name, **settings), breakage)
    assert not comparison.is_equal
    assert {mismatch.kind for mismatch in comparison.mismatches} >= {"weight"}


@pytest.mark.parametrize("name", ["lamb", "lars", "adafactor"])
def test_a_norm_that_is_not_summed_over_ranks_is_seen(ranks: RankPool, name: str):
    recipe = recipe_of(name, **({"relative_step": True} if name == "adafactor" else {}))
    expected = join_trials([trial(recipe, ALONE)], ALONE)
    plan = TWO if name != "adafactor" else replace(TWO, mesh=MeshPlan(tensor=2), microbatch=MicrobatchPlan(size=4))
    for breakage, is_equal in ((None, True), ("norms of a shard", False)):
        actual = join_trials(ranks.run(2, trial, recipe, plan, breakage), plan)
        assert compare_results(expected, actual, precision="fp64").is_equal is is_equal
