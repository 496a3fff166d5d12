"""A better plan from measurements: what is corrected, what counts as better, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.config.cluster import parse_cluster_spec
from weft.config.plan import Plan, complete_plan
from weft.config.recipe import PermitRecipe, Recipe, parse_recipe
from weft.errors import PlanError
from weft.model.description import facts_of, profile_of
from weft.planning.price import CostModel
from weft.planning.search import BetterPlan, MeasuredSteps, better_plan
from weft.techniques.check import check_plan, mesh_sizes
from weft.techniques.cost_terms import DATASHEET, Layout

RECIPE = parse_recipe("""[model]
reference = "decoder"
num_layers = 4
hidden_size = 512
num_heads = 8
sequence_length = 512
[batch]
global_batch_size = 32
[run]
steps = 1
""")
CLUSTER = parse_cluster_spec("4xcpu")


def completed(plan: Plan, recipe: Recipe = RECIPE) -> Plan:
    return complete_plan(plan, recipe, {}, None, is_chosen=False)[0]


def measured(plan: Plan, *, times: float = 1.0, exposed: float | None = None, noise: float = 0.01) -> MeasuredSteps:
    """Steps that take `times` what is predicted; `exposed`: times what is predicted of waiting for others."""
    profile = profile_of(RECIPE)
    assert profile is not None
    time = CostModel(profile, CLUSTER, calibration=DATASHEET).predict(Layout.of(plan), exact=True).time
    waits = time.tensor + time.context + time.expert + time.pipeline + time.bubble + time.data
    exposed_seconds = waits * (times if exposed is None else exposed)
    rest = (time.total - waits) * times
    return MeasuredSteps(
        plan=plan,
        num_steps=40,
        seconds=rest + exposed_seconds,
        noise=noise,
        exposed_seconds=exposed_seconds,
        optimizer_seconds=time.optimizer * times,
        other_seconds=0.0,
    )


def better(before: MeasuredSteps, *earlier: MeasuredSteps, recipe: Recipe = RECIPE) -> BetterPlan:
    profile = profile_of(recipe)
    assert profile is not None
    found = better_plan(before, earlier, recipe=recipe, facts=facts_of(recipe), profile=profile, cluster=CLUSTER)
    check_plan(found.plan, recipe, facts_of(recipe))
    return found


def test_a_slow_plan_is_left_for_the_best() -> None:
    found = better(measured(completed(Plan.tensor(4, zero=0)), exposed=3.0))
    assert found.plan.mesh.tensor == 1
    assert not found.is_measured
    assert found.gain > found.margin >= 0.15
    first, second = found.lines()
    assert first.startswith("measured  tensor 4, ZeRO-0: ")
    assert "over 40 steps" in first
    assert "was predicted)" in first
    assert second.startswith(f"best      {mesh_sizes(found.plan)}")
    assert "predicted" in second


def test_the_best_plan_stays() -> None:
    best = better(measured(completed(Plan.tensor(4)), exposed=3.0)).plan
    for times in (0.5, 1.0, 3.0):  # a machine that is slower than predicted is so under every plan
        with pytest.raises(PlanError, match=r"(?s)No plan is better by more than 15 % of a step.*Next: "):
            better(measured(best, times=times))


def test_what_was_measured_counts_more_than_what_is_predicted() -> None:
    best = better(measured(completed(Plan.tensor(4)), exposed=3.0)).plan
    ran = completed(Plan.tensor(2, replicate=2))
    slow, fast = measured(best, times=2.0), replace(measured(ran), seconds=0.9 * measured(best, times=2.0).seconds)
    found = better(slow, fast)
    assert found.plan == ran
    assert found.is_measured
    assert found.margin < 0.05
    assert "measured" in found.lines()[1]
    with pytest.raises(PlanError, match="No plan is better"):
        better(slow, replace(fast, noise=0.2))


def test_numbers_stay_what_they_are() -> None:
    recipe = replace(RECIPE, permit=PermitRecipe(precision=("bf16", "fp32")))
    for precision in ("fp32", "bf16"):
        plan = completed(Plan.tensor(4, precision=precision), recipe)
        assert better(measured(plan, exposed=9.0), recipe=recipe).plan.compute.precision == precision
