"""What the supervisor says to its ranks: that one of them has failed, so that nobody waits for it any longer.

The ranks' parent learns within milliseconds that a rank has ended badly.  It writes a line into a FIFO of every other
rank, where a thread reads it and lets go of whatever the rank waits for.
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

_AGAIN_SECONDS = 0.2
"""After which it is looked for groups that were only being made when the word came."""
_MOST_CHARACTERS = 300
"""Of what is said: a line must go into a FIFO in one piece."""
_OVER = b"\n"
"""What a listener says to itself."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank that has failed."""

    rank: int
    how: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


def word_path(folder: Path, rank: int) -> Path:
    """Where a rank hears of the others."""
    return folder / f"word{rank}"


def open_words(folder: Path, num_processes: int) -> list[int]:
    """Make the FIFOs of all ranks and return the supervisor's ends, which lose nothing that is said before a rank
    listens."""
    words: list[int] = []
    for rank in range(num_processes):
        os.mkfifo(word_path(folder, rank), 0o600)
        words.append(os.open(word_path(folder, rank), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    return words


def how_it_ended(code: int) -> str:
    """Of an exit code that is not 0; negative: the signal that killed the rank."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def tell(words: Iterable[int], lost: Lost) -> None:
    """Say into open FIFOs that a rank has failed."""
    line = json.dumps([lost.rank, lost.how[:_MOST_CHARACTERS]]).encode() + b"\n"
    for word in words:
        with suppress(BlockingIOError):  # a rank that has not read hundreds of words knows enough
            os.write(word, line)


def tell_others(folder: Path, num_processes: int, lost: Lost) -> None:
    """Say to all ranks but the one that failed, which is this process and can say why, that it has."""
    for rank in range(num_processes):
        with suppress(OSError):  # nobody listens any more
            word = os.open(word_path(folder, rank), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                tell([word], lost)
            finally:
                os.close(word)


class Listener:
    """Hears the supervisor in a thread of its own, and calls `let_go` with the first rank that it names: again and
    again, until it is closed, because groups may be in the making."""

    def __init__(self, path: str, rank: int, let_go: Callable[[Lost], object]) -> None:
        self._rank = rank
        self._let_go = let_go
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._lost: Lost | None = None
        self._has_heard = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="weft-supervisor", daemon=True)
        self._thread.start()

    def lost(self, patience_seconds: float = 0.0) -> Lost | None:
        """The first other rank that failed, as far as it is known after some time."""
        self._has_heard.wait(patience_seconds)
        return self._lost

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        os.write(self._descriptor, _OVER)
        self._thread.join()
        os.close(self._descriptor)

    def _listen(self) -> None:
        with os.fdopen(os.dup(self._descriptor), "rb", buffering=0) as words:
            while not self._is_over.is_set():
                line = words.readline().strip()
                if not line:
                    continue
                rank, how = json.loads(line)
                if rank == self._rank:
                    continue
                self._lost = Lost(rank, how)
                self._has_heard.set()
                self._let_go(self._lost)
                while not self._is_over.wait(_AGAIN_SECONDS):
                    self._let_go(self._lost)


@contextmanager
def listening(path: str | None, rank: int, let_go: Callable[[Lost], object]) -> Generator[Listener | None]:
    """Listen inside; None where there is no supervisor that could say something."""
    if path is None or not os.path.exists(path):
        yield None
        return
    listener = Listener(path, rank, let_go)
    try:
        yield listener
    finally:
        listener.close()
