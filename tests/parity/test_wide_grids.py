"""Squares of tensor ranks for forwards that do more with features than parts allow, against one process."""

from __future__ import annotations

import pytest
import wide_grids
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool

from weft.config.recipe import ModelRecipe

STEPS = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRecipe]:
    return wide_grids.models(tmp_path_factory.mktemp("grids"))


@pytest.fixture(scope="module")
def parity(ranks: RankPool, models: dict[str, ModelRecipe]) -> Matrix:
    return Matrix(ranks, models, steps=STEPS, backend="cpu:weft")


@pytest.mark.parametrize(("breakage", "model"), wide_grids.BREAKAGES)
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, model: str) -> None:
    cell = Cell(model, plan(tensor=4, grid="2d"))
    assert parity.verdict(cell, breakage=breakage).failures("fp64") != []


@pytest.mark.parametrize("cell", wide_grids.ALL, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


@pytest.fixture(scope="module")
def long(ranks: RankPool, models: dict[str, ModelRecipe], pytestconfig: pytest.Config) -> Matrix:
    return Matrix(ranks, models, backend=str(pytestconfig.getoption("--parity-backend")))


@pytest.mark.parity
@pytest.mark.parametrize("cell", wide_grids.ALL + wide_grids.COMBINED, ids=str)
def test_every_cell_equals_one_process(long: Matrix, cell: Cell) -> None:
    assert long.verdict(cell).failures("fp64") == []
