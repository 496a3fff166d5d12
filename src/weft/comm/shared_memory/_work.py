"""What is under way over shared memory, as torch sees it, and the futures that are made of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from weft.comm.shared_memory._call import Call, GroupFailed
from weft.comm.shared_memory._failure import explain
from weft.comm.shared_memory._future import of_tensors
from weft.comm.shared_memory._profiler import is_profiling, waiting
from weft.comm.shared_memory._tensors import CopyBack
from weft.comm.shared_memory.engine import Engine
from weft.comm.trace_event import TraceEvent
from weft.comm.untraced import untraced
from weft.errors import CollectiveError


class UnderWay(Protocol):
    """A call of the engine, or a message, that has begun."""

    @property
    def seconds(self) -> float:
        """How long a wait waits that says nothing else."""
        ...

    @property
    def completer(self) -> Completer:
        """The thread that waits for futures of it."""
        ...

    def finish(self, seconds: float) -> tuple[int, int]:
        """Wait for the end and put what has come where it belongs.

        Return the position of the rank that sent it (-1 of a collective), and when it ended by `perf_counter_ns` (0
        where that is not known any more).

        Raises:
            CollectiveError: it could not be carried out.
        """
        ...

    def has_done(self) -> bool:
        """Whether `finish` would return, or raise, at once."""
        ...


class Calling(Protocol):
    """The group whose calls are under way."""

    @property
    def engine(self) -> Engine:
        """What carries out the calls."""
        ...

    @property
    def ranks(self) -> Sequence[int]: ...

    @property
    def seconds(self) -> float:
        """How long a wait waits that says nothing else."""
        ...

    @property
    def completer(self) -> Completer:
        """The thread that waits for futures of the calls."""
        ...

    def let_go(self) -> None:
        """Forget what calls that have ended read and wrote."""
        ...


@dataclass(frozen=True, slots=True)
class CallsUnderWay:
    """Calls that have begun, as one; see `UnderWay`.  They are carried out in the order of their numbers, so the last
    one's end is the end of all."""

    group: Calling
    ticket: int
    """Number of the last call."""
    call: Call | None
    copy_back: CopyBack

    @property
    def seconds(self) -> float:
        return self.group.seconds

    @property
    def completer(self) -> Completer:
        return self.group.completer

    def finish(self, seconds: float) -> tuple[int, int]:
        group = self.group
        try:
            group.engine.wait(self.ticket, seconds)
            group.let_go()
        except GroupFailed as failed:
            raise explain(failed.failure, self.call, group.ranks, seconds) from None
        for target, source in self.copy_back:
            target.copy_(source)
        return -1, group.engine.done_ns(self.ticket)

    def has_done(self) -> bool:
        try:
            return self.group.engine.completed() >= self.ticket
        except GroupFailed:
            return True


@untraced
class SharedMemoryWork(dist.Work):
    """A call or a message under way.  `wait` raises `CollectiveError` where it could not be carried out; it may be
    waited for more than once, and by several threads, of which one finishes it."""

    title: str | None = None
    """How profilers call it; None: none ran when it was launched."""

    def __init__(self, tensors: list[Tensor], under_way: UnderWay | None, seen: TraceEvent | None) -> None:
        """With nothing `under_way` it is over."""
        super().__init__()
        self._tensors = tensors
        self._under_way = under_way  # None: there is nothing to wait for any more
        self._seen = seen
        self._error: CollectiveError | None = None
        self._source = -1
        self._waiting = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        seen = None if self._under_way is None else self._seen
        entered = 0 if seen is None else seen.enter_wait()
        try:
            if self.title is not None and is_profiling():
                with waiting(self.title):
                    return self._wait(timeout)
            return self._wait(timeout)
        finally:
            if seen is not None:
                seen.exit_wait(entered)

    def _wait(self, timeout: timedelta | None = None) -> bool:
        """Wait without being seen to; raise what went wrong, each time."""
        with self._waiting:
            if self._under_way is not None:
                self._finish(self._under_way, timeout)
        if self._error is not None:
            raise self._error
        return True

    def _finish(self, under_way: UnderWay, timeout: timedelta | None) -> None:
        try:
            self._source, done_ns = under_way.finish(timeout.total_seconds() if timeout else under_way.seconds)
        except CollectiveError as error:
            # Not `error` itself: its traceback and context hold the group, and torch's futures hold on to errors.
            self._error, self._under_way = CollectiveError(str(error), status=error.status), None
            raise
        if self._seen is not None and done_ns:
            self._seen.done(done_ns)
        self._under_way = None

    def is_completed(self) -> bool:
        under_way = self._under_way
        return under_way is None or under_way.has_done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> CollectiveError | None:
        if self.is_completed() and self._under_way is not None:
            try:
                self.wait()
            except CollectiveError as error:
                return error
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:  # `dist.recv` asks for it by this name
        return self._source

    def get_future(self) -> Future[Any]:
        """A future that is completed when this is, by a thread that waits for such futures.

        What is chained to it runs on that thread.  If it calls collectives in turn, ranks may do so in different
        orders: the call after it then fails on all of them with the error of different calls (Gloo would take what
        comes).
        """
        future: Future[Any] = Future()
        under_way = self._under_way
        if under_way is None or not under_way.completer.add(self, future):
            self.complete(future)
        is_half = len(self._tensors) == 1 and self._tensors[0].dtype is torch.float16
        return of_tensors(future) if is_half else future  # DDP's own hook for fp16 asserts that

    def complete(self, future: Future[Any]) -> None:
        """Wait, and give the future its value or its error."""
        try:
            self._wait()  # nobody computes less for it: it is not seen as a wait
        except CollectiveError:
            future.set_exception(self._error)  # pyright: ignore[reportArgumentType]  # torch's stub: a generic T
        except Exception as error:  # of copying back; the thread must live for the futures that follow
            future.set_exception(error)  # pyright: ignore[reportArgumentType]
        else:
            future.set_result(self._tensors)


class Completer:
    """A thread that waits for works and completes their futures, in the order of the calls.  It starts with the first
    of them."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[SharedMemoryWork, Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: SharedMemoryWork, future: Future[Any]) -> bool:
        """False on the very thread that would complete it: what is chained to a future may wait for another."""
        if threading.current_thread() is self._thread:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=_complete, args=(self._works,), name="weft-futures", daemon=True)
            self._thread.start()
        self._works.put((work, future))
        return True

    def close(self) -> None:
        """End the thread once it has completed what it was given."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._works.put(None)
            thread.join()


def _complete(works: queue.SimpleQueue[tuple[SharedMemoryWork, Future[Any]] | None]) -> None:
    while (item := works.get()) is not None:
        work, future = item
        work.complete(future)
        del item, work, future  # nothing is kept while waiting for the next
