"""One log file per rank."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from weft.events._events import (
    CheckpointEvent,
    EvaluationEvent,
    Event,
    FailureEvent,
    MessageEvent,
    StepEvent,
    WarningEvent,
)
from weft.events._format import text_of
from weft.events._run import Emitted
from weft.events._sinks import Listening

_LEVELS: dict[type[Event], str] = {
    MessageEvent: "INFO",
    EvaluationEvent: "INFO",
    CheckpointEvent: "INFO",
    StepEvent: "INFO",
    WarningEvent: "WARNING",
    FailureEvent: "ERROR",
}


class LogSink:
    """Appends what a rank says to its log, a line for each event that has words.

    The file comes with the first line.  A full disk costs lines, of which the terminal hears nothing, for it is there
    for the training: the next line that finds room says how many.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        """Lines that could not be written."""
        self._untold = 0
        self._begun = False
        """Whether the last line was written in part."""
        self._descriptor: int | None = None

    def take(self, emitted: Emitted) -> None:
        words = text_of(emitted.event)
        if words is None:
            return
        event, seconds = emitted.event, emitted.unix_time_seconds
        who = "launcher" if emitted.rank is None else f"rank {emitted.rank}"
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
        source = event.source if isinstance(event, MessageEvent | WarningEvent) else "weft"
        line = f"{when} {who} {_LEVELS.get(type(event), 'INFO')} {source}: {words}\n"
        if self._untold:
            line = f"{when} {who} WARNING weft: {self._untold} lines before this one found no room\n{line}"
        self._append((b"\n" if self._begun else b"") + line.encode())

    def _append(self, line: bytes) -> None:
        written = 0
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            written = os.write(self._descriptor, line)
        except OSError:
            pass
        self._begun = 0 < written < len(line) or (self._begun and not written)
        lost = written < len(line)
        self.dropped += lost
        self._untold = self._untold + 1 if lost else 0

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def create(run: Listening) -> LogSink | None:
    """See `weft.events.sinks`."""
    return None if run.folder is None else LogSink(run.folder.log(run.rank))
