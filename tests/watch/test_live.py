"""A run is recorded while it goes on: who holds it back, and for whom it waits, is named within seconds."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from living_run import SCRIPT, WEFT, living_run

from weft.watch.accounting import STATES, frontier
from weft.watch.store import TelemetryReader, has_telemetry
from weft.watch.verdicts import judge

RECIPE = """
[model]
reference = "mlp"
num_layers = 2
input_size = 16
hidden_size = 16
num_classes = 4
[data]
train = [{{ source = "synthetic" }}]
validation_fraction = 0.0
[batch]
global_batch_size = 8
[run]
steps = 3
telemetry = {telemetry}
"""
PHASES = ("forward", "backward", "optimizer")


def reader_of(folder: Path) -> TelemetryReader:
    (run,) = folder.glob("runs/*")
    return TelemetryReader(run)


def named(folder: Path, rank: int, phase: str) -> float:
    """Seconds from the first recorded step until the rank and its phase are the first verdict."""
    with living_run(folder, rank, phase, 0.03) as run:
        reader, began = run.reader, time.monotonic()

        def look() -> bool | None:
            generation, step = reader.newest_step()
            facts = reader.generations()
            if not facts:
                return None
            first = judge(reader.window(generation, step - 60), facts[-1])[0]
            return True if (first.kind, first.ranks, first.phase) == ("slow_rank", (rank,), phase) else None

        run.wait_for(look, 30)
        seconds = time.monotonic() - began
        window = reader.window(1, 2)
    sums = sum(window.column(name) for name in STATES)
    np.testing.assert_allclose(sums, window.column("wall"), rtol=0.02)
    pace = frontier(window).seconds.sum(axis=1)
    np.testing.assert_allclose(pace, np.nanmax(window.column("wall"), axis=1), rtol=0.01)
    return seconds


def test_a_slow_rank_is_named_while_it_runs(tmp_path: Path) -> None:
    named(tmp_path, 2, "forward")


def test_twenty_slow_ranks_are_named(tmp_path: Path) -> None:
    draw = random.Random(40)
    took: list[float] = []
    for case in range(20):
        folder = tmp_path / str(case)
        folder.mkdir()
        took.append(named(folder, draw.randrange(4), draw.choice(PHASES)))
    print("seconds to the name:", *(f"{seconds:.1f}" for seconds in took))
    assert max(took) < 5


def test_a_stopped_rank_is_named_with_the_collective_of_the_others(tmp_path: Path) -> None:
    with living_run(tmp_path) as run:
        began = time.monotonic()
        with run.stopped(3):

            def look() -> dict[str, Any] | None:
                return next((one for one in run.reader.verdicts() if one["kind"] == "hang"), None)

            verdict = run.wait_for(look, 25)

            def stacks() -> list[str] | None:
                """What the others do, once their launcher has asked them."""
                texts = [run.reader.live()[rank].get("stack", "") for rank in (0, 1, 2)]
                return texts if all(texts) else None

            waiting = ("/torch/distributed/", "/weft/comm/")
            assert all(any(part in text for part in waiting) for text in run.wait_for(stacks, 15))
    assert time.monotonic() - began < 20
    assert verdict["ranks"] == [3]
    assert "stopped (SIGSTOP)" in verdict["title"]
    assert verdict["axis"] == "data"


LAUNCHERS = {
    "launch": [WEFT, "launch", "-n", "2"],
    "python": [sys.executable],
    "torchrun": [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_of_seconds_is_recorded_to_its_last_step(launcher: str, tmp_path: Path) -> None:
    command = [*LAUNCHERS[launcher], SCRIPT, "0", "none", "0", "20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    reader = reader_of(tmp_path)
    assert reader.newest_step() == (1, 20)
    (facts,) = reader.generations()
    number = 1 if launcher == "python" else 2
    assert facts.axes == ({} if number == 1 else {"replicate": 2})
    assert [rank["coordinates"] for rank in facts.ranks] == (
        [{}] if number == 1 else [{"replicate": 0}, {"replicate": 1}]
    )
    assert reader.live() == {}
    assert reader.gaps() == []


@pytest.mark.parametrize("telemetry", [True, False])
def test_a_recipe_may_leave_the_record_out(telemetry: bool, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(telemetry=str(telemetry).lower()))
    command = [WEFT, "train", "recipe.toml", "--processes", "1", "--prove", "never", "--run-folder", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert has_telemetry(tmp_path / "run") == telemetry
