"""The owner of a run's folder: one process at a time may write there, and it is known by name.

`owner.json` names it.  Its owner holds a lock of the operating system on it (`flock`), which ends with the
process, in whatever way that ends.  Where such a lock does not reach (between hosts, on some file systems) the file's
time is the owner's sign of life.  Each owner has a higher token than the one before, so that whoever has been taken for
dead, and was not, finds another token than its own before it names a checkpoint.
Source: fencing tokens, M. Kleppmann, "How to do distributed locking", 2016.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, Self, final

from weft.errors import LaunchError
from weft.process import is_ending, machine_name, start_of

OWNER = "owner.json"
MOST_BYTES = 1 << 16
PAUSE_SECONDS = 0.05
"""Time between two reads of a file that another process may be writing."""
SILENT_SECONDS = 1200.0
"""Silence after which an owner on another host counts as gone, unless it asked for longer."""
_COMMAND_LETTERS = 300
_TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOwner:
    """A process that writes in a run's folder, or did."""

    token: int
    """Number of this owner, counted from 1: higher than that of every owner before."""
    nonce: str = field(default_factory=lambda: os.urandom(8).hex())
    """Drawn by each owner, where two take the same number at once."""
    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=machine_name)
    """`weft.process.machine_name` of where it runs."""
    pid: int = field(default_factory=os.getpid)
    started: str = field(default_factory=lambda: start_of(os.getpid()) or "unknown")
    """Start time of the process, in the kernel's ticks.  It tells two processes with the same pid apart."""
    user: str = field(default_factory=lambda: _user())
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    command: str = field(default_factory=lambda: _command())
    silent_seconds: float = SILENT_SECONDS
    """Silence after which it counts as gone where nobody can ask for its process."""
    ended: bool = False
    """Whether it has given the folder back."""

    def __str__(self) -> str:
        who = "this process" if self.is_here and self.pid == os.getpid() else f"process {self.pid}"
        return f"{who} on host {self.host} (user {self.user}, since {self.since}: {self.command})"

    @property
    def process(self) -> str:
        """Names the owner's process; a further token of it changes nothing."""
        return f"{self.machine} {self.pid} {self.started}"

    @property
    def is_here(self) -> bool:
        """Whether its process id means a process of this machine and of this container."""
        return self.machine == machine_name()

    @property
    def shares_kernel(self) -> bool:
        """Whether a lock of this machine's kernel shows whether it lives: it runs here, maybe in another container, or
        ran here before the machine was started anew."""
        # host/boot/pid namespace: on the same host locks of an earlier boot are gone, and in the same boot this kernel
        # has the lock, whichever container its owner runs in.
        theirs, ours = self.machine.split("/"), machine_name().split("/")
        return theirs[0] == ours[0] or (len(theirs) > 1 and theirs[1:2] == ours[1:2])

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended, as far as this machine can tell."""
        return self.is_here and (start_of(self.pid) != self.started or is_ending(self.pid))

    def is_(self, other: FolderOwner | None) -> bool:
        """Whether another record is of the same owner."""
        return other is not None and (self.token, self.nonce) == (other.token, other.nonce)

    @classmethod
    def read(cls, content: bytes) -> Self | None:
        """The owner that a file names; None where it names none."""
        try:
            known: Any = json.loads(content)
            kinds = {"token": int, "pid": int, "silent_seconds": (int, float), "ended": bool}
            values = {entry.name: known[entry.name] for entry in fields(cls)}
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        right = all(isinstance(value, kinds.get(name, str)) for name, value in values.items())
        return cls(**values) if right else None


class Owned(Protocol):
    """A folder of a run, as this process owns it (`FolderLock`) or was told who does (`FolderToken`)."""

    def check(self) -> None:
        """Return where the folder is this run's own.  Raises `LaunchError` where it is another's by now."""
        ...

    def beat(self) -> None:
        """Give a sign of life of the owner."""
        ...


@final
@dataclass(frozen=True, slots=True)
class FolderToken:
    """The right to write in a folder, as processes know it that are not the owner itself: its ranks."""

    folder: Path
    owner: FolderOwner

    def check(self) -> None:
        """Return where the folder is still its owner's.

        Raises:
            LaunchError: another owns it by now, or nobody does.
        """
        now = read_owner(self.folder / OWNER)
        if self.owner.is_(now):
            return
        whose = f"it is that of {now} by now" if now is not None else f"{self.folder / OWNER} has been taken away"
        raise LaunchError(
            f"{self.folder} is no longer this run's folder: {whose}. Nothing more is written there. Stop one of the"
            " two, and go on from what was saved."
        )

    def beat(self) -> None:
        """Give a sign of life.  It raises nothing: a lost one is followed by others."""
        with contextlib.suppress(OSError):
            if self.owner.is_(read_owner(self.folder / OWNER)):
                os.utime(self.folder / OWNER)

    def to_json(self) -> dict[str, Any]:
        """The owner, for `of_json` in another process."""
        return asdict(self.owner)

    @classmethod
    def of_json(cls, folder: Path, owner: dict[str, Any]) -> Self:
        return cls(folder, FolderOwner(**owner))


def read_owner(path: Path) -> FolderOwner | None:
    """The owner that a file names, read again while it is being written."""
    for _ in range(_TRIES):
        try:
            with path.open("rb") as file:
                owner = FolderOwner.read(file.read(MOST_BYTES))
        except OSError:
            return None
        if owner is not None:
            return owner
        time.sleep(PAUSE_SECONDS)
    return None


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may know no name for its user
        return str(os.getuid())


def _command() -> str:
    name, *rest = sys.argv or [""]
    words = ["python", *([name] if name else []), *rest] if name in ("", "-c") else [Path(name).name, *rest]
    return " ".join(words)[:_COMMAND_LETTERS]
