"""Waits that Python does not see: DDP waits in C++ for its collectives once backward has made the last gradient.

Collectives that are launched inside a backward pass are remembered until the pass ends.  Autograd then runs final
callbacks in the order in which they were queued.  Weft queues the first one, at the first launch.  DDP queues the
second, in which it waits.  Weft's first one queues the third when it runs.  So DDP waits between Weft's two callbacks,
and the time from the first callback to the end of a collective is exposed.  This is an upper bound: DDP copies the
first buckets back while it waits for the last.
"""

# torch has no public names for the number of a pass and for its final callbacks; `fully_shard` uses the same ones.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter_ns

import torch
from torch.autograd import Variable

from weft.comm.trace_event import TraceEvent

_OUTSIDE = -1
"""Autograd's number of the pass in a thread that runs none."""


class BackwardWaits:
    """Notes the waits of what is launched in backward passes, in any thread, as futures that C++ waits for."""

    def __init__(self) -> None:
        self._local = threading.local()

    def add(self, seen: TraceEvent) -> None:
        """Remember a collective that is launched; outside a backward pass this does nothing."""
        task = torch._C._current_graph_task_id()
        if task == _OUTSIDE:
            return
        if getattr(self._local, "task", _OUTSIDE) != task:
            launched: list[TraceEvent] = []
            self._local.task, self._local.launched = task, launched
            _at_the_end(lambda: _begin(launched))
        self._local.launched.append(seen)


def _begin(launched: Sequence[TraceEvent]) -> None:
    """Take the time at which the last gradient is there, which is when DDP begins to wait."""
    began = perf_counter_ns()
    _at_the_end(lambda: _finish(launched, began))


def _finish(launched: Sequence[TraceEvent], began: int) -> None:
    """Record the waits of DDP, which has waited by now: one after another, in the order of the launches."""
    through, now = began, perf_counter_ns()
    for seen in launched:
        if seen.wait_entered_ns == 0 and (seen.done_ns or seen.is_future):
            through = seen.waited(through, now)


def _at_the_end(callback: Callable[[], None]) -> None:
    queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
    queue(callback)
