"""What a submitted run keeps in its folder: what the agents do, which place has them, and how each ended.

RUN/submission/order.json         what every agent does
RUN/submission/1.json, 2.json     one for each time that the run was handed to a place
RUN/submission/agent-0.json, .log what the agent of each machine said, the newest attempt
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from weft.config.document import plain, typed
from weft.config.pool import Pool
from weft.errors import LaunchError
from weft.files import cache_folder, write_whole
from weft.run.places.contract import Gang, PlacedJob

FOLDER = "submission"
_ORDER, _STOP = "order.json", "stop"
ATTEMPTS = "attempts.json"
_TAIL_BYTES = 1 << 16
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOrder:
    """What every agent of a run does: train a recipe.  Paths are absolute."""

    recipe: Path
    plan: str = "auto"
    """Path of the plan, or `auto`."""
    overrides: tuple[str, ...] = ()
    """Settings that were given by `--set`."""
    processes_per_node: int | None = None
    prove: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """What every agent of a run does: run a script on its ranks.  Paths are absolute."""

    script: str
    """Python file; with `module`, the name of a module."""
    arguments: tuple[str, ...] = ()
    module: bool = False
    under: str | None = None
    """Module that runs it, as in `python -m under script`."""
    processes_per_node: int | None = None
    threads: int | None = None
    logs: Path | None = None
    on_failure: tuple[str, ...] = ()
    max_restarts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """One run as it was submitted: the same for every agent and every attempt."""

    train: TrainOrder | None = None
    """The training; None: a script is launched."""
    launch: LaunchOrder | None = None
    """The script; None: a recipe is trained."""
    folder: Path
    """Working folder of the agents: that of the command which submitted."""
    pool: Pool
    gang: Gang

    def write(self, run: Path) -> None:
        """Write it into the run's folder."""
        _write(run / FOLDER / _ORDER, self)

    @classmethod
    def read(cls, run: Path) -> Self:
        """Raises `LaunchError` where the folder has none: it was not submitted."""
        path = run / FOLDER / _ORDER
        if not path.is_file():
            raise LaunchError(f"{run} was not submitted to any place (no {FOLDER}/{_ORDER}). See weft train --on.")
        return _read(cls, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One time that a run was handed to a place."""

    number: int
    """Counted from 1."""
    time: float
    """Unix time."""
    host: str
    """Host and process of the command that did it."""
    pid: int
    placed: PlacedJob | None = None
    """None: it was begun, and the place has not answered."""

    @classmethod
    def newest(cls, run: Path) -> Self | None:
        """The newest of a run; None: it was never submitted."""
        numbers = [int(path.stem) for path in (run / FOLDER).glob("[0-9]*.json") if path.stem.isdecimal()]
        return _read(cls, _path(run, max(numbers))) if numbers else None

    @classmethod
    def begin(cls, run: Path, *, after: Submission | None) -> Self:
        """Take the next number.  Of two commands that submit at the same time one gets it.

        Raises:
            LaunchError: another command was first.
        """
        number = 1 if after is None else after.number + 1
        begun = cls(number=number, time=time.time(), host=socket.gethostname(), pid=os.getpid())
        try:
            descriptor = os.open(_path(run, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise LaunchError(
                f"{run} is being submitted by another command just now. weft jobs shows where it went."
            ) from None
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(plain(begun)))
        return begun

    def place(self, run: Path, placed: PlacedJob) -> Submission:
        """Note what the place has called the job."""
        noted = replace(self, placed=placed)
        _write(_path(run, self.number), noted)
        remember(run)
        return noted

    def take_back(self, run: Path) -> None:
        """Forget a submission that the place has refused."""
        _path(run, self.number).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentNote:
    """What one agent says of itself."""

    index: int
    host: str
    pid: int
    attempt: int
    began: float
    """Unix time."""
    topology: tuple[str, ...] = ()
    node: str = ""
    """The place's name for its machine."""
    status: int | None = None
    """Its exit status; None: it has not ended, or has ended without a word."""
    text: str = ""
    """How it ended, in a sentence."""

    def write(self, run: Path) -> None:
        _write(run / FOLDER / f"agent-{self.index}.json", self)

    @classmethod
    def all_of(cls, run: Path) -> list[AgentNote]:
        """The agents of a run, by their numbers."""
        paths = (run / FOLDER).glob("agent-*.json")
        return sorted((_read(AgentNote, path) for path in paths), key=lambda note: note.index)


def agent_log(run: Path, index: int) -> Path:
    """File of what an agent prints."""
    return run / FOLDER / f"agent-{index}.log"


def job_name(run: Path) -> str:
    """Name by which places show a run: `weft-` and that of its folder."""
    return f"weft-{re.sub(r'[^a-z0-9]+', '-', run.name.lower()).strip('-')[:40].rstrip('-') or 'run'}"


def newest_step(run: Path) -> int | None:
    """The newest step that a run has finished; None before the first."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if event.get("kind") == "step":
                return int(event["step"])
    return None


def forget_attempts(run: Path) -> None:
    """Forget what the agents of an earlier submission have noted.  Their logs stay."""
    for path in (*(run / FOLDER).glob("agent-*.json"), run / FOLDER / ATTEMPTS):
        path.unlink(missing_ok=True)


def ask_to_stop(run: Path) -> None:
    """Note that the user wants the run's newest submission to end: no attempt of it follows."""
    newest = Submission.newest(run)
    write_whole(run / FOLDER / _STOP, str(0 if newest is None else newest.number))


def is_to_stop(run: Path) -> bool:
    """Whether the user wants the run's newest submission to end."""
    newest = Submission.newest(run)
    try:
        return newest is not None and (run / FOLDER / _STOP).read_text() == str(newest.number)
    except OSError:
        return False


# ── the runs that this user has submitted ─────────────────────────────────────────────────────────────────────────────


def remember(run: Path) -> None:
    """Add a run to the list that `weft jobs` shows."""
    folder = cache_folder("jobs")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_reminder(run), json.dumps({"run": str(run)}))


def forget(run: Path) -> None:
    """Take a run off that list."""
    _reminder(run).unlink(missing_ok=True)


def submitted_runs() -> list[Path]:
    """The runs of that list, the one that was submitted last in front.  Those whose folders are gone are left out."""
    found: list[tuple[float, Path]] = []
    for path in cache_folder("jobs").glob("*.json"):
        try:
            run = Path(json.loads(path.read_text())["run"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if (run / FOLDER).is_dir():
            found.append((path.stat().st_mtime, run))
    return [run for _, run in sorted(found, reverse=True)]


def _reminder(run: Path) -> Path:
    return cache_folder("jobs", f"{hashlib.sha256(str(run).encode()).hexdigest()[:24]}.json")


def _path(run: Path, number: int) -> Path:
    return run / FOLDER / f"{number}.json"


def _write(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(plain(value), indent=1), durable=True)


def _read(cls: type[_T], path: Path) -> _T:
    try:
        return typed(cls, json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"{path} cannot be read: {error}. It is not of this version of Weft, or is damaged."
        ) from None
