"""`python tests/gpu`: everything on one GPU, in less than nine minutes, into `benchmarks/results`.

Needs torch 2.11 or newer with CUDA and what Weft itself imports; installs nothing and needs no network, so that
`make gpu PYTHON=python3` runs on a machine where no `.venv` can be made.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "src"), str(TESTS / "support"), str(TESTS / "gpu")]

import gpu_suite  # noqa: E402
import torch  # noqa: E402
from gpu_report import Report  # noqa: E402

from weft.comm.device import device_for_rank  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/gpu", description="The suite for one GPU.")
    parser.add_argument("--phases", nargs="+", choices=gpu_suite.PHASES, default=list(gpu_suite.PHASES))
    parser.add_argument("--budget-seconds", type=float, default=520.0, help="no new cell starts after this")
    parser.add_argument("--results", type=Path, help="folder for the file, by default benchmarks/results")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device, so there is nothing to do here.", file=sys.stderr)
        return 2
    report = Report(device_for_rank("cuda", 0), chosen.budget_seconds)
    if chosen.results is not None:
        report.folder = chosen.results
    gpu_suite.run_all(report, "cuda", chosen.phases)
    print(f"written: {report.path}", file=sys.stderr)
    for failure in report.failures:
        print(f"FAILED   {failure}", file=sys.stderr)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
