"""Values that only the job's own hosts can have written: each carries a code that needs the job's secret.

The secret lies in the run's folder, readable by its user alone.  Whoever reaches the registry may delete or repeat what
is there, and so disturb a job; nobody can make it obey.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Any, final

from weft.errors import LaunchError
from weft.run.hosts.registry import MOST_BYTES

SECRET = "job-secret"
"""File of the secret in a run's folder."""
_SECRET_BYTES = 32
_WAIT_SECONDS = 10.0


@final
class JobSecret:
    """The secret of one run's folder."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def of_folder(cls, folder: Path) -> JobSecret:
        """Read the secret in a run's folder, or draw one where there is none.  Any number of hosts may call this at
        once; all get the same.

        Raises:
            LaunchError: the file is another user's, or others can read it.
        """
        path = folder / SECRET
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return cls(_read(path))
        except OSError as error:
            raise LaunchError(f"{path} cannot be written: {error.strerror}. All hosts need the folder.") from None
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        return cls(_read(path))

    def of_meeting(self, mark: str) -> JobSecret:
        """The secret of one meeting of the job's hosts: what was signed at an earlier one does not hold there."""
        return JobSecret(hmac.new(self._secret, f"meeting {mark}".encode(), hashlib.sha256).digest())

    def key(self, purpose: str) -> bytes:
        """A key for connections of the job's hosts that serve one purpose; it tells nothing of the secret."""
        return hmac.new(self._secret, f"key {purpose}".encode(), hashlib.sha256).digest()

    @property
    def job(self) -> str:
        """A name of the job that tells nothing of the secret."""
        return hashlib.sha256(b"job " + self._secret).hexdigest()[:16]

    def sign(self, place: str, content: dict[str, Any]) -> str:
        """Return the text of a value that is to stand in a place of the registry: at another it does not hold."""
        body = json.dumps(content, separators=(",", ":"))
        text = json.dumps([self._code(place, body), body])
        if len(text) > MOST_BYTES:
            raise LaunchError(f"{len(text):,} bytes are too many for a value that hosts exchange ({MOST_BYTES:,}).")
        return text

    def open(self, place: str, text: str) -> dict[str, Any] | None:
        """Return what was signed for this place; None where nobody with the secret has."""
        try:
            code, body = json.loads(text) if len(text) <= MOST_BYTES else (None, None)
        except (ValueError, TypeError, RecursionError):
            return None
        if not isinstance(code, str) or not isinstance(body, str):
            return None
        if not hmac.compare_digest(code.encode(), self._code(place, body).encode()):
            return None
        content = json.loads(body)
        return content if isinstance(content, dict) else None  # pyright: ignore[reportUnknownVariableType]

    def _code(self, place: str, body: str) -> str:
        return hmac.new(self._secret, f"{place}\0{body}".encode(), hashlib.sha256).hexdigest()


def _read(path: Path) -> bytes:
    """Read a secret that another host may be writing just now."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                status, content = os.fstat(file.fileno()), file.read(1024)
        except OSError as error:
            raise LaunchError(f"{path} cannot be read: {error.strerror}.") from None
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise LaunchError(f"{path} must belong to you and be readable by nobody else (chmod 600 {path}).")
        if len(content) == 2 * _SECRET_BYTES:
            return content
        if time.monotonic() > deadline:
            raise LaunchError(f"{path} holds no secret of a job. Remove it, and start the hosts again.")
        time.sleep(0.05)
