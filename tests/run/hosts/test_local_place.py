"""`--on local`: a run apart from the command that submitted it, by that machine's own keeper and agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hosts_kit import write_recipe
from test_hosts import losses_of_one_process

from weft.run.launch.launcher import ForkServer

STEPS, PAUSE = 80, 0.1


@dataclass
class LocalRun:
    """One run, and the commands about it."""

    folder: Path
    recipe: Path
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        own = {"XDG_CACHE_HOME": str(self.folder / "cache"), "XDG_CONFIG_HOME": str(self.folder / "config")}
        self.environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}

    def weft(self, *words: str) -> tuple[int, str]:
        """Give a command; return its status and what it has said."""
        command = [sys.executable, "-m", "weft.cli", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=90
        )
        return done.returncode, done.stdout + done.stderr

    def submit(self, *options: str) -> tuple[int, str]:
        words = [
            "--on",
            "local",
            "--nodes",
            "1",
            "--run-folder",
            "run",
            "--processes-per-node",
            "2",
            "--prove",
            "never",
        ]
        return self.weft("train", str(self.recipe), *words, "--plan", "plan.toml", *options)

    def job(self) -> dict[str, Any]:
        """The run as `weft jobs` has it."""
        (job,) = json.loads(self.weft("jobs", "--json")[1])
        return job

    def wait(self, is_so: str, seconds: float = 60) -> dict[str, Any]:
        """Wait for a phase, or `a step`."""
        deadline = time.monotonic() + seconds
        while True:
            job = self.job()
            if job["phase"] == is_so or (is_so == "a step" and (job["step"] or 0) > 0):
                return job
            assert time.monotonic() < deadline, f"{job}\n{self.weft('logs', 'run')[1]}"
            time.sleep(0.1)

    @property
    def losses(self) -> list[float]:
        lines = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["kind"] == "step"]
        assert [line["step"] for line in steps] == list(range(1, len(steps) + 1)), "a step was lost, or done twice"
        return [line["loss"] for line in steps]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    made = LocalRun(tmp_path, write_recipe(tmp_path, steps=STEPS, pause=PAUSE))
    (tmp_path / "plan.toml").write_text("[mesh]\nreplicate = 2\n")
    yield made
    made.weft("stop", "run")


def test_a_run_goes_on_after_its_time_limit_and_a_stop(
    run: LocalRun, tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer
) -> None:
    one = tmp_path_factory.mktemp("one")
    wanted = losses_of_one_process(one, fork_server, steps=STEPS, pause=0.0)
    status, said = run.submit("--dry-run")
    assert (status, run.weft("jobs")[1].startswith("no run was submitted")) == (0, True), said
    assert not (run.folder / "run").exists()

    status, said = run.submit("--time-limit", "0:01")
    assert status == 0, said
    assert run.wait("ended")["why"] == "stopped, and can go on"

    assert run.submit()[0] == 0
    job = run.wait("a step")
    assert job["pool"] == "local"
    status, said = run.submit()
    assert status == 2
    assert f"submitted as local job {job['job']}, running" in said
    assert run.weft("stop", "run")[0] == 0
    run.wait("ended")

    assert run.submit()[0] == 0
    assert run.wait("ended")["why"] == "done"
    assert run.losses == pytest.approx(wanted, rel=1e-5)
    status, said = run.weft("logs", "run")
    assert (status, f"step   {STEPS}" in said) == (0, True), said
    status, said = run.weft("stop", "run")
    assert (status, "does not run: done" in said) == (2, True), said


def test_pools_are_listed_with_what_is_free_and_what_is_wrong(run: LocalRun) -> None:
    assert "no pool has a name" in run.weft("pools")[1]
    pools = run.folder / "config" / "weft" / "pools"
    pools.mkdir(parents=True)
    (pools / "here.toml").write_text('place = "local"\n')
    assert run.weft("pools")[0] == 0
    (pools / "wrong.toml").write_text('place = "locall"\n')
    status, said = run.weft("pools")
    assert status == 2
    assert [line.split()[:4] for line in said.splitlines()[1:2]] == [["here", "local", "1", "1"]]
    assert "locall" in said.splitlines()[2]
