"""The engine's own loop leaves updated weights under way after a step, where a plan shards its optimizer."""

from __future__ import annotations

from typing import Any

import pytest
from engine_kit import Training, plan_of, recipe_of

from weft.config.recipe import OptimizerRecipe

RECIPE: dict[str, Any] = {"hidden_size": 32, "ffn_size": 64, "vocabulary_size": 64, "dropout": 0.0}


def away_and_back(zero: int) -> tuple[int, int]:
    """Parameters without elements after a step, and once all have been waited for."""
    recipe = recipe_of("fp32", OptimizerRecipe(learning_rate=1e-2), **RECIPE)
    training = Training(recipe, plan_of("fp32", replicate=2, zero=zero))
    training.step(0)
    parameters = list(training.state.model.module.parameters())
    away = sum(parameter.numel() == 0 for parameter in parameters)
    training.state.model.stores.wait_weights()
    back = sum(parameter.numel() == 0 for parameter in parameters)
    training.state.close()
    return away, back


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_weights_are_away_after_a_step_and_back_when_they_are_waited_for(ranks: Any, zero: int) -> None:
    for away, back in ranks.run(2, away_and_back, zero):
        assert (away > 0) == (zero > 0)
        assert back == 0
