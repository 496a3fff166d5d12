"""`--on mpi:FILE`: agents by the launchers of MPICH and Open MPI, over real ssh servers on fake machines."""

from __future__ import annotations

import shlex
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hosts_kit import job_on_machines
from machines import Machine
from places_kit import COMMAND, PlacedRun, processes_of
from sshd import SshKeys, serve_ssh
from test_hosts import losses_of_one_process

from weft.run.launch.launcher import ForkServer

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_sshd, pytest.mark.needs_mpi]
STEPS, PAUSE = 60, 0.05
LONG_PAUSE = 0.4
"""Pause in a step of runs to which something happens in their midst."""
LAUNCHERS = {"MPICH": "mpiexec.mpich", "Open MPI": "mpirun.openmpi"}
both = pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[float]:
    return losses_of_one_process(tmp_path_factory.mktemp("one"), fork_server, steps=STEPS, pause=0.0)


def write_pool(path: Path, hosts: Sequence[Machine], keys: SshKeys, launcher: str, **changes: str) -> Path:
    lines = {
        "place": '"mpi"',
        "command": str(COMMAND),
        "grace_seconds": "20",
        "network": f'"{hosts[0].address}/24"',
        **changes,
    }
    listed = ", ".join(f'{{ address = "{host.address}", topology = ["rack{i % 2}"] }}' for i, host in enumerate(hosts))
    table = f'[mpi]\nhosts = [{listed}]\nidentity = "{keys.identity}"\nknown_hosts = "{keys.known_hosts}"\n'
    options = '["--allow-run-as-root"]' if "openmpi" in launcher else "[]"
    table += f'launcher = "{launcher}"\noptions = {options}\n'
    path.write_text("".join(f"{name} = {value}\n" for name, value in lines.items()) + table)
    return path


@contextmanager
def run_by_mpi(
    folder: Path, number: int, launcher: str, *, pause: float | None = PAUSE
) -> Generator[tuple[PlacedRun, list[Machine]]]:
    """A run that has not been submitted, and its machines; commands are given on a further one."""
    with job_on_machines(number + 1, folder, rendezvous="folder", nodes=str(number), steps=STEPS, pause=pause) as (
        job,
        hosts,
    ):
        login, *workers = hosts
        keys = serve_ssh(workers, folder / "ssh")
        yield PlacedRun(job, write_pool(folder / "pool.toml", workers, keys, launcher), login), workers


@both
@pytest.mark.parametrize("number", [2, 4])
def test_losses_are_those_of_one_process_and_nothing_is_left(
    tmp_path: Path, losses: list[float], launcher: str, number: int
) -> None:
    with run_by_mpi(tmp_path, number, launcher) as (run, workers):
        run.job.plan.write_text(f"[mesh]\nreplicate = {number}\n")
        status, shown = run.submit("--processes-per-node", "1", "--dry-run")
        assert status == 0, shown
        assert not run.job.run.exists()
        status, said = run.submit()
        assert status == 0, said
        (command,) = run.commands_of_keeper()
        text = shown.partition("request   these commands\n")[2].partition("why ")[0]
        assert shlex.split(text.replace("\\\n", "")) == command
        assert run.wait_until_ended(seconds=180) == "done", run.said()
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)
        for host in (*workers, run.login):
            left = "".join(line for line in processes_of(host).splitlines() if "<defunct>" not in line)
            assert not [word for word in ("weft", "mpi", "hydra", "orted") if word in left], left


@both
def test_a_stopped_run_goes_on_by_the_same_command(tmp_path: Path, losses: list[float], launcher: str) -> None:
    with run_by_mpi(tmp_path, 2, launcher, pause=LONG_PAUSE) as (run, workers):
        assert run.submit()[0] == 0
        run.job.wait_for_step(10, seconds=180)
        assert run.state()["machines"] == [worker.address for worker in workers]
        status, said = run.submit()
        assert (status, "running" in said) == (2, True), said
        status, said = run.weft("stop", str(run.job.run))
        assert status == 0, said
        assert run.wait_until_ended(seconds=180) == "stopped, and can go on", run.said()
        assert run.submit()[0] == 0
        assert run.wait_until_ended(seconds=180) == "done", run.said()
        steps = [each["step"] for each in run.job.events("step")]
        assert steps == list(range(1, STEPS + 1)), "a step was lost"
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)


@both
def test_a_job_without_one_of_its_machines_ends_and_begins_again(
    tmp_path: Path, losses: list[float], launcher: str
) -> None:
    with run_by_mpi(tmp_path, 2, launcher, pause=LONG_PAUSE) as (run, workers):
        assert run.submit()[0] == 0
        run.job.wait_for_step(10, seconds=180)
        workers[1].cut_off()
        deadline = time.monotonic() + 150
        while "starting an agent" not in run.said():
            assert time.monotonic() < deadline, run.said()
            time.sleep(0.2)
        workers[1].reconnect()
        assert run.wait_until_ended(seconds=180) == "done", run.said()
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)


def test_what_is_wrong_is_said_in_a_paragraph_and_nothing_is_submitted(tmp_path: Path) -> None:
    with run_by_mpi(tmp_path, 2, LAUNCHERS["MPICH"], pause=None) as (run, workers):
        keys, right = SshKeys(tmp_path / "ssh" / "user", tmp_path / "ssh" / "known_hosts"), run.pool

        def pool(launcher: str, **changes: str) -> Path:
            return write_pool(tmp_path / "wrong.toml", workers, keys, launcher, **changes)

        def refused(words: str, *options: str, nodes: str = "2") -> None:
            status, said = run.submit(*options, nodes=nodes)
            assert (status, words in said, "Traceback" in said) == (2, True, False), said

        run.pool = pool("mpiexek")
        refused("needs the command mpiexek, and this machine has none")
        run.pool = pool("env")
        refused("neither that of MPICH nor that of Open MPI")
        run.pool = pool(LAUNCHERS["Open MPI"], network='"10.99.0.0/24"')
        refused("no address in --network 10.99.0.0/24")
        run.pool = right
        refused("lists 2 hosts, and 3 are wanted", "--dry-run", nodes="3")
        refused("none later. Give one number, as --nodes 2", nodes="1..2")
        workers[1].lose_power()
        refused(f"{workers[1].address}: ")
        assert not run.job.run.exists()
