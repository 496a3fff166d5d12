"""`--on slurm`: agents under a real Slurm on fake machines."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts_kit import job_on_machines
from machines import Machine
from places_kit import COMMAND, PlacedRun, processes_of
from slurm import slurm_on, start_daemon
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

    def start_now(self, seconds: float = 60) -> None:
        """Wait until the job is requeued, and let it start soon, for which Slurm waits two minutes: its daemons refuse
        a job that they have just ended for as long as its credential holds, which is five seconds here."""
        number = self.state()["job"]
        deadline = time.monotonic() + seconds
        while self.ask("squeue", "-h", "-j", number, "-o", "%T") != "PENDING":
            assert time.monotonic() < deadline, self.ask("squeue")
            time.sleep(0.2)
        self.ask("scontrol", "update", f"JobId={number}", "StartTime=now+10")


@contextmanager
def run_under_slurm(
    folder: Path,
    number: int,
    nodes: str,
    *,
    more: str = "",
    leaves: Mapping[str, Sequence[str]] | None = None,
    pool: str = "",
    steps: int = STEPS,
    ranks: int = 2,
) -> Generator[tuple[SlurmRun, list[Machine]]]:
    """A run that has not been submitted, and its machines; commands are given on a further one."""
    job_on = job_on_machines(number + 1, folder, rendezvous="folder", nodes=nodes, steps=steps, pause=PAUSE)
    with (
        job_on as (job, (login, *workers)),
        slurm_on(login, workers, folder / "slurm", more=more, leaves=leaves) as environment,
    ):
        job.plan.write_text(f"[mesh]\nreplicate = {ranks}\n")
        path = folder / "pool.toml"
        network = f'network = "{workers[0].address}/24"'
        path.write_text(f'place = "slurm"\ncommand = {COMMAND}\ngrace_seconds = 10\n{network}\n{pool}')
        yield SlurmRun(job, path, login, {"SLURM_CONF": environment["SLURM_CONF"]}), workers


def test_requeue_and_stop_lose_no_step(tmp_path: Path, losses: list[float]) -> None:
    with run_under_slurm(tmp_path, 2, "2") as (run, workers):
        status, said = run.submit("--dry-run", "--processes-per-node", "1")
        assert status == 0, said
        assert "Slurm would start it" in said
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


PREEMPTING = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=20 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 State=UP
"""


def test_a_preempted_job_and_one_at_its_time_limit_lose_no_step(tmp_path: Path) -> None:
    low = '[slurm]\npartition = "low"\n'
    with run_under_slurm(tmp_path, 2, "2", more=PREEMPTING, pool=low, steps=1500) as (run, _):
        assert run.submit("--processes-per-node", "1", "--time-limit", "0:02:00")[0] == 0
        run.job.wait_for_step(20)
        run.ask("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
        run.start_now()
        done = run.job.num_steps
        run.job.wait_for_step(done + 20)
        run.start_now(seconds=150)  # after its time limit
        done = run.job.num_steps
        run.job.wait_for_step(done + 20)
        steps = [each["step"] for each in run.job.events("step")]
        assert steps == list(range(1, steps[-1] + 1)), "a step was lost"
        assert run.weft("stop", str(run.job.run))[0] == 0
        run.wait_until_ended()


def test_a_job_goes_on_without_a_machine_that_loses_its_power(tmp_path: Path, losses: list[float]) -> None:
    with run_under_slurm(tmp_path, 3, "2..3", ranks=3) as (run, workers):
        assert run.submit()[0] == 0
        run.job.wait_for_step(20)
        workers[2].lose_power()
        assert run.wait_until_ended(seconds=120) == "done", run.said()
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)
        numbers = [each["world_size"] for each in run.job.events("generation")]
        assert numbers[-1] == 2, numbers


def test_a_job_goes_on_after_a_machine_has_started_again(tmp_path: Path, losses: list[float]) -> None:
    """Slurm does not miss it, and knows of no end of its agent."""
    with run_under_slurm(tmp_path, 2, "2") as (run, workers):
        status, said = run.submit()
        assert status == 0, said
        run.job.wait_for_step(20, seconds=120)
        workers[1].crash()
        workers[1].boot()
        start_daemon(workers[1], run.environment)
        run.start_now(seconds=150)
        assert run.wait_until_ended(seconds=150) == "done", run.said()
        assert run.job.losses() == pytest.approx(losses, rel=1e-5)


def test_an_agent_that_does_not_leave_is_ended_after_the_grace(tmp_path: Path) -> None:
    with run_under_slurm(tmp_path, 2, "2", steps=5000) as (run, workers):
        assert run.submit()[0] == 0
        run.job.wait_for_step(5)
        stuck = workers[1].start(["pkill", "-STOP", "-f", "weft.cli agent"])
        assert stuck.wait(10) == 0
        status, said = run.weft("stop", str(run.job.run))
        assert status == 0, said
        # The grace in whole minutes of the job's time, Slurm's KillWait, and its look at limits, every 30 s.
        run.wait_until_ended(seconds=10 + 60 + 20 + 30 + 30)
        assert run.ask("squeue", "-h") == "", "it was requeued"
        for host in workers:
            assert "weft" not in processes_of(host)


def test_what_is_wrong_is_said_in_a_paragraph_and_nothing_is_submitted(tmp_path: Path) -> None:
    with run_under_slurm(tmp_path, 2, "2") as (run, _):
        good = run.pool.read_text()
        for pool, nodes, words in (
            (good, "3", "Slurm says"),
            (good + '[slurm]\npartition = "gone"\n', "2", "invalid partition"),
            (good.replace("10.83", "10.84"), "2", "no machine of the partition"),
        ):
            run.pool.write_text(pool)
            status, said = run.submit(nodes=nodes)
            assert status == 2, said
            assert words in said
            assert "Traceback" not in said
        run.pool.write_text(good)
        run.ask("scontrol", "shutdown", "slurmctld")
        status, said = run.submit()
        assert status == 2, said
        assert "Slurm says" in said
        assert not run.job.run.exists()
