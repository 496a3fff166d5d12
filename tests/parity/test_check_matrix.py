"""`make parity`: `weft check` passes every plan of the matrix.

Its ranks are those of the pool, which have imported everything; `tests/api/test_check.py` starts fresh ones.
"""

from __future__ import annotations

from pathlib import Path

import cells
import matrix
import pytest
from cells import Cell
from checking import on_ranks
from pool import RankPool

from weft.api import CheckReport, check_by

CELLS = tuple(cell for cell in matrix.FULL if not cell.plan.compute.compile)
"""Compiled ones leave things behind in the pool; `test_full_matrix.py` runs them in processes of their own."""


def check(ranks: RankPool, cell: Cell, folder: Path) -> CheckReport:
    recipe = cells.recipe_of(cells.models(folder)[cell.model], "fp64")
    return check_by(on_ranks(ranks), recipe, cell.plan, processes=None, explain=True)


@pytest.mark.parametrize("cell", matrix.COVERING[:4], ids=str)
def test_a_check_passes(ranks: RankPool, cell: Cell, tmp_path: Path) -> None:
    report = check(ranks, cell, tmp_path)
    assert report.is_equal, report


@pytest.mark.parity
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_check_passes(ranks: RankPool, cell: Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check(ranks, cell, tmp_path)
    with capsys.disabled():
        print(f"\n{cell}: {report.result_lines()[0]}", end="", flush=True)
    assert report.is_equal, report
