"""Convolutional networks whose channels tensor ranks share out, against one process."""

from __future__ import annotations

import channel_cells
import pytest
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool
from test_dry_runs import check

STEPS = 3
BREAKAGES = (
    ("bias of every rank", "mobile", "gradient"),
    ("input channels not summed", "basic", "gradient"),
    ("gradients of inputs by rank", "basic", "gradient"),
    ("statistics of the other rank", "mobile", "final buffer"),
    ("blocks of channels lost", "multiplied", "gradient"),
    ("channels dropped by rank", "plain", "gradient"),
)
"""Piece of Weft that is broken, a network that shows it, and where."""


@pytest.fixture(scope="module")
def parity(ranks: RankPool) -> Matrix:
    return Matrix(ranks, channel_cells.MODELS, steps=STEPS, backend="cpu:weft")


@pytest.fixture(scope="module")
def long(ranks: RankPool, pytestconfig: pytest.Config) -> Matrix:
    return Matrix(ranks, channel_cells.MODELS, backend=str(pytestconfig.getoption("--parity-backend")))


@pytest.mark.parametrize("cell", channel_cells.DRAWN, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


def test_equals_one_process_in_fp32_over_gloo(ranks: RankPool) -> None:
    cell = Cell("grouped", plan(tensor=2, shard=2, zero=1, micro=6))
    assert Matrix(ranks, channel_cells.MODELS, steps=STEPS).verdict(cell, "fp32").failures("fp32") == []


@pytest.mark.parametrize(("breakage", "model", "seen_in"), BREAKAGES, ids=[name for name, *_ in BREAKAGES])
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, model: str, seen_in: str) -> None:
    failures = parity.verdict(Cell(model, plan(tensor=2, micro=12)), breakage=breakage).failures("fp64")
    assert any(seen_in in failure for failure in failures), failures


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
