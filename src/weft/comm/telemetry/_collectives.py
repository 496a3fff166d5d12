"""What the collectives of a step took, by axis of the mesh: how long they ran, and were waited for."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from weft.comm.trace_event import TraceEvent
from weft.events.ring import RankRing


@dataclass(slots=True)
class Traffic:
    """Sums over collectives of one axis that ended, on this rank.

    total − exposed is what overlapped with computation.  Where a collective's end was not observed when it happened,
    its total runs until somebody asked, so totals are upper bounds; `inexact_count` says of how many.
    """

    count: int = 0
    num_bytes: int = 0
    """Bytes of the tensors, as `TraceEvent.num_bytes`."""
    total_ns: int = 0
    """Time from launch to end."""
    exposed_ns: int = 0
    """Time inside waits and blocking calls."""
    inexact_count: int = 0

    def add(self, seen: TraceEvent) -> None:
        self.count += 1
        self.num_bytes += seen.num_bytes
        self.total_ns += seen.total_ns
        self.exposed_ns += seen.exposed_ns
        self.inexact_count += not seen.is_done_exact


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """What one step of this rank launched, and what of that its data decided."""

    step: int
    """Number of the step, from 0."""
    is_first: bool
    """Whether the process took none before."""
    some_unused: bool
    """Whether some parameter took no part on some rank."""
    labels: Sequence[int]
    """Labels that count, by microbatch."""
    rows: Sequence[tuple[str, int, int]]
    """Sparse table, number of the exchange, rows of the rank that brought most; mixture, number of the microbatch, rows
    that came to this rank's experts."""
    sent: Sequence[tuple[str, str, int, int]]
    """Axis, operation, bytes, count."""


class CollectiveLog:
    """Takes every collective when it is launched (`add`, from any thread), and sums up per step those that ended.

    A collective counts in the step in which the wait for it ended.  One that nobody waits for counts, too, once its end
    is known; one of which nothing more is heard is given up when `keep` later ones have come, and counted as `lost`.
    """

    def __init__(self, *, keep: int = 16_384, ring: RankRing | None = None) -> None:
        """Keep the latest `keep` that ended, and as many that did not.  `ring` gets all of them, too."""
        self._ring = ring
        self._open: deque[TraceEvent] = deque()
        self._latest: deque[TraceEvent] = deque(maxlen=keep)
        self._sums: dict[str, Traffic] = {}
        self._keep = keep
        self._sweeping = threading.Lock()
        self._launched: Counter[tuple[str, str, int]] = Counter()
        self._counting = threading.Lock()
        self._waited_ns = 0
        self.lost = 0
        """Collectives whose end was never seen."""

    def add(self, seen: TraceEvent) -> None:
        """A collective was launched."""
        with self._counting:
            self._launched[seen.axis, seen.operation, seen.num_bytes] += 1
            if self._ring is not None:
                seen.slot = self._ring.launched(seen.axis, seen.operation, seen.num_bytes, seen.launched_ns)
        self._open.append(seen)
        if len(self._open) > self._keep:
            with self._sweeping:
                self._sweep()
                while len(self._open) > self._keep // 2:
                    self._open.popleft()
                    self.lost += 1

    def end_step(self) -> dict[str, Traffic]:
        """Return what ended since the last call, by axis, in the order of their first collective."""
        with self._sweeping:
            self._sweep()
            sums, self._sums = self._sums, {}
        return sums

    def waited_ns(self) -> int:
        """Return the nanoseconds in waits for all collectives that have ended."""
        with self._sweeping:
            self._sweep()
        return self._waited_ns

    def take_launched(self) -> Counter[tuple[str, str, int]]:
        """Return how often each (axis, operation, bytes) was launched since the last call.

        Unlike `end_step`'s sums this counts in the step of the launch, whether it has ended or not: what a predicted
        program says of a step.
        """
        with self._counting:
            launched, self._launched = self._launched, Counter()
        return launched

    def latest(self) -> list[TraceEvent]:
        """Return the kept ones that ended, in the order in which they were launched."""
        return sorted(self._latest, key=lambda seen: seen.launched_ns)

    def under_way(self) -> list[TraceEvent]:
        """Return those whose end has not been seen: on a rank that hangs the last of them is what it hangs in."""
        return list(self._open)

    def _sweep(self) -> None:
        """Take out what ended; other threads may append at the same time."""
        for _ in range(len(self._open)):
            seen = self._open.popleft()
            if seen.is_over or seen.is_done_exact:
                self._latest.append(seen)
                self._waited_ns += seen.exposed_ns
                self._sums.setdefault(seen.axis, Traffic()).add(seen)
            else:
                self._open.append(seen)
