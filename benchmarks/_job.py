"""A training that runs beside a benchmark, which reads its steps and knows its ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks._results import ROOT

_DEADLINE_SECONDS = 120.0


class WatchedJob:
    """A command that trains.  Use it as a context manager: in the end it is killed, with all that it has started.

    Each line of the file `lines` is an event in JSON; one of kind `step` has its number and the time at its end.
    """

    def __init__(self, command: Sequence[str], lines: Path) -> None:
        self._command, self._lines = list(command), lines
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        quiet = subprocess.DEVNULL
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            self._command, cwd=ROOT, stdout=quiet, stderr=quiet, start_new_session=True, env=environment
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is None:
            return
        # torchrun gives each rank a session of its own, in which it would outlive its parent.
        for pid in [*_descendants(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What has happened so far, in order."""
        lines = self._lines.read_text().splitlines(keepends=True) if self._lines.is_file() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["kind"] == kind]

    def steps(self) -> list[tuple[int, float]]:
        """Steps in the order in which they were finished, each with its time in seconds."""
        return [(event["step"], event["unix_time_seconds"]) for event in self.events("step")]

    def ranks(self) -> list[int]:
        """Process ids of the ranks that live now, by rank.  Subclasses know them."""
        raise NotImplementedError

    def wait_for(self, condition: Callable[[], bool], *, seconds: float = _DEADLINE_SECONDS) -> None:
        """Wait until something is so.  Raises TimeoutError."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError("the job has not come so far")
            time.sleep(0.01)

    def wait_for_step(self, step: int, *, seconds: float = _DEADLINE_SECONDS) -> None:
        self.wait_for(lambda: any(done >= step for done, _ in self.steps()), seconds=seconds)


class WeftTrainJob(WatchedJob):
    """`weft train` in a folder that gets recipe, plan and run."""

    def __init__(self, folder: Path, recipe: str, plan: str, *, before: Sequence[str] = ()) -> None:
        """Args:
        before: a launcher and its options, such as torchrun's; by default none, so that Weft watches over the run.
        """
        (folder / "recipe.toml").write_text(recipe)
        (folder / "plan.toml").write_text(plan)
        self.run = folder / "run"
        weft = str(Path(sys.executable).with_name("weft"))
        command = [*before, weft, "train", str(folder / "recipe.toml"), "--plan", str(folder / "plan.toml")]
        super().__init__([*command, "--run-folder", str(self.run), "--prove", "never"], self.run / "metrics.jsonl")

    def ranks(self) -> list[int]:
        owner = json.loads((self.run / "owner.json").read_text())["pid"]
        parents = [child for server in _children(owner) for child in _children(server)]
        return [rank for parent in parents for rank in _children(parent)]


class TorchrunJob(WatchedJob):
    """A module of two ranks under torchrun, which starts them again when one fails.

    It gets a folder as its first argument.  Each rank writes its process id there as a line of `rank-<number>`.
    """

    def __init__(self, folder: Path, module: str, *arguments: str) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, "--max-restarts", "100", "-m", module, str(folder), *arguments]
        super().__init__(command, folder / "steps.jsonl")
        self._folder = folder

    def ranks(self) -> list[int]:
        return [int(path.read_text().split()[-1]) for path in sorted(self._folder.glob("rank-*"))]


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError):  # it has just ended
        for child in _children(pid):
            found += [child, *_descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
