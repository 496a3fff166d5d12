"""Plans whose optimizer states wait on a disk, against one process that keeps everything: gradients, losses, states."""

from __future__ import annotations

from dataclasses import replace

import cells
import pytest
from cells import Cell
from parity_run import Matrix

from pool import RankPool
from weft.plan import MemoryPlan

STEPS = 6


def offloaded(model: str, **settings: object) -> Cell:
    plan = cells.plan(**settings)  # type: ignore[arg-type]
    return Cell(model, replace(plan, memory=MemoryPlan(offload="optimizer", offload_to="disk")))


CELLS = [
    offloaded("decoder", replicate=2, zero=0),
    offloaded("decoder_untied", shard=2, zero=1, shares=(4, 2)),
    offloaded("decoder", replicate=2, zero=2),
    offloaded("decoder_dropout", shard=2, zero=3),
    offloaded("decoder", tensor=2, sequence=True, pipeline=2, micro=2),
]


@pytest.fixture(scope="module")
def parity(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.create(ranks, tmp_path_factory.mktemp("models"), steps=STEPS, backend="cpu:weft")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []
