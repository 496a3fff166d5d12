"""The suite for GPUs, driven on the CPU at tiny sizes, so that it still works on the day when a GPU is at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_parity
import gpu_suite
import pytest
import torch
from gpu_kernels import summed
from gpu_parity import Cells, Verdict
from gpu_report import ROOT, Report
from pool import RankPool

TINY: dict[str, int] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "ffn_size": 64,
    "vocabulary_size": 64,
    "sequence_length": 16,
}


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(torch.device("cpu"), 600.0, tmp_path)


@pytest.fixture(scope="module")
def cells(ranks: RankPool) -> Cells:
    return Cells(ranks, "cpu")


def read(report: Report) -> Any:
    return json.loads(report.path.read_text())


def test_every_precision_is_compared_with_the_cpu(cells: Cells) -> None:
    verdicts = list(gpu_suite.one_process_verdicts(cells, ["encoder"], ["fp64", "bf16"]))
    assert [verdict.difference for verdict in verdicts] == [0, 0, 0, 0, 1]  # the same device: bit for bit


@pytest.mark.parametrize(
    "name", ["data 2, ZeRO-2", "tensor 2, sequence", "data 2, ZeRO-3, recompute, both away", "context 2, ring"]
)
def test_ranks_are_compared_with_one_process(cells: Cells, name: str) -> None:
    assert all(verdict.passed for verdict in cells.against_one(name))


def test_attention_in_parts_is_the_whole(report: Report) -> None:
    found = gpu_suite.attention(report, "cpu", tokens=64, heads=2, size=16, rounds=2)
    assert not report.failures
    assert [len(seconds) for seconds in found["seconds"].values()] == [2, 2, 2]


def test_ranks_are_compared_in_halves(cells: Cells) -> None:
    assert [verdict.passed for verdict in cells.against_one("mixture: expert 2", "bf16")] == [True]


def test_every_plan_of_the_suite_can_be_made() -> None:
    for name, changes in gpu_parity.PLANS.items():
        assert gpu_parity.plan_of(**changes).global_batch_size == gpu_parity.BATCH, name


def test_speed_is_measured_beside_the_hand_written_loop(report: Report) -> None:
    found = gpu_suite.throughput(
        report, "cpu", sizes=TINY, batch=2, precision="fp32", compiled=False, warmup=1, rounds=2, steps=1
    )
    assert not report.failures
    assert len(found["contenders"]) == 3
    assert all(len(contender["seconds"]) == 2 for contender in found["contenders"].values())
    first = [contender["first_losses"][0] for contender in found["contenders"].values()]
    assert first == pytest.approx([first[0]] * 3, rel=1e-5)


def test_memory_is_held_against_the_estimate(report: Report) -> None:
    found = gpu_suite.memory(report, "cpu", sizes=TINY, batch=2, recomputes=["none", "full"])
    assert [entry["recompute"] for entry in found] == ["none", "full"]
    assert not report.failures


def test_offloaded_states_are_measured_beside_none(report: Report) -> None:
    found = gpu_suite.offload(report, "cpu", sizes=TINY, ways=(("none", "host"), ("parameters", "disk")))
    assert list(found["measured"]) == ["none", "parameters to disk"]
    losses, memory = found["verdicts"]
    assert losses["difference"] == 0.0
    assert "still there of the 16 bytes per weight" in memory["what"]  # of a process on the CPU: all of its memory


def test_collectives_leave_a_group_of_one_as_it_was(report: Report) -> None:
    assert all(gpu_suite.collectives(report, "cpu").values())


def test_training_goes_through_the_launcher() -> None:
    assert [verdict.passed for verdict in gpu_suite.way_in_verdicts("cpu")] == [True]


def test_the_file_holds_machine_date_and_failures(report: Report) -> None:
    bad = Verdict("something", float("nan"), 1e-10)
    report.add("one process", gpu_suite.judged(report, iter([bad]), told=lambda text: None), 1.0)
    assert report.path.name.startswith("gpu-cpu-20")
    found = read(report)
    assert found["machine"]["torch"] == torch.__version__
    assert found["phases"]["one process"]["verdicts"][0]["what"] == "something"
    assert len(found["failures"]) == 1


def test_a_phase_that_breaks_is_a_failure_and_the_next_one_runs(report: Report) -> None:
    gpu_suite.run_all(report, "no such device", ["way in", "collectives"])
    assert [failure.partition(":")[0] for failure in report.failures] == ["PlanError", "collectives"]
    assert read(report)["phases"].keys() == {"way in", "collectives"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: `make gpu` runs the real thing")
def test_without_a_gpu_it_says_so() -> None:
    ended = subprocess.run([sys.executable, "tests/gpu"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "finds no CUDA device" in ended.stderr


def test_kernels_of_a_trace_are_summed_by_name() -> None:
    trace = [("matmul", 0.0, 1000.0), ("add", 500.0, 1000.0), ("matmul", 4500.0, 500.0)]
    found = summed([{"name": name, "ts": begin, "dur": taken} for name, begin, taken in trace], steps=2)
    assert found["busy"] == pytest.approx(1.0)
    assert found["idle"] == pytest.approx(1.5)
    assert found["kernels"] == [("matmul", 1.0, pytest.approx(0.75)), ("add", 0.5, pytest.approx(0.5))]
    assert found["gaps"] == [(pytest.approx(3.0), "add", "matmul")]
