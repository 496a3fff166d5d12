"""Many small runs on a Slurm of eight fake nodes, with stops, cancellations, preemptions and machines that die."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hosts_kit import write_recipe
from machines import Machine, machines
from places_kit import COMMAND, processes_of
from slurm import slurm_on, start_daemon
from test_hosts import losses_of_one_process

from weft.api.planning.describe import describe_recipe
from weft.config.pool import Pool, find_pool
from weft.errors import LaunchError
from weft.run.launch.launcher import ForkServer
from weft.run.places.proposal import propose, state_of, stop, submit
from weft.run.places.slurm import expand_nodes
from weft.run.places.submission import TrainOrder, newest_step

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_slurm]
SUBMISSIONS = int(os.environ.get("WEFT_TEST_SUBMISSIONS", "12"))
"""Runs that are submitted; 60 for the figure in the lab notes."""
NUM_NODES, STEPS, PAUSE = 8, 40, 0.15
MOST_AT_ONCE, MOST_WAITING = 4, 8
"""Jobs that Slurm lets run at the same time, and those that are submitted at the same time."""
SECONDS_EACH = 90
DARK_SECONDS = 15
"""How long a machine that has died is away: longer than Slurm's time to notice."""
FATES = {"none": 6, "stop": 2, "stop, and on": 3, "scancel": 3, "preempt": 3, "lose_power": 3, "crash": 2}
MORE = f"""
Licenses=place:{MOST_AT_ONCE}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=20 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 State=UP
"""
_NEXT = """
from weft.run.launch.memory_folder import RINGS, SAVES, create_memory_folder, remove_memory_folder
for kind in (RINGS, SAVES):
    remove_memory_folder(create_memory_folder(kind))
"""
POOL = """
place = "slurm"
command = {command}
network = "{network}"
grace_seconds = 20
[slurm]
partition = "low"
lines = ["--licenses=place:1"]
"""


@dataclass
class PoolRun:
    """One run, and what is to become of it."""

    folder: Path
    nodes: str
    ranks: int
    fate: str
    at_step: int
    """Step at which its fate is met; 0: while it waits in the queue."""
    job: str = ""
    has_met_fate: bool = False
    submissions: int = 0
    why: str = ""
    """How it has ended; empty: it has not."""

    def row(self) -> str:
        fate = f"{self.fate} at {self.at_step}" + ("" if self.has_met_fate else " (not met)")
        step, end = newest_step(self.folder), self.why or "goes on"
        return f"{self.folder.name}  job {self.job or '-'}  {self.nodes} nodes  {fate}  step {step}  {end}"

    def losses(self) -> list[float]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        steps = (json.loads(line) for line in lines if line.endswith("}"))
        by_step = {each["step"]: each["loss"] for each in steps if each["kind"] == "step"}
        return [by_step[step] for step in range(1, len(by_step) + 1)]


