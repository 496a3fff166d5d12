"""Squares of tensor ranks for families that looking at a model shows, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import cells
import looked_grids
import pytest
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool

from weft.analysis.blueprint import build_blueprint
from weft.api import describe_recipe
from weft.config.recipe import ModelRecipe, Recipe
from weft.errors import PlanError
from weft.model.description import facts_of
from weft.run.worker import facts_of_blueprint
from weft.techniques.check import check_plan

STEPS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRecipe]:
    return looked_grids.models(tmp_path_factory.mktemp("grids"))


@pytest.fixture(scope="module")
def parity(ranks: RankPool, models: dict[str, ModelRecipe]) -> Matrix:
    return Matrix(ranks, models, steps=STEPS, backend="cpu:weft")


@pytest.fixture(scope="module")
def long(ranks: RankPool, models: dict[str, ModelRecipe], pytestconfig: pytest.Config) -> Matrix:
    return Matrix(ranks, models, backend=str(pytestconfig.getoption("--parity-backend")))


@pytest.mark.parametrize("cell", looked_grids.DRAWN, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


def recipe_of(models: dict[str, ModelRecipe], name: str) -> Recipe:
    return cells.recipe_of(models[name], "fp64")


@pytest.mark.parametrize("documents", ["packed", "isolated"])
@pytest.mark.parametrize("name", ["mistral", "qwen2", "mixtral"])
def test_a_file_and_a_look_agree(
    models: dict[str, ModelRecipe], name: str, documents: Literal["packed", "isolated"]
) -> None:
    recipe = recipe_of(models, name)
    recipe = replace(recipe, data=replace(recipe.data, documents=documents))
    described, built = facts_of(recipe), facts_of_blueprint(build_blueprint(recipe), recipe)
    assert (described.no_grid, described.no_cube) == (built.no_grid, built.no_cube)
    assert bool(described.no_grid) == (documents == "isolated")


def test_all_that_know_a_model_agree_on_its_squares(models: dict[str, ModelRecipe]) -> None:
    recipe, chosen = recipe_of(models, "arcee"), plan(tensor=4, grid="2d")
    built, described = facts_of_blueprint(build_blueprint(recipe), recipe), describe_recipe(recipe).facts
    for facts in (facts_of(recipe), built, described, describe_recipe(recipe).facts):
        check_plan(chosen, recipe, facts)
    assert build_blueprint(recipe, chosen).no_grid == ""
    for facts in (built, described):
        with pytest.raises(PlanError, match="looked at for squares of ranks"):
            check_plan(plan(tensor=8, grid="3d", micro=4, fused=False), recipe, facts)
        with pytest.raises(PlanError, match="cannot join mesh.pipeline = 2 for this model: its blocks were found"):
            check_plan(plan(tensor=4, grid="2d", pipeline=2), recipe, facts)


@pytest.mark.parametrize("name", looked_grids.REFUSED)
def test_what_stands_in_the_way_is_said(models: dict[str, ModelRecipe], name: str) -> None:
    recipe, chosen = recipe_of(models, name), plan(tensor=4, grid="2d")
    built = build_blueprint(recipe)
    described = describe_recipe(recipe).facts
    assert built.no_grid == described.no_grid == build_blueprint(recipe, chosen).no_grid
    for facts in (facts_of_blueprint(built, recipe), described):
        with pytest.raises(PlanError) as refused:
            check_plan(chosen, recipe, facts)
        assert looked_grids.REFUSED[name][1] in str(refused.value)


def test_isolated_documents_are_refused(models: dict[str, ModelRecipe]) -> None:
    recipe = recipe_of(models, "arcee")
    recipe = replace(recipe, data=replace(recipe.data, documents="isolated"))
    assert "kept apart by masks" in build_blueprint(recipe).no_grid


@pytest.mark.parity
@pytest.mark.parametrize("cell", looked_grids.ALL, ids=str)
def test_every_cell_equals_one_process(long: Matrix, cell: Cell) -> None:
    assert long.verdict(cell).failures("fp64") == []
