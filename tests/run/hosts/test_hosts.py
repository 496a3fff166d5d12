"""A training on several fake machines, of which some are lost, leave or come: the losses are those of one process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts_kit import STEPS, HostJob, job_on_machines, write_recipe
from machines import Machine

import weft
from weft.run.launch.launcher import ForkServer

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_etcd]


PATIENT_STEPS, PAUSE = 200, 0.05
"""Of the trainings that lose a host: they wait, so that three ranks leave two cores something."""


def losses_of_one_process(folder: Path, fork_server: ForkServer, **options: Any) -> list[float]:
    plan = weft.Plan.ddp(replicate=1)
    keywords: dict[str, Any] = {"folder": folder / "run", "fork_server": fork_server, "prove": "never", "quiet": True}
    return list(weft.train(write_recipe(folder, **options), plan, **keywords).losses)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[float]:
    return losses_of_one_process(tmp_path_factory.mktemp("one"), fork_server)


@pytest.fixture(scope="module")
def patient_losses(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[float]:
    return losses_of_one_process(tmp_path_factory.mktemp("patient"), fork_server, steps=PATIENT_STEPS, pause=0.0)


def crash_leader(job: HostJob, hosts: list[Machine]) -> list[Machine]:
    hosts[0].crash()
    return hosts[1:]


def lose_power(job: HostJob, hosts: list[Machine]) -> list[Machine]:
    hosts[1].lose_power()
    return [hosts[0], hosts[2]]


def lose_power_of_leader(job: HostJob, hosts: list[Machine]) -> list[Machine]:
    hosts[0].lose_power()
    return hosts[1:]


def cut_leader_off(job: HostJob, hosts: list[Machine]) -> list[Machine]:
    """The leader cannot reach the majority of etcd: it ends its ranks by itself, before another goes on."""
    hosts[0].cut_off()
    job.wait_for(("this host is on its own",), hosts[0])
    return hosts[1:]


def cut_off_for_a_while(job: HostJob, hosts: list[Machine]) -> list[Machine]:
    hosts[1].cut_off()
    job.wait_for(("this host looks for the others again",), hosts[1])
    hosts[1].reconnect()
    return hosts


def stop_one(job: HostJob, hosts: list[Machine]) -> list[Machine]:
    job.tell(hosts[1], signal.SIGTERM)
    assert job.wait(hosts[1]) == 75
    return [hosts[0], hosts[2]]


def stop_leader(job: HostJob, hosts: list[Machine]) -> list[Machine]:
    job.tell(hosts[0], signal.SIGTERM)
    assert job.wait(hosts[0]) == 75
    return hosts[1:]


FAULTS: dict[str, tuple[str, Callable[[HostJob, list[Machine]], list[Machine]], str]] = {
    "etcd, the leader crashes": ("etcd", crash_leader, ""),
    "etcd, power": ("etcd", lose_power, "host node1 was lost"),
    "etcd, power of the leader": ("etcd", lose_power_of_leader, ""),
    "etcd, the leader is cut off": ("etcd", cut_leader_off, ""),
    "etcd, cut off for a while": ("etcd", cut_off_for_a_while, "host node1 was lost"),
    "etcd, one is stopped": ("etcd", stop_one, "host node1 has left"),
    "etcd, the leader is stopped": ("etcd", stop_leader, "has saved with the others, who go on"),
    "folder, the leader crashes": ("folder", crash_leader, ""),
    "folder, power": ("folder", lose_power, "host node1 was lost"),
    "folder, power of the leader": ("folder", lose_power_of_leader, ""),
    "folder, one is stopped": ("folder", stop_one, "host node1 has left"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_host_is_lost_or_leaves(fault: str, tmp_path: Path, patient_losses: list[float]) -> None:
    rendezvous, act, said = FAULTS[fault]
    options: dict[str, Any] = {"nodes": "2..3", "plan": "[mesh]\nreplicate = 3\n", "steps": PATIENT_STEPS}
    with job_on_machines(3, tmp_path, rendezvous=rendezvous, pause=PAUSE, **options) as (job, hosts):
        job.start(hosts[0])
        job.wait_for(("hosts     ",), hosts[0])  # it leads
        for host in hosts[1:]:
            job.start(host)
        # Who comes a second later than the others is taken in after a step.
        job.wait_for(("3 hosts: ", "node1 has come", "node2 has come"), hosts[0])
        job.wait_for_step(job.num_steps + 20)
        left = act(job, hosts)
        for host in left:
            assert job.wait(host) == 0, job.said(host)
        everything = "".join(job.said(host) for host in hosts)
        assert said in everything
        assert "Traceback" not in everything
        assert job.events("step")[-1]["step"] == PATIENT_STEPS
        assert len(job.events("step")) < 2 * PATIENT_STEPS  # at most the steps since the last save were done again
        assert job.losses() == pytest.approx(patient_losses, rel=2e-4)


def test_a_host_joins(tmp_path: Path, losses: list[float]) -> None:
    plan = "[mesh]\ntensor = 2\n"
    with job_on_machines(2, tmp_path, rendezvous="folder", nodes="1..2", plan=plan) as (job, hosts):
        job.start(hosts[0], "--processes-per-node", "2")
        job.wait_for_step(30)
        job.start(hosts[1], "--processes-per-node", "2")
        assert [job.wait(host) for host in hosts] == [0, 0]
        assert "tensor 2 → data 2 × tensor 2, since host node1 has come" in job.said(hosts[0])
        assert job.losses() == pytest.approx(losses, rel=2e-4)


def test_all_are_stopped_and_go_on(tmp_path: Path, losses: list[float]) -> None:
    """What a job engine does: SIGTERM to all, and later the same command again."""
    with job_on_machines(2, tmp_path, rendezvous="folder", nodes="2") as (job, hosts):
        for host in hosts:
            job.start(host)
        job.wait_for_step(40)
        for host in hosts:
            job.tell(host, signal.SIGTERM)
        assert [job.wait(host) for host in hosts] == [75, 75]
        done = len(job.losses())
        for host in hosts:
            job.start(host)
        assert [job.wait(host) for host in hosts] == [0, 0]
        assert len(job.events("step")) == STEPS  # none was done twice
        assert done < STEPS
        assert job.losses() == pytest.approx(losses, rel=2e-4)


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    with job_on_machines(2, tmp_path, rendezvous="folder", nodes="1") as (job, hosts):
        job.start(hosts[0])
        job.wait_for_step(30)
        assert job.resume_alone(hosts[1]) == 2
        assert "run is in use by process" in job.said(hosts[1])
        job.tell(hosts[0], signal.SIGTERM)
        assert job.wait(hosts[0]) == 75


def test_hosts_that_do_not_belong_together(tmp_path: Path) -> None:
    with job_on_machines(2, tmp_path, rendezvous="folder", nodes="2") as (job, hosts):
        job.start(hosts[0])
        job.wait_for(("hosts     ",), hosts[0])
        job.start(hosts[1], "--processes-per-node", "1", "--set", "recipe.run.seed=7")
        assert job.wait(hosts[1]) == 2
        assert "host node1 was started with another recipe" in job.said(hosts[1])
        job.tell(hosts[0], signal.SIGTERM)  # which waits for another host
        assert job.wait(hosts[0], seconds=10) == 75
