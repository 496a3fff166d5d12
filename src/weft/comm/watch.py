"""Collectives as they are seen: each once, whoever started it, with its axis, bytes, and when it began, ended, was
waited for.

A group that can be watched has a place for a `Watch`, which makes a `TraceEvent` of everything that is launched and
hands it to a callback at once; the event fills while the collective runs.  What one collective does inside (messages
between ranks, a collective that stands in for another) is part of it.  A launch and a wait cost 3 µs together (2.5 GHz
Xeon, 2026-11).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter_ns
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from weft.comm._backward import BackwardWaits
from weft.comm.untraced import untraced

Operation = Literal[
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "send",
    "receive",
    "barrier",
]

TraceCallback = Callable[["TraceEvent"], object]
"""Receives every collective when it is launched, in the thread that launches it."""


class TraceEvent:
    """One collective as this rank sees it.  Times are nanoseconds of `perf_counter_ns`, 0 as long as nothing happened.

    Written by the thread that launches, the one that waits, and the one that carries out; each field by one of them.
    """

    __slots__ = (
        "axis",
        "done_ns",
        "exposed_ns",
        "is_done_exact",
        "is_future",
        "launched_ns",
        "num_bytes",
        "operation",
        "wait_entered_ns",
        "wait_exited_ns",
    )

    def __init__(self, axis: str, operation: Operation, num_bytes: int) -> None:
        self.axis = axis
        """Axis of the mesh: as in the plan, or `data`, `world`."""
        self.operation: Operation = operation
        self.num_bytes = num_bytes
        """Bytes of the whole tensor on this rank: an all-reduce's, an all-gather's result, a reduce-scatter's input."""
        self.launched_ns = perf_counter_ns()
        self.done_ns = 0
        self.is_done_exact = False
        """Whether `done_ns` was observed when it happened.  Else it was over at that moment, and perhaps before."""
        self.wait_entered_ns = 0
        """When somebody first waited for it; a blocking call waits at once."""
        self.wait_exited_ns = 0
        self.exposed_ns = 0
        """How long it was waited for, by all who did."""
        self.is_future = False
        """Whether somebody has a future of it, for which waits are not seen, but those of DDP (`BackwardWaits`)."""

    @property
    def is_over(self) -> bool:
        """Whether it has been waited for to the end."""
        return self.wait_exited_ns != 0

    @property
    def total_ns(self) -> int:
        """Time from launch to end; until now where it is under way."""
        return (self.done_ns or perf_counter_ns()) - self.launched_ns

    def done(self, at_ns: int = 0) -> None:
        """It ended now, or at `at_ns`."""
        if not self.is_done_exact:
            self.done_ns = at_ns or perf_counter_ns()
            self.is_done_exact = True

    def enter_wait(self, *, is_over: bool = False) -> int:
        """Somebody begins to wait; `is_over` says that it ended before.  Returns what `exit_wait` wants."""
        now = perf_counter_ns()
        if not self.wait_entered_ns:
            self.wait_entered_ns = now
        if is_over and not self.done_ns:
            self.done_ns = now
        return now

    def exit_wait(self, entered_ns: int) -> None:
        """The wait that began at `entered_ns` is over, and so is the collective."""
        now = perf_counter_ns()
        self.exposed_ns += now - entered_ns
        self.wait_exited_ns = now
        if not self.done_ns:
            self.done_ns, self.is_done_exact = now, True

    def waited(self, since_ns: int, until_ns: int) -> int:
        """It was waited for inside a stretch of time that it did not outlast; returns when that wait was over."""
        self.done_ns, self.is_done_exact = self.done_ns or until_ns, True
        self.wait_entered_ns = max(since_ns, self.launched_ns)
        self.wait_exited_ns = min(max(self.wait_entered_ns, self.done_ns), until_ns)
        self.exposed_ns = self.wait_exited_ns - self.wait_entered_ns
        return self.wait_exited_ns


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


def num_bytes(tensors: object) -> int:
    """Bytes of a tensor, or of all in lists of them."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    if isinstance(tensors, list | tuple):
        return sum(map(num_bytes, cast("list[object]", tensors)))
    return 0
