"""Models without a table are split by looking at them: drawn forms of attention, judged by gradients on two ranks."""

from __future__ import annotations

import pytest
from drawn_models import drawn_form, drawn_model
from pool import RankPool

from weft.analysis.look import look
from weft.config.plan import ComputePlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, ModelRecipe, PermitRecipe, Recipe, RunRecipe
from weft.model.blueprint import Blueprint
from weft.verify.numerics import TOLERANCES, Trial, assemble, compare, one_process, run_trial

RECIPE = Recipe(
    model=ModelRecipe(factory="drawn_models:drawn_model"),
    batch=BatchRecipe(global_batch_size=4),
    run=RunRecipe(steps=2),
    permit=PermitRecipe(precision=("fp64",)),
)


def looked_at(seed: int) -> Blueprint:
    blueprint = drawn_model(seed)
    look(blueprint)
    return blueprint


def run_rank(seed: int, tensor: int) -> Trial:
    plan = Plan(
        mesh=MeshPlan(tensor=tensor),
        microbatch=MicrobatchPlan(size=2, per_step=2),
        compute=ComputePlan(precision="fp64", device="cpu"),
    )
    if tensor == 1:
        return run_trial(RECIPE, one_process(plan), lambda: drawn_model(seed), steps=2)
    return run_trial(RECIPE, plan, lambda: looked_at(seed), steps=2)


@pytest.mark.parametrize("seed", range(8))
def test_two_ranks_compute_the_gradients_of_one(seed: int, ranks: RankPool) -> None:
    form, blueprint = drawn_form(seed), looked_at(seed)
    kinds = {name: blueprint.kind_of(name) for name in ("blocks.1.attention.out", "blocks.1.down", "tokens", "head")}
    assert kinds == {
        "blocks.1.attention.out": "row",
        "blocks.1.down": "row",
        "tokens": "vocab",
        "head": "column",
    }, form
    norm, sinks = blueprint.rule_of("blocks.0.attention.q_norm"), "blocks.0.attention.sinks"
    assert norm is None or norm.kind == {"all": "gather", "head": "heads"}[form.norm], form
    assert (form.per_head == "sink") == (blueprint.rule_of_parameter(sinks) is not None), form
    (whole,) = ranks.run(1, run_rank, seed, 1)
    halves = ranks.run(2, run_rank, seed, 2)
    worst = compare(assemble([whole.gradients]), assemble([trial.gradients for trial in halves]))[0]
    assert worst.relative <= TOLERANCES["fp64"], f"{form}: {worst}"
    assert halves[0].losses == pytest.approx(whole.losses, rel=1e-10), form
