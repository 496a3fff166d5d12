"""`make parity`: every cell of the matrix against one process, in fp64 and then in fp32.

`--parity-report=PATH` also writes the table of worst differences as Markdown.  `--parity-backend=cpu:weft`, or
`make parity BACKEND=cpu:weft`: over shared memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matrix
import pytest
from cells import Cell
from parity_run import Matrix, Verdict
from pool import RankPool

from weft.verify.numerics import TOLERANCES

pytestmark = pytest.mark.parity

PLAIN = tuple(cell for cell in matrix.FULL if not cell.plan.compute.compile)
COMPILED = tuple(cell for cell in matrix.FULL if cell.plan.compute.compile)


class Table:
    """Verdicts as rows of Markdown."""

    def __init__(self) -> None:
        self._rows: list[str] = []

    def add(self, cell: Cell, precision: str, verdict: Verdict, failures: list[str]) -> str:
        values = (verdict.gradient, verdict.loss, verdict.norm, verdict.validation, verdict.state)
        columns = " | ".join(f"{value:.0e}" for value in values)
        self._rows.append(f"| {cell} | {cell.world} | {precision} | {columns} | {'no' if failures else 'yes'} |")
        return self._rows[-1]

    def __str__(self) -> str:
        limits = ", ".join(f"{limit:.0e} in {precision}" for precision, limit in TOLERANCES.items())
        head = (
            "# Parity: every plan against one process",
            "",
            "Largest relative differences over 20 optimizer steps; gradients are those of the first step."
            f" Limits: {limits}; final weights are judged in fp64 only.  In fp32 a step's loss and norm count"
            " relative to what one rounding of the first weights does to one process's own.",
            "",
            "| cell | world | precision | gradients | losses | norms | validation | weights | equal |",
            "|---|---|---|---|---|---|---|---|---|",
        )
        return "\n".join((*head, *self._rows)) + "\n"


@pytest.fixture(scope="module")
def table(pytestconfig: pytest.Config) -> Iterator[Table]:
    made = Table()
    yield made
    path = pytestconfig.getoption("--parity-report")
    if path is not None:
        Path(path).write_text(str(made))


@pytest.fixture(scope="module")
def parity(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Matrix:
    backend = pytestconfig.getoption("--parity-backend")
    return Matrix.create(ranks, tmp_path_factory.mktemp("models"), backend=backend)


@pytest.mark.parametrize("cell", PLAIN, ids=str)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_equals_one_process(
    parity: Matrix, table: Table, cell: Cell, precision: str, capsys: pytest.CaptureFixture[str]
):
    verdict = parity.verdict(cell, precision)
    failures = verdict.failures(precision)
    row = table.add(cell, precision, verdict, failures)
    with capsys.disabled():
        print(f"\n{row}", end="", flush=True)
    assert failures == []


@pytest.mark.parametrize("cell", COMPILED, ids=str)
def test_compiled_blocks_equal_one_process(cell: Cell, pytestconfig: pytest.Config):
    """In processes of their own: Dynamo leaves semaphores and references behind."""
    precision = "fp32" if cell.model in matrix.NARROW_NORMS else "fp64"
    command = [sys.executable, str(Path(__file__).with_name("one_cell.py"))]
    command += ["--backend", pytestconfig.getoption("--parity-backend"), precision, str(cell)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["failures"] == []
