"""Delivers the events of a rank to its sinks, in one order."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from weft.events._events import Event, FailureEvent, WarningEvent


@dataclass(frozen=True, slots=True)
class Emitted:
    """An event with its sender and its time."""

    event: Event
    rank: int | None
    """None for the launcher."""
    number: int
    """Number of the event among those of this run on this rank, from 0."""
    unix_time_seconds: float


class Sink(Protocol):
    """A receiver of a run's events: a file, a terminal, a page, a supervisor."""

    def take(self, emitted: Emitted) -> None:
        """Take one event.  The run waits: do little.  One that raises is asked no more."""
        ...

    def close(self) -> None:
        """No more events come."""
        ...


class Run:
    """The events of one rank, or of the launcher.  Any thread may emit.

    Every sink gets every event, in one order, before `emit` returns; what a sink emits itself comes after.  A sink that
    raises is closed and left out from then on, and the others hear of it in a `WarningEvent`.
    """

    def __init__(self, rank: int | None, sinks: Sequence[Sink] = ()) -> None:
        self.rank = rank
        self._sinks = list(sinks)
        self._waiting: deque[Emitted] = deque()
        self._lock = threading.RLock()
        self._is_delivering = False
        self._count = 0
        self._process = os.getpid()

    def attach(self, sink: Sink) -> None:
        """Let another sink listen, from now on."""
        with self._lock:
            self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Say something to all sinks.  Never raises for a sink's sake."""
        if os.getpid() != self._process:
            self._begin_in_child()
        with self._lock:
            # A sink that emits is inside of this very loop (the lock lets its thread in): its event waits for its turn,
            # so that all sinks get events in one order.
            self._waiting.append(Emitted(event, self.rank, self._count, time.time()))
            self._count += 1
            if self._is_delivering:
                return
            self._is_delivering = True
            try:
                while self._waiting:
                    self._deliver(self._waiting.popleft())
            finally:
                self._is_delivering = False

    def fail(self, error: BaseException) -> None:
        """Emit the error that this rank ends with."""
        text = str(error).strip()
        self.emit(FailureEvent(error=type(error).__name__, text=text, rank=self.rank or 0, host=socket.gethostname()))

    def close(self) -> None:
        """Close the sinks.  What is emitted later is heard by nobody."""
        with self._lock:
            sinks, self._sinks = self._sinks, []
            for sink in sinks:
                self._close(sink)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_in_child(self) -> None:
        """Start anew in a forked child, such as a data worker: in the parent another thread may have held the lock."""
        self._lock, self._is_delivering, self._process = threading.RLock(), False, os.getpid()
        self._waiting.clear()

    def _deliver(self, emitted: Emitted) -> None:
        for sink in tuple(self._sinks):
            try:
                sink.take(emitted)
            except Exception as problem:  # a listener's fault is none of the run's
                self._leave_out(sink, problem)

    def _leave_out(self, sink: Sink, problem: Exception) -> None:
        self._sinks.remove(sink)
        self._close(sink)
        name, kind = type(sink).__name__, type(problem).__name__
        self.emit(WarningEvent(text=f"{name} hears no more of this run: it raised {kind}: {problem}", source=__name__))

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as problem:
            text = f"{type(sink).__name__} was not closed: {type(problem).__name__}: {problem}"
            self.emit(WarningEvent(text=text, source=__name__))
