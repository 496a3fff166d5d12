"""`weft doctor RUN` of trainings on two fake machines: a link that is slow is named, and one that is well is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hosts_kit import job_on_machines
from trained_runs import said_of

pytestmark = pytest.mark.needs_root


def _on_two_machines(folder: Path, *, steps: int, pause: float | None = None, tc: Sequence[str] = ()) -> Path:
    """Train on two fake machines, whose cards `tc` may slow down, and return the run's folder."""
    with job_on_machines(2, folder, rendezvous="folder", nodes="2", steps=steps, pause=pause) as (job, hosts):
        text = job.recipe.read_text()
        assert "save_every = 25\n" in text
        job.recipe.write_text(text.replace("save_every = 25\n", "save_every = 1000\n"))  # saves take time of their own
        for host in hosts:
            if tc:
                assert host.start(["tc", "qdisc", "add", "dev", "eth0", "root", *tc]).wait(10) == 0
            job.start(host)
        for host in hosts:
            assert job.wait(host) == 0, job.said(host)
        return job.run


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_slow_link_is_named(tmp_path: Path, seed: int) -> None:
    bits = int(np.random.default_rng(seed).uniform(1e7, 4e7))
    slow = ("tbf", "rate", f"{bits}bit", "burst", "64kb", "latency", "500ms")
    said = said_of(_on_two_machines(tmp_path, steps=60, tc=slow))
    assert [(one["kind"], one["axis"]) for one in said] == [("slow_link", "data")], said


def test_nothing_is_said_of_a_healthy_run_on_two_machines(tmp_path: Path) -> None:
    assert said_of(_on_two_machines(tmp_path, steps=60, pause=0.05)) == []
