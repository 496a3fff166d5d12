"""Predicting published runs needs neither torch nor numpy; only a fit needs numpy."""

from __future__ import annotations

import subprocess
import sys


def test_without_torch_or_numpy() -> None:
    code = (
        "import sys, benchmarks.published; print([name for name in ('torch', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
