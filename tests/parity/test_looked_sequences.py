"""Ranks that share the sequence of models that were looked at, which draw by functions or have mixtures."""

from __future__ import annotations

import looked_sequences
import pytest
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool
from test_dry_runs import check

from weft.config.recipe import ModelRecipe

STEPS = 3
BREAKAGES = (
    ("draws of a shorter sample", "seed_oss"),
    ("draws of the first tokens", "seed_oss"),
    ("no sum over context", "olmoe"),
)
"""Piece of Weft that is broken, and a model that shows it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRecipe]:
    return looked_sequences.models(tmp_path_factory.mktemp("sequences"))


@pytest.fixture(scope="module")
def parity(ranks: RankPool, models: dict[str, ModelRecipe]) -> Matrix:
    return Matrix(ranks, models, steps=STEPS, backend="cpu:weft")


@pytest.fixture(scope="module")
def long(ranks: RankPool, models: dict[str, ModelRecipe], pytestconfig: pytest.Config) -> Matrix:
    return Matrix(ranks, models, backend=str(pytestconfig.getoption("--parity-backend")))


@pytest.mark.parametrize("cell", looked_sequences.DRAWN, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize(("breakage", "model"), BREAKAGES, ids=[name for name, _ in BREAKAGES])
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, model: str) -> None:
    failures = parity.verdict(Cell(model, plan(context=2)), breakage=breakage).failures("fp64")
    assert any("gradient" in failure for failure in failures), failures


@pytest.mark.parametrize("cell", looked_sequences.DRAWN, ids=str)
def test_a_dry_run_sends_what_is_predicted(models: dict[str, ModelRecipe], cell: Cell) -> None:
    check(cell, models, "fp32")


@pytest.mark.parity
@pytest.mark.parametrize("cell", looked_sequences.ALL, ids=str)
def test_every_cell_equals_one_process(long: Matrix, cell: Cell) -> None:
    assert long.verdict(cell).failures("fp64") == []


@pytest.mark.parity
@pytest.mark.parametrize("cell", looked_sequences.ALL, ids=str)
def test_every_dry_run_sends_what_is_predicted(models: dict[str, ModelRecipe], cell: Cell) -> None:
    check(cell, models, "fp32")
