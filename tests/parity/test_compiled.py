"""What is to run compiled does: every block, in every forward and backward of every step, as one graph for all blocks.

In a process of its own: Dynamo leaves semaphores and references behind that the suite would count against the pool.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matrix
import pytest
from cells import Cell
from compiled_blocks import STEPS
from window_models import WINDOWED

SMALL = [cell for cell in matrix.FULL if cell.plan.compute.compile and cell.plan.mesh.world_size <= 2]
ALWAYS = ("decoder_untied-t2_z0_sp_m2x6_plain_loss_compiled", "decoder_dropout-c2_ring_z0_m2x6_compiled")
"""Keyed masks, collectives inside a block, and attention that is shared."""


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[] if str(cell) in ALWAYS else pytest.mark.parity) for cell in SMALL], ids=str
)
def test_every_block_runs_compiled_in_one_graph(cell: Cell) -> None:
    command = [sys.executable, str(Path(__file__).with_name("compiled_blocks.py")), str(cell)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    plan = cell.plan
    for index, rank in enumerate(found["ranks"]):
        shares = found["microbatches"]
        # Torch compiles what is hooked before a block by itself: the cut of the sequence before the first one.
        cuts = int(plan.tensor_parallel.sequence)
        blocks = 2 if cell.model in WINDOWED else 4
        each = (blocks // plan.mesh.pipeline + cuts) * shares[index % len(shares)]
        assert rank["breaks"] == []
        assert rank["backwards"] == each * (STEPS + 1), "the first gradients, and every step"
        assert rank["forwards"] == each * (STEPS + 2), "and an evaluation"
        kinds = (1 + (plan.memory.recompute == matrix.MIXED)) * (1 + cuts)
        assert rank["graphs"] <= 2 * kinds, "one for training and one for evaluation"


def test_those_that_always_run_are_there() -> None:
    assert set(ALWAYS) <= set(map(str, SMALL))
