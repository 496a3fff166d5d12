"""Starting is fast: the command line answers without torch, and `import weft` adds little to it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

REPEATS = 5
WEFT = Path(sys.executable).with_name("weft")


def best_seconds(*command: str) -> float:
    """Return the shortest of some runs: what the command costs when nobody else uses the machine."""
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return min(times)


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_help_takes_less_than_300_ms() -> None:
    assert best_seconds(str(WEFT), "--help") < 0.3


@pytest.mark.parametrize("module", ["cli", "recipe", "cluster", "plan", "document", "errors", "launch"])
def test_imports_no_torch(module: str) -> None:
    assert "torch" not in modules_after(f"import weft.{module}")


def test_import_weft_adds_less_than_200_ms() -> None:
    code = (
        "import torch, torch.distributed, time; start = time.perf_counter(); import weft; "
        "print(time.perf_counter() - start)"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(REPEATS)
    ]
    assert min(times) < 0.2
