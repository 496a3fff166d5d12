"""`make parity`: `weft check` passes every plan of the matrix.

Its ranks are those of the pool, which have imported everything; `tests/entry/test_check.py` starts fresh ones.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cells
import matrix
import pytest
import torch.distributed as dist
from cells import Cell

from pool import RankPool
from weft.entry._check import check_by
from weft.entry._check_report import CheckReport
from weft.entry._check_worker import run_rank
from weft.launch import Place

CELLS = tuple(cell for cell in matrix.FULL if not cell.plan.compute.compile)
"""Compiled ones leave things behind in the pool; `test_full_matrix.py` runs them in processes of their own."""


def on_a_rank(arguments: dict[str, Any]) -> None:
    """A rank of the pool instead of a fresh one."""
    known = set(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    run_rank(Place(rank, world, rank, world), **arguments)
    for name in [name for name in os.environ if "TORCHINDUCTOR" in name and name not in known]:
        del os.environ[name]


def check(ranks: RankPool, cell: Cell, folder: Path) -> CheckReport:
    recipe = cells.recipe_of(cells.models(folder)[cell.model], "fp64")

    def launch(arguments: dict[str, Any], world_size: int) -> object:
        return ranks.run(world_size, on_a_rank, arguments, timeout=300.0)  # two or three trials in one run

    return check_by(launch, recipe, cell.plan, processes=None, explain=True)


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
