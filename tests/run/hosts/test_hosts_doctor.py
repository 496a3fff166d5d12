"""`weft doctor RUN` names a slow link between hosts, and nothing where the link is as fast as it was thought."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts_kit import HostJob, job_on_machines
from machines import Machine
from trained_runs import said_of

pytestmark = [pytest.mark.needs_root]


def run_to_end(job: HostJob, hosts: list[Machine]) -> None:
    job.start(hosts[0])
    job.wait_for(("hosts     ",), hosts[0])  # it leads
    job.start(hosts[1])
    assert [job.wait(host, seconds=300) for host in hosts] == [0, 0], job.said(hosts[0])


def slow_down(host: Machine, bits_per_second: float) -> None:
    """Let what a machine sends leave it so slowly."""
    words = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{round(bits_per_second)}bit"]
    assert host.start([*words, "burst", "64kb", "latency", "500ms"]).wait(10) == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_slow_link_is_named(tmp_path: Path, seed: int) -> None:
    rate = float(np.random.default_rng(seed).uniform(1e7, 4e7))
    with job_on_machines(2, tmp_path, rendezvous="folder", nodes="2", steps=30) as (job, hosts):
        for host in hosts:
            slow_down(host, rate)
        run_to_end(job, hosts)
        said = [one for one in said_of(job.run) if one["kind"] != "busy_machine"]
    (finding,) = said
    assert (finding["kind"], finding["axis"]) == ("slow_link", "data")
    assert "node0, node1" in str(finding["evidence"])


def test_nothing_is_said_of_a_healthy_run_on_two_hosts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 60, "pause": 0.05}
    with job_on_machines(2, tmp_path, rendezvous="folder", nodes="2", **options) as (job, hosts):
        run_to_end(job, hosts)
        assert [one for one in said_of(job.run) if one["kind"] != "busy_machine"] == []
