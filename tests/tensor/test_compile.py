"""Compiled blocks compute the same with keyed dropout and recomputation.

In a process of its own: Dynamo leaves semaphores and references behind that the suite would count against the pool.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from functools import partial
import parity, small
loss, gradients = parity.compare(partial(small.decoder, 9, 0.2), parity.plan_of(recompute="{}", compile=True))
assert loss <= 1e-12 and gradients <= 1e-10, (loss, gradients)
"""


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gradients_equal_one_process(recompute):
    command = [sys.executable, "-c", PROGRAM.format(recompute)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
