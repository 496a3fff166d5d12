"""Who is missing: ranks that give up leave word in the group's store for whom they waited; who leaves none is missing.

A rank on a ring sees only that its neighbour sends nothing, while the neighbour waits for its own.  Each of them
reports; whoever is waited for and does not report within a grace is the cause.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

Reason = Literal["deadline", "closed", "alarm"]
"""A peer sent nothing in time; its connection broke; another rank has given up."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says when it gives up."""

    waits_for: tuple[int, ...]
    """Ranks within the group."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class Board:
    """Where the ranks of a group leave their last words: after the first the group is of no use.

    A store that is gone, because the rank that served it has died, holds no reports and takes none.
    """

    store: dist.Store
    prefix: str
    members: int

    def has_alarm(self) -> bool:
        """Whether some rank has given up."""
        try:
            return self.store.check([f"{self.prefix}/alarm"])
        except RuntimeError:
            return False

    def leave(self, rank: int, report: Report) -> None:
        """Leave a report and raise the alarm."""
        try:
            self.store.set(f"{self.prefix}/{rank}", json.dumps([report.waits_for, report.reason]))
            self.store.set(f"{self.prefix}/alarm", "1")
        except RuntimeError:
            return

    def reports(self) -> dict[int, Report]:
        """Return what has been left until now, by rank."""
        found: dict[int, Report] = {}
        try:
            for rank in range(self.members):
                if self.store.check([f"{self.prefix}/{rank}"]):
                    waits_for, reason = json.loads(self.store.get(f"{self.prefix}/{rank}"))
                    found[rank] = Report(tuple(waits_for), reason)
        except RuntimeError:
            pass
        return found

    def missing(self, rank: int, own: Report, grace_seconds: float) -> tuple[tuple[int, ...], dict[int, Report]]:
        """Wait until all who are waited for have reported; return those who have not after the grace, and all
        reports."""
        stop = time.monotonic() + grace_seconds
        while True:
            reports = {**self.reports(), rank: own}
            silent = _silent(reports)
            if not silent or time.monotonic() > stop:
                return silent, reports
            time.sleep(0.02)


def _silent(reports: Mapping[int, Report]) -> tuple[int, ...]:
    awaited = {peer for report in reports.values() for peer in report.waits_for}
    return tuple(sorted(awaited - reports.keys()))
