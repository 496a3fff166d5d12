"""Batch norm and recomputation do not go together: the second forward would move running statistics again."""

from __future__ import annotations

import pytest

from weft.config.plan import MemoryPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, ConvNetShape, ModelRecipe, Recipe, RunRecipe
from weft.errors import PlanError
from weft.model.description import facts_of
from weft.techniques.check import check_plan


def test_recomputing_a_batch_norm_is_refused() -> None:
    recipe = Recipe(
        model=ModelRecipe(reference="convnet", shape=ConvNetShape(num_layers=2, channels=4)),
        batch=BatchRecipe(global_batch_size=4),
        run=RunRecipe(steps=1),
    )
    microbatch = MicrobatchPlan(size=4)
    check_plan(Plan(microbatch=microbatch), recipe, facts_of(recipe))
    for recompute in ("full", ("none", "selective")):
        plan = Plan(microbatch=microbatch, memory=MemoryPlan(recompute=recompute))  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=r'running statistics would move twice\.\nUse recompute = "none"'):
            check_plan(plan, recipe, facts_of(recipe))
