"""Becoming the owner of a run's folder; `weft.events` has what processes need that are told of an owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self, final

from weft.errors import LaunchError
from weft.events._owner import MOST_BYTES, OWNER, PAUSE_SECONDS, SILENT_SECONDS, FolderOwner, FolderToken, read_owner

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_ENDING_SECONDS = 0.5
"""A process that has just been sent a signal may not know it yet."""
_CLOSING_SECONDS = 20.0
"""Longest time that the system takes to close the files of a large process that has ended."""
_SETTLE_SECONDS = 0.3


@final
class FolderLock:
    """Makes this process the owner of a run's folder.  Use it on one rank, and say to the others how it went."""

    def __init__(self, folder: Path, *, silent_seconds: float = SILENT_SECONDS, beats: bool = False) -> None:
        """Say which folder.  Nothing is touched yet.

        Args:
            folder: made by `acquire`.
            silent_seconds: what passes at most between two events of the run.
            beats: whether this process calls `beat` several times within `silent_seconds`, whatever the run does.
                Otherwise an owner counts as gone after 20 minutes at the earliest.
        """
        self.folder = folder
        self._path = folder.absolute() / OWNER
        self._silent_seconds = silent_seconds if beats else max(silent_seconds, SILENT_SECONDS)
        self._watched: tuple[str, float, float] | None = None
        """Nonce and last sign of life of an owner that beats, and when it was seen first by this process's clock."""
        self._descriptor: int | None = None
        self._token: FolderToken | None = None
        self._renewing = threading.Lock()

    @property
    def token(self) -> FolderToken | None:
        """The right to write that the run's other processes are given; None before `acquire` and after `release`."""
        return self._token

    def acquire(self, *, is_lost: Callable[[], bool] | None = None) -> str:
        """Become the owner, if this process is not yet.  Return a line on the last owner where that has ended without
        giving the folder back; else nothing.  `is_lost` says whether the owner is known to be gone, by better evidence
        than the folder has.

        Raises:
            LaunchError: another process is the owner, or the folder is not writable.
        """
        if self._token is not None:
            return ""
        path = self._path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_lost is not None and is_lost():
                # The lost host may seem to hold the file's lock for a while: the new owner's is another file.
                self._replace(path)
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
                time.sleep(PAUSE_SECONDS)
        except OSError as error:
            raise LaunchError(
                f"{path} cannot be written: {error.strerror}. It says who writes in the run's folder: give a folder"
                " that is writable."
            ) from None
        last = read_owner(path)
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
        with self._renewing:  # the file and the token change together
            assert self._token is not None
            self._token.check()

    def renew(self) -> None:
        """Take the next token: whoever was given the one before can name no checkpoint any more.  Call it on the owner
        before ranks start again.

        Raises:
            LaunchError: another owns the folder by now.
        """
        assert self._token is not None
        assert self._descriptor is not None
        self._token.check()
        owner = replace(self._token.owner, token=self._token.owner.token + 1, nonce=os.urandom(8).hex())
        with self._renewing:
            _write(self._descriptor, owner)
            self._token = FolderToken(self._path.parent, owner)

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
        # Opened, locked, and only then compared with the name: a file that was removed in between would be locked by
        # nobody else, and two processes could own one folder.
        locked = _lock(descriptor)
        last = _read(descriptor)
        if locked is False:
            # The lock of an owner that is ending may outlive its process for a moment, as may a fork's copy of the
            # file.
            if last is None or last.ended or last.is_gone or waited < _ENDING_SECONDS:
                return None
            raise self._in_use(last, "")
        if not _is_at(descriptor, path):
            return None
        line = self._judge(last, os.fstat(descriptor).st_mtime, locked=locked is not None)
        if line is None:
            return None
        owner = FolderOwner(token=last.token + 1 if last is not None else 1, silent_seconds=self._silent_seconds)
        _write(descriptor, owner)
        if locked is None:  # two may be here at once: the one that wrote last
            time.sleep(_SETTLE_SECONDS)
            if not owner.is_(read_owner(path)):
                return None
        self._descriptor, self._token = descriptor, FolderToken(path.parent, owner)
        # A forked child has the same open file, and with it the lock: it must not keep it when the owner ends.
        os.register_at_fork(after_in_child=_ForgetInChild(self))
        return line

    def _replace(self, path: Path) -> None:
        """Put a new file in the place of the owner's, with the same content: it has no lock."""
        last = read_owner(path)
        if last is not None:
            new = path.with_name(f"{OWNER}.{os.urandom(4).hex()}")
            new.write_text(json.dumps(asdict(replace(last, ended=True)), indent=1) + "\n")
            new.replace(path)

    def _silence(self, last: FolderOwner, beat_at: float) -> float:
        """Seconds since the last sign of life of an owner on another host."""
        if last.silent_seconds >= SILENT_SECONDS:
            return max(time.time() - beat_at, 0.0)
        # So short a time cannot be told by two hosts' clocks.  This process watches whether the sign changes.
        now = time.monotonic()
        if self._watched is None or self._watched[:2] != (last.nonce, beat_at):
            self._watched = last.nonce, beat_at, now
        return now - self._watched[2]

    def _judge(self, last: FolderOwner | None, beat_at: float, *, locked: bool) -> str | None:
        """Return a sentence about the last owner; None: it must be watched for longer.  Raises where it may live,
        though this process has the lock."""
        if last is None or last.ended:
            return ""
        before = self._watched
        silent = self._silence(last, beat_at)
        # Three kinds of evidence, the surest first: this kernel's lock; the process table of this machine and
        # container; and, for another host, silence alone.
        if locked and last.shares_kernel:
            why = "has ended"
        elif last.is_here:
            if not last.is_gone:
                raise self._in_use(last, "")
            why = "has ended"
        elif silent <= last.silent_seconds and last.silent_seconds < SILENT_SECONDS and before in (None, self._watched):
            return None
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
    return FolderOwner.read(os.pread(descriptor, MOST_BYTES, 0))


def _write(descriptor: int, owner: FolderOwner) -> None:
    """Write an owner at once; a reader that meets the two records mixed reads again."""
    content = (json.dumps(asdict(owner), indent=1) + "\n").encode()
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))
    os.fsync(descriptor)
