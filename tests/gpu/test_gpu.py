"""The suite for GPUs under pytest: `make gpu`, or `python tests/gpu` where pytest is not at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gpu_parity
import gpu_suite
import pytest
import torch
from gpu_parity import Cells
from gpu_report import Report
from pool import RankPool

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Takes the place of the suite's check: a device's libraries leave files and threads until the process ends."""


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    ranks = RankPool(8, ["default"])  # a new warning on a new device is to be read, not to end the day
    yield Cells(ranks, "cuda")
    ranks.close()


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("model", gpu_parity.MODELS)
def test_one_process_computes_what_the_cpu_computes(cells: Cells, model: str, precision: str) -> None:
    verdicts = gpu_suite.one_process_verdicts(cells, [model], [precision])
    assert not [str(verdict) for verdict in verdicts if not verdict.passed]


@pytest.mark.parametrize("name", gpu_parity.PLANS)
def test_ranks_on_one_gpu_compute_what_one_process_computes(cells: Cells, name: str) -> None:
    assert not [str(verdict) for verdict in cells.against_one(name) if not verdict.passed]


def test_training_from_the_top(tmp_path: Path) -> None:
    assert not [str(verdict) for verdict in gpu_suite.way_in_verdicts("cuda") if not verdict.passed]


def test_collectives_of_the_device_s_own_backend(tmp_path: Path) -> None:
    report = Report(torch.device("cuda", 0), 600.0, tmp_path)
    gpu_suite.collectives(report, "cuda")
    assert not report.failures


def test_speed_and_memory_are_measured_and_kept() -> None:
    report = Report(torch.device("cuda", 0), 600.0)
    gpu_suite.run_all(report, "cuda", ("throughput", "memory"))
    assert not report.failures
    assert report.path.is_file()
