"""Times of a run's own steps by plan, read from its `metrics.jsonl` while it runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.config.plan import Plan
from weft.errors import PlanError
from weft.planning.search import MeasuredSteps

_WARM_UP = 3
"""Reports of a generation that do not count: its first steps compile, allocate and fill caches."""
_LEAST = 8
"""Reports from which a plan counts as measured."""


class StepTimes:
    """Notes which plan the lines of a run's metrics belong to, and reads how long steps took under each."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._spans: list[tuple[Plan, int]] = []
        """Plan of each generation, and the first byte of its lines."""

    def begin(self, plan: Plan) -> None:
        """A generation begins.  None of its ranks has written yet."""
        self._spans.append((plan, self._metrics.stat().st_size if self._metrics.exists() else 0))

    def read(self) -> tuple[MeasuredSteps, list[MeasuredSteps]]:
        """Return the steps under the plan that runs, and those under others before.

        Raises:
            PlanError: too few steps have been reported under the plan that runs.
        """
        content = self._metrics.read_bytes() if self._metrics.exists() else b""
        ends = [start for _, start in self._spans[1:]] + [len(content)]
        spans = [(plan, content[start:end]) for (plan, start), end in zip(self._spans, ends, strict=True)]
        plan, lines = spans[-1]
        now = _measured(plan, lines)
        if now is None:
            raise PlanError(
                f"Too few steps have been measured under the plan that runs: {_LEAST} reports are needed, behind"
                f" {_WARM_UP} of warming up. Ask again when they are there."
            )
        earlier = [measured for plan, lines in spans[:-1] if (measured := _measured(plan, lines)) is not None]
        return now, earlier


def _measured(plan: Plan, lines: bytes) -> MeasuredSteps | None:
    """The steps in some lines of metrics; None where they are too few."""
    reports = list(_reports(lines))[_WARM_UP:]
    if len(reports) < _LEAST:
        return None
    seconds = [_step_seconds(report) / steps for steps, report in reports]
    middle = statistics.median(seconds)
    # 1.4826 turns a median deviation into a standard one, and 1.2533 is what a median errs more than a mean.
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in seconds)
    return MeasuredSteps(
        plan=plan,
        num_steps=sum(steps for steps, _ in reports),
        seconds=middle,
        noise=1.2533 * deviation / math.sqrt(len(seconds)) / middle,
        exposed_seconds=statistics.median(_exposed_seconds(report) / steps for steps, report in reports),
        optimizer_seconds=statistics.median(report["optimizer_seconds"] / steps for steps, report in reports),
        other_seconds=statistics.median(
            (report["data_wait_seconds"] + report["other_seconds"]) / steps for steps, report in reports
        ),
    )


def _reports(lines: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Reports of steps, with how many steps each is about.  How many the first is about, none says."""
    before: int | None = None
    for line in lines.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        report = json.loads(line)
        if report["kind"] != "step":
            continue
        if before is not None and report["step"] > before:
            yield report["step"] - before, report
        before = report["step"]


def _step_seconds(report: dict[str, Any]) -> float:
    return report["step_seconds"] - report["checkpoint_seconds"] - report["evaluation_seconds"]


def _exposed_seconds(report: dict[str, Any]) -> float:
    return sum(axis["exposed_seconds"] for axis in report["communication"].values())
