"""Plans against one process: the cells that show every pair of techniques and every model, within `make test`.

A few steps over shared memory, which is what ranks of one host use; `make parity` takes all cells and more steps.
"""

from __future__ import annotations

from pathlib import Path

import cells
import matrix
import pytest
from cells import Cell
from matrix import COVERING, FULL
from parity_run import Matrix
from pool import RankPool

from weft.config.recipe import ModelRecipe
from weft.errors import PlanError
from weft.model.build import build_model
from weft.model.description import facts_of
from weft.techniques.check import check_plan

STEPS = 6
IN_FP32 = tuple(cell for cell in COVERING if cell.world in (2, 4))[::3]

IMPOSSIBLE = {
    *(f"zero{low} and zero{high}" for low in range(4) for high in range(low + 1, 4)),
    "hybrid and zero0",  # nothing would be sharded
    "compile and split_backward",  # a compiled block has one backward
    *(f"grid and {name}" for name in ("sequence", "split_backward")),
    "context and grid",  # refused
    "compile and grid",  # refused
}
NOT_TRIED = {*(f"compile and {name}" for name in ("hybrid", "unequal", "zero0")), "grid and hybrid"}
"""Compiled cells take a minute each, and what is compiled is the block, which none of these enter; a grid beside hybrid
sharding takes 16 ranks."""


@pytest.fixture(scope="module")
def parity(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.create(ranks, tmp_path_factory.mktemp("models"), steps=STEPS, backend="cpu:weft")


@pytest.mark.parametrize("cell", COVERING, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell):
    assert parity.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize("cell", IN_FP32, ids=str)
def test_equals_one_process_in_fp32(parity: Matrix, cell: Cell):
    assert parity.verdict(cell, "fp32").failures("fp32") == []


def test_the_matrix_is_large_enough():
    assert len(FULL) >= 110
    assert len({str(cell) for cell in FULL}) == len(FULL)
    assert {cell.world for cell in FULL} == {1, 2, 3, 4, 5, 8}
    assert {cell.model for cell in FULL} >= set(matrix.ALL_MODELS)


def test_every_pair_of_techniques_has_a_cell():
    techniques = set[str]().union(*(matrix.techniques(cell) for cell in FULL))
    shown = set[str]().union(*(matrix.features(cell) for cell in FULL))
    pairs = {f"{one} and {other}" for one in techniques for other in techniques if one < other}
    assert pairs - shown == IMPOSSIBLE | NOT_TRIED


def test_every_cell_is_a_plan_that_may_be_run(tmp_path: Path):
    models = cells.models(tmp_path)
    for cell in FULL:
        recipe = cells.recipe_of(models[cell.model], "fp64")
        check_plan(cell.plan, recipe, facts_of(recipe), cell.world)


def test_a_model_that_computes_outside_its_cut_table_is_refused(parity: Matrix):
    recipe = cells.recipe_of(ModelRecipe(factory="parity_models:build_scaled_outside"), "fp64")
    with pytest.raises(PlanError, match="ScaledOutside cannot be cut into stages .* changes the activation outside"):
        parity.run(recipe, cells.plan(pipeline=2))


def test_a_model_that_is_not_cut_may_compute_anywhere(parity: Matrix):
    assert build_model(cells.recipe_of(ModelRecipe(factory="parity_models:build_scaled_outside"), "fp64"))
