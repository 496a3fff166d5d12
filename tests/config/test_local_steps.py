"""Local steps in plans: settings, permission, and with what they do not go."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from noun_examples import SMALL, case

from weft.config.plan import DataParallelPlan, MeshPlan, MicrobatchPlan, Plan, dump_plan, parse_plan
from weft.config.recipe import ConvNetShape, OptimizerRecipe, PermitRecipe, Recipe, ReferenceShape
from weft.errors import PlanError, RecipeError
from weft.techniques.check import check_plan, check_runnable
from weft.techniques.describe import describe_plan


def plan_of(replicate: int = 2, shard: int = 1, **data: Any) -> Plan:
    settings: dict[str, Any] = {"zero": 0, "local_steps": 50} | data
    return Plan(
        mesh=MeshPlan(replicate=replicate, shard=shard),
        data_parallel=DataParallelPlan(**settings),
        microbatch=MicrobatchPlan(size=64 // replicate // shard),
    )


def permitted(plan: Plan, steps: int = 50, shape: ReferenceShape = SMALL, **changes: Any) -> tuple[Plan, Recipe, Any]:
    plan, recipe, facts = case(plan, shape)
    return plan, replace(recipe, permit=PermitRecipe(local_steps=steps), **changes), facts


@pytest.mark.parametrize(
    "plan", [plan_of(), plan_of(2, 2, zero=1), plan_of(2, 2, zero=2), plan_of(2, 2, zero=3), plan_of(local_steps=1)]
)
def test_good_plans_pass(plan: Plan) -> None:
    check_plan(*permitted(plan), plan.mesh.world_size)
    check_runnable(plan)


REFUSED: list[tuple[Plan, str]] = [
    (
        plan_of(local_steps=51),
        "plan.data_parallel.local_steps = 51 is not permitted by the recipe, whose permit.local_steps = 50.\n"
        "Use 50, or permit.local_steps = 51; of a session, weft.session(local_steps=51).",
    ),
    (plan_of(1, 2, zero=1), "plan.data_parallel.local_steps = 50 has no effect with mesh.replicate = 1"),
]


@pytest.mark.parametrize(("plan", "message"), REFUSED)
def test_the_recipe_must_permit_them(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        check_plan(*permitted(plan), plan.mesh.world_size)


def test_nothing_is_permitted_without_being_asked_for() -> None:
    with pytest.raises(PlanError, match=re.escape("whose permit.local_steps = 0.\nUse 0, or permit.local_steps = 50;")):
        check_plan(*case(plan_of()), 2)
    with pytest.raises(RecipeError, match=re.escape("local_steps = -1 is too small: use 0 or more.")):
        PermitRecipe(local_steps=-1)


def test_weights_and_statistics_that_change_in_every_step() -> None:
    averaged = permitted(plan_of(), optimizer=OptimizerRecipe(average_decay=0.99))
    with pytest.raises(PlanError, match=re.escape("Use 0, or leave out the recipe's optimizer.average_decay.")):
        check_plan(*averaged, 2)
    with pytest.raises(PlanError, match="would let the running statistics of BatchNorm drift apart"):
        check_plan(*permitted(plan_of(), shape=ConvNetShape(num_layers=4, channels=8)), 2)
    check_plan(*permitted(plan_of(), shape=ConvNetShape(num_layers=4, channels=8, norm="group")), 2)


UNFIT: list[tuple[Plan, str]] = [
    (plan_of(compression="int8"), 'cannot join data_parallel.compression = "int8": between replicas no gradients'),
    (plan_of(zero=1), "cannot join data_parallel.zero = 1 with mesh.shard = 1: replicas step by themselves"),
    (plan_of(zero=2), "Use zero = 0, or mesh.shard = 2 or more."),
    (plan_of(algorithm="ring"), 'cannot join data_parallel.algorithm = "ring"'),
]


@pytest.mark.parametrize(("plan", "message"), UNFIT)
def test_plans_that_cannot_be_run(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        check_runnable(plan)


ALONE: list[tuple[dict[str, Any], str]] = [
    ({"local_steps": -1}, "local_steps = -1 is too small: use 0 or more."),
    ({"local_steps": 5, "outer_learning_rate": 0.0}, "outer_learning_rate = 0.0 must be a finite number above 0."),
    ({"local_steps": 5, "outer_momentum": 1.0}, "outer_momentum = 1.0 must be at least 0 and below 1."),
    ({"outer_learning_rate": 1.0}, "outer_learning_rate = 1.0 has no effect with local_steps = 0. Remove it, or give"),
    ({"outer_momentum": 0.0}, "outer_momentum = 0.0 has no effect with local_steps = 0."),
]


@pytest.mark.parametrize(("settings", "message"), ALONE)
def test_settings_that_are_impossible_by_themselves(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        DataParallelPlan(**settings)


def test_they_are_written_and_shown() -> None:
    plan = plan_of(2, 2, zero=3, local_steps=500, outer_momentum=0.0)
    assert parse_plan(dump_plan(plan)) == plan
    lines = describe_plan(plan, {}, permitted(plan)[2])
    assert "replicas average every 500 steps" in lines[0]
    assert any("data_parallel.local_steps = 500" in line for line in lines[1:])
