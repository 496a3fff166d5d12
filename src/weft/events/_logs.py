"""One log file per rank, and loggers as one more way into the run."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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
from weft.events._run import Emitted, Run

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


class _EventHandler(logging.Handler):
    """Makes events of log records."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).strip()
        kind = WarningEvent if record.levelno >= logging.WARNING else MessageEvent
        self._run.emit(kind(text=text, source=record.name))


@contextmanager
def loggers_to(run: Run, *, all_of_process: bool) -> Generator[None]:
    """Let Weft's loggers speak through `run`.  They are put back at the end, so that a notebook can train twice.

    With `all_of_process`, in a process that is Weft's own, details come, too, and nothing goes to other handlers.  In a
    user's process warnings come, of Weft's loggers and Python's own, and also go where they would have gone.
    """
    if all_of_process:
        with _all_loggers_to(_EventHandler(run)):
            yield
        return
    logger, show = logging.getLogger("weft"), warnings.showwarning
    handlers: list[logging.Handler] = [_EventHandler(run)]
    if not logger.hasHandlers() and logging.lastResort is not None:
        handlers.append(logging.lastResort)  # which logging leaves out where there is any handler
    for handler in handlers:
        logger.addHandler(handler)

    def show_and_emit(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        run.emit(WarningEvent(text=f"{category.__name__}: {message}", source="py.warnings"))
        show(message, category, *where, **options)

    warnings.showwarning = show_and_emit
    try:
        yield
    finally:
        if warnings.showwarning is show_and_emit:  # a context that the session lies in may have ended before
            warnings.showwarning = show
        for handler in handlers:
            logger.removeHandler(handler)


@contextmanager
def _all_loggers_to(handler: logging.Handler) -> Generator[None]:
    loggers = [logging.getLogger(name) for name in ("weft", "py.warnings")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
