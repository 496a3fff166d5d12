"""The runs of a chaos campaign: supervisors in processes of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft.errors import LaunchError
from weft.process import children_of, machine_name, start_of

_SCRIPT = Path(__file__).with_name("_supervisors_main.py")
_READY_SECONDS = 120.0
_GRACE_SECONDS = 3.0
"""Time in which the processes of a run that has ended may still be ending."""
_SHARED_MEMORY = Path("/dev/shm")
_UNFINISHED = ("*.tmp", "*.partial-*", "*.removing-*", "*.replaced-*")
"""Names of files and folders that are there only while something is being written."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run that a supervisor is to do."""

    subject: Path
    """A recipe, or a script with a session."""
    plan: Path
    folder: Path
    resume: bool
    output: Path
    """File that gets what the run prints, behind what is there."""
    faults: dict[str, Any] | None = None
    delay_seconds: float = 0.0

    def to_json(self) -> bytes:
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(values, default=str).encode() + b"\n"


class Supervisors:
    """Starts supervisors, and waits for their ends.  Use it as a context manager."""

    def __init__(self, temporary: Path) -> None:
        """`temporary` is where the runs make their temporary files."""
        environment = {**os.environ, "TMPDIR": str(temporary)}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        self._temporary = temporary
        self._received = b""
        self._ended: dict[int, int] = {}
        self._started: list[int] = []
        self._known: dict[int, str | None] = {}
        self._next("ready", time.monotonic() + _READY_SECONDS)

    def start(self, request: RunRequest) -> int:
        """Start a run, and return the process id of its supervisor."""
        self._control.sendall(request.to_json())
        pid = int(self._next("started", time.monotonic() + _READY_SECONDS)["started"])
        self._known[pid] = start_of(pid)
        return pid

    def status(self, pid: int, timeout_seconds: float = 0.0) -> int | None:
        """The exit status of a supervisor, negative for a signal; None where it has not ended in time."""
        until = time.monotonic() + timeout_seconds
        while pid not in self._ended:
            answer = self._receive(until)
            if answer is None:
                return None
            self._take(answer)
        return self._ended[pid]

    def kill_all(self) -> None:
        """Kill every process of every run."""
        for pid in self._descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left_behind(self, folder: Path) -> list[str]:
        """What ended runs have left that should not be there: processes, memory, temporary files, unfinished saves.

        It is removed, so that the next run begins without it.
        """
        until = time.monotonic() + _GRACE_SECONDS
        while (pids := self._descendants()) and time.monotonic() < until:
            time.sleep(0.02)
            self.status(0)  # takes ends that have come meanwhile
        left = [f"process {pid}: {_command(pid)}" for pid in pids]
        self.kill_all()
        outside = [*self._temporary.glob("weft-*"), *self._memory()]
        within = [path for pattern in _UNFINISHED for path in folder.rglob(pattern)]
        for path in outside:
            _remove(path)
        return left + [str(path) for path in (*outside, *within)]

    def _memory(self) -> list[Path]:
        """Folders in the host's memory that belong to supervisors of this campaign."""
        mine: list[Path] = []
        for path in _SHARED_MEMORY.glob(f"weft-*-{os.getuid()}-*"):
            with suppress(OSError, ValueError, KeyError):
                owner = json.loads((path / "owner.json").read_text())
                pid = int(owner["pid"])
                if owner["machine"] == machine_name() and pid in self._known and owner["started"] == self._known[pid]:
                    mine.append(path)
        return mine

    def _descendants(self) -> list[int]:
        pids, new = list[int](), children_of(self._process.pid)
        while new:
            pids += new
            new = [child for pid in new for child in children_of(pid)]
        return pids

    def _next(self, name: str, until: float) -> dict[str, Any]:
        while (answer := self._receive(until)) is not None:
            if name in answer:
                return answer
            self._take(answer)
        raise LaunchError(
            "the process that starts the runs of weft chaos does not answer. Look above for its error, and free memory."
        )

    def _take(self, answer: dict[str, Any]) -> None:
        if "ended" in answer:
            self._ended[int(answer["ended"])] = int(answer["status"])

    def _receive(self, until: float) -> dict[str, Any] | None:
        while b"\n" not in self._received:
            self._control.settimeout(max(0.001, until - time.monotonic()))
            try:
                word = self._control.recv(1 << 16)
            except TimeoutError:
                return None
            if not word:
                raise LaunchError("the process that starts the runs of weft chaos has ended. Look above for its error.")
            self._received += word
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Kill what runs, and end."""
        self.kill_all()
        self._control.close()
        self._process.kill()
        self._process.wait()
        for folder in self._memory():
            _remove(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
    except OSError:
        return "gone"
