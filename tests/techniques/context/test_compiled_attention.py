"""Compiled blocks whose attention is shared: the same numbers, and one graph for all of them (`compiled_alone.py`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compiled_alone import CASES


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Case → what was found of it."""
    command = [sys.executable, str(Path(__file__).with_name("compiled_alone.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: of for line in done.stdout.splitlines() for name, of in json.loads(line).items()}


@pytest.mark.parametrize("case", CASES)
def test_compiled_blocks_compute_the_same_in_one_graph(found: dict[str, Any], case: str) -> None:
    assert found[case]["difference"] <= 1e-12
    assert found[case]["breaks"] == []
    # The input of the first block wants no gradient; of several lengths there is one graph more for all of them.
    assert found[case]["graphs"] == (4 if case == "lengths" else 2)
