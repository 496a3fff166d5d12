"""ZeRO-3 over ranks that hold the same experts, against one process; `make parity` has all cells."""

from __future__ import annotations

import expert_cells
import library_experts
import pytest
import sharded_experts
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool
from test_dry_runs import check

from weft.config.recipe import ModelRecipe

STEPS = 3
BREAKAGES = (
    ("experts cut over all shards", Cell("mixture", plan(expert=2, shard=4, zero=3, micro=1))),
    ("neighbour's part of experts", Cell("mixture_six", plan(expert=2, shard=4, zero=3, micro=1))),
)
"""Piece of Weft that is broken, and a cell that shows it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRecipe]:
    return expert_cells.MODELS | library_experts.models(tmp_path_factory.mktemp("mixtures"))


@pytest.fixture(scope="module")
def parity(ranks: RankPool, models: dict[str, ModelRecipe]) -> Matrix:
    return Matrix(ranks, models, steps=STEPS, backend="cpu:weft")


@pytest.fixture(scope="module")
def long(ranks: RankPool, models: dict[str, ModelRecipe], pytestconfig: pytest.Config) -> Matrix:
    return Matrix(ranks, models, backend=str(pytestconfig.getoption("--parity-backend")))


@pytest.mark.parametrize("cell", sharded_experts.DRAWN, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize(("breakage", "cell"), BREAKAGES, ids=[name for name, _ in BREAKAGES])
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, cell: Cell) -> None:
    failures = parity.verdict(cell, breakage=breakage).failures("fp64")
    assert any("gradient" in failure for failure in failures), failures


@pytest.mark.parametrize("cell", sharded_experts.DRAWN, ids=str)
def test_a_dry_run_sends_what_is_predicted(models: dict[str, ModelRecipe], cell: Cell) -> None:
    check(cell, models)


@pytest.mark.parity
@pytest.mark.parametrize("cell", sharded_experts.ALL + sharded_experts.LIBRARY, ids=str)
def test_every_cell_equals_one_process(long: Matrix, cell: Cell) -> None:
    assert long.verdict(cell).failures("fp64") == []


@pytest.mark.parity
@pytest.mark.parametrize("cell", sharded_experts.ALL + sharded_experts.LIBRARY, ids=str)
def test_every_dry_run_sends_what_is_predicted(models: dict[str, ModelRecipe], cell: Cell) -> None:
    check(cell, models, "fp32" if cell in sharded_experts.LIBRARY else "fp64")
