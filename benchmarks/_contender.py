"""Trainings that stay alive and run a few steps when told, so that rivals can be measured in turn."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks._results import ROOT, log


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A place for one rank that looks like a machine of its own, such as a network namespace."""

    prefix: tuple[str, ...] = ()
    """Words before the rank's command."""
    address: str = "127.0.0.1"
    interface: str = "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Who takes part, and how to start it."""

    name: str
    target: str
    """`module:function`; see `benchmarks._rank`."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ranks: int = 2
    python: str = sys.executable
    about: str = ""
    hosts: Sequence[Host] = ()
    """Where each rank runs; by default all of them here."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps of one contender: seconds of each on the slowest rank, losses averaged over ranks."""

    seconds: list[float]
    cpu_seconds: list[float]
    """Processor time of a step on all ranks together: hardly touched by what else the machine does."""
    losses: list[float]
    peak_bytes: int


class ContenderError(RuntimeError):
    """A contender ended instead of answering."""


class Contender:
    """The processes of one entry."""

    def __init__(self, entry: Entry, logs: Path) -> None:
        self.entry = entry
        self._log = logs / f"{entry.name.replace(' ', '-').replace('/', '-')}.log"
        self.warm_losses: list[float] = []
        """Of the first steps, averaged over ranks."""
        port = _free_port()
        self._ranks = [self._start(rank, port) for rank in range(entry.ranks)]

    def _start(self, rank: int, port: int) -> subprocess.Popen[str]:
        size = str(self.entry.ranks)
        hosts = self.entry.hosts or (Host(),) * self.entry.ranks
        host = hosts[rank]
        environment = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size},
            **{"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": host.interface},
            **{"OMP_NUM_THREADS": str(self.entry.settings.get("threads", 1)), "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
            **{"TORCHELASTIC_RUN_ID": "benchmark", "TOKENIZERS_PARALLELISM": "false"},
        }
        command = [*host.prefix, self.entry.python, "-m", "benchmarks._rank", self.entry.target]
        command.append(json.dumps(self.entry.settings))
        with self._log.open("ab") as errors:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait_until_ready(self) -> None:
        self._answers()

    def run(self, steps: int) -> Block:
        """Run `steps` more steps on all ranks at once."""
        for process in self._ranks:
            _pipe(process.stdin).write(f"{steps}\n")
            _pipe(process.stdin).flush()
        answers = self._answers()
        return Block(
            [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)],
            [sum(times) for times in zip(*(answer["cpu_seconds"] for answer in answers), strict=True)],
            [sum(losses) / len(losses) for losses in zip(*(answer["losses"] for answer in answers), strict=True)],
            max(answer["peak_bytes"] for answer in answers),
        )

    def _answers(self) -> list[Any]:
        lines = [_pipe(process.stdout).readline() for process in self._ranks]
        if not all(lines):
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise ContenderError(f"{self.entry.name} ended early:\n{tail}")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the processes: those that are alive read the end of their input."""
        for process in self._ranks:
            _pipe(process.stdin).close()
        for process in self._ranks:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _pipe(process.stdout).close()


@contextmanager
def contenders(entries: Sequence[Entry], *, warmup_steps: int) -> Generator[list[Contender]]:
    """Start and warm up all entries one after another; one that cannot start is left out, aloud."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-bench-")))
        alive: list[Contender] = []
        for entry in entries:
            contender = Contender(entry, logs)
            stack.callback(contender.close)
            try:
                contender.wait_until_ready()
                warm = contender.run(warmup_steps)
            except (ContenderError, BrokenPipeError) as problem:
                log(f"left out: {problem}")
                continue
            losses = ", ".join(f"{loss:.4f}" for loss in warm.losses[:3])
            log(f"ready: {entry.name:34s} {warm.seconds[-1]:.3f} s, {warm.peak_bytes / 2**20:.0f} MiB, losses {losses}")
            contender.warm_losses = warm.losses
            alive.append(contender)
        yield alive


def interleave(alive: Sequence[Contender], *, rounds: int, steps: int) -> dict[str, list[Block]]:
    """Let everybody run `steps` steps per round; the order turns by one from round to round."""
    blocks: dict[str, list[Block]] = {contender.entry.name: [] for contender in alive}
    for turn in range(rounds):
        first = turn % len(alive)
        for contender in [*alive[first:], *alive[:first]]:
            blocks[contender.entry.name].append(contender.run(steps))
        log(f"round {turn + 1} of {rounds}")
    return blocks


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
