"""Runs that are submitted to a place, on fake machines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hosts_kit import HostJob
from machines import Machine

from weft.config.recipe import OnFailure
from weft.run.launch.launcher import ForkServer
from weft.run.launched_script import LaunchedScript
from weft.run.supervised_script import SupervisedScript

COMMAND = ["env", f"PYTHONPATH={os.pathsep.join(sys.path)}", "CUDA_VISIBLE_DEVICES=", sys.executable, "-m", "weft.cli"]
"""What starts Weft on a pool's machines."""


@dataclass
class PlacedRun:
    """One run on one pool."""

    job: HostJob
    pool: Path
    login: Machine
    """The machine on which commands are given."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """What the place's commands need."""

    def weft(self, *words: str, seconds: float = 240) -> tuple[int, str]:
        """Give a command of Weft on the login machine; return its status and what it has said."""
        folder = self.pool.parent
        own = {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder / "config")}
        process = self.login.start([*COMMAND, *words], environment={**own, **self.environment}, folder=folder)
        said, _ = process.communicate(timeout=seconds)
        return process.returncode, said

    def submit(self, *options: str, nodes: str | None = None) -> tuple[int, str]:
        """Submit the run."""
        words = ["train", str(self.job.recipe), "--run-folder", str(self.job.run), "--plan", str(self.job.plan)]
        words += ["--on", str(self.pool), "--nodes", nodes or self.job.nodes, "--prove", "never"]
        return self.weft(*words, *(options or ("--processes-per-node", "1")))

    def wait_until_ended(self, *, seconds: float = 240) -> str:
        """Wait until the place says that the run has ended, and return why."""
        deadline = time.monotonic() + seconds
        while (state := self.state()["phase"]) != "ended":
            assert time.monotonic() < deadline, f"{state} after {seconds} s:\n{self.said()}"
            time.sleep(1.0)  # each look starts a Python, beside the ranks of all machines
        return self.state()["why"]

    def state(self) -> dict[str, Any]:
        """How the run stands at its place."""
        status, said = self.weft("jobs", "--json")
        assert status == 0, said
        (run,) = json.loads(said)
        return run

    def commands_of_keeper(self) -> list[list[str]]:
        """The commands by which the run's keeper starts agents."""
        task = json.loads((self.job.run / "submission" / "keeper.json").read_text())
        return [agent["command"] for agent in task["agents"]]

    def said(self) -> str:
        """What agents and the keeper have said."""
        paths: Sequence[Path] = sorted((self.job.run / "submission").glob("*.log"))
        return "\n".join(f"── {path.name}\n{path.read_text()}" for path in paths)


class PlacedScript(PlacedRun):
    """A script with a session on one pool."""

    path = Path(__file__).with_name("host_session.py")
    epochs = 4
    steps = 80
    """Of so many epochs."""

    def launch(self, *options: str, nodes: str, words: tuple[str, ...] = ()) -> tuple[int, str]:
        """Submit it."""
        where = ["--on", str(self.pool), "--nodes", nodes, "--run-folder", str(self.job.run)]
        given = options or ("--processes-per-node", "1")
        return self.weft("launch", *where, *given, str(self.path), "--epochs", str(self.epochs), *words)


def losses_of_one_script(folder: Path, fork_server: ForkServer) -> list[float]:
    """The losses of the script's session on one process."""
    job = HostJob(folder, folder / "run", "folder", "1", folder)
    arguments = ("--epochs", str(PlacedScript.epochs))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        launched = LaunchedScript(script=str(PlacedScript.path), arguments=arguments, num_processes=1)
        script = SupervisedScript(launched=launched, policies=OnFailure(), restarts_any=False, fork_server=fork_server)
        assert script.run() == 0
        assert script.run_folder is not None
        job.run = script.run_folder
    assert job.num_steps == PlacedScript.steps
    return job.losses()


def processes_of(host: Machine) -> str:
    """The processes that run on a machine."""
    process = host.start(["ps", "-eo", "pid,args"])
    said, _ = process.communicate(timeout=10)
    return said
