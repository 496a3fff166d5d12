"""`make parity`: `weft check` passes every plan of the matrix, in fresh processes as a user starts them."""

from __future__ import annotations

from pathlib import Path

import cells
import matrix
import pytest
from cells import Cell

import weft

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("cell", matrix.FULL, ids=str)
def test_a_check_passes(cell: Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = cells.recipe_of(cells.models(tmp_path)[cell.model], "fp64")
    report = weft.check(recipe, cell.plan)
    with capsys.disabled():
        print(f"\n{cell}: {report.result_lines()[0]}", end="", flush=True)
    assert report.is_equal, report
