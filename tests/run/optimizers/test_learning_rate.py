"""Learning rates at the ends and in between."""

from __future__ import annotations

import math

import pytest

from weft.config.recipe import (
    BatchRecipe,
    MlpShape,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    RunRecipe,
    learning_rate,
    peak_learning_rate,
)

MLP = MlpShape(num_layers=1, input_size=4, hidden_size=4, num_classes=2)


def recipe_with(steps: int = 101, batch: int = 64, **settings: object) -> Recipe:
    return Recipe(
        model=ModelRecipe(reference="mlp", shape=MLP),
        batch=BatchRecipe(global_batch_size=batch),
        optimizer=OptimizerRecipe(learning_rate=0.3, **settings),  # type: ignore[arg-type]
        run=RunRecipe(steps=steps),
    )


def rates(recipe: Recipe) -> list[float]:
    return [learning_rate(recipe, step) for step in range(recipe.run.steps)]


def test_constant_is_constant() -> None:
    assert set(rates(recipe_with())) == {0.3}


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "warmup_stable_decay"])
def test_warm_up_rises_to_the_peak_in_its_last_step(schedule: str) -> None:
    values = rates(recipe_with(schedule=schedule, warmup_steps=7))
    assert values[6] == 0.3
    assert values[:7] == pytest.approx([0.3 * k / 7 for k in range(1, 8)])
    assert max(values) == 0.3


@pytest.mark.parametrize("warmup", [0, 1, 9])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "warmup_stable_decay"])
def test_decay_ends_exactly_at_its_ratio(schedule: str, warmup: int) -> None:
    recipe = recipe_with(schedule=schedule, warmup_steps=warmup, final_learning_rate_ratio=0.07)
    values = rates(recipe)
    assert values[max(warmup - 1, 0)] == 0.3
    assert values[-1] == 0.3 * 0.07
    assert learning_rate(recipe, 10_000) == values[-1]
    after = values[max(warmup - 1, 0) :]
    assert after == sorted(after, reverse=True)


def test_schedules_in_the_middle() -> None:
    assert learning_rate(recipe_with(schedule="linear", final_learning_rate_ratio=0.0), 50) == pytest.approx(0.15)
    cosine = recipe_with(schedule="cosine", final_learning_rate_ratio=0.1)
    assert learning_rate(cosine, 25) == pytest.approx(0.3 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))


def test_stable_part_lasts_until_the_decay() -> None:
    values = rates(recipe_with(schedule="warmup_stable_decay", decay_steps=10, final_learning_rate_ratio=0.0))
    assert values[:91] == [0.3] * 91
    assert values[91:] == pytest.approx([0.3 * k / 10 for k in range(9, -1, -1)])
    by_default = rates(recipe_with(steps=100, schedule="warmup_stable_decay"))
    assert by_default.count(0.3) == 80


@pytest.mark.parametrize("schedule", ["linear", "cosine", "warmup_stable_decay"])
def test_runs_of_one_step_or_of_warm_up_alone(schedule: str) -> None:
    assert rates(recipe_with(steps=1, schedule=schedule)) == [0.3]
    assert rates(recipe_with(steps=3, warmup_steps=3, schedule=schedule)) == pytest.approx([0.1, 0.2, 0.3])


def test_large_batch_rules() -> None:
    assert peak_learning_rate(recipe_with(batch=256, batch_scaling="linear", base_batch_size=64)) == 0.3 * 4
    assert peak_learning_rate(recipe_with(batch=256, batch_scaling="square_root", base_batch_size=64)) == 0.3 * 2
    assert peak_learning_rate(recipe_with(batch=256)) == 0.3
