"""Times of steps by plan, as a run's metrics tell them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.api.training.step_times import StepTimes
from weft.config.plan import Plan
from weft.errors import PlanError


def line(step: int, seconds: float, kind: str = "step") -> str:
    report = {
        "kind": kind,
        "step": step,
        "step_seconds": seconds + 0.5,
        "checkpoint_seconds": 0.5,
        "evaluation_seconds": 0.0,
        "data_wait_seconds": 0.01,
        "other_seconds": 0.02,
        "optimizer_seconds": 0.1,
        "communication": {"data": {"exposed_seconds": 0.2}, "tensor": {"exposed_seconds": 0.1}},
    }
    return json.dumps(report) + "\n"


def test_steps_are_read_by_plan(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(line(step, 9.0) for step in range(1, 40)))  # of an earlier call
    steps, first, second = StepTimes(metrics), Plan.ddp(replicate=2), Plan.tensor(2)
    steps.begin(first)
    with pytest.raises(PlanError, match="8 reports are needed"):
        steps.read()
    with metrics.open("a") as file:
        file.write("".join(line(step, 5.0 if step < 3 else 1.0 + 0.01 * (step % 3)) for step in range(1, 30)))
    now, earlier = steps.read()
    assert (now.plan, earlier, now.num_steps) == (first, [], 25)
    assert now.seconds == pytest.approx(1.01)
    assert 0 < now.noise < 0.01
    assert now.exposed_seconds == pytest.approx(0.3)
    assert now.other_seconds == pytest.approx(0.03)
    steps.begin(second)
    with metrics.open("a") as file:
        file.write(line(20, 0.0, "evaluation") + "".join(line(step, 4.0) for step in range(30, 100, 2)) + '{"kin')
    now, earlier = steps.read()
    assert (now.plan, now.seconds) == (second, pytest.approx(2.0))
    assert [steps.plan for steps in earlier] == [first]
