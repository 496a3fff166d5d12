"""Squares of tensor ranks for encoder-decoders, against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cells
import pytest
import two_stacks
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool

from weft.analysis.blueprint import build_blueprint
from weft.api import describe_recipe
from weft.config.recipe import DataSource, ModelRecipe, Recipe
from weft.errors import PlanError
from weft.model.description import facts_of
from weft.run.worker import facts_of_blueprint
from weft.techniques.check import check_plan

STEPS = 3
SQUARE = plan(tensor=4, grid="2d")
FOLLOWED_IN_FP16 = ("mbart", "t5gemma", "fsmt")
"""Families that look at no features for what overflows, or only at each by itself."""


class TwoStacks(Matrix):
    """Cells whose samples stand in a file."""

    def recipe(self, model: str, precision: str, **optimizer: Any) -> Recipe:
        recipe = super().recipe(model, precision, **optimizer)
        path = Path(str(self.models[model].hf)).parent / f"{'masked' if model in two_stacks.MASKED else 'whole'}.jsonl"
        return replace(recipe, data=replace(recipe.data, train=(DataSource(source=str(path)),)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRecipe]:
    folder = tmp_path_factory.mktemp("stacks")
    for is_masked in (False, True):
        two_stacks.write_samples(folder, is_masked=is_masked)
    return two_stacks.models(folder)


@pytest.fixture(scope="module")
def parity(ranks: RankPool, models: dict[str, ModelRecipe]) -> Matrix:
    return TwoStacks(ranks, models, steps=STEPS, backend="cpu:weft")


@pytest.mark.parametrize("name", two_stacks.CONFIGS)
def test_all_that_know_a_model_agree_on_its_squares(models: dict[str, ModelRecipe], name: str) -> None:
    recipe = cells.recipe_of(models[name], "fp64")
    built, described = facts_of_blueprint(build_blueprint(recipe), recipe), describe_recipe(recipe).facts
    half = replace(SQUARE, compute=replace(SQUARE.compute, precision="fp16"))
    narrow = replace(recipe, permit=replace(recipe.permit, precision=("fp16",)))
    for facts in (facts_of(recipe), built, described):
        check_plan(SQUARE, recipe, facts)
    for facts in (built, described):
        if name in FOLLOWED_IN_FP16:
            check_plan(half, narrow, facts)
        else:
            with pytest.raises(PlanError, match='cannot join compute.precision = "fp16" for this model: .* computes'):
                check_plan(half, narrow, facts)


@pytest.mark.parametrize("cell", two_stacks.ALL, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize("breakage", ["biases of other heads", "own gradients of biases"])
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str) -> None:
    assert "relative_attention_bias" in " ".join(parity.verdict(Cell("t5", SQUARE), breakage=breakage).failures("fp64"))


@pytest.fixture(scope="module")
def long(ranks: RankPool, models: dict[str, ModelRecipe], pytestconfig: pytest.Config) -> Matrix:
    return TwoStacks(ranks, models, backend=str(pytestconfig.getoption("--parity-backend")))


@pytest.mark.parity
@pytest.mark.parametrize("cell", two_stacks.ALL + two_stacks.COMBINED, ids=str)
def test_every_cell_equals_one_process(long: Matrix, cell: Cell) -> None:
    assert long.verdict(cell).failures("fp64") == []
