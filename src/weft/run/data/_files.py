"""A folder that one process at a time writes into."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import DataError

_POLL_SECONDS = 0.1


def make_folder(folder: Path) -> None:
    """Create a folder and its parents.

    Raises:
        DataError: It cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    except OSError as error:
        raise DataError(
            f"Prepared data cannot be written to {folder}: {error.strerror}. Set data.cache to a folder you may write."
        ) from error


@contextmanager
def locked(folder: Path, waiting: Callable[[], None]) -> Generator[int, None, None]:
    """Hold the folder's lock and give its descriptor; call `waiting` once if another process has the lock.

    The system releases it when the last process that has the descriptor dies.  Helpers inherit it, so that nobody else
    enters while the helpers of a killed process still write.
    """
    with (folder / ".lock").open("a") as stream:
        is_reported = False
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_reported:
                    waiting()
                    is_reported = True
                time.sleep(_POLL_SECONDS)
        yield stream.fileno()


def remove_strays(folder: Path) -> None:
    """Delete what a killed process left half written.  Hold the lock."""
    for path in folder.glob("*.tmp"):
        path.unlink(missing_ok=True)
