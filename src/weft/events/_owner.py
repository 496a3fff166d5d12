"""Who writes in the folder of a run: one owner at a time, known by name.

`owner.json` says who it is.  Its owner holds a lock of the operating system on it (`flock`), which ends with the
process, in whatever way that ends.  Where such a lock does not reach (between hosts, on some file systems) the file's
time is the owner's sign of life.  Each owner has a higher token than the one before, so that whoever has been taken for
dead, and was not, finds another token than its own before it names a checkpoint.
Source: fencing tokens, M. Kleppmann, "How to do distributed locking", 2016.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import pwd
import socket
import sys
import time
import weakref
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self, final

from weft.errors import LaunchError
from weft.events._run import Emitted
from weft.process import is_ending, machine_name, start_of

logger = logging.getLogger(__name__)

OWNER = "owner.json"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_MOST_BYTES = 1 << 16
_COMMAND_LETTERS = 300
_TRIES = 20
_PAUSE_SECONDS = 0.05
_ENDING_SECONDS = 0.5
"""A process that has just been sent a signal may not know it yet."""
_CLOSING_SECONDS = 20.0
"""What the system may take to close the files of a large process that has ended."""
_SETTLE_SECONDS = 0.3
_BEAT_SECONDS = 15.0
SILENT_SECONDS = 1200.0
"""Silence after which an owner on another host counts as gone, unless it asked for longer."""


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
    """When the process started, in the kernel's ticks."""
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
    def is_here(self) -> bool:
        """Whether its process id means a process of this machine and of this container."""
        return self.machine == machine_name()

    @property
    def shares_kernel(self) -> bool:
        """Whether a lock of this machine's kernel shows whether it lives: it runs here, maybe in another container, or
        ran here before the machine was started anew."""
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
            given = {each.name: known[each.name] for each in fields(cls)}
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        right = all(isinstance(value, kinds.get(name, str)) for name, value in given.items())
        return cls(**given) if right else None


class Owned(Protocol):
    """What a checkpoint asks before it takes its name."""

    def check(self) -> None:
        """Return where the folder is this run's own.  Raises `LaunchError` where it is another's by now."""
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
        now = _read_at(self.folder / OWNER)
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
            if self.owner.is_(_read_at(self.folder / OWNER)):
                os.utime(self.folder / OWNER)

    def to_json(self) -> dict[str, Any]:
        """The owner, for `of_json` in another process."""
        return asdict(self.owner)

    @classmethod
    def of_json(cls, folder: Path, owner: dict[str, Any]) -> Self:
        return cls(folder, FolderOwner(**owner))


