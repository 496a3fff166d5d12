"""Convolutional networks whose channels tensor ranks share out, against one process."""

from __future__ import annotations

import channel_cells
import pytest
from cells import Cell, plan
from parity_run import Matrix
from test_dry_runs import check

from pool import RankPool

STEPS = 3


@pytest.fixture(scope="module")
def parity(ranks: RankPool) -> Matrix:
    return Matrix(ranks, channel_cells.MODELS, steps=STEPS, backend="cpu:weft")


@pytest.fixture(scope="module")
def long(ranks: RankPool, pytestconfig: pytest.Config) -> Matrix:
    return Matrix(ranks, channel_cells.MODELS, backend=str(pytestconfig.getoption("--parity-backend")))


@pytest.mark.parametrize("cell", channel_cells.DRAWN, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize("cell", channel_cells.DRAWN, ids=str)
def test_a_dry_run_sends_what_is_predicted(cell: Cell) -> None:
    check(cell, channel_cells.MODELS)


@pytest.mark.parity
@pytest.mark.parametrize("cell", channel_cells.ALL, ids=str)
def test_every_cell_equals_one_process(long: Matrix, cell: Cell) -> None:
    assert long.verdict(cell).failures("fp64") == []


@pytest.mark.parity
@pytest.mark.parametrize("cell", channel_cells.ALL, ids=str)
def test_every_dry_run_sends_what_is_predicted(cell: Cell) -> None:
    check(cell, channel_cells.MODELS)
