"""The end of a job of ranks, and the error that its caller gets."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import weft.errors
from weft.errors import LaunchError, WeftError
from weft.events.progress import Position
from weft.run.launch._job import RankExit as RankExit
from weft.run.launch._report import report

HANG = "Hang"
"""`RankExit.error` of a rank whose step made no progress, which the launcher has noticed and ended."""
HOST_LOST = "HostLost"
"""`RankExit.error` of the first rank of a host that is gone."""
PARENT_LOST = "ParentLost"
"""`RankExit.error` where the process that started the ranks was killed."""


class RankError(LaunchError):
    """A rank stopped with an error that is none of Weft's; its text is the whole report."""

    def __init__(self, text: str, *, rank: int, host: str, kind: str, status: int = 1) -> None:
        super().__init__(text, status=status)
        self.rank = rank
        self.host = host
        self.kind = kind
        """Type of the rank's exception, or how it died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """The end of a job: of its ranks on this host, or of all."""

    num_processes: int
    outcomes: Mapping[int, RankExit | None]
    """Rank → its exit as it reported it; None: it ended without a report."""
    cause: RankExit | None
    """Exit of the rank that failed first; None if all ended well."""
    was_ended: bool = False
    """Whether these ranks were killed because those of another host could not go on: the cause is there."""
    signals: tuple[signal.Signals, ...] = ()
    """Signals that this process got and passed on while the ranks ran."""
    has_failed_rank: bool = False
    """Whether a rank had an exit status other than 0."""
    positions: Mapping[int, Position] = field(default_factory=dict[int, Position])
    """Rank → its position in the training when it ended; ranks that do not train are absent."""

    @property
    def has_left_to_go_on(self) -> bool:
        """Whether all ranks have ended with status 75: everything is saved, for a next generation or another day."""
        return all(exit is not None and exit.status == os.EX_TEMPFAIL for exit in self.outcomes.values())

    @property
    def values(self) -> list[Any]:
        """Return values of the function, by rank."""
        outcomes = (self.outcomes[rank] for rank in sorted(self.outcomes))
        return [outcome.value for outcome in outcomes if outcome is not None]

    def report(self, logs: Path | None = None) -> str:
        """The first cause in a few lines: rank, host, error, and where it was raised.  `logs` is the folder with what
        the ranks have printed, where that was kept."""
        assert self.cause is not None
        if self.cause.error in (signal.SIGSTOP.name, PARENT_LOST, HOST_LOST):
            return self.cause.message
        return report(self.cause, self.num_processes, logs)

    def raise_cause(self, reason: str = "", *, is_user_function: bool = False) -> None:
        """Raise what the job failed by; return where it did not.

        Args:
            reason: a sentence that follows the error: why the run does not go on.
            is_user_function: the function is the user's own, so every error is shown with the line that raised it.

        Raises:
            WeftError: the one that a rank raised, of its own class.
            RankError: a rank died, or raised an error of another kind.
            LaunchError: the process that started the ranks was killed.
            KeyboardInterrupt: Ctrl-C ended the ranks.
        """
        if signal.SIGINT in self.signals and self.has_failed_rank:
            raise KeyboardInterrupt
        cause = self.cause
        if cause is None:
            return
        reason = f"\n{reason}" if reason else ""
        if cause.error == PARENT_LOST:
            raise LaunchError(cause.message + reason)
        rank, host = cause.rank, cause.host
        if cause.error in (signal.SIGSTOP.name, HOST_LOST):
            raise RankError(cause.message + reason, rank=rank, host=host, kind=cause.error)
        if self.signals:
            name = self.signals[0].name
            status = os.EX_TEMPFAIL if self.signals[0] == signal.SIGTERM else 128 + self.signals[0]
            text = f"stopped by {name} before a step could be finished and saved."
            raise RankError(text, rank=rank, host=host, kind=name, status=status)
        if is_user_function or not cause.is_weft_error:
            text = report(cause, self.num_processes, None) + reason
            status = cause.weft_status if cause.is_weft_error else 1
            raise RankError(text, rank=rank, host=host, kind=cause.error or "died", status=status)
        kind = getattr(weft.errors, cause.error or "", WeftError)
        everywhere = all(one is not None and one.message == cause.message for one in self.outcomes.values())
        message = cause.message if everywhere else f"rank {cause.rank} on host {cause.host}: {cause.message}"
        raise kind(message + reason, status=cause.weft_status)
