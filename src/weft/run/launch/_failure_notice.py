"""Failure notices: the launcher says to its ranks that one of them has failed, so that nobody waits for it any longer.

The ranks' parent learns within milliseconds that a rank has ended badly.  It writes a line into a FIFO of every other
rank, where a thread reads it and ends whatever wait the rank is in.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_REPEAT_SECONDS = 0.2
"""Interval at which a listener calls `on_failure` again: groups may have been in the making when the notice came."""
_MAX_CHARACTERS = 300
"""Length to which a notice is cut: a line must go into a FIFO in one piece."""
_WAKE = b"\n"
"""Line that a listener writes to itself so that its thread ends."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank that has failed."""

    rank: int
    how: str
    """The rest of a sentence about its end, such as `was killed by SIGKILL`."""

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


def failure_pipe_path(folder: Path, rank: int) -> Path:
    """Return the FIFO in which a rank hears of the others."""
    return folder / f"failures{rank}"


def open_failure_pipes(folder: Path, ranks: Iterable[int]) -> dict[int, int]:
    """Make the FIFOs of all ranks and return the launcher's ends by rank, which lose nothing that is written before a
    rank listens."""
    pipes: dict[int, int] = {}
    for rank in ranks:
        os.mkfifo(failure_pipe_path(folder, rank), 0o600)
        # O_RDWR: opening for writing alone fails without a reader, and content is dropped when the last end closes.
        pipes[rank] = os.open(failure_pipe_path(folder, rank), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    return pipes


def describe_exit(code: int) -> str:
    """Say in words what an exit code other than 0 means; negative: the signal that killed the rank."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def notify(pipes: Iterable[int], failure: RankFailure) -> None:
    """Write into open FIFOs that a rank has failed."""
    line = json.dumps([failure.rank, failure.how[:_MAX_CHARACTERS]]).encode() + b"\n"
    for pipe in pipes:
        with suppress(BlockingIOError):  # a rank that has not read hundreds of notices knows enough
            os.write(pipe, line)


def notify_other_ranks(folder: Path, ranks: Iterable[int], failure: RankFailure) -> None:
    """Notify all ranks of this host that this one has failed.  Called in the failed rank, which alone knows why."""
    for rank in ranks:
        with suppress(OSError):  # nobody listens any more
            pipe = os.open(failure_pipe_path(folder, rank), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                notify([pipe], failure)
            finally:
                os.close(pipe)


class FailureListener:
    """Reads failure notices in a thread of its own, and calls `on_failure` with the first rank that is named: again and
    again, until it is closed, because groups may be in the making."""

    def __init__(self, pipe: str, rank: int, on_failure: Callable[[RankFailure], object]) -> None:
        self._rank = rank
        self._on_failure = on_failure
        self._descriptor = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)  # O_RDWR: the thread never meets an end of file
        self._failure: RankFailure | None = None
        self._is_notified = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="weft-supervisor", daemon=True)
        self._thread.start()

    def failure(self, timeout_seconds: float = 0.0) -> RankFailure | None:
        """The first other rank that failed, as far as it is known after some time."""
        self._is_notified.wait(timeout_seconds)
        return self._failure

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        os.write(self._descriptor, _WAKE)
        self._thread.join()
        os.close(self._descriptor)

    def _listen(self) -> None:
        with os.fdopen(os.dup(self._descriptor), "rb", buffering=0) as notices:
            while not self._is_over.is_set():
                line = notices.readline().strip()
                if not line:
                    continue
                rank, how = json.loads(line)
                if rank == self._rank:  # a rank that fails notifies itself, too
                    continue
                # The first notice counts: later ones are of ranks that failed because of it.
                self._failure = RankFailure(rank, how)
                self._is_notified.set()
                self._on_failure(self._failure)
                while not self._is_over.wait(_REPEAT_SECONDS):
                    self._on_failure(self._failure)


@contextmanager
def listening_for_failures(
    pipe: str | None, rank: int, on_failure: Callable[[RankFailure], object]
) -> Generator[FailureListener | None]:
    """Listen inside; None where there is no launcher that could say something."""
    if pipe is None or not os.path.exists(pipe):
        yield None
        return
    listener = FailureListener(pipe, rank, on_failure)
    try:
        yield listener
    finally:
        listener.close()
