"""Ranks that share out the experts of mixtures, against one process; `make parity` has all cells of `expert_cells`."""

from __future__ import annotations

import expert_cells
import pytest
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool
from test_dry_runs import check

STEPS = 3
BREAKAGES = (
    ("another rank's experts", "gradient"),
    ("experts summed over nobody", "gradient"),
    ("experts summed over all data ranks", "gradient"),
    ("rows as they came", "gradient"),
    ("gradients of rows stay", "gradient"),
)
"""Piece of Weft that is broken, and where it shows."""


@pytest.fixture(scope="module")
def parity(ranks: RankPool) -> Matrix:
    return Matrix(ranks, expert_cells.MODELS, steps=STEPS, backend="cpu:weft")


@pytest.fixture(scope="module")
def long(ranks: RankPool, pytestconfig: pytest.Config) -> Matrix:
    return Matrix(ranks, expert_cells.MODELS, backend=str(pytestconfig.getoption("--parity-backend")))


@pytest.mark.parametrize("cell", expert_cells.DRAWN, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


def test_equals_one_process_in_fp32_over_gloo(ranks: RankPool) -> None:
    over_gloo = Matrix(ranks, expert_cells.MODELS, steps=STEPS)
    cell = Cell("mixture_untied", plan(expert=2, shard=4, zero=1, micro=1))
    assert over_gloo.verdict(cell, "fp32").failures("fp32") == []


@pytest.mark.parametrize(("breakage", "seen_in"), BREAKAGES, ids=[name for name, _ in BREAKAGES])
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, seen_in: str) -> None:
    cell = Cell("mixture", plan(expert=2, shard=4, zero=1, micro=1))
    failures = parity.verdict(cell, breakage=breakage).failures("fp64")
    assert any(seen_in in failure for failure in failures), failures


@pytest.mark.parametrize("breakage", ["sums of own experts alone", "gathered weights by rank"])
def test_a_broken_piece_of_gathering_is_seen(parity: Matrix, breakage: str) -> None:
    cell = Cell("mixture", expert_cells.gathering(expert=2, shard=4, zero=1, micro=1))
    failures = parity.verdict(cell, breakage=breakage).failures("fp64")
    assert any("gradient" in failure for failure in failures), failures


@pytest.mark.parametrize("cell", expert_cells.DRAWN, ids=str)
def test_a_dry_run_sends_what_is_predicted(cell: Cell) -> None:
    check(cell, expert_cells.MODELS)


@pytest.mark.parity
@pytest.mark.parametrize("cell", expert_cells.ALL, ids=str)
def test_every_cell_equals_one_process(long: Matrix, cell: Cell) -> None:
    assert long.verdict(cell).failures("fp64") == []


@pytest.mark.parity
@pytest.mark.parametrize("cell", expert_cells.ALL, ids=str)
def test_every_dry_run_sends_what_is_predicted(cell: Cell) -> None:
    check(cell, expert_cells.MODELS)
