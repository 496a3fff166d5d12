"""`--on ssh:FILE`: agents over real ssh servers on fake machines."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hosts_kit import job_on_machines
from machines import Machine
from places_kit import COMMAND, PlacedRun, processes_of
from sshd import SshKeys, serve_ssh, start_ssh
from test_hosts import losses_of_one_process

from weft.run.launch.launcher import ForkServer

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_sshd]
STEPS, PAUSE = 120, 0.05


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[float]:
    return losses_of_one_process(tmp_path_factory.mktemp("one"), fork_server, steps=STEPS, pause=0.0)


def write_pool(path: Path, hosts: Sequence[Machine], keys: SshKeys, **changes: str) -> Path:
    lines = {
        "place": '"ssh"',
        "command": str(COMMAND),
        "grace_seconds": "20",
        "network": f'"{hosts[0].address}/24"',
        **changes,
    }
    listed = ", ".join(f'{{ address = "{host.address}", topology = ["rack{i % 2}"] }}' for i, host in enumerate(hosts))
    table = f'[ssh]\nhosts = [{listed}]\nidentity = "{keys.identity}"\nknown_hosts = "{keys.known_hosts}"\n'
    path.write_text("".join(f"{name} = {value}\n" for name, value in lines.items()) + table)
    return path


@contextmanager
def run_over_ssh(
    folder: Path, number: int, nodes: str, *, pause: float | None = PAUSE
) -> Generator[tuple[PlacedRun, list[Machine]]]:
    """A run that has not been submitted, and its machines; commands are given on a further one."""
    with job_on_machines(number + 1, folder, rendezvous="folder", nodes=nodes, steps=STEPS, pause=pause) as (
        job,
        hosts,
    ):
        login, *workers = hosts
        keys = serve_ssh(workers, folder / "ssh")
        yield PlacedRun(job, write_pool(folder / "pool.toml", workers, keys), login), workers


def test_losses_are_those_of_one_process_and_nothing_is_left(tmp_path: Path, losses: list[float]) -> None:
    with run_over_ssh(tmp_path, 2, "2") as (run, workers):
        status, said = run.submit()
        assert status == 0, said
        assert run.wait_until_ended() == "done", run.said()
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)
        for host in (*workers, run.login):
            assert "weft" not in processes_of(host)


def test_a_stopped_run_goes_on_by_the_same_command(tmp_path: Path, losses: list[float]) -> None:
    with run_over_ssh(tmp_path, 2, "2") as (run, _):
        assert run.submit()[0] == 0
        run.job.wait_for_step(20)
        status, said = run.submit()
        assert status == 2
        assert "running" in said
        status, said = run.weft("stop", str(run.job.run))
        assert status == 0, said
        assert run.wait_until_ended() == "stopped, and can go on", run.said()
        assert run.submit()[0] == 0
        assert run.wait_until_ended() == "done", run.said()
        steps = [each["step"] for each in run.job.events("step")]
        assert steps == list(range(1, STEPS + 1)), "a step was lost"
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)


def test_a_machine_of_the_reserve_takes_the_place_of_one_without_power(tmp_path: Path, losses: list[float]) -> None:
    with run_over_ssh(tmp_path, 3, "1..2") as (run, workers):
        assert run.submit()[0] == 0
        run.job.wait_for_step(20)
        assert run.state()["machines"] == [worker.address for worker in workers[:2]]
        workers[1].lose_power()
        assert run.wait_until_ended(seconds=120) == "done", run.said()
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)
        changes = [each for each in run.job.events("generation") if each["number"] > 1]
        assert changes, run.said()
        assert "host node3 has come" in run.said()


def test_a_machine_that_starts_again_is_waited_for(tmp_path: Path, losses: list[float]) -> None:
    with run_over_ssh(tmp_path, 2, "2") as (run, workers):
        assert run.submit()[0] == 0
        run.job.wait_for_step(20)
        workers[1].lose_power()
        time.sleep(20)
        workers[1].boot()
        start_ssh(workers[1], tmp_path / "ssh")
        assert run.wait_until_ended(seconds=180) == "done", run.said()
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)


def test_what_is_wrong_is_said_in_a_paragraph_and_nothing_is_submitted(tmp_path: Path) -> None:
    with run_over_ssh(tmp_path, 2, "2", pause=None) as (run, workers):
        good = SshKeys(tmp_path / "ssh" / "user", tmp_path / "ssh" / "known_hosts")
        strange = tmp_path / "strange"
        strange.write_text(
            good.known_hosts.read_text()
            .replace(workers[0].address, "x")
            .replace(workers[1].address, workers[0].address)
        )
        right, changed, unknown = run.pool, write_pool(tmp_path / "changed.toml", workers, good), tmp_path / "none"
        write_pool(changed, workers, SshKeys(good.identity, strange))
        unknown.write_text("")
        wrong = {
            "another key": changed,
            "not in known_hosts": write_pool(tmp_path / "unknown.toml", workers, SshKeys(good.identity, unknown)),
            "no address in": write_pool(tmp_path / "network.toml", workers, good, network='"10.99.0.0/24"'),
        }
        for words, run.pool in wrong.items():
            status, said = run.submit()
            assert status == 2, said
            assert words in said
            assert "Traceback" not in said
        run.pool = right
        status, said = run.submit("--dry-run", nodes="3")
        assert (status, "lists 2 hosts, and 3 are wanted" in said) == (2, True), said
        workers[1].lose_power()
        status, said = run.submit()
        assert status == 2, said
        assert f"{workers[1].address}: " in said
        assert not run.job.run.exists()