def draw_runs(folder: Path, number: int) -> list[PoolRun]:
    draw = random.Random(number)
    runs: list[PoolRun] = []
    for index in range(number):
        least, more = draw.choice((1, 1, 1, 2, 2, 3)), draw.choice((0, 0, 1))
        most = min(3, least + more)
        fate = draw.choices(list(FATES), list(FATES.values()))[0]
        waits = fate in ("stop", "stop, and on", "scancel") and draw.random() < 0.2
        at_step = 0 if waits else draw.randint(3, 2 * STEPS // 3)
        nodes = str(least) if least == most else f"{least}..{most}"
        runs.append(PoolRun(folder / f"run-{index}", nodes, most, fate, at_step))
    return runs


@dataclass
class Crowd:
    """All runs on one pool, and what Slurm has said of them."""

    workers: dict[str, Machine]
    environment: dict[str, str]
    pool: Pool
    recipe: Path
    runs: list[PoolRun]
    dead: dict[str, float] = field(default_factory=dict[str, float])
    """Machines that have died, and when they come back."""
    soon: set[str] = field(default_factory=set[str])
    """Jobs that were requeued, and start soon."""
    looks: int = 0

    def ask(self, *words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    def submit(self, run: PoolRun) -> None:
        plan = run.folder.with_suffix(".toml")
        plan.write_text(f"[mesh]\nreplicate = {run.ranks}\n")
        order = TrainOrder(recipe=self.recipe, plan=str(plan), processes_per_node=1, prove="never")
        folder = self.recipe.parent
        proposal = propose(order, self.pool, run.nodes, run.folder, folder, describe=describe_recipe)
        run.job = submit(proposal).number
        run.submissions += 1

    def turn(self) -> None:
        """Look at Slurm once, and do what is due."""
        jobs = self.jobs()
        for run in self.runs:
            if run.job and not run.why:
                self.look_at(run, *jobs.get(run.job, ("", [])))
        for name in [name for name, back in self.dead.items() if time.monotonic() > back]:
            del self.dead[name]
            self.workers[name].boot()
            start_daemon(self.workers[name], self.environment)
        waiting = sum(bool(run.job) and not run.why for run in self.runs)
        fresh = [run for run in self.runs if not run.job]
        if fresh and waiting < MOST_WAITING:
            self.submit(fresh[0])

    def jobs(self) -> dict[str, tuple[str, list[str]]]:
        """State and nodes of each job that Slurm has; no node is held by two."""
        held: dict[str, str] = {}
        jobs: dict[str, tuple[str, list[str]]] = {}
        for line in self.ask("squeue", "-h", "-o", "%i|%T|%r|%N").splitlines():
            number, state, why, names = line.split("|")
            jobs[number] = state, expand_nodes(names)
            if state != "PENDING":
                self.soon.discard(number)
            if state == "PENDING" and why == "BeginTime" and number not in self.soon:
                # Slurm waits two minutes with what was requeued.  Its daemons refuse a job that they have just ended
                # as long as its credential holds, which is five seconds here.
                self.soon.add(number)
                self.ask("scontrol", "update", f"JobId={number}", "StartTime=now+10")
            if state in ("RUNNING", "COMPLETING"):
                for name in jobs[number][1]:
                    assert name not in held, f"{name} is held by jobs {held[name]} and {number}"
                    held[name] = number
        self.looks += 1
        return jobs

    def look_at(self, run: PoolRun, state: str, nodes: list[str]) -> None:
        if state in ("", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"):
            if run.fate == "stop, and on" and run.has_met_fate and run.submissions == 1:
                self.submit(run)
            else:
                run.why = state_of(run.folder).why
                print(f"{time.strftime('%T')}  {run.row()}", flush=True)
            return
        if run.has_met_fate or run.fate == "none":
            return
        step = newest_step(run.folder) or 0
        if (state == "RUNNING" and run.at_step and step >= run.at_step) or (state == "PENDING" and not run.at_step):
            with suppress(LaunchError, subprocess.CalledProcessError):  # it has just ended
                self.meet(run, nodes)
                run.has_met_fate = True

    def meet(self, run: PoolRun, nodes: list[str]) -> None:
        """Do to a run what was drawn for it."""
        if run.fate.startswith("stop"):
            stop(run.folder)
        elif run.fate == "scancel":
            self.ask("scancel", run.job)
        elif run.fate == "preempt":
            words = ["--partition=high", "--exclusive", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"]
            self.ask("sbatch", *words, "--output=/dev/null", "--chdir=/", "--wrap=sleep 3")
        else:
            name = random.Random(run.job).choice(nodes)
            machine = self.workers[name]
            if run.fate == "crash":
                machine.crash()
            else:
                machine.lose_power()
            self.dead[name] = time.monotonic() + DARK_SECONDS

    def wait(self, seconds: float) -> None:
        """Go on until all has ended, and all machines are there again."""
        deadline = time.monotonic() + seconds
        while not all(run.why for run in self.runs) or self.dead or self.ask("squeue", "-h"):
            assert time.monotonic() < deadline, f"{self.ask('squeue')}\n{self.table()}"
            self.turn()
            time.sleep(0.5)
        while self.ask("sinfo", "-h", "-o", "%t %D") != f"idle {NUM_NODES}":
            assert time.monotonic() < deadline, self.ask("sinfo", "-N", "-l")
            time.sleep(0.5)

    def table(self) -> str:
        return "\n".join(run.row() for run in self.runs)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[float]:
    return losses_of_one_process(tmp_path_factory.mktemp("one"), fork_server, steps=STEPS, pause=0.0)


@pytest.fixture
def crowd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = write_recipe(tmp_path, steps=STEPS, pause=PAUSE, telemetry=False)
    with (
        machines(NUM_NODES + 1, tmp_path / "machines", from_here=True) as (login, *workers),
        slurm_on(login, workers, tmp_path / "slurm", more=MORE) as environment,
    ):
        monkeypatch.setenv("SLURM_CONF", environment["SLURM_CONF"])
        path = tmp_path / "pool.toml"
        command = ["env", "-u", "PYTHONDONTWRITEBYTECODE", *COMMAND[1:]]
        path.write_text(POOL.format(command=command, network=f"{login.address}/24"))
        runs = draw_runs(tmp_path, SUBMISSIONS)
        yield Crowd({each.name: each for each in workers}, environment, find_pool(str(path)), recipe, runs)


def test_every_run_ends_as_one_process_would_or_says_why_not(crowd: Crowd, losses: list[float]) -> None:
    began = time.monotonic()
    crowd.wait(SECONDS_EACH * len(crowd.runs) + 120)
    print(f"{len(crowd.runs)} runs in {time.monotonic() - began:.0f} s, {crowd.looks} looks\n{crowd.table()}")
    for run in crowd.runs:
        mine = run.losses()
        assert mine == pytest.approx(losses[: len(mine)], rel=1e-5), run
        if run.why.endswith("done"):
            assert len(mine) == STEPS, run
        else:
            assert run.fate in ("stop", "scancel"), run
            assert run.has_met_fate, run
            assert "stopped" in run.why or "no agent has started" in run.why, run
    for host in crowd.workers.values():
        assert "weft" not in processes_of(host)
        # An agent that Slurm has killed leaves its folder in memory to the next one there, which removes it.
        assert printed(host, *COMMAND[:-2], "-c", _NEXT) == ""
        assert printed(host, "ls", "/dev/shm") == ""
        listening = printed(host, "ss", "-Htln")
        assert all(":6818 " in line for line in listening.splitlines()), listening


def printed(host: Machine, *words: str) -> str:
    said, _ = host.start(words).communicate(timeout=30)
    return said.strip()
