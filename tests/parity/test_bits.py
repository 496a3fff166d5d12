"""Every cell of two ranks over shared memory gives the gradients that it gives over Gloo, to the last bit.

`make test` takes cells that together show every axis and every family of models; `make parity` all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cells
import matrix
import pytest
import torch
from bits import differing, same_bits
from cells import Cell
from parity_run import Matrix
from pool import RankPool

PAIRS = tuple(cell for cell in matrix.FULL if cell.world == 2 and not cell.plan.compute.compile)
COMPILED = tuple(cell for cell in matrix.FULL if cell.world == 2 and cell.plan.compute.compile)


def shown(cell: Cell) -> frozenset[str]:
    """Ways in which ranks talk, and families of models."""
    ways = matrix.techniques(cell) - {"data", "recompute", "plain_loss", "accumulation"}
    return ways | {cell.model.partition("_")[0]}


FEW = matrix.covering(PAIRS, shown)
IN_BF16 = tuple(cell for cell in PAIRS if cell.model not in ("own", "looked", "pairs"))
"""Without the model that multiplies by a buffer, which stays fp32 and makes its activations so."""
FEW_IN_BF16 = matrix.covering(IN_BF16, lambda cell: matrix.techniques(cell) & {"tensor", "sequence", "zero3"})


def _tiered(all_cells: tuple[Cell, ...], few: tuple[Cell, ...]) -> list[Any]:
    """Cells, of which `make test` runs a few."""
    return [pytest.param(cell, id=str(cell), marks=() if cell in few else pytest.mark.parity) for cell in all_cells]


@pytest.fixture(scope="module")
def parity(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.create(ranks, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("cell", _tiered(PAIRS, FEW))
def test_the_bits_of_gloo(parity: Matrix, cell: Cell) -> None:
    assert differing(parity, cell, "fp64") == []


@pytest.mark.parametrize("cell", _tiered(IN_BF16, FEW_IN_BF16))
def test_the_bits_of_gloo_in_bf16(parity: Matrix, cell: Cell) -> None:
    """What tensor ranks exchange is rounded to bf16; gradients of data ranks are summed in fp32."""
    assert differing(parity, cell, "bf16") == []


@pytest.mark.parametrize(
    "zero", [pytest.param(0, marks=pytest.mark.parity), 1, pytest.param(2, marks=pytest.mark.parity), 3]
)
def test_sums_in_bf16(parity: Matrix, zero: int) -> None:
    """Gradients that are bf16 on the wire: a sum of two is rounded once, whoever adds."""
    axes = {"replicate": 2} if zero == 0 else {"shard": 2}
    plan = cells.plan(zero=zero, **axes)
    plan = replace(plan, data_parallel=replace(plan.data_parallel, reduce_precision="compute"))
    assert differing(parity, Cell("decoder_dropout", plan), "bf16") == []


@pytest.mark.parity
@pytest.mark.parametrize("cell", COMPILED, ids=str)
def test_the_bits_of_gloo_compiled(cell: Cell) -> None:
    """In processes of their own: Dynamo leaves semaphores and references behind."""
    command = [sys.executable, str(Path(__file__).with_name("one_cell.py")), "--bits", "fp64", str(cell)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["differing"] == []


def test_every_axis_and_family_is_shown() -> None:
    """The engine runs no expert axis yet, so the matrix has no cell of its."""
    assert {way for cell in PAIRS for way in shown(cell)} == {way for cell in FEW for way in shown(cell)}
    ways = {way for cell in FEW for way in matrix.techniques(cell)}
    assert ways >= {"zero0", "zero1", "zero2", "zero3", "tensor", "sequence", "pipeline", "split_backward", "unequal"}
    families = {name.partition("_")[0] for name in matrix.ALL_MODELS} | {cell.model for cell in matrix.adapted()}
    families |= {"isolated"}  # the decoder over isolated documents, of the cells that share sequences
    assert {cell.model.partition("_")[0] for cell in FEW} == families


def test_the_last_bit_counts() -> None:
    value = torch.tensor([1.0, 0.0])
    assert same_bits(value, value.clone())
    assert not same_bits(value, torch.tensor([1.0, -0.0]))
    assert not same_bits(value, torch.nextafter(value, torch.tensor(2.0)))
    assert not same_bits(value, value.double())
