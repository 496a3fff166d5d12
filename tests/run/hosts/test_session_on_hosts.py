"""`weft launch --on` and `--nodes`: scripts with a session on ranks of several machines."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import machines
import pytest
import test_mpi_place
from hosts_kit import HostJob
from machines import Machine
from places_kit import COMMAND, PlacedScript, losses_of_one_script, processes_of
from slurm import slurm_on
from sshd import serve_ssh
from test_ssh import write_pool

from weft.run.launch.launcher import ForkServer

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_sshd]
STEPS = PlacedScript.steps


@contextmanager
def script_over_ssh(folder: Path, number: int) -> Generator[tuple[PlacedScript, list[Machine]]]:
    """A script that has not been submitted, and its machines; commands are given on a further one."""
    with machines.machines(number + 1, folder / "machines") as (login, *workers):
        keys = serve_ssh(workers, folder / "ssh")
        job = HostJob(folder / "none", folder / "run", "folder", str(number), folder / "none")
        yield PlacedScript(job, write_pool(folder / "pool.toml", workers, keys), login), workers


@contextmanager
def script_under_slurm(folder: Path, number: int) -> Generator[tuple[PlacedScript, list[Machine]]]:
    """The same under Slurm."""
    with (
        machines.machines(number + 1, folder / "machines") as (login, *workers),
        slurm_on(login, workers, folder / "slurm") as environment,
    ):
        job = HostJob(folder / "none", folder / "run", "folder", str(number), folder / "none")
        pool, network = folder / "pool.toml", f'network = "{workers[0].address}/24"'
        pool.write_text(f'place = "slurm"\ncommand = {COMMAND}\ngrace_seconds = 20\n{network}\n')
        yield PlacedScript(job, pool, login, {"SLURM_CONF": environment["SLURM_CONF"]}), workers


@contextmanager
def script_by_mpi(
    folder: Path, number: int, *, launcher: str = "mpiexec.mpich"
) -> Generator[tuple[PlacedScript, list[Machine]]]:
    """The same by an MPI's launcher."""
    with machines.machines(number + 1, folder / "machines") as (login, *workers):
        keys = serve_ssh(workers, folder / "ssh")
        job = HostJob(folder / "none", folder / "run", "folder", str(number), folder / "none")
        yield (
            PlacedScript(job, test_mpi_place.write_pool(folder / "pool.toml", workers, keys, launcher), login),
            workers,
        )


Placed = Callable[[Path, int], AbstractContextManager[tuple[PlacedScript, list[Machine]]]]
PLACES: dict[str, Placed] = {
    "Slurm": script_under_slurm,
    "MPICH": script_by_mpi,
    "Open MPI": partial(script_by_mpi, launcher="mpirun.openmpi"),
}
NEEDS = {"Slurm": "needs_slurm", "MPICH": "needs_mpi", "Open MPI": "needs_mpi"}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[float]:
    return losses_of_one_script(tmp_path_factory.mktemp("one"), fork_server)


@pytest.mark.parametrize("number", [2, 4])
def test_losses_are_those_of_one_process_and_nothing_is_left(tmp_path: Path, losses: list[float], number: int) -> None:
    with script_over_ssh(tmp_path, number) as (run, workers):
        status, said = run.launch(nodes=str(number))
        assert status == 0, said
        assert run.wait_until_ended(seconds=180) == "done", run.said()
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)
        (plan,) = [line for line in run.said().splitlines() if line.startswith("plan ")]
        assert str(number) in plan
        for host in (*workers, run.login):
            assert "weft" not in processes_of(host)


@pytest.mark.parametrize("place", [pytest.param(each, marks=getattr(pytest.mark, NEEDS[each])) for each in PLACES])
def test_losses_are_those_of_one_process_under_other_places(tmp_path: Path, losses: list[float], place: str) -> None:
    with PLACES[place](tmp_path, 2) as (run, workers):
        status, said = run.launch(nodes="2")
        assert status == 0, said
        assert run.wait_until_ended(seconds=180).endswith("done"), run.said()
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)
        for host in workers:
            assert "weft" not in processes_of(host)


def test_a_stopped_script_goes_on_by_the_same_command(tmp_path: Path, losses: list[float]) -> None:
    with script_over_ssh(tmp_path, 2) as (run, _):
        assert run.launch(nodes="2", words=("--pause", "0.4"))[0] == 0
        run.job.wait_for_step(10, seconds=180)
        status, said = run.launch(nodes="2", words=("--pause", "0.4"))
        assert (status, "running" in said) == (2, True), said
        status, said = run.weft("stop", str(run.job.run))
        assert status == 0, said
        assert run.wait_until_ended(seconds=180) == "stopped, and can go on", run.said()
        assert run.launch(nodes="2")[0] == 0
        assert run.wait_until_ended(seconds=180) == "done", run.said()
        steps = [each["step"] for each in run.job.events("step")]
        assert steps == list(range(1, STEPS + 1)), "a step was lost"
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)


def test_a_session_goes_on_without_a_machine_that_loses_its_power(tmp_path: Path, losses: list[float]) -> None:
    with script_over_ssh(tmp_path, 3) as (run, workers):
        assert run.launch(nodes="2..3", words=("--pause", "0.4"))[0] == 0
        run.job.wait_for_step(10, seconds=180)
        workers[1].lose_power()
        assert run.wait_until_ended(seconds=240) == "done", run.said()
        assert "3 → 2 ranks, since host node2 was lost" in run.said()
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)


def test_how_a_script_failed_is_told_and_one_without_a_save_is_not_started_again(tmp_path: Path) -> None:
    with script_over_ssh(tmp_path, 2) as (run, _):
        assert run.launch(nodes="2", words=("--exit", "7", "--at", "1"))[0] == 0
        assert run.wait_until_ended(seconds=180) == "failed: something must be mended first", run.said()
        assert re.search(r"rank 1 of 2 on host node\d stopped: exit status 7", run.said()), run.said()
        assert not run.job.events("generation"), run.said()
        status, said = run.launch("--on-failure", "killed=maybe", nodes="2")
        assert (status, "killed" in said) == (2, True), said
