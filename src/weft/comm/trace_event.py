"""What is noted of one collective: its axis, its bytes, and when it began, ended and was waited for."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Literal, cast

from torch import Tensor

from weft.events.ring import CollectiveSlot

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
        "slot",
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
        """Time of the first wait; a blocking call waits at once."""
        self.wait_exited_ns = 0
        self.exposed_ns = 0
        """Nanoseconds of all waits together."""
        self.is_future = False
        """Whether somebody has a future of it, for which waits are not seen, but those of DDP (`BackwardWaits`)."""
        self.slot: CollectiveSlot | None = None
        """Its record in the ring of this rank; None: it has none."""

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
            if self.slot is not None:
                self.slot.done(self.done_ns)

    def enter_wait(self, *, is_over: bool = False) -> int:
        """Somebody begins to wait; `is_over` says that it ended before.  Returns what `exit_wait` wants."""
        now = perf_counter_ns()
        if not self.wait_entered_ns:
            self.wait_entered_ns = now
        if is_over and not self.done_ns:
            self.done_ns = now
        if self.slot is not None:
            self.slot.waits(now)
        return now

    def exit_wait(self, entered_ns: int) -> None:
        """The wait that began at `entered_ns` is over, and so is the collective."""
        now = perf_counter_ns()
        self.exposed_ns += now - entered_ns
        self.wait_exited_ns = now
        if not self.done_ns:
            self.done_ns, self.is_done_exact = now, True
        if self.slot is not None:
            self.slot.waited(self.done_ns, self.exposed_ns)

    def waited(self, since_ns: int, until_ns: int) -> int:
        """It was waited for inside a stretch of time that it did not outlast; returns when that wait was over."""
        self.done_ns, self.is_done_exact = self.done_ns or until_ns, True
        self.wait_entered_ns = max(since_ns, self.launched_ns)
        self.wait_exited_ns = min(max(self.wait_entered_ns, self.done_ns), until_ns)
        self.exposed_ns = self.wait_exited_ns - self.wait_entered_ns
        if self.slot is not None:
            self.slot.waits(self.wait_entered_ns)
            self.slot.waited(self.done_ns, self.exposed_ns)
        return self.wait_exited_ns


def num_bytes(tensors: object) -> int:
    """Bytes of a tensor, or of all in lists of them."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    if isinstance(tensors, list | tuple):
        return sum(map(num_bytes, cast("list[object]", tensors)))
    return 0
