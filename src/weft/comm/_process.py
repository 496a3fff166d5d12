"""What a rank tells of its process, so that the others of its host can see whether it still lives."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Differs between hosts, and on one host between boots; containers of one host have the same.  Empty where nobody
    can tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def started_at(pid: int) -> int:
    """Clock ticks since boot at which the process started; 0 when there is none, or it is a zombie."""
    state, started = _state_and_start(pid)
    return 0 if state in ("Z", "X") else started


def _state_and_start(pid: int) -> tuple[str, int]:
    try:
        # The name, in parentheses, may itself hold spaces and parentheses: fields are counted from the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


def _where_numbers_hold() -> str:
    """The boot and the container in which a process id means the same process; empty where nobody can tell."""
    boot = boot_id()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if boot else ""
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Process:
    """A rank's process.  Ids are used again: the start time makes sure."""

    where: str
    """Its host and container."""
    pid: int
    started: int

    @classmethod
    def own(cls) -> Process:
        pid = os.getpid()
        return cls(_where_numbers_hold(), pid, started_at(pid))

    @classmethod
    def read(cls, description: str) -> Process:
        """Return what `describe` has told."""
        where, pid, started = json.loads(description)
        return cls(str(where), int(pid), int(started))

    def describe(self) -> str:
        return json.dumps([self.where, self.pid, self.started])

    def is_dead(self) -> bool:
        """Whether it is certain that the process has ended; of another host's or container's nobody here knows."""
        return self._is_near() and started_at(self.pid) != self.started

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger holds the process."""
        return self._is_near() and _state_and_start(self.pid)[0] in ("T", "t")

    def _is_near(self) -> bool:
        return bool(self.started) and bool(self.where) and self.where == _where_numbers_hold()
