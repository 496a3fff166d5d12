"""`--on slurm`: agents under a real Slurm on fake machines."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts_kit import job_on_machines
from machines import Machine
from places_kit import COMMAND, PlacedRun, processes_of
from slurm import slurm_on
from test_hosts import losses_of_one_process

from weft.run.launch.launcher import ForkServer

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_slurm]
STEPS, PAUSE = 120, 0.05


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[float]:
    return losses_of_one_process(tmp_path_factory.mktemp("one"), fork_server, steps=STEPS, pause=0.0)


@dataclass
class SlurmRun(PlacedRun):
    """A run on fake machines under Slurm."""

    def ask(self, *words: str) -> str:
        """Give one of Slurm's commands on the login machine."""
        said, _ = self.login.start(list(words), environment=self.environment).communicate(timeout=30)
        return said.strip()

    def start_now(self) -> None:
        """Let a requeued job start at once, for which Slurm waits two minutes."""
        deadline = time.monotonic() + 60
        while self.ask("squeue", "-h", "-o", "%T") != "PENDING":
            assert time.monotonic() < deadline, self.ask("squeue")
            time.sleep(0.2)
        self.ask("scontrol", "update", f"JobId={self.state()['job']}", "StartTime=now")


@contextmanager
def run_under_slurm(
    folder: Path, number: int, nodes: str, *, more: str = "", pool: str = ""
) -> Generator[tuple[SlurmRun, list[Machine]]]:
    """A run that has not been submitted, and its machines; commands are given on a further one."""
    job_on = job_on_machines(number + 1, folder, rendezvous="folder", nodes=nodes, steps=STEPS, pause=PAUSE)
    with job_on as (job, (login, *workers)), slurm_on(login, workers, folder / "slurm", more=more) as environment:
        path = folder / "pool.toml"
        network = f'network = "{workers[0].address}/24"'
        path.write_text(f'place = "slurm"\ncommand = {COMMAND}\ngrace_seconds = 10\n{network}\n{pool}')
        yield SlurmRun(job, path, login, {"SLURM_CONF": environment["SLURM_CONF"]}), workers


def test_requeue_and_stop_lose_no_step(tmp_path: Path, losses: list[float]) -> None:
    with run_under_slurm(tmp_path, 2, "2") as (run, workers):
        status, said = run.submit("--dry-run", "--processes-per-node", "1")
        assert status == 0, said
        assert "Slurm would have it" in said
        assert run.ask("squeue", "-h") == ""
        assert not run.job.run.exists()
        status, said = run.submit()
        assert status == 0, said
        text = said.partition("which reads\n")[2].partition("\nwhy ")[0]
        assert run.ask("scontrol", "write", "batch_script", run.state()["job"], "-") == text.strip()
        run.job.wait_for_step(20)
        status, said = run.submit()
        assert (status, "running" in said) == (2, True), said
        run.ask("scontrol", "requeue", run.state()["job"])
        run.start_now()
        run.job.wait_for_step(60)
        assert run.weft("stop", str(run.job.run))[0] == 0
        run.wait_until_ended()
        assert run.ask("squeue", "-h") == ""
        assert run.submit()[0] == 0
        assert run.wait_until_ended() == "done", run.said()
        assert [each["step"] for each in run.job.events("step")] == list(range(1, STEPS + 1)), "a step was lost"
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)
        for host in (*workers, run.login):
            assert "weft" not in processes_of(host)
