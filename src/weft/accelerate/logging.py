"""A logger that says things once for all processes."""

from __future__ import annotations

import logging
from typing import Any, final

from weft.accelerate._job import open_job


@final
class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """Logs on rank 0, unless `main_process_only=False`; with `in_order=True` one rank after another."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """See the class."""
        job = open_job()
        main, ordered = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        rank, ranks = (0, 1) if job is None else (job.session.rank, job.session.world_size)
        kwargs.setdefault("stacklevel", 2)
        for turn in range(ranks) if ordered and not main else [rank]:
            if turn == rank and (rank == 0 or not main):
                self.logger.log(level, msg, *args, **kwargs)
            if ordered and not main and job is not None:
                job.session.wait()

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, unless it was said before."""
        said: set[str] = self.__dict__.setdefault("_said", set())
        if (text := repr(args)) not in said:
            said.add(text)
            self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger of that name."""
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return MultiProcessAdapter(logger, {})
