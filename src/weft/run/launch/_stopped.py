"""Watches for processes of a job that a signal has stopped (SIGSTOP).  After a second a warning names such a process;
when it has been stopped for as long as collectives wait, the run ends.

A stopped process cannot report itself, and ranks that wait for it only know that it is late.  So the launcher asks the
operating system.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from weft.process import children_of, is_stopped

POLL_SECONDS = 0.5
_WARN_AFTER_SECONDS = 1.0


@dataclass(slots=True)
class _Stopped:
    who: str
    pid: int
    rank: int
    since: float
    is_reported: bool = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def __str__(self) -> str:
        return f"{self.who} (pid {self.pid}) on host {socket.gethostname()}"


@dataclass(slots=True)
class StoppedProcesses:
    """The processes of a job that are stopped now, with warnings about them."""

    stopped_timeout_seconds: float
    warn: Callable[[str], object]
    fork_server: int = 0
    """Pid of the process that forks the parents of ranks.  Nobody has a reason to stop these processes, so the launcher
    continues them."""
    ranks: dict[int, int] = field(default_factory=dict[int, int])
    """Rank → pid."""
    _stopped: dict[int, _Stopped] = field(default_factory=dict[int, _Stopped])

    def started(self, rank: int, pid: int) -> None:
        """Take note of a rank that is there now."""
        self.ranks[rank] = pid

    def ended(self, rank: int) -> None:
        """Forget a rank."""
        self.ranks.pop(rank, None)

    def poll(self) -> None:
        """Ask the system which processes are stopped, and warn of what is new."""
        self.continue_parents(say=True)
        # A process that was stopped before keeps its first record, and with it the time since when it is stopped.
        stopped_now = {one.pid: one for one in self._stopped_now()}
        for pid, before in self._stopped.items():
            if pid not in stopped_now and before.is_reported and os.path.exists(f"/proc/{pid}"):
                self.warn(f"{before} goes on after {before.seconds:.1f} s.")
        self._stopped = {pid: self._stopped.get(pid, one) for pid, one in stopped_now.items()}
        for one in self._stopped.values():
            if not one.is_reported and one.seconds >= _WARN_AFTER_SECONDS:
                one.is_reported = True
                left = max(0.0, self.stopped_timeout_seconds - one.seconds)
                self.warn(
                    f"{one} was stopped by a signal (SIGSTOP), and the others wait for it. Continue it with: kill -CONT"
                    f" {one.pid}. Otherwise the run ends in {left:.0f} s (compute.collective_timeout_seconds)."
                )

    def continue_parents(self, *, say: bool = False) -> None:
        """Continue a stopped fork server or parent of ranks: without them the launcher would not see how ranks end."""
        for pid in (self.fork_server, *children_of(self.fork_server)) if self.fork_server else ():
            if is_stopped(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                if say:
                    what = f"the process that starts the ranks (pid {pid})"
                    self.warn(f"{what} was stopped by a signal, and has been continued.")

    def cause(self) -> str | None:
        """Return the report of a run that ends because a process is stopped; None if none is stopped."""
        now = {one.pid: one for one in self._stopped_now()}
        first = min(now.values(), key=lambda one: self._stopped.get(one.pid, one).since, default=None)
        if first is None:
            return None
        first = self._stopped.get(first.pid, first)
        return (
            f"{first} was stopped by a signal (SIGSTOP), and the others waited for it in vain, so the run has ended."
            f" Continue a stopped process with kill -CONT {first.pid} before collectives time out (a plan's"
            " compute.collective_timeout_seconds). What was saved is kept; the run can be resumed."
        )

    def rank_of_cause(self) -> int:
        """The rank that is stopped, or whose child is."""
        return next((one.rank for one in self._stopped_now()), 0)

    @property
    def is_timed_out(self) -> bool:
        """Whether one has been stopped for longer than collectives wait."""
        return any(one.seconds > self.stopped_timeout_seconds for one in self._stopped.values())

    def _stopped_now(self) -> Iterator[_Stopped]:
        now = time.monotonic()
        for rank, pid in self.ranks.items():
            if is_stopped(pid):
                yield _Stopped(f"rank {rank}", pid, rank, now)
            for child in children_of(pid):
                if is_stopped(child):
                    yield _Stopped(f"a process that rank {rank} has started", child, rank, now)