@final
class FolderLock:
    """Makes this process the owner of a run's folder.  Use it on one rank, and say to the others how it went."""

    def __init__(self, folder: Path, *, silent_seconds: float = SILENT_SECONDS) -> None:
        """Say which folder.  Nothing is touched yet.

        Args:
            folder: made by `acquire`.
            silent_seconds: what passes at most between two events of the run.
        """
        self.folder = folder
        self._path = folder.absolute() / OWNER
        self._silent_seconds = max(silent_seconds, SILENT_SECONDS)
        self._descriptor: int | None = None
        self._token: FolderToken | None = None

    @property
    def token(self) -> FolderToken | None:
        """What the run's other processes are given; None before `acquire` and after `release`."""
        return self._token

    def acquire(self) -> str:
        """Become the owner, if this process is not yet.  Return a line on the last owner where that has ended without
        giving the folder back; else nothing.

        Raises:
            LaunchError: another process is the owner, or the folder is not writable.
        """
        if self._token is not None:
            return ""
        path = self._path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            started = time.monotonic()
            while (waited := time.monotonic() - started) < _CLOSING_SECONDS:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                try:
                    line = self._try(descriptor, path, waited)
                finally:
                    if self._descriptor is None:
                        os.close(descriptor)
                if line is not None:
                    return line
                time.sleep(_PAUSE_SECONDS)
        except OSError as error:
            raise LaunchError(
                f"{path} cannot be written: {error.strerror}. It says who writes in the run's folder: give a folder"
                " that is writable."
            ) from None
        last = _read_at(path)
        whose = f"that was left by {last}" if last is not None else "that does not say whose it is"
        raise LaunchError(
            f"{self.folder} is in use: a process holds its {OWNER}, {whose}. End that process (`fuser {path}` shows"
            f" it), or remove {path} if you know that nobody writes there."
        )

    def check(self) -> None:
        """Return where the folder is this process's; `acquire` it first, if that was not done.

        Raises:
            LaunchError: another owns it.
        """
        if self._token is None and (line := self.acquire()):
            logger.warning("%s", line)
        assert self._token is not None
        self._token.check()

    def beat(self) -> None:
        """Give a sign of life, if this process is the owner."""
        if self._token is not None:
            self._token.beat()

    def release(self) -> None:
        """Give the folder back.  Nothing happens where this process is not its owner."""
        descriptor, token = self._descriptor, self._token
        self._descriptor = self._token = None
        if descriptor is None or token is None:
            return
        with contextlib.suppress(OSError):
            if token.owner.is_(_read(descriptor)):
                _write(descriptor, replace(token.owner, ended=True))
        with contextlib.suppress(OSError):
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _try(self, descriptor: int, path: Path, waited: float) -> str | None:
        """Become the owner by an open file.  None: try again, for another has just made, removed or taken it."""
        locked = _lock(descriptor)
        last = _read(descriptor)
        if locked is False:
            if last is None or last.ended or last.is_gone or waited < _ENDING_SECONDS:
                return None
            raise self._in_use(last, "")
        if not _is_at(descriptor, path):
            return None
        line = self._judge(last, os.fstat(descriptor).st_mtime, locked=locked is not None)
        owner = FolderOwner(token=last.token + 1 if last is not None else 1, silent_seconds=self._silent_seconds)
        _write(descriptor, owner)
        if locked is None:  # two may be here at once: the one that wrote last
            time.sleep(_SETTLE_SECONDS)
            if not owner.is_(_read_at(path)):
                return None
        self._descriptor, self._token = descriptor, FolderToken(path.parent, owner)
        os.register_at_fork(after_in_child=_ForgetInChild(self))
        return line

    def _judge(self, last: FolderOwner | None, beat_at: float, *, locked: bool) -> str:
        """What is to be said of the last owner.  Raises where it may live, though this process has the lock."""
        if last is None or last.ended:
            return ""
        silent = max(time.time() - beat_at, 0.0)
        if locked and last.shares_kernel:
            why = "has ended"
        elif last.is_here:
            if not last.is_gone:
                raise self._in_use(last, "")
            why = "has ended"
        elif silent <= last.silent_seconds:
            raise self._in_use(
                last,
                f" Its process cannot be seen from host {socket.gethostname()}: its last sign of life is"
                f" {silent:,.0f} s old, and it counts as gone after {last.silent_seconds:,.0f} s. If you know that it"
                f" has ended, remove {self.folder / OWNER}.",
            )
        else:
            why = f"has given no sign of life for {silent:,.0f} s"
        return f"{self.folder} was left by {last}, which {why}: this run takes the folder over."

    def _in_use(self, owner: FolderOwner, more: str) -> LaunchError:
        stop = f"stop it (kill {owner.pid})" if owner.is_here and owner.pid != os.getpid() else "end it"
        return LaunchError(
            f"{self.folder} is in use by {owner}. Wait until that has ended, {stop}, or give another folder.{more}"
        )


class OwnerSink:
    """Lets the events of a run be its owner's signs of life."""

    def __init__(self, owner: FolderLock | FolderToken) -> None:
        self._owner = owner
        self._due_at = 0.0

    def take(self, emitted: Emitted) -> None:
        if (now := time.monotonic()) >= self._due_at:
            self._owner.beat()
            self._due_at = now + _BEAT_SECONDS

    def close(self) -> None:
        """The lock outlives the events."""


class _ForgetInChild:
    """Lets go of the open file in a forked process, such as a data worker: the lock ends with the owner alone."""

    def __init__(self, lock: FolderLock) -> None:
        self._lock = weakref.ref(lock)

    def __call__(self) -> None:
        lock = self._lock()
        descriptor = getattr(lock, "_descriptor", None)
        if lock is not None and descriptor is not None:
            lock._descriptor = lock._token = None  # pyright: ignore[reportPrivateUsage]
            os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether this process got the lock; None on a file system that has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one that has the name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> FolderOwner | None:
    return FolderOwner.read(os.pread(descriptor, _MOST_BYTES, 0))


def _read_at(path: Path) -> FolderOwner | None:
    """The owner that a file names, read again while it is being written."""
    for _ in range(_TRIES):
        try:
            with path.open("rb") as file:
                owner = FolderOwner.read(file.read(_MOST_BYTES))
        except OSError:
            return None
        if owner is not None:
            return owner
        time.sleep(_PAUSE_SECONDS)
    return None


def _write(descriptor: int, owner: FolderOwner) -> None:
    """Write an owner at once; a reader that meets the two records mixed reads again."""
    content = (json.dumps(asdict(owner), indent=1) + "\n").encode()
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))
    os.fsync(descriptor)


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may know no name for its user
        return str(os.getuid())


def _command() -> str:
    name, *rest = sys.argv or [""]
    words = ["python", *([name] if name else []), *rest] if name in ("", "-c") else [Path(name).name, *rest]
    return " ".join(words)[:_COMMAND_LETTERS]
