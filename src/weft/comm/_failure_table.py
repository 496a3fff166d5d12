"""Who is missing: ranks that give up leave word in the group's store for whom they waited; who leaves none is missing.

A rank on a ring sees only that its neighbour sends nothing, while the neighbour waits for its own.  Each of them
reports; whoever is waited for and does not report within a grace is the cause.

The store has a host, often rank 0.  Where that one is missing, nobody can report, and a rank knows only for whom it
waits itself: then the errors say so.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch.distributed as dist

Reason = Literal["deadline", "closed", "alarm"]
"""A peer sent nothing in time; its connection broke; another rank has given up."""
State = Literal["there", "gone", "silent"]
"""It answers; its host has closed the connection; it has not answered yet."""
_STORE_SECONDS = 0.5
"""Time to wait for a store that says nothing."""
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class FailureReport:
    """What a rank says when it gives up."""

    waits_for: tuple[int, ...]
    """Ranks within the group."""
    reason: Reason


@dataclass(slots=True)
class FailureTable:
    """Where the ranks of a group leave their last words: after the first the group is of no use.

    The store may go while it is needed, because the rank that served it has died; and it may fall silent, because that
    rank is stopped.  Nothing here waits for it longer than it says: torch's TCPStore would, without end.
    """

    store: dist.Store
    prefix: str
    members: int
    state: State = "there"
    """State of the store, when it was last asked."""
    _known: dict[int, FailureReport] = field(default_factory=dict[int, "FailureReport"])
    """The reports that have been read so far."""
    _asking: threading.Thread | None = None
    """Ends, where the store is silent, when its host goes on or goes away."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def has_alarm(self) -> bool:
        """Whether some rank has given up.  Returns within half a second."""
        return self._ask(lambda: self.store.check([f"{self.prefix}/alarm"]), False)

    def leave(self, rank: int, report: FailureReport) -> None:
        """Leave a report and raise the alarm.  Returns within half a second."""

        def write() -> None:
            self.store.set(f"{self.prefix}/{rank}", json.dumps([report.waits_for, report.reason]))
            self.store.set(f"{self.prefix}/alarm", "1")

        self._ask(write, None)

    def reports(self) -> dict[int, FailureReport]:
        """Return what has been left until now, by rank, as far as it is known.  Returns within half a second."""

        def read() -> None:
            for rank in range(self.members):
                if rank not in self._known and self.store.check([f"{self.prefix}/{rank}"]):
                    waits_for, reason = json.loads(self.store.get(f"{self.prefix}/{rank}"))
                    self._known[rank] = FailureReport(tuple(waits_for), reason)

        self._ask(read, None)
        return dict(self._known)

    def missing(
        self, rank: int, own: FailureReport, grace_seconds: float
    ) -> tuple[tuple[int, ...], dict[int, FailureReport]]:
        """Wait until all who are waited for have reported; return those who have not after the grace, and all
        reports.  Where the store is gone nothing can come any more."""
        stop = time.monotonic() + grace_seconds
        while True:
            reports = {**self.reports(), rank: own}
            silent = _silent(reports)
            if not silent or self.state == "gone" or time.monotonic() > stop:
                return silent, reports
            time.sleep(0.02)

    def _ask(self, question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        """Ask the store in a thread of its own; `otherwise` if it is gone or says nothing."""
        answers: list[_Answer] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question())

        with self._lock:
            if self._asking is not None and self._asking.is_alive():
                return otherwise
            self._asking = threading.Thread(target=ask, name="weft-failures", daemon=True)
            self._asking.start()
            self._asking.join(_STORE_SECONDS)
            self.state = "there" if answers else "silent" if self._asking.is_alive() else "gone"
        return answers[0] if answers else otherwise


def _silent(reports: Mapping[int, FailureReport]) -> tuple[int, ...]:
    awaited = {peer for report in reports.values() for peer in report.waits_for}
    return tuple(sorted(awaited - reports.keys()))
