"""Warnings, and how ranks ended, on a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from weft.events._events import FailureEvent, WarningEvent
from weft.events._run import Emitted
from weft.events._sinks import Listening


class WarningSink:
    """Prints warnings, undecorated, and with `failures` how ranks ended."""

    def __init__(self, stream: TextIO | None = None, *, failures: bool = False) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._failures = failures

    def take(self, emitted: Emitted) -> None:
        event = emitted.event
        if isinstance(event, WarningEvent) or (self._failures and isinstance(event, FailureEvent)):
            print(event.text, file=self._stream, flush=True)

    def close(self) -> None:
        """The stream stays open."""


def create(run: Listening) -> WarningSink | None:
    """See `weft.events.sinks`."""
    return WarningSink() if run.prints_warnings and run.rank == 0 else None
