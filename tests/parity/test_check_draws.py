"""`weft check` of a model that draws by functions: plain torch is given the same numbers."""

from __future__ import annotations

from checking import on_ranks
from pool import RankPool

from weft.api import check_by
from weft.config.plan import MemoryPlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, ModelRecipe, Recipe, RunRecipe


def test_functional_dropout_is_proved(ranks: RankPool) -> None:
    recipe = Recipe(
        model=ModelRecipe(factory="drawing_models:build_drawing", arguments={"kinds": "dropout sdpa randn"}),
        batch=BatchRecipe(global_batch_size=8),
        run=RunRecipe(steps=3),
    )
    plan = Plan(
        mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=2, per_step=2), memory=MemoryPlan(fused_loss=False)
    )
    report = check_by(on_ranks(ranks), recipe, plan, processes=None, explain=False)
    assert report.is_equal, str(report)
