"""A small training on fake machines, and a real etcd of three."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machines
from machines import Machine

STEPS = 300
_DECODER = """
[model]
reference = "decoder"
num_layers = 4
hidden_size = 48
num_heads = 4
num_kv_heads = 2
vocabulary_size = 300
sequence_length = 48
dropout = 0.1
"""
_PATIENT = """
[model]
factory = "patient_model:build"
arguments = {{ seconds = {pause}, slow_host = "{slow_host}" }}
sequence_length = 16
loss = "tokens"
propose_split = false
"""
_REST = """
[data]
train = [{{ source = "{corpus}" }}]
cache = "{cache}"
[batch]
global_batch_size = 12
[optimizer]
name = "adamw"
learning_rate = 1e-3
[run]
steps = {steps}
save_every = 25
telemetry = {telemetry}
"""


def write_recipe(
    folder: Path, *, steps: int = STEPS, pause: float | None = None, slow_host: str = "", telemetry: bool = True
) -> Path:
    """Write a recipe and its texts, and return its path.  With a pause: of a model that waits so long in each step, and
    twice as long on `slow_host`."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(6):
        lines = (f"text {number} says {line * number % 97}\n" for line in range(200))
        (corpus / f"{number}.txt").write_text("".join(lines))
    recipe = folder / "recipe.toml"
    model = _DECODER if pause is None else _PATIENT.format(pause=pause, slow_host=slow_host)
    values = {"corpus": corpus, "cache": folder / "cache", "steps": steps, "telemetry": str(telemetry).lower()}
    recipe.write_text(model + _REST.format(**values))
    return recipe


@contextmanager
def etcd_on(hosts: Sequence[Machine], folder: Path) -> Generator[str]:
    """Run a member of etcd on each machine, and return the address for `--rendezvous`."""
    cluster = ",".join(f"{host.name}=http://{host.address}:2380" for host in hosts)
    for host in hosts:
        client, peer = f"http://{host.address}:2379", f"http://{host.address}:2380"
        words = ["etcd", "--name", host.name, "--data-dir", str(folder / f"etcd-{host.name}"), "--logger", "zap"]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client, "--initial-cluster", cluster]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--log-level", "error"]
        words += ["--heartbeat-interval", "100", "--election-timeout", "500"]
        with (folder / f"etcd-{host.name}.log").open("w") as output:
            host.start(words, output=output)
    yield "etcd://" + ",".join(f"{host.address}:2379" for host in hosts)


@dataclass
class HostJob:
    """One job on fake machines."""

    recipe: Path
    run: Path
    rendezvous: str
    nodes: str
    plan: Path
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict[str, subprocess.Popen[str]])

    def start(self, host: Machine, *options: str) -> None:
        """Start the job's command on a machine."""
        words = [sys.executable, "-m", "weft.cli", "train", str(self.recipe), "--run-folder", str(self.run)]
        words += ["--nodes", self.nodes, "--rendezvous", self.rendezvous, "--prove", "never"]
        words += ["--plan", str(self.plan), *(options or ("--processes-per-node", "1"))]
        with self._output(host.name).open("a") as output:
            self.processes[host.name] = host.start([*words], output=output, environment=_environment())

    def resume_alone(self, host: Machine) -> int:
        """Try to go on with the run on one machine, as if nobody else did; return the status."""
        words = [sys.executable, "-m", "weft.cli", "train", str(self.recipe), "--resume", str(self.run)]
        with self._output(host.name).open("a") as output:
            return host.start(words, output=output, environment=_environment()).wait(60)

    def said(self, host: Machine) -> str:
        """What the job has printed on a machine."""
        return self._output(host.name).read_text()

    def tell(self, host: Machine, number: signal.Signals) -> None:
        """Send the job's command on a machine a signal."""
        host.signal(self.processes[host.name], number)

    def wait_for_step(self, step: int, *, seconds: float = 180) -> None:
        """Wait until a step has been finished."""
        deadline = time.monotonic() + seconds
        while not any(each["step"] >= step for each in self.events("step")):
            self._go_on(deadline, f"step {step}")

    def wait_for(self, texts: Sequence[str], host: Machine, *, seconds: float = 180) -> None:
        """Wait until the job has printed one of some texts on a machine."""
        deadline = time.monotonic() + seconds
        while not any(text in self.said(host) for text in texts):
            self._go_on(deadline, repr(texts))

    def wait(self, host: Machine, *, seconds: float = 180) -> int:
        """Wait for the end of the job's command on a machine, and return its status."""
        try:
            return self.processes[host.name].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{host.name} has not ended in {seconds} s:\n{self._tails()}") from None

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind in the run's folder."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        found: list[dict[str, Any]] = []
        for line in lines:
            if line.endswith("}") and (event := json.loads(line))["kind"] == kind:
                found.append(event)
        return found

    @property
    def num_steps(self) -> int:
        """Steps that have been finished."""
        return max((each["step"] for each in self.events("step")), default=0)

    def losses(self) -> list[float]:
        """The loss of each step in the history that was kept."""
        by_step = {each["step"]: each["loss"] for each in self.events("step")}
        return [by_step[step] for step in range(1, len(by_step) + 1)]

    def _output(self, name: str) -> Path:
        return self.run.parent / f"{name}.out"

    def _go_on(self, deadline: float, what: str) -> None:
        assert time.monotonic() < deadline, f"not in time: {what}\n{self._tails()}"
        time.sleep(0.02)

    def _tails(self) -> str:
        return "\n".join(f"── {name}\n{self._output(name).read_text()[-2000:]}" for name in self.processes)


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}


@contextmanager
def job_on_machines(
    number: int,
    folder: Path,
    *,
    rendezvous: str,
    nodes: str,
    steps: int = STEPS,
    plan: str = "[mesh]\nreplicate = 2\n",
    pause: float | None = None,
    slow_host: str = "",
) -> Generator[tuple[HostJob, list[Machine]]]:
    """A job that has not begun, and the machines for it.  `rendezvous` is `folder` or `etcd`."""
    (folder / "plan.toml").write_text(plan)
    with machines.machines(number, folder / "machines") as hosts:
        recipe = write_recipe(folder, steps=steps, pause=pause, slow_host=slow_host)
        job = HostJob(recipe, folder / "run", rendezvous, nodes, folder / "plan.toml")
        if rendezvous == "folder":
            yield job, hosts
            return
        with etcd_on(hosts, folder) as job.rendezvous:
            yield job, hosts
