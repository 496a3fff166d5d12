"""One log file per rank by the standard `logging`; rank 0 besides speaks to the person at the terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_LOGGERS = ("weft", "py.warnings")


class RankFilter(logging.Filter):
    """Puts the rank into every record, for formats with `%(rank)d`."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True


class _PatientFileHandler(logging.FileHandler):
    """A log that loses lines on a full disk instead of filling the terminal with tracebacks; it counts them."""

    dropped: int = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        if isinstance(sys.exc_info()[1], OSError):
            self.dropped += 1
        else:
            super().handleError(record)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self.dropped += 1

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # what is still buffered cannot be written; the handler is closed nevertheless
            self.dropped += 1


@contextmanager
def rank_logging(path: Path, rank: int, *, level: int = logging.INFO) -> Generator[None]:
    """Log Weft's messages and Python's warnings to `path`; on rank 0, warnings and worse also to stderr, undecorated.

    Handlers and levels are put back at the end, so that a notebook can train twice.
    """
    to_file = _PatientFileHandler(path, mode="a", encoding="utf-8", delay=True)
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ rank %(rank)d %(levelname)s %(name)s: %(message)s")
    formatter.datefmt, formatter.converter = "%Y-%m-%dT%H:%M:%S", time.gmtime
    to_file.setFormatter(formatter)
    to_file.addFilter(RankFilter(rank))
    handlers: list[logging.Handler] = [to_file]
    if rank == 0:
        to_person = logging.StreamHandler(sys.stderr)
        to_person.setFormatter(logging.Formatter("%(message)s"))
        to_person.setLevel(logging.WARNING)
        handlers.append(to_person)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
        logger.propagate = False
        for handler in handlers:
            logger.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, (old_level, propagate) in zip(loggers, before, strict=True):
            logger.level, logger.propagate = old_level, propagate
            for handler in handlers:
                logger.removeHandler(handler)
        to_file.close()
