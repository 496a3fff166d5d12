"""A user's function as a sink of a session's events, called where the loop stands and not where the event was said."""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import suppress

from weft.events import Emitted, Event, OnEvent, Run


class Callback:
    """A sink that keeps the events of one model's run until somebody calls `deliver`."""

    def __init__(self, on_event: OnEvent, model: int) -> None:
        self._on_event, self._model = on_event, model
        self._waiting: deque[Event] = deque()
        self._is_delivering = False

    def take(self, emitted: Emitted) -> None:
        """See `Sink`.  From any thread, also in the middle of a collective call."""
        self._waiting.append(emitted.event)

    def close(self) -> None:
        """Nothing is held."""

    def deliver(self) -> None:
        """Call the function with what is waiting, in its order.  What it does itself is told after it; what it raises
        is raised here, and the rest goes on waiting."""
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._waiting:
                self._on_event(self._waiting.popleft(), self._model)
        finally:
            self._is_delivering = False

    def deliver_last(self) -> None:
        """`deliver` on the way out by an error, which is the one to be seen: what the function raises is a warning."""
        while self._waiting:
            try:
                self.deliver()
            except Exception as problem:
                with suppress(Warning):  # of a user who turns them into errors
                    text = f"on_event raised {type(problem).__name__}: {problem}, while the session ended by an error."
                    warnings.warn(text, stacklevel=2)


class CalledRun(Run):
    """What a state says things through: another run, whose callback then hears what has been said so far."""

    def __init__(self, run: Run, callback: Callback) -> None:
        super().__init__(run.rank)
        self._run, self._callback = run, callback

    def emit(self, event: Event) -> None:
        """Say something, and call the user's function; its errors are raised."""
        self._run.emit(event)
        self._callback.deliver()
