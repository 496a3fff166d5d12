"""Loggers as one more way into a run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from weft.events._events import MessageEvent, WarningEvent
from weft.events._run import Run


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
    # Python's last resort prints warnings where nobody has set up logging; a handler of ours would silence it.
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
