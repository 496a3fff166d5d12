"""Ranks that share out the experts of mixtures of transformers, against one process."""

from __future__ import annotations

import library_experts
import pytest
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool
from test_dry_runs import check

from weft.config.recipe import ModelRecipe

STEPS = 3
BREAKAGES = (
    ("another rank's experts", "gradient"),
    ("experts summed over all data ranks", "gradient"),
    ("rows as they came", "gradient"),
    ("weights of the choices before", "gradient"),
)
"""Piece of Weft that is broken, and where it shows."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRecipe]:
    return library_experts.models(tmp_path_factory.mktemp("mixtures"))


@pytest.fixture(scope="module")
def parity(ranks: RankPool, models: dict[str, ModelRecipe]) -> Matrix:
    return Matrix(ranks, models, steps=STEPS, backend="cpu:weft")


@pytest.fixture(scope="module")
def long(ranks: RankPool, models: dict[str, ModelRecipe], pytestconfig: pytest.Config) -> Matrix:
    return Matrix(ranks, models, backend=str(pytestconfig.getoption("--parity-backend")))


@pytest.mark.parametrize("cell", library_experts.DRAWN, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize(("breakage", "seen_in"), BREAKAGES, ids=[name for name, _ in BREAKAGES])
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, seen_in: str) -> None:
    cell = Cell("mixtral", plan(expert=2, shard=4, zero=1, micro=1))
    failures = parity.verdict(cell, breakage=breakage).failures("fp64")
    assert any(seen_in in failure for failure in failures), failures


@pytest.mark.parametrize("cell", library_experts.DRAWN, ids=str)
def test_a_dry_run_sends_what_is_predicted(models: dict[str, ModelRecipe], cell: Cell) -> None:
    check(cell, models, "fp32")


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_what_is_predicted_knows_in_what_precision_choices_are_weighted(
    models: dict[str, ModelRecipe], precision: str
) -> None:
    """Mixtral's routers weight in fp32, whatever the rest computes in."""
    check(library_experts.DRAWN[0], models, precision)


@pytest.mark.parity
@pytest.mark.parametrize("cell", library_experts.ALL, ids=str)
def test_every_cell_equals_one_process(long: Matrix, cell: Cell) -> None:
    assert long.verdict(cell).failures("fp64") == []


@pytest.mark.parity
@pytest.mark.parametrize("cell", library_experts.ALL, ids=str)
def test_every_dry_run_sends_what_is_predicted(models: dict[str, ModelRecipe], cell: Cell) -> None:
    check(cell, models, "fp32")
