"""Grids of tensor ranks for families of `transformers`: with windows against one process, and refused for models that
were only looked at, whose tensor ranks split in one dimension."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import cells
import looked_grids
import pytest
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool
from test_dry_runs import check

from weft.analysis.blueprint import build_blueprint
from weft.analysis.facts import facts_of_blueprint
from weft.api import describe_recipe
from weft.config.cluster import Cluster
from weft.config.plan import Plan
from weft.config.recipe import ModelRecipe, Recipe
from weft.errors import PlanError
from weft.model.description import facts_of
from weft.planning.search import recipe_space
from weft.techniques.check import check_plan

STEPS = 3
CUBE = plan(tensor=8, grid="3d", micro=4, fused=False)


class Isolating(Matrix):
    """Cells whose samples hold several documents, kept apart."""

    def recipe(self, model: str, precision: str, **optimizer: Any) -> Recipe:
        recipe = super().recipe(model, precision, **optimizer)
        return replace(recipe, data=replace(recipe.data, documents="isolated"))


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


def test_windows_of_isolated_documents_equal_one_process(ranks: RankPool, models: dict[str, ModelRecipe]) -> None:
    isolating = Isolating(ranks, models, steps=STEPS, backend="cpu:weft")
    assert isolating.verdict(Cell("mistral", plan(tensor=4, grid="2d"))).failures("fp64") == []


def test_a_dry_run_sends_what_is_predicted(models: dict[str, ModelRecipe]) -> None:
    check(looked_grids.ALL[0], models, "fp32")


@pytest.mark.parametrize("documents", ["packed", "isolated"])
@pytest.mark.parametrize("name", looked_grids.WINDOWED)
def test_a_file_and_the_built_model_agree_on_windows(
    models: dict[str, ModelRecipe], name: str, documents: Literal["packed", "isolated"]
) -> None:
    recipe = cells.recipe_of(models[name], "fp64")
    recipe = replace(recipe, data=replace(recipe.data, documents=documents))
    described, built = facts_of(recipe), facts_of_blueprint(build_blueprint(recipe), recipe)
    for facts in (described, built):
        check_plan(plan(tensor=4, grid="2d"), recipe, facts)
        with pytest.raises(PlanError, match=r"its masks of windows are made for other samples|isolated"):
            check_plan(CUBE, recipe, facts)
    with pytest.raises(PlanError, match="cannot join mesh.pipeline = 2 for this model: its blocks were found"):
        check_plan(plan(tensor=4, grid="2d", pipeline=2), recipe, built)


@pytest.mark.parametrize("scheme", ["2d", "2.5d", "3d"])
@pytest.mark.parametrize("name", looked_grids.REFUSED)
def test_other_models_form_no_grid_and_are_told_of_one_dimension(
    models: dict[str, ModelRecipe], name: str, scheme: str
) -> None:
    recipe, why = cells.recipe_of(models[name], "fp64"), looked_grids.REFUSED[name][1]
    chosen = {"2d": plan(tensor=4, grid="2d"), "2.5d": plan(tensor=8, grid="2.5d", micro=4), "3d": CUBE}[scheme]
    built = build_blueprint(recipe)
    description = describe_recipe(recipe)
    for facts in (facts_of_blueprint(built, recipe), description.facts):
        with pytest.raises(PlanError, match=rf'(?s)cannot be had for this model: {why}.*\nUse "1d"\.'):
            check_plan(chosen, recipe, facts)
        check_plan(plan(tensor=2), recipe, facts)
    space = recipe_space(recipe, description.profile, description.facts, Cluster.detect(), Plan())
    assert space.tensor_schemes == ("1d",)


@pytest.mark.parity
@pytest.mark.parametrize("cell", looked_grids.ALL, ids=str)
def test_every_cell_equals_one_process(long: Matrix, cell: Cell) -> None:
    assert long.verdict(cell).failures("fp64") == []
