"""Starting is fast: the command line answers without torch, and `import weft` adds little to it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pace
import pytest

WEFT = Path(sys.executable).with_name("weft")


def processor_seconds(*command: str) -> float:
    """Seconds of processor time of one run; the wall clock would measure the other jobs of a busy machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


NO_TORCH = ["cli", "config.recipe", "config.cluster", "config.plan", "config.document", "comm.algorithms", "errors"]
NO_TORCH += ["run.launch", "planning.search", "interop.systems", "model.description", "verify.program"]


def test_help_takes_less_than_300_ms() -> None:
    assert pace.reference_seconds(lambda: processor_seconds(str(WEFT), "--help"), 0.3, pace=pace.import_slowness) < 0.3


@pytest.mark.parametrize("module", NO_TORCH)
def test_imports_no_torch(module: str) -> None:
    assert "torch" not in modules_after(f"import weft.{module}")


def test_import_weft_adds_less_than_200_ms() -> None:
    code = (
        "import torch, torch.distributed, time; start = time.process_time(); import weft; "
        "print(time.process_time() - start)"
    )

    def measure() -> float:
        return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)

    assert pace.reference_seconds(measure, 0.2, pace=pace.import_slowness) < 0.2
