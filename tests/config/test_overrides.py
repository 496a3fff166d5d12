"""`--set`: single settings laid over recipes and plans."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from noun_examples import PLAN, RECIPE, recipe_of

from weft.config.plan import Plan, apply_overrides, load_plan, parse_plan
from weft.config.recipe import load_recipe, parse_recipe
from weft.errors import PlanError, RecipeError, WeftError
from weft.model.description import facts_of
from weft.techniques.check import check_plan


def test_settings_are_laid_over_files(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "plan.toml").write_text(PLAN)
    recipe = load_recipe(
        tmp_path / "recipe.toml", ["recipe.optimizer.learning_rate=1e-3", "recipe.data.train.1.weight=2"]
    )
    assert recipe.optimizer.learning_rate == 1e-3
    assert recipe.data.train[1].weight == 2.0
    assert recipe.origins["optimizer.learning_rate"] == "--set"
    assert recipe.origins["run.steps"] == f"{tmp_path / 'recipe.toml'}, line 24"
    plan = load_plan(tmp_path / "plan.toml", ["plan.mesh.tensor=4", "plan.mesh.tensor=1"])
    assert plan.mesh.tensor == 1  # the later one wins


def test_settings_are_laid_over_objects() -> None:
    texts = [
        "recipe.optimizer.name=sgd",  # a bare word is text
        'recipe.model.split."blocks.*.up" = "column"',
        'recipe.data.train=[{source="a"}]',
        "recipe.permit.precision=['fp32', 'bf16']",
        "plan.compute.precision=bf16",
        "plan.tensor_parallel.sequence=true",
        "plan.microbatch.per_step=[1, 2]",
        "plan.memory.recompute=full",
    ]
    before = recipe_of(), Plan()
    recipe, plan = apply_overrides(*before, texts)
    assert recipe.optimizer.name == "sgd"
    assert recipe.model.split == {"blocks.*.up": "column"}
    assert [source.source for source in recipe.data.train] == ["a"]
    assert plan.compute.precision == "bf16"
    assert plan.tensor_parallel.sequence is True
    assert plan.microbatch.per_step == (1, 2)
    assert plan.origins["memory.recompute"] == "--set"
    assert apply_overrides(*before, []) == before


def test_a_conflict_names_where_both_came_from() -> None:
    plan = parse_plan(PLAN)
    recipe = parse_recipe(RECIPE)
    changed, plan = apply_overrides(recipe, plan, ["plan.mesh.tensor=3"])
    message = (
        "plan.mesh.tensor = 3 (from --set) does not divide num_heads = 8, num_kv_heads = 4, ffn_size = 1408, "
        "vocabulary_size = 8192.\nUse 1, 2 or 4."
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        check_plan(plan, changed, facts_of(changed))
    with pytest.raises(
        RecipeError, match=re.escape("recipe.toml, line 21: optimizer.warmup_steps = 100 is longer than run")
    ):
        apply_overrides(recipe, plan, ["recipe.run.steps=50"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "recipe.optimizer.learning_rat=1",
            "recipe.optimizer.learning_rat (from --set) is not a setting. Did you mean learning_rate?",
        ),
        (
            "recipe.optimizer.learning_rate=fast",
            'recipe.optimizer.learning_rate = "fast" (from --set) is not a number.',
        ),
        ("plan.mesh.tensor=0", "plan.mesh.tensor = 0 (from --set) is too small: use 1 or more."),
        (
            "plan.compute.compile=True",
            'plan.compute.compile = "True" (from --set) is not true or false. Write true, without quotes.',
        ),
        ("plan.mesh.tensor", "--set plan.mesh.tensor gives no value. Write --set plan.mesh.tensor=VALUE."),
        ("plan.mesh.tensor=", "--set plan.mesh.tensor= gives no value. For empty text write ''."),
        ("mesh.tensor=2", "--set mesh.tensor=2: settings begin with recipe. or plan. Write for example"),
        ("plam.mesh.tensor=2", "--set plam.mesh.tensor=2: settings begin with recipe. or plan. Did you mean plan?"),
        ("plan=2", "--set plan=2: settings begin with recipe. or plan."),
        ("plan.mesh.=2", "'plan.mesh.' is not the name of a setting."),
        ("plan.pipeline_parallel.cuts=[1, 2", "[1, 2 is not a TOML value. Check its brackets and quotes."),
        ("plan.mesh.tensor.size=2", "plan.mesh.tensor = 1 is a single value: it has no size."),
        ("recipe.data.train.7.weight=2", "recipe.data.train.7 does not exist: the positions in this list are 0."),
        ("recipe.run.steps=3\nseed = 4", 'recipe.run.steps = "3\\nseed = 4" (from --set) is not a whole number.'),
    ],
)
def test_bad_settings(text: str, message: str) -> None:
    with pytest.raises(WeftError, match=re.escape(message)):
        apply_overrides(recipe_of(), Plan(), [text])


def test_a_recipe_takes_only_its_own_settings() -> None:
    with pytest.raises(WeftError, match=re.escape("settings begin with recipe.")):
        parse_recipe(RECIPE, ["plan.mesh.tensor=2"])


def test_words_that_look_like_dates_stay_text() -> None:
    recipe = parse_recipe(RECIPE, ["recipe.data.cache=2026-01-02"])
    assert recipe.data.cache == "2026-01-02"
