"""Squares of tensor ranks for mixtures of experts, against one process."""

from __future__ import annotations

from dataclasses import replace

import cells
import pytest
import whole_grids
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool

from weft.analysis.blueprint import build_blueprint
from weft.api import describe_recipe
from weft.config.recipe import ModelRecipe
from weft.errors import PlanError
from weft.model.description import facts_of
from weft.run.worker import facts_of_blueprint
from weft.techniques.check import check_plan

STEPS = 3
SQUARE = plan(tensor=4, grid="2d")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRecipe]:
    return whole_grids.models(tmp_path_factory.mktemp("grids"))


@pytest.fixture(scope="module")
def parity(ranks: RankPool, models: dict[str, ModelRecipe]) -> Matrix:
    return Matrix(ranks, models, steps=STEPS, backend="cpu:weft")


@pytest.mark.parametrize("name", ["mixtral", "hy_v3"])
def test_all_that_know_a_mixture_agree_on_its_squares(models: dict[str, ModelRecipe], name: str) -> None:
    recipe = cells.recipe_of(models[name], "fp64")
    built, described = facts_of_blueprint(build_blueprint(recipe), recipe), describe_recipe(recipe)
    for facts in (facts_of(recipe), built, described.facts):
        check_plan(SQUARE, recipe, facts)
    for facts in (built, described.facts):
        with pytest.raises(PlanError, match="looked at for squares of ranks"):
            check_plan(plan(tensor=8, grid="3d", micro=4, fused=False), recipe, facts)
        isolated = replace(recipe, data=replace(recipe.data, documents="isolated"))
        with pytest.raises(PlanError, match="documents"):
            check_plan(SQUARE, isolated, facts)
    assert described.profile.whole_parameters > 0


@pytest.mark.parametrize("name", whole_grids.REFUSED)
def test_what_stands_in_the_way_is_said(models: dict[str, ModelRecipe], name: str) -> None:
    recipe = cells.recipe_of(models[name], "fp64")
    described = describe_recipe(recipe).facts
    assert build_blueprint(recipe, SQUARE).no_grid == described.no_grid
    assert whole_grids.REFUSED[name][1] in described.no_grid


@pytest.mark.parametrize("cell", whole_grids.ALL, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize("breakage", whole_grids.BREAKAGES)
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str) -> None:
    assert parity.verdict(Cell("hy_v3", SQUARE), breakage=breakage).failures("fp64") != []


@pytest.fixture(scope="module")
def long(ranks: RankPool, models: dict[str, ModelRecipe], pytestconfig: pytest.Config) -> Matrix:
    return Matrix(ranks, models, backend=str(pytestconfig.getoption("--parity-backend")))


@pytest.mark.parity
@pytest.mark.parametrize("cell", whole_grids.ALL + whole_grids.COMBINED, ids=str)
def test_every_cell_equals_one_process(long: Matrix, cell: Cell) -> None:
    assert long.verdict(cell).failures("fp64") == []
